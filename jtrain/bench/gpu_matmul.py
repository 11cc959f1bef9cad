"""The fused matmul kernels on one Hopper GPU: the tile kernel against cuBLAS, fused kernels on virtual ranks.

    python -m jtrain.bench gpu_matmul --json FILE

Needs a Hopper GPU, and refuses without one. Virtual ranks are groups of thread blocks that run the same
kernels as several GPUs, with the same tables, counters and copies, but through one GPU's memory instead of
NVLink. The benchmark measures how much of the copying is hidden, `max(matmul alone, copies alone) / fused`,
and not the speed of several GPUs. Every result is compared with XLA's before it is timed. A rehearsal on a
CPU emulates the kernels.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.bench import REHEARSE, Options, Row, option, row
from jtrain.bench._live import difference, seconds
from jtrain.errors import UserError
from jtrain_kernels import compat
from jtrain_kernels.device import DEVICES, DeviceSpec, from_device
from jtrain_kernels.overlap.mosaic_gpu.tables import GpuProgram, OverlapConfig, default_config, gpu_program
from jtrain_kernels.overlap.mosaic_gpu.tile_shapes import CANDIDATES, TileConfig, does_not_fit, unsupported
from jtrain_kernels.overlap.schedule import OPS, OpName, make_schedule

BAR = ">= 0.9"

REHEARSED_SIZE, REHEARSED_RANKS = 128, 2
REHEARSED_TILES = TileConfig(tile_m=64, tile_n=32, tile_k=32, stages=2, out_rows=64, out_columns=16, group=2)
"""Tiles small enough for an emulated GPU."""


OPTIONS = (
    option("--size", type=int, default=8192, help="rows, columns and depth of the whole matmul"),
    option("--ranks", type=int, nargs="+", default=[2, 4], help="virtual ranks"),
    option("--calls", type=int, default=20, help="timed calls of each"),
    option("--only", choices=("matmul", *OPS), help="the tile kernel alone, or one of the fused ops"),
    REHEARSE,
)


def run(args: Options) -> Iterator[Row]:
    """Rows of the tile kernel over cuBLAS, and of each op over the longer of its two parts.

    Raises:
      UserError: the first device is no Hopper GPU.
      RuntimeError: a kernel's result is not XLA's.
    """
    emulated = args.rehearse and jax.default_backend() == "cpu"
    # Four cores: an emulated GPU runs a thread per warpgroup.
    spec = dataclasses.replace(DEVICES["h100"], num_cores=4) if emulated else hopper_gpu(jax.devices()[0])
    size, calls = (REHEARSED_SIZE, 1) if args.rehearse else (args.size, args.calls)
    x, kernel = (normal(seed, size, size) for seed in (0, 1))
    plain = jax.jit(jnp.matmul)
    want = plain(x, kernel)
    flop, times_s = 2 * size**3, {}
    for tiles in [REHEARSED_TILES] if args.rehearse else tilings(size):
        # `tiles` is bound as a default, so that each jitted function keeps its own.
        tile_kernel = jax.jit(
            lambda x, kernel, tiles=tiles: matmul(x, kernel, spec, tiles, emulated=emulated)
        )
        # Compared before it is timed: a wrong kernel may well be fast.
        check_agreement("matmul", tile_kernel(x, kernel), want)
        times_s[tiles] = seconds(tile_kernel, x, kernel, calls=calls)
    # The fastest tiling stands for the kernel, as the tuner would choose it.
    tiles = min(times_s, key=lambda tiles: times_s[tiles])
    if args.only in (None, "matmul"):
        cublas_s = seconds(plain, x, kernel, calls=calls)
        rate, theirs = (flop / s / 1e12 for s in (times_s[tiles], cublas_s))
        label = (
            f"matmul {size}^3 bf16, tiles {tiles.tile_m}x{tiles.tile_n}x{tiles.tile_k} group {tiles.group}"
        )
        yield row(f"{label}, over cuBLAS", rate, "TFLOP/s", baseline=theirs, bar=BAR)
    for op in OPS:
        if args.only not in (None, op):
            continue
        for ranks in [REHEARSED_RANKS] if args.rehearse else args.ranks:
            yield overlap_row(op, ranks, spec, size, times_s[tiles], calls, emulated=emulated)


def hopper_gpu(device: jax.Device) -> DeviceSpec:
    """Specification of the device.

    Raises:
      UserError: the device is no Hopper GPU.
    """
    spec = from_device(device)
    reason = f"{device.device_kind} is not known" if spec is None else unsupported(spec)
    if reason is not None or spec is None:
        raise UserError(f"gpu_matmul needs a Hopper GPU (h100, h200): {reason}. Run the same command on one.")
    return spec


def overlap_row(
    op: OpName,
    ranks: int,
    spec: DeviceSpec,
    size: int,
    matmul_s: float,
    calls: int,
    *,
    emulated: bool = False,
) -> Row:
    """Row of an op on virtual ranks: the longer of its matmul and its copies alone, over the fused kernel."""
    program = gpu_program(make_schedule(op, "full_mesh", ranks))
    x, kernel = operands(op, ranks, size)
    want = jax.jit(lambda x, kernel: plain_op(op, ranks, x, kernel))(x, kernel)
    times_s: dict[int, float] = {}
    # Reduce-scatter has no blocks that only send.
    small = OverlapConfig(REHEARSED_TILES, 1 if program.moves[0] else 0)
    for config in [small] if size == REHEARSED_SIZE else overlap_configs(program, ranks, spec, size):
        fused = jax.jit(
            lambda x, kernel, config=config: run_virtual_ranks(
                program, ranks, x, kernel, spec, config, emulated=emulated
            )
        )
        check_agreement(op, fused(x, kernel), want)
        times_s[config.sending_blocks] = seconds(fused, x, kernel, calls=calls)
    best = min(times_s, key=lambda blocks: times_s[blocks])
    # Every rank sends to all others: (ranks - 1) * size rows in total, read and written once.
    sent = normal(2, (ranks - 1) * size, size)
    # To negate is to read and write each element once, as a copy does; XLA would drop a plain copy.
    copy_s = seconds(jax.jit(lambda sent: -sent), sent, calls=calls)
    label = (
        f"{op}, {ranks} virtual ranks, {best} sending blocks each: longer of matmul and copies, over fused"
    )
    # The longer of the two parts is the least that a perfect overlap could take.
    return row(label, max(matmul_s, copy_s) * 1e3, "ms", baseline=times_s[best] * 1e3, bar=BAR)


def tilings(size: int) -> list[TileConfig]:
    """Tilings that fit a square matmul."""
    cuts = [dataclasses.replace(tiles, group=group) for tiles in CANDIDATES for group in (4, 8, 16)]
    return [tiles for tiles in cuts if does_not_fit(size, size, size, "bfloat16", tiles) is None]


def overlap_configs(program: GpuProgram, ranks: int, spec: DeviceSpec, size: int) -> list[OverlapConfig]:
    """Tilings of a fused kernel on virtual ranks, with different numbers of sending blocks."""
    gathers = program.schedule.op == "all_gather_matmul"
    n, k = (size // ranks, size) if gathers else (size, size // ranks)
    # Virtual ranks divide the cores.
    blocks = (spec.num_cores or 0) // ranks
    # At most half of a rank's blocks send, so that enough are left to multiply.
    counts = [count for count in (1, 2, 4) if count < blocks // 2] if program.moves[0] else [0]
    return [default_config(program, size, n, k, count) for count in counts]


def operands(op: OpName, ranks: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Operands of all ranks for a matmul of `size` cubed: x [ranks, 1, rows, k], kernels [ranks, k, n]."""
    if op == "all_gather_matmul":
        x, kernel = (ranks, 1, size // ranks, size), (ranks, size, size // ranks)
    else:
        x, kernel = (ranks, 1, size, size // ranks), (ranks, size // ranks, size)
    return normal(0, *x), normal(1, *kernel)


def plain_op(op: OpName, ranks: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Result of the op by XLA, on the arrays of all ranks."""
    if op == "all_gather_matmul":
        # Rows of all ranks one after the other, as the gather would leave them.
        gathered = jnp.concatenate(list(x), axis=1)
        return jnp.einsum("bmk,rkn->rbmn", gathered, kernel)
    # Float32 sums over ranks, rounded once; the kernel rounds at each hop, hence the tolerance.
    total = jnp.einsum("rbmk,rkn->bmn", x, kernel, preferred_element_type=jnp.float32).astype(x.dtype)
    return jnp.stack(jnp.split(total, ranks, axis=1))


def run_virtual_ranks(
    program: GpuProgram,
    ranks: int,
    x: jax.Array,
    kernel: jax.Array,
    spec: DeviceSpec,
    config: OverlapConfig,
    *,
    emulated: bool = False,
) -> jax.Array:
    """Result of the fused kernel with all ranks on this GPU, or on an emulated one."""
    from jtrain_kernels.overlap.mosaic_gpu.kernel import fused
    from jtrain_kernels.overlap.mosaic_gpu.peer_access import EmulatedRanks, VirtualRanks

    peers = EmulatedRanks(ranks) if emulated else VirtualRanks(ranks)
    options: dict[str, Any] = dict(
        num_cores=spec.num_cores or 0, config=config, interpret=_interpret(emulated)
    )
    return fused(program, peers, x, kernel, **options)[0]


def matmul(
    x: jax.Array, kernel: jax.Array, spec: DeviceSpec, tiles: TileConfig, *, emulated: bool = False
) -> jax.Array:
    """Result of the tile kernel alone, by this GPU or an emulated one."""
    from jtrain_kernels.overlap.mosaic_gpu import wgmma_tile

    options: dict[str, Any] = dict(
        num_cores=spec.num_cores or 0, config=tiles, interpret=_interpret(emulated)
    )
    return wgmma_tile.matmul(x, kernel, **options)


def _interpret(emulated: bool) -> Any:
    return compat.gpu_interpret(detect_races=False) if emulated else None


def normal(seed: int, *shape: int) -> jax.Array:
    """Normal bfloat16 numbers of variance 1."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def check_agreement(what: str, got: jax.Array, want: jax.Array) -> None:
    """Checks that results agree up to the bfloat16 rounding of partial sums.

    Raises:
      RuntimeError: the results differ by more.
    """
    error = difference(got, want)
    if not error <= 0.02:  # so that NaN fails too
        raise RuntimeError(f"{what}: off by {error:.3g} of the largest entry of XLA's result.")
