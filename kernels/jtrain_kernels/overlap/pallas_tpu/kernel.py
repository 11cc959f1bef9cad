"""A schedule as one Pallas TPU kernel: remote copies by the DMA engine, matmuls by tiles from and to HBM.

Only tiles are in vector memory, so sizes are limited by HBM alone. Each send has two semaphores of its own, so no
message can be taken for another; the model checker verifies that the schedule writes no place too early.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from jtrain_kernels.errors import UserError
from jtrain_kernels.overlap.pallas_tpu import shmem
from jtrain_kernels.overlap.schedule import Barrier, Compute, Place, Release, Schedule, ScheduleInstruction, Send, Wait
from jtrain_kernels.overlap.xla.lower_schedule import by_rank, piece_of
from jtrain_kernels.overlap.xla.op import KernelTuple, OverlapPlan, gather_backward, scatter_backward

TILES = (512, 512, 1024)
"""Rows, columns and contraction of a tile: 4.5 MB of vector memory in bfloat16, with two buffers per operand."""

COLLECTIVE_ID = 7
"""Collective id of the barrier; two kernels that may run at the same time need different ids."""


def overlapped(
    schedule: Schedule,
    x_RK: Float[Array, "_ K"],
    kernel_KN: Float[Array, "K N"],
    *,
    axis_name: str,
    tiles: tuple[int, int, int] = TILES,
    interpret: Any = False,
) -> Float[Array, "_ N"]:
    """Runs the schedule's op and returns this device's output; call it inside `shard_map`.

    Args:
      tiles: maximum rows, columns and contracted elements of a tile.
      interpret: passed to `pallas_call`.

    Raises:
      UserError: the schedule has one rank, or the sizes have no tiles.
    """
    n = schedule.num_ranks
    if n == 1:
        raise UserError(f"{schedule.op}: one rank has nothing to send, so there is no such kernel. Use a plain matmul.")
    gathers = schedule.op == "all_gather_matmul"
    rows = x_RK.shape[0] * (n if gathers else 1)
    each = schedule.piece_rows(rows)
    k, columns = kernel_KN.shape
    out_rows = rows if gathers else rows // n
    sends = sum(isinstance(i, Send) for i in schedule.programs[0])
    partial = (schedule.num_slots, each, columns), (schedule.num_accumulators, each, columns)
    outputs = [jax.ShapeDtypeStruct((out_rows, columns), x_RK.dtype)]
    if gathers:
        outputs.append(jax.ShapeDtypeStruct((rows, k), x_RK.dtype))
    else:
        outputs += [jax.ShapeDtypeStruct(shape, x_RK.dtype) for shape in partial]
    tile = (_tile(each, tiles[0], 8), _tile(columns, tiles[1], 128), _tile(k, tiles[2], 128))
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        _Kernel(schedule, axis_name, each, tile),
        out_shape=outputs,
        in_specs=[in_hbm, in_hbm],
        out_specs=[in_hbm] * len(outputs),
        scratch_shapes=[
            pltpu.SemaphoreType.DMA((sends,)),
            pltpu.SemaphoreType.DMA((sends,)),
            pltpu.SemaphoreType.REGULAR((max(1, schedule.num_slots),)),
        ],
        compiler_params=pltpu.CompilerParams(collective_id=COLLECTIVE_ID, has_side_effects=True),
        interpret=interpret,
    )
    return call(x_RK, kernel_KN)[0]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def all_gather_matmul(x_BRK: Float[Array, "1 _ K"], kernels: KernelTuple, plan: OverlapPlan) -> KernelTuple:
    """`all_gather_matmul` of `xla/op.py` as one TPU kernel on the concatenated kernels; the backward pass is XLA's."""
    y_RN = overlapped(
        plan.schedule("all_gather_matmul"),
        x_BRK[0],
        jnp.concatenate([kernel.astype(x_BRK.dtype) for kernel in kernels], axis=1),
        axis_name=plan.axis_name,
    )
    ends = itertools.accumulate(kernel.shape[1] for kernel in kernels[:-1])
    return tuple(part[None] for part in jnp.split(y_RN, list(ends), axis=1))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul_reduce_scatter(x_BRK: Float[Array, "1 _ K"], kernel_KN: Float[Array, "K N"], plan: OverlapPlan) -> Array:
    """`matmul_reduce_scatter` of `xla/op.py` as one TPU kernel; the backward pass is XLA's."""
    schedule = plan.schedule("matmul_reduce_scatter")
    return overlapped(schedule, x_BRK[0], kernel_KN.astype(x_BRK.dtype), axis_name=plan.axis_name)[None]


all_gather_matmul.defvjp(lambda x, kernels, plan: (all_gather_matmul(x, kernels, plan), (x, kernels)), gather_backward)
matmul_reduce_scatter.defvjp(
    lambda x, kernel, plan: (matmul_reduce_scatter(x, kernel, plan), (x, kernel)), scatter_backward
)


def _tile(size: int, most: int, unit: int) -> int:
    """Largest tile of at most `most` that divides `size` and is a multiple of `unit`; `size` itself if that fits."""
    if size <= most:
        return size
    for tile in range(most - most % unit, 0, -unit):
        if size % tile == 0:
            return tile
    raise UserError(f"a dimension of {size} has no tile of at most {most} that is a multiple of {unit}. Pad it.")


class _Kernel:
    """Body of the kernel: rank 0's program, with peers and pieces computed from the rank."""

    def __init__(self, schedule: Schedule, axis_name: str, each: int, tile: tuple[int, int, int]) -> None:
        self._schedule = schedule
        self._axis_name = axis_name
        self._each = each
        self._tile = tile
        self._gathers = schedule.op == "all_gather_matmul"

    def __call__(self, x: Any, kernel: Any, out: Any, *rest: Any) -> None:
        *self._buffers, self._sent, self._arrived, self._released = rest
        self._x, self._kernel, self._out = x, kernel, out
        self._rank = shmem.my_pe(self._axis_name)
        self._puts: list[tuple[Any, ...]] = []
        self._incoming: dict[Place, list[int]] = {}
        self._outgoing: dict[tuple[Place, int], list[int]] = {}
        for step, instruction in enumerate(self._schedule.programs[0]):
            self._do(step, instruction)

    def _do(self, step: int, instruction: ScheduleInstruction) -> None:
        on: Any = {"axis_name": self._axis_name}
        if isinstance(instruction, Barrier):
            every = [getattr(program[step], "peers") for program in self._schedule.programs]  # noqa: B009
            shmem.barrier([by_rank(peers, self._rank) for peers in zip(*every, strict=True)], **on)
        elif isinstance(instruction, Send):
            self._send(step, instruction)
        elif isinstance(instruction, Wait) and instruction.until == "arrived":
            _, _, sent, arrived = self._puts[self._incoming[instruction.place].pop(0)]
            shmem.wait_until_arrived(self._at(instruction.place, self._of(step, "place")), sent, arrived, **on)
        elif isinstance(instruction, Wait) and instruction.until == "sent":
            put = self._puts[self._outgoing[instruction.place, instruction.peer].pop(0)]
            shmem.quiet(*put, **on, pe=self._rank)
        elif isinstance(instruction, Wait):
            shmem.signal_wait_until(self._released.at[instruction.place.number])
        elif isinstance(instruction, Release):
            shmem.signal_op(self._released.at[instruction.slot.number], **on, pe=self._of(step, "peer"))
        elif isinstance(instruction, Compute):
            piece = self._of(step, "piece")
            rows = self._rows(instruction.piece, piece) if self._gathers else self._x.at[self._span(piece)]
            _matmul(rows, self._kernel, self._at(instruction.into, piece), self._tile)
        else:
            into = self._at(instruction.into, self._of(step, "piece"))
            _add(self._at(instruction.slot, 0), into, self._tile)

    def _send(self, step: int, send: Send) -> None:
        source = self._at(send.source, self._of(step, "source"))
        if send.source.kind == "shard":
            source = self._rows(send.piece, self._of(step, "source"))
        index = len(self._puts)
        put = source, self._at(send.target, self._of(step, "target")), self._sent.at[index], self._arrived.at[index]
        shmem.put_signal_nbi(*put, axis_name=self._axis_name, pe=self._of(step, "peer"))
        self._puts.append(put)
        every: list[Any] = [program[step] for program in self._schedule.programs]
        reaching = next(other.target for other in every if other.peer == 0)
        self._incoming.setdefault(reaching, []).append(index)
        self._outgoing.setdefault((send.source, send.peer), []).append(index)

    def _of(self, step: int, name: str) -> Any:
        """Field `name` of this rank's instruction as a number: a peer, a piece, or the number of a place."""
        found: list[Any] = [getattr(program[step], name) for program in self._schedule.programs]
        if name == "peer":
            return by_rank(found, self._rank)
        numbers = [value if isinstance(value, int) else value.number for value in found]
        return piece_of(numbers, self._schedule, self._rank)

    def _span(self, number: Any) -> Any:
        return pl.ds(pl.multiple_of(number * self._each, self._each), self._each)

    def _rows(self, piece_of_rank_0: int, piece: Any) -> Any:
        """Gathered rows of x; a rank's own rows are read from its x. Pieces that rank 0 owns are own on every rank."""
        if self._schedule.owner(piece_of_rank_0) == 0:
            return self._x.at[self._span(piece_of_rank_0)]
        return self._buffers[0].at[self._span(piece)]

    def _at(self, place: Place, number: Any) -> Any:
        """Ref of a place of this rank, or of the same place in the memory of another rank."""
        if place.kind == "shard":
            return self._buffers[0].at[self._span(number)]
        if place.kind == "output":
            own = number if self._gathers else number - self._rank * self._schedule.pieces_per_rank
            return self._out.at[self._span(own)]
        return self._buffers[0 if place.kind == "slot" else 1].at[place.number]


type _Blocks = tuple[int, int]


def _matmul(x: Any, kernel: Any, out: Any, tile: tuple[int, int, int]) -> None:
    """`out = x @ kernel`, all in HBM, tile by tile."""
    rows, columns, depth = tile
    across, deep = kernel.shape[1] // columns, x.shape[1] // depth

    def start(step: Array) -> tuple[Array, Array, Array]:
        return step // deep // across * rows, step // deep % across * columns, step % deep * depth

    def of_x(step: Array) -> Any:
        i, _, k = start(step)
        return x.at[pl.ds(i, rows), pl.ds(k, depth)]

    def of_kernel(step: Array) -> Any:
        _, j, k = start(step)
        return kernel.at[pl.ds(k, depth), pl.ds(j, columns)]

    def of_out(step: Array) -> Any:
        i, j, _ = start(step)
        return out.at[pl.ds(i, rows), pl.ds(j, columns)]

    def product(x_tile: Array, kernel_tile: Array) -> Array:
        return jnp.dot(x_tile, kernel_tile, preferred_element_type=jnp.float32)

    blocks = (rows, depth), (depth, columns), (rows, columns)
    _pipeline(of_x, of_kernel, of_out, product, blocks, x.shape[0] // rows * across * deep, deep)


def _add(slot: Any, into: Any, tile: tuple[int, int, int]) -> None:
    """`into += slot`, in float32, tile by tile."""
    rows, columns, _ = tile
    across = into.shape[1] // columns

    def of(ref: Any, step: Array) -> Any:
        return ref.at[pl.ds(step // across * rows, rows), pl.ds(step % across * columns, columns)]

    def total(a: Array, b: Array) -> Array:
        return a.astype(jnp.float32) + b.astype(jnp.float32)

    block = (rows, columns)
    steps = into.shape[0] // rows * across
    _pipeline(partial(of, slot), partial(of, into), partial(of, into), total, (block, block, block), steps, 1)


def _pipeline(
    first: Callable[[Array], Any],
    second: Callable[[Array], Any],
    out: Callable[[Array], Any],
    compute: Callable[[Array, Array], Array],
    blocks: tuple[_Blocks, _Blocks, _Blocks],
    steps: int,
    every: int,
) -> None:
    """Writes one tile of `out` every `every` steps: the sum of `compute` over tiles of `first` and `second`.

    Tiles are copied into vector memory one step ahead, and a result is copied out during the following steps. (Pallas's
    `emit_pipeline` does the same but needs a live device, which is missing when compiling for another chip.)
    """
    dtypes = [of(jnp.int32(0)).dtype for of in (first, second, out)]
    buffers = [pltpu.VMEM((2, *block), dtype) for block, dtype in zip(blocks, dtypes, strict=True)]

    def body(a: Any, b: Any, o: Any, total: Any, semaphore: Any) -> None:
        def load(step: Array, slot: Array) -> list[Any]:
            pairs = (first(step), a.at[slot]), (second(step), b.at[slot])
            return [pltpu.make_async_copy(*pair, semaphore.at[i, slot]) for i, pair in enumerate(pairs)]

        def store(step: Array, slot: Array) -> Any:
            return pltpu.make_async_copy(o.at[slot], out(step), semaphore.at[2, slot])

        def one(step: Array, _: None) -> None:
            slot = step % 2

            @pl.when(step + 1 < steps)
            def _ahead() -> None:
                for copy in load(step + 1, 1 - slot):
                    copy.start()

            for copy in load(step, slot):
                copy.wait()
            value = compute(a[slot], b[slot])

            @pl.when(step % every == 0)
            def _begin() -> None:
                total[...] = value

            @pl.when(step % every != 0)
            def _go_on() -> None:
                total[...] += value

            @pl.when(step % every == every - 1)
            def _end() -> None:
                number = step // every

                @pl.when(number >= 2)
                def _written() -> None:
                    store(step - 2 * every, number % 2).wait()

                o[number % 2] = total[...].astype(o.dtype)
                store(step, number % 2).start()

        for copy in load(jnp.int32(0), jnp.int32(0)):
            copy.start()
        jax.lax.fori_loop(0, steps, one, None)
        count = steps // every
        for number in range(max(0, count - 2), count):
            store(jnp.int32(number * every + every - 1), jnp.int32(number % 2)).wait()

    pl.run_scoped(body, *buffers, pltpu.VMEM(blocks[2], jnp.float32), pltpu.SemaphoreType.DMA((3, 2)))
