"""SwiGLU of the first rows of a buffer on Hopper and newer NVIDIA GPUs, without touching the rows after them.

A device's buffer for the rows of a mixture's experts is sized for the worst case, n times the rows of
balanced experts. XLA reads and writes all of it. Here a block of 64 rows after the last one in use ends at
once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels.device import DeviceSpec
from jtrain_kernels.registry import Avals

ROWS, COLUMNS = 64, 128
"""Block of one program: four arrays of 16 KiB in bfloat16, so that three blocks fit a multiprocessor."""


def supports(device: DeviceSpec, avals: Avals) -> str | None:
    """Reason why the kernel cannot run; None if it can."""
    gate = avals["gate"]
    assert isinstance(gate, jax.ShapeDtypeStruct)
    if device.compute_capability is None or device.compute_capability[0] < 9:
        return "it is for NVIDIA GPUs from Hopper on"
    if gate.dtype != jnp.bfloat16:
        return f"it is for bfloat16, not {gate.dtype}"
    if gate.shape[0] % ROWS or gate.shape[1] % COLUMNS:
        return f"it takes multiples of {ROWS} rows and {COLUMNS} columns, not {gate.shape}"
    return None


def swiglu(
    gate: Float[Array, "T F"], up: Float[Array, "T F"], group_size: Int[Array, " X"], *, expected_rows: int
) -> Float[Array, "T F"]:
    """See `api.grouped_swiglu`."""
    del expected_rows
    return differentiable(None)(gate, up, jnp.sum(group_size, dtype=jnp.int32)[None])


def differentiable(interpret: Any) -> Callable[[Array, Array, Array], Array]:
    """`silu(gate) * up` of the first `used_1` rows, with the gradients of both; other rows are undefined.

    Args:
      interpret: passed to `plgpu.kernel`, for emulation.
    """

    @jax.custom_vjp
    def gated(gate: Array, up: Array, used_1: Array) -> Array:
        return _blocks(_value, used_1, gate, up, results=1, interpret=interpret)[0]

    def forward(gate: Array, up: Array, used_1: Array) -> tuple[Array, Any]:
        return gated(gate, up, used_1), (gate, up, used_1)

    def backward(saved: Any, dy: Array) -> tuple[Array, Array, None]:
        gate, up, used_1 = saved
        dgate, dup = _blocks(_gradients, used_1, gate, up, dy, results=2, interpret=interpret)
        return dgate, dup, None

    gated.defvjp(forward, backward)
    return gated


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _value(gate: Array, up: Array) -> tuple[Array]:
    return (gate * _sigmoid(gate) * up,)


def _gradients(gate: Array, up: Array, dy: Array) -> tuple[Array, Array]:
    sigmoid = _sigmoid(gate)
    silu = gate * sigmoid
    # Derivative of x sigmoid(x): sigmoid + x sigmoid (1 - sigmoid).
    return dy * up * (sigmoid + silu * (1.0 - sigmoid)), dy * silu


def _blocks(
    formula: Callable[..., tuple[Array, ...]], used_1: Array, *arrays: Array, results: int, interpret: Any
) -> tuple[Array, ...]:
    """Applies an elementwise formula in float32 to each block that has a row in use."""
    from jax.experimental import pallas as pl  # lazy: 1 s
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows, columns = arrays[0].shape
    like = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)

    def kernel(used_ref: Any, *refs: Any) -> None:
        input_refs, output_refs = refs[: len(arrays)], refs[len(arrays) : len(arrays) + results]
        *tiles, barrier = refs[len(arrays) + results :]
        row = jax.lax.axis_index("row") * ROWS

        # Rows in use come first, so a block beyond them has nothing to do and ends.
        @pl.when(row < used_ref[0])
        def _() -> None:
            block = pl.ds(row, ROWS), pl.ds(jax.lax.axis_index("column") * COLUMNS, COLUMNS)
            # All copies signal one barrier, whose count is the number of arrays.
            for ref, tile in zip(input_refs, tiles, strict=False):
                plgpu.copy_gmem_to_smem(ref.at[block], tile, barrier)
            plgpu.barrier_wait(barrier)
            values = formula(*(tile[...].astype(jnp.float32) for tile in tiles[: len(arrays)]))
            for value, tile in zip(values, tiles, strict=False):
                # Results overwrite the tiles of the inputs, which have been read into registers.
                tile[...] = value.astype(tile.dtype)
            # TMA reads shared memory by another path: the writes must be visible first.
            plgpu.commit_smem()
            for ref, tile in zip(output_refs, tiles, strict=False):
                plgpu.copy_smem_to_gmem(tile, ref.at[block])
            # Shared memory must not be given back before TMA has read it.
            plgpu.wait_smem_to_gmem(0)

    tile = plgpu.SMEM((ROWS, COLUMNS), like.dtype)
    return plgpu.kernel(
        kernel,
        out_type=(like,) * results,
        grid=(rows // ROWS, columns // COLUMNS),
        grid_names=("row", "column"),
        scratch_types=[*[tile] * len(arrays), plgpu.Barrier(num_arrivals=len(arrays))],
        kernel_name="grouped_swiglu",
        interpret=interpret,
    )(used_1, *arrays)
