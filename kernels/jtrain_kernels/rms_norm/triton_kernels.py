"""Triton source of RMSNorm's backward pass; Triton is imported only when a kernel is compiled."""

import functools
import importlib
import inspect
from typing import Any


class _NotYet:
    constexpr, tensor = int, Any


tl: Any = _NotYet
"""`triton.language` after `kernels` was called, because Triton looks up names in the globals of a kernel's
module."""

_CONSTANTS = ("rows", "width", "block", "stride", "stages", "eps")


def backward(
    dy: tl.tensor,
    x: tl.tensor,
    scale: tl.tensor,
    dx: tl.tensor,
    parts: tl.tensor,
    rows: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    stride: tl.constexpr,
    stages: tl.constexpr,
    eps: tl.constexpr,
) -> None:
    """Computes dx of every `stride`-th row, and this program's part of dscale.

    Arrays are pointers: dy, x and dx to [rows, width], scale to f32 [width], parts to f32 [stride, width], a
    row per program. `block` is the power of two from width on; `stages` is Triton's `num_stages`.
    """
    program = tl.program_id(0)
    column = tl.arange(0, block)
    inside = column < width
    scales = tl.load(scale + column, mask=inside, other=0.0)
    total = tl.zeros([block], tl.float32)
    first = tl.zeros([1], tl.int64)  # an array may have more than 2^31 elements
    for row in tl.range(program, rows, stride, num_stages=stages):
        offsets = column + width * (row + first)
        value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
        unit = value * factor
        dy_row = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
        dunit = dy_row * scales
        # Masked lanes are 0 in both factors, so the sum is over the row's own elements.
        mean = tl.sum(dunit * unit, axis=0) / width
        tl.store(dx + offsets, (factor * (dunit - unit * mean)).to(dx.dtype.element_ty), mask=inside)
        total += dy_row * unit
    # One row of `parts` per program; XLA adds them up.
    tl.store(parts + program * width + column, total, mask=inside)


def backward_with_residual(
    dy: tl.tensor,
    x: tl.tensor,
    residual: tl.tensor,
    scale: tl.tensor,
    dx: tl.tensor,
    parts: tl.tensor,
    rows: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    stride: tl.constexpr,
    stages: tl.constexpr,
    eps: tl.constexpr,
) -> None:
    """Computes the same as `backward`, with the gradient of the residual stream added to dx.

    residual: that gradient, a pointer to [rows, width]. The other arguments are those of `backward`.
    """
    program = tl.program_id(0)
    column = tl.arange(0, block)
    inside = column < width
    scales = tl.load(scale + column, mask=inside, other=0.0)
    total = tl.zeros([block], tl.float32)
    first = tl.zeros([1], tl.int64)  # an array may have more than 2^31 elements
    for row in tl.range(program, rows, stride, num_stages=stages):
        offsets = column + width * (row + first)
        value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
        unit = value * factor
        dy_row = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
        dunit = dy_row * scales
        mean = tl.sum(dunit * unit, axis=0) / width
        stream = tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + offsets, (factor * (dunit - unit * mean) + stream).to(dx.dtype.element_ty), mask=inside)
        total += dy_row * unit
    tl.store(parts + program * width + column, total, mask=inside)


@functools.cache
def kernels() -> tuple[Any, Any]:
    """`backward` and `backward_with_residual` for Triton to compile."""
    global tl
    triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")

    def compiled(function: Any) -> Any:
        # Triton reads a function's source and globals, so a decorator's wrapper must be removed.
        source = inspect.unwrap(function)
        source.__annotations__.update(dict.fromkeys(_CONSTANTS, tl.constexpr))
        return triton.jit(source)

    return compiled(backward), compiled(backward_with_residual)
