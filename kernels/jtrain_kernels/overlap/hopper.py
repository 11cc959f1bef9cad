"""A matmul of tiles on Hopper's tensor cores: what every fused kernel here computes with, and alone at axis size 1.

A persistent grid: each block of three warpgroups takes every num_cores-th tile. One warpgroup keeps a ring of
`stages` pairs of tiles in shared memory full (TMA, no bubble between tiles: it runs ahead into the next one while the
last is written out), two multiply (wgmma, float32 accumulators in registers) and write the result out through shared
memory. The design is that of JAX's Pallas Mosaic GPU guide and CUTLASS's persistent "ping" kernels.
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

from jtrain_kernels.overlap.tiles import (
    COMPUTE_REGISTERS,
    MEMORY_REGISTERS,
    THREADS,
    WARPGROUPS,
    TileConfig,
    does_not_fit,
)


def transforms(columns: int, itemsize: int) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Layout of a tile in shared memory, by which neither TMA nor wgmma meets bank conflicts."""
    swizzle = plgpu.find_swizzle(columns * itemsize * 8)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def scratch(config: TileConfig, dtype: Any, out_dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of one block, for `pl.run_scoped(collective_axes="wg")`."""
    size, out_size = jnp.dtype(dtype).itemsize, jnp.dtype(out_dtype).itemsize
    c = config
    return {
        "a_smem": plgpu.SMEM((c.stages, c.tile_m, c.tile_k), dtype, transforms=transforms(c.tile_k, size)),
        "b_smem": plgpu.SMEM((c.stages, c.tile_k, c.tile_n), dtype, transforms=transforms(c.warpgroup_n, size)),
        "out_smem": plgpu.SMEM(
            (WARPGROUPS, 2, c.out_rows, c.out_columns), out_dtype, transforms=transforms(c.out_columns, out_size)
        ),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
        "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=c.stages),
    }


@dataclasses.dataclass(frozen=True)
class Steps:
    """What `multiply` does around its products; `tile` is whatever `tile` returned.

    tile: i -> this block's i-th tile.
    load: (tile, step of k, a_smem, b_smem, barrier) starts both copies; in the loading warpgroup, like `ready`.
    ready: (tile) waits until the tile's operands may be loaded.
    add: (tile, piece, sums) -> sums: adds to float32 sums before they are rounded.
    store: (tile, piece, smem) starts writing a piece. A piece is (first row, first column) within the tile.
    before_store: (i, tile) when a tile's sums are there, before its first piece.
    """

    tile: Callable[[Any], Any]
    load: Callable[[Any, Any, Any, Any, Any], None]
    store: Callable[[Any, tuple[Any, Any], Any], None]
    ready: Callable[[Any], None] = lambda tile: None
    add: Callable[[Any, tuple[Any, Any], Any], Any] = lambda tile, piece, sums: sums
    before_store: Callable[[Any, Any], None] = lambda i, tile: None


def multiply(
    do: Steps,
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
      do: what is loaded and written.
      num_tiles: how many tiles this block has.
      steps: stages of a tile: the length of the sum over tile_k.
      config: see there.
      a_smem, b_smem, out_smem, full, free: `scratch`.
    """
    wg = lax.axis_index("wg")

    @pl.when(wg == WARPGROUPS)
    def _load() -> None:
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

        @pl.loop(0, num_tiles)
        def _tile(i: jax.Array) -> None:
            tile = do.tile(i)
            do.ready(tile)

            @pl.loop(0, steps)
            def _step(j: jax.Array) -> None:
                step = i * steps + j
                slot = lax.rem(step, config.stages)

                @pl.when(step >= config.stages)
                def _wait() -> None:
                    plgpu.barrier_wait(free.at[slot])

                do.load(tile, j, a_smem.at[slot], b_smem.at[slot], full.at[slot])

        # So that no barrier ends with a phase that its waiter has not seen.
        @pl.loop(0, jnp.minimum(num_tiles * steps, config.stages))
        def _drain(slot: jax.Array) -> None:
            plgpu.barrier_wait(free.at[slot])

    @pl.when(wg < WARPGROUPS)
    def _compute() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        columns = pl.ds(wg * config.warpgroup_n, config.warpgroup_n)

        @pl.loop(0, num_tiles)
        def _tile(i: jax.Array) -> None:
            tile = do.tile(i)

            def sum_up(acc_ref: Any) -> jax.Array:
                @pl.loop(0, steps)
                def _step(j: jax.Array) -> None:
                    step = i * steps + j
                    slot = lax.rem(step, config.stages)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc_ref, a_smem.at[slot], b_smem.at[slot, :, columns])
                    plgpu.wgmma_wait(1)

                    # The product before this one is done, so its operands may be overwritten.
                    @pl.when(j > 0)
                    def _release() -> None:
                        plgpu.barrier_arrive(free.at[lax.rem(step - 1, config.stages)])

                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[lax.rem((i + 1) * steps - 1, config.stages)])
                return acc_ref[...]

            acc = pl.run_scoped(sum_up, plgpu.WGMMAAccumulatorRef((config.tile_m, config.warpgroup_n), jnp.float32))
            do.before_store(i, tile)
            pieces = config.pieces()
            for count, (row, column) in enumerate(pieces):
                buffer = lax.rem(i * len(pieces) + count, 2)
                piece = (row, wg * config.warpgroup_n + column)
                sums = acc[row : row + config.out_rows, column : column + config.out_columns]
                sums = do.add(tile, piece, sums)
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # of two pieces the older one has left
                out_smem[wg, buffer] = sums.astype(out_smem.dtype)
                plgpu.commit_smem()
                do.store(tile, piece, out_smem.at[wg, buffer])


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
      num_cores: of the device, a Hopper chip: the most blocks of the grid. No live device is asked.
      config: see `TileConfig`; sizes must be multiples of the tiles.
      interpret: `plgpu.InterpretGPUParams()` runs it on a CPU.

    Raises:
      ValueError: the tiles do not fit the shapes or the dtype, with the reason.
    """
    config = config or TileConfig()
    (m, k), (k2, n) = a_MK.shape, b_KN.shape
    if k != k2 or a_MK.dtype != b_KN.dtype:
        raise ValueError(f"a is {a_MK.dtype}[{m}, {k}] and b {b_KN.dtype}[{k2}, {n}]: they do not multiply here.")
    if reason := does_not_fit(m, n, k, str(a_MK.dtype), config):
        raise ValueError(f"mosaic_gpu matmul: {reason}. Choose other tiles, or kernels.<op>=xla.")
    tiles_m, tiles_n = m // config.tile_m, n // config.tile_n
    blocks = min(math.prod((tiles_m, tiles_n)), num_cores)

    def body(a_ref: Any, b_ref: Any, out_ref: Any) -> None:
        block = lax.axis_index("block")

        def load(at: Any, step: jax.Array, a_smem: Any, b_smem: Any, barrier: Any) -> None:
            load_a(a_ref, at[0], step, config, a_smem, barrier)
            load_b(b_ref, at[1], step, config, b_smem, barrier)

        do = Steps(
            tile=lambda i: plgpu.planar_snake(block + i * blocks, (tiles_m, tiles_n), 0, config.group),
            load=load,
            store=lambda at, piece, smem: plgpu.copy_smem_to_gmem(smem, out_ref.at[piece_of(at, piece, config)]),
        )
        share = lax.div(tiles_m * tiles_n - block + blocks - 1, blocks)
        pl.run_scoped(
            lambda **smem: multiply(do, share, k // config.tile_k, config, **smem),
            **scratch(config, a_MK.dtype, a_MK.dtype),
            collective_axes="wg",
        )
        plgpu.wait_smem_to_gmem(0)  # what was handed to TMA must have left before the block ends

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
    """Starts the copy of a stage's part of the left operand: the `row`-th tile of rows."""
    depth = pl.ds(step * config.tile_k, config.tile_k)
    plgpu.copy_gmem_to_smem(a_ref.at[pl.ds(row * config.tile_m, config.tile_m), depth], a_smem, barrier)


def load_b(b_ref: Any, column: Any, step: Any, config: TileConfig, b_smem: Any, barrier: Any) -> None:
    """Starts the copy of a stage's part of the right operand: the `column`-th tile of columns."""
    depth = pl.ds(step * config.tile_k, config.tile_k)
    plgpu.copy_gmem_to_smem(b_ref.at[depth, pl.ds(column * config.tile_n, config.tile_n)], b_smem, barrier)


def piece_of(at: Any, piece: tuple[Any, Any], config: TileConfig) -> tuple[Any, Any]:
    """Where a piece of tile `at` (row, column) lies in the result."""
    rows = pl.ds(at[0] * config.tile_m + piece[0], config.out_rows)
    return rows, pl.ds(at[1] * config.tile_n + piece[1], config.out_columns)
