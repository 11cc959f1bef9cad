"""Makes the reference blocks of NF4 with bitsandbytes on a CPU; tests that read them need neither it nor torch.

    pip install bitsandbytes==0.50.2      # into the environment v5 of tests/golden/hf/setup.sh
    PYTHON_WITH_BITSANDBYTES tests/golden/bitsandbytes/make.py

Weights [outputs, inputs] of a torch Linear in float32 and bfloat16: normal numbers, and in the first rows all zeros,
numbers of very different size, and multiples of every midpoint between two codes and of their neighbours.
Made with torch 2.13.0 and bitsandbytes 0.50.2.
"""

from pathlib import Path

import numpy as np
import torch
from bitsandbytes.functional import dequantize_4bit, get_4bit_type, quantize_4bit

HERE = Path(__file__).parent


def weights() -> torch.Tensor:
    """Rows of 192 inputs: 3 blocks each."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 192, generator=generator) * 0.02
    weight[0, :64] = 0.0
    code = get_4bit_type("nf4", device="cpu")
    middle = (code[:-1] + code[1:]) / 2
    around = torch.stack([torch.nextafter(middle, middle - 1), middle, torch.nextafter(middle, middle + 1)])
    weight[1] *= 10.0 ** torch.linspace(-30, 30, 192)
    for row, largest in enumerate([1.0, *torch.rand(30, generator=generator).tolist()], start=2):
        weight[row, :45] = around.reshape(-1) * largest
        weight[row, 63] = -largest
    return weight


def main() -> None:
    """Writes nf4.npz."""
    weight = weights()
    arrays = {"weight": weight.numpy()}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        rounded = weight.to(dtype)
        codes, state = quantize_4bit(rounded, blocksize=64, quant_type="nf4")
        arrays[f"codes/{name}"] = codes.numpy().reshape(40, -1)
        arrays[f"scale/{name}"] = state.absmax.numpy().reshape(40, -1)
        arrays[f"back/{name}"] = dequantize_4bit(codes, state).float().numpy()
    np.savez_compressed(HERE / "nf4.npz", **arrays)


if __name__ == "__main__":
    main()
