"""Runs the Triton kernels of RMS norm's backward pass in Triton's interpreter; prints their relative errors.

python rms_norm_gradients.py SOURCE
"""

import importlib.util
import json
import sys

import torch

spec = importlib.util.spec_from_file_location("kernels", sys.argv[1])
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
torch.manual_seed(0)
rows, width, errors = 13, 96, {}
for dtype in (torch.float32, torch.bfloat16):
    x, dy, stream = (torch.randn(rows, width).to(dtype) for _ in range(3))
    scale = torch.randn(width)
    x64, scale64 = x.double().requires_grad_(), scale.double().requires_grad_()
    y = x64 * torch.rsqrt((x64 * x64).mean(-1, keepdim=True) + 1e-5) * scale64
    want, dscale = torch.autograd.grad(y, (x64, scale64), dy.double())
    alone, with_residual = kernels.kernels()
    for kernel, given, add in ((alone, (dy, x), 0), (with_residual, (dy, x, stream), 1)):
        dx, parts = torch.full_like(x, float("nan")), torch.full((4, width), float("nan"))
        kernel[(4,)](
            *given, scale, dx, parts, rows=rows, width=width, block=128, stride=4, stages=2, eps=1e-5
        )
        right = want + add * stream.double()
        pairs = (dx.double(), right), (parts.sum(0).double(), dscale)
        errors[f"{str(dtype)[6:]} {add}"] = max(
            ((a - b).abs().max() / b.abs().max()).item() for a, b in pairs
        )
print(json.dumps(errors))
