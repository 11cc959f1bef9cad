"""RMSNorm's backward pass on TPUs in one pass over memory, where XLA makes three.

XLA:TPU reads x for its mean square, x and dy for the mean of their product, and both again for the result.
Compiled for a v5p at 8192 x 4096 in bfloat16, it moves 384 MiB where 192 are enough, and with a residual's
gradient 448 MiB where 256 are enough. The kernel holds a block of whole rows in VMEM and reads each array
once. The forward pass stays XLA's, which fuses it with the producer of its input.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels.device import DeviceSpec

VMEM_BYTES = 8 * 2**20
"""VMEM for the arrays of a block: half of the default limit of a kernel, which is the same on every TPU."""

PARTS = 2
"""Sums over rows that run in parallel: a v4 or v5p device has two cores."""

_LANES, _SUBLANES = 128, 8


def block_rows(rows: int, width: int, itemsize: int, *, residual: bool) -> int | None:
    """Rows of a block: the largest power of two that fits; None if no block size divides the rows."""
    # dy, x and dx, and the residual's gradient.
    arrays = 4 if residual else 3
    # Two buffers per array, and four float32 intermediates.
    row_bytes = width * (2 * arrays * itemsize + 4 * 4)
    fitting_rows = None
    size = _SUBLANES * 4 // itemsize  # rows of one tile
    while size * row_bytes <= VMEM_BYTES and rows % (PARTS * size) == 0:
        fitting_rows, size = size, 2 * size
    return fitting_rows


def refusal(device: DeviceSpec, x: jax.ShapeDtypeStruct, *, residual: bool) -> str | None:
    """Reason why the kernel cannot run; None if it can."""
    if device.platform != "tpu":
        return f"it is for TPUs, not for a {device.name}"
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"x is {x.dtype}, not bfloat16 or float32"
    width = x.shape[-1]
    rows = x.size // width
    if width % _LANES:
        return f"rows of {width} are no multiple of {_LANES} lanes"
    if block_rows(rows, width, x.dtype.itemsize, residual=residual) is None:
        return f"{rows} rows of {width} do not divide into {PARTS} parts of blocks that fit into VMEM"
    return None


@dataclasses.dataclass(frozen=True)
class OnePassTPU:
    """Gradients of `x * inverse_rms(x) * scale` in one kernel.

    interpret: passed to `pallas_call`, for emulation.
    """

    interpret: Any = False

    def __call__(
        self,
        dy: Float[Array, "*rest C"],
        x: Float[Array, "*rest C"],
        inverse: Float[Array, "*rest 1"],
        scale_C: Float[Array, " C"],
        eps: float,
        residual: Float[Array, "*rest C"] | None = None,
    ) -> tuple[Float[Array, "*rest C"], Float[Array, " C"]]:
        """Returns dx (plus `residual`, added in float32, if given) and dscale. `inverse` is recomputed."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        del inverse  # a single column fills a tile of 128: reading it would cost as much as 128 columns
        width = x.shape[-1]
        rows = x.size // width
        block = block_rows(rows, width, x.dtype.itemsize, residual=residual is not None)
        assert block is not None, "`refusal` checks this first"
        # Each part is a run of consecutive blocks, so that its sum stays in one output block.
        steps = rows // (PARTS * block)
        row_block = pl.BlockSpec((block, width), lambda part, step: (part * steps + step, 0))
        arrays = [dy, x] if residual is None else [dy, x, residual]
        dx_TC, parts_SC = pl.pallas_call(
            functools.partial(_kernel, eps=eps),
            grid=(PARTS, steps),
            # The scale's block index never changes: it is read once.
            in_specs=[pl.BlockSpec((1, width), lambda part, step: (0, 0)), *[row_block] * len(arrays)],
            out_specs=[row_block, pl.BlockSpec((_SUBLANES, width), lambda part, step: (part, 0))],
            out_shape=[
                jax.ShapeDtypeStruct((rows, width), x.dtype),
                jax.ShapeDtypeStruct((PARTS * _SUBLANES, width), jnp.float32),
            ],
            # Parts run on two cores; steps of a part run in order, since they add to one sum.
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
            interpret=self.interpret,
            name="rms_norm_backward",
        )(scale_C.astype(jnp.float32)[None], *(a.reshape(rows, width) for a in arrays))
        return dx_TC.reshape(x.shape), jnp.sum(parts_SC, axis=0).astype(scale_C.dtype)


def _kernel(scale_ref: Any, dy_ref: Any, x_ref: Any, *refs: Any, eps: float) -> None:
    from jax.experimental import pallas as pl

    *residual_ref, dx_ref, sums_ref = refs
    x, dy = x_ref[...].astype(jnp.float32), dy_ref[...].astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    unit = x * inverse
    dunit = dy * scale_ref[...]
    dx = inverse * (dunit - unit * jnp.mean(dunit * unit, axis=-1, keepdims=True))
    if residual_ref:
        dx += residual_ref[0][...].astype(jnp.float32)
    dx_ref[...] = dx.astype(dx_ref.dtype)
    rows, width = x.shape

    # The output block of the sums stays in VMEM over all steps of a part.
    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        sums_ref[...] = jnp.zeros_like(sums_ref)

    # The kernel adds up tiles; XLA adds the eight rows that remain.
    sums_ref[...] += jnp.sum((dy * unit).reshape(rows // _SUBLANES, _SUBLANES, width), axis=0)
