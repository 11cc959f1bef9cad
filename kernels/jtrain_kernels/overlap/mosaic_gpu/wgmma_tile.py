"""Tiled matmul on Hopper's tensor cores: the core of every fused kernel, and alone for axis size 1.

The grid is persistent: each block of three warpgroups takes every num_cores-th tile. One warpgroup loads by
TMA into a ring buffer of `stages` pairs of tiles in shared memory, and runs ahead into the next tile while
the last one is written. Two warpgroups multiply (wgmma, float32 accumulators in registers) and write the
result through shared memory. The design follows JAX's Pallas Mosaic GPU guide and CUTLASS's persistent "ping"
kernels.

Example: 8192 x 8192 x 8192 with tiles 128 x 256 x 64 on 132 cores: 64 * 32 = 2048 tiles, 16 for blocks 0 to
67 and 15 for the others, 128 steps each. Step 5 of a block's tile 1 is step 133 of its ring: with 4 stages it
uses slot 133 % 4 = 1, once both multiplying warpgroups have freed that slot from step 129.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from jtrain_kernels.errors import UserError
from jtrain_kernels.overlap.mosaic_gpu.tile_shapes import (
    COMPUTE_REGISTERS,
    MEMORY_REGISTERS,
    THREADS,
    WARPGROUPS,
    TileConfig,
    does_not_fit,
)


def transforms(columns: int, itemsize: int) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Layout of a tile in shared memory without bank conflicts for TMA and wgmma."""
    # find_swizzle counts bits: a row of the tile, at most 128 bytes wide.
    swizzle = plgpu.find_swizzle(columns * itemsize * 8)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def scratch(config: TileConfig, dtype: Any, out_dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of one block, for `pl.run_scoped(collective_axes="wg")`."""
    size, out_size = jnp.dtype(dtype).itemsize, jnp.dtype(out_dtype).itemsize
    c = config
    return {
        "a_smem": plgpu.SMEM((c.stages, c.tile_m, c.tile_k), dtype, transforms=transforms(c.tile_k, size)),
        "b_smem": plgpu.SMEM(
            (c.stages, c.tile_k, c.tile_n), dtype, transforms=transforms(c.warpgroup_n, size)
        ),
        "out_smem": plgpu.SMEM(
            # Two buffers per warpgroup: one is written to memory while the next is filled.
            (WARPGROUPS, 2, c.out_rows, c.out_columns),
            out_dtype,
            transforms=transforms(c.out_columns, out_size),
        ),
        # Two arrivals, one for each operand's copy; `free` gets one from each multiplying warpgroup.
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
        "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=c.stages),
    }


@dataclasses.dataclass(frozen=True)
class TileSteps:
    """Callbacks of `multiply`; their argument `tile` is the value that the callback `tile` returned.

    tile: i -> this block's i-th tile.
    load: (tile, step of k, a_smem, b_smem, barrier) starts both copies; runs in the loading warpgroup.
    wait_operands: (tile) waits until the tile's operands may be loaded; runs in the loading warpgroup.
    add: (tile, piece, sums) -> sums: adds to float32 sums before they are rounded.
    store: (tile, piece, smem) starts writing a piece. A piece is (first row, first column) within the tile,
      in elements.
    before_store: (i, tile) runs when a tile's sums are complete, before its first piece is stored.
    """

    tile: Callable[[Any], Any]
    load: Callable[[Any, Any, Any, Any, Any], None]
    store: Callable[[Any, tuple[Any, Any], Any], None]
    wait_operands: Callable[[Any], None] = lambda tile: None
    add: Callable[[Any, tuple[Any, Any], Any], Any] = lambda tile, piece, sums: sums
    before_store: Callable[[Any, Any], None] = lambda i, tile: None


def multiply(
    callbacks: TileSteps,
    num_tiles: Any,
    steps: int,
    config: TileConfig,
    *,
    a_smem: Any,
    b_smem: Any,
    out_smem: Any,
    full: Any,
    free: Any,
) -> None:
    """Loads, multiplies and writes this block's tiles, one after another; called by all its warpgroups.

    Args:
      callbacks: what to load, where to store.
      num_tiles: number of tiles of this block.
      steps: stages of a tile: the contracted size over tile_k.
      config: the tiling.
      a_smem, b_smem, out_smem, full, free: from `scratch`.
    """
    wg = lax.axis_index("wg")

    @pl.when(wg == WARPGROUPS)
    def _load() -> None:
        # The loading warpgroup gives registers back first: the multiplying ones cannot grow before.
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

        @pl.loop(0, num_tiles)
        def _tile(i: jax.Array) -> None:
            tile = callbacks.tile(i)
            callbacks.wait_operands(tile)

            @pl.loop(0, steps)
            def _step(j: jax.Array) -> None:
                # Steps count on across tiles, so the next tile loads during the epilogue.
                step = i * steps + j
                slot = lax.rem(step, config.stages)

                # The first `stages` loads find empty slots, on which nobody has arrived yet.
                @pl.when(step >= config.stages)
                def _wait() -> None:
                    plgpu.barrier_wait(free.at[slot])

                callbacks.load(tile, j, a_smem.at[slot], b_smem.at[slot], full.at[slot])

        # Every phase of a barrier must be waited for before the kernel ends.
        @pl.loop(0, jnp.minimum(num_tiles * steps, config.stages))
        def _drain(slot: jax.Array) -> None:
            plgpu.barrier_wait(free.at[slot])

    @pl.when(wg < WARPGROUPS)
    def _compute() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        # Both warpgroups multiply all rows of a; each has half of the columns of b.
        columns = pl.ds(wg * config.warpgroup_n, config.warpgroup_n)

        @pl.loop(0, num_tiles)
        def _tile(i: jax.Array) -> None:
            tile = callbacks.tile(i)

            def sum_up(acc_ref: Any) -> jax.Array:
                @pl.loop(0, steps)
                def _step(j: jax.Array) -> None:
                    step = i * steps + j
                    slot = lax.rem(step, config.stages)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc_ref, a_smem.at[slot], b_smem.at[slot, :, columns])
                    # At most one wgmma in flight: the one of this step runs while the loop turns.
                    plgpu.wgmma_wait(1)

                    # The previous product is done, so its operands may be overwritten.
                    @pl.when(j > 0)
                    def _release() -> None:
                        plgpu.barrier_arrive(free.at[lax.rem(step - 1, config.stages)])

                # The last product has no next step that would release its operands, so it is released here.
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[lax.rem((i + 1) * steps - 1, config.stages)])
                return acc_ref[...]

            acc = pl.run_scoped(
                sum_up, plgpu.WGMMAAccumulatorRef((config.tile_m, config.warpgroup_n), jnp.float32)
            )
            # The sums are complete, the operands free: the loader already works on the next tile.
            callbacks.before_store(i, tile)
            pieces = config.pieces()
            for count, (row, column) in enumerate(pieces):
                # Buffers alternate across tiles too, so the count of a tile's pieces may be odd.
                buffer = lax.rem(i * len(pieces) + count, 2)
                piece = (row, wg * config.warpgroup_n + column)
                sums = acc[row : row + config.out_rows, column : column + config.out_columns]
                # Before rounding: sums of other ranks are added in float32.
                sums = callbacks.add(tile, piece, sums)
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the older of the two buffers has been read
                out_smem[wg, buffer] = sums.astype(out_smem.dtype)
                # Makes this warpgroup's writes visible to TMA, which reads by another path.
                plgpu.commit_smem()
                callbacks.store(tile, piece, out_smem.at[wg, buffer])


def matmul(
    a_MK: Float[jax.Array, "M K"],
    b_KN: Float[jax.Array, "K N"],
    *,
    num_cores: int,
    config: TileConfig | None = None,
    interpret: Any = None,
) -> Float[jax.Array, "M N"]:
    """a @ b on one device, summed in float32 and rounded once to the operands' dtype.

    Args:
      a_MK: bfloat16 or float16.
      b_KN: the same dtype.
      num_cores: cores of the device, a Hopper chip: the maximum number of blocks. No live device is queried.
      config: the tiling; sizes must be multiples of the tiles.
      interpret: `plgpu.InterpretGPUParams()` runs the kernel on a CPU.

    Raises:
      UserError: the tiles do not fit the shapes or the dtype, with the reason.
    """
    config = config or TileConfig()
    (m, k), (k2, n) = a_MK.shape, b_KN.shape
    if k != k2 or a_MK.dtype != b_KN.dtype:
        raise UserError(
            f"a is {a_MK.dtype}[{m}, {k}] and b {b_KN.dtype}[{k2}, {n}]: they do not multiply here."
        )
    if reason := does_not_fit(m, n, k, str(a_MK.dtype), config):
        raise UserError(f"mosaic_gpu matmul: {reason}. Choose other tiles, or kernels.<op>=xla.")
    tiles_m, tiles_n = m // config.tile_m, n // config.tile_n
    # The grid is persistent, so each of its blocks should have at least one tile.
    blocks = min(math.prod((tiles_m, tiles_n)), num_cores)

    def body(a_ref: Any, b_ref: Any, out_ref: Any) -> None:
        block = lax.axis_index("block")

        def load(tile: Any, step: jax.Array, a_smem: Any, b_smem: Any, barrier: Any) -> None:
            load_a(a_ref, tile[0], step, config, a_smem, barrier)
            load_b(b_ref, tile[1], step, config, b_smem, barrier)

        callbacks = TileSteps(
            tile=lambda i: plgpu.planar_snake(block + i * blocks, (tiles_m, tiles_n), 0, config.group),
            load=load,
            store=lambda tile, piece, smem: plgpu.copy_smem_to_gmem(
                smem, out_ref.at[piece_of(tile, piece, config)]
            ),
        )
        # ceil((tiles - block) / blocks): this block's tiles are block, block + blocks, ...
        share = lax.div(tiles_m * tiles_n - block + blocks - 1, blocks)
        pl.run_scoped(
            lambda **smem: multiply(callbacks, share, k // config.tile_k, config, **smem),
            **scratch(config, a_MK.dtype, a_MK.dtype),
            collective_axes="wg",
        )
        plgpu.wait_smem_to_gmem(0)  # TMA's writes must be complete before the block ends

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), a_MK.dtype),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=THREADS,
        thread_name="wg",
        kernel_name="jtrain_hopper_matmul",
        interpret=interpret,
    )(a_MK, b_KN)


def load_a(a_ref: Any, row: Any, step: Any, config: TileConfig, a_smem: Any, barrier: Any) -> None:
    """Starts the copy of one stage of the left operand, in the `row`-th row of tiles."""
    depth = pl.ds(step * config.tile_k, config.tile_k)
    plgpu.copy_gmem_to_smem(a_ref.at[pl.ds(row * config.tile_m, config.tile_m), depth], a_smem, barrier)


def load_b(b_ref: Any, column: Any, step: Any, config: TileConfig, b_smem: Any, barrier: Any) -> None:
    """Starts the copy of one stage of the right operand, in the `column`-th column of tiles."""
    depth = pl.ds(step * config.tile_k, config.tile_k)
    plgpu.copy_gmem_to_smem(b_ref.at[depth, pl.ds(column * config.tile_n, config.tile_n)], b_smem, barrier)


def piece_of(tile: Any, piece: tuple[Any, Any], config: TileConfig) -> tuple[Any, Any]:
    """Slices, in elements, of the `out_rows` x `out_columns` that a warpgroup writes at once.

    Args:
      tile: row and column of the tile in the result, in tiles.
      piece: first row and column within the tile, in elements.
    """
    rows = pl.ds(tile[0] * config.tile_m + piece[0], config.out_rows)
    return rows, pl.ds(tile[1] * config.tile_n + piece[1], config.out_columns)
