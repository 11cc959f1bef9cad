"""RMSNorm's backward pass on TPUs: one pass over memory, where XLA makes three.

XLA:TPU reads x for its mean square, x and dy for the mean of their product, and both again for the result: compiled for
a v5p, 384 MiB for 8192 x 4096 in bfloat16 that take 192, and 448 MiB with a residual's gradient that take 256. A block
of whole rows in VMEM needs each once. The forward pass stays XLA's, which joins it to whatever makes its input.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels.device import DeviceSpec

VMEM_BYTES = 8 * 2**20
"""What a block's arrays may take: half of what every TPU gives a kernel by default."""

PARTS = 2
"""Sums over rows that run side by side: a v4 or v5p has two cores behind one device."""

_LANES, _SUBLANES = 128, 8


def block_rows(rows: int, width: int, itemsize: int, *, residual: bool) -> int | None:
    """Rows of a block: the most that fit, as a power of two; None where no block divides the rows."""
    arrays = 4 if residual else 3
    row_bytes = width * (2 * arrays * itemsize + 4 * 4)  # each array in two buffers; four float32 in between
    found = None
    size = _SUBLANES * 4 // itemsize  # what fills a tile
    while size * row_bytes <= VMEM_BYTES and rows % (PARTS * size) == 0:
        found, size = size, 2 * size
    return found


def refusal(device: DeviceSpec, x: jax.ShapeDtypeStruct, *, residual: bool) -> str | None:
    """Why the kernel cannot run, None if it can."""
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
class OnePass:
    """Gradients of `x * inverse_rms(x) * scale` in one kernel.

    interpret: of `pallas_call`, for emulation.
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
        """dx (with `residual` added in float32, if there is one) and dscale. `inverse` is computed again."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        del inverse  # one column of a tile of 128: to read it would cost as much as 128 columns
        width = x.shape[-1]
        rows = x.size // width
        block = block_rows(rows, width, x.dtype.itemsize, residual=residual is not None)
        assert block is not None, "`refusal` says so first"
        steps = rows // (PARTS * block)
        wide = pl.BlockSpec((block, width), lambda part, step: (part * steps + step, 0))
        given = [dy, x] if residual is None else [dy, x, residual]
        dx_TC, parts_SC = pl.pallas_call(
            functools.partial(_kernel, eps=eps),
            grid=(PARTS, steps),
            in_specs=[pl.BlockSpec((1, width), lambda part, step: (0, 0)), *[wide] * len(given)],
            out_specs=[wide, pl.BlockSpec((_SUBLANES, width), lambda part, step: (part, 0))],
            out_shape=[
                jax.ShapeDtypeStruct((rows, width), x.dtype),
                jax.ShapeDtypeStruct((PARTS * _SUBLANES, width), jnp.float32),
            ],
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
            interpret=self.interpret,
            name="rms_norm_backward",
        )(scale_C.astype(jnp.float32)[None], *(a.reshape(rows, width) for a in given))
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

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        sums_ref[...] = jnp.zeros_like(sums_ref)

    # Tiles are added to each other; only XLA adds the eight rows that are left.
    sums_ref[...] += jnp.sum((dy * unit).reshape(rows // _SUBLANES, _SUBLANES, width), axis=0)
