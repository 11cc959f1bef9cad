"""A schedule as JAX: each send a `ppermute`, each computation whatever the caller makes of a piece.

All ranks run one traced program, rank 0's; what differs between ranks, which rows a piece is, is worked out from the
rank. Waits and barriers are the data's own dependences, so XLA may keep permutes in flight while it multiplies.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels.overlap.schedule import Compute, Place, Reduce, Schedule, Send, Wait


class Piece(NamedTuple):
    """A piece of the result.

    number: which one it is of this rank.
    value: its rows, [B, rows, N].
    """

    number: Int[Array, ""]
    value: Array


def gather[C](
    schedule: Schedule,
    axis_name: str,
    shard: Float[Array, "B _ _"],
    visit: Callable[[C, Int[Array, ""], Array], C],
    carry: C,
) -> C:
    """Brings every piece of x by every rank, its own first; inside `shard_map` over `axis_name`.

    Around rings it is a loop, in whose body a permute and the matmuls of what arrived before have only each other to
    run beside. Written out, XLA:TPU was seen to send the first half of all pieces at once and to wait for them.

    Args:
      shard: this rank's rows, [B, rows of a shard, K].
      visit: (what was carried so far, number of a piece, its rows) -> what is carried on.
    """
    rank = jax.lax.axis_index(axis_name)
    rows = jnp.split(shard, schedule.pieces_per_rank, axis=1)
    if schedule.swizzle in ("ring", "bidirectional") and schedule.num_ranks > 1:
        return _around(schedule, axis_name, rows, visit, carry)
    memory = {Place("shard", index): piece for index, piece in enumerate(rows)}  # of rank 0: owner 0
    arriving: dict[Place, deque[Array]] = {}
    for step, instruction in enumerate(schedule.programs[0]):
        if isinstance(instruction, Send):
            _permute(schedule, step, axis_name, memory[instruction.source], arriving)
        elif isinstance(instruction, Wait) and instruction.until == "arrived":
            memory[instruction.place] = arriving[instruction.place].popleft()
        elif isinstance(instruction, Compute):
            carry = visit(carry, _number(schedule, step, rank), memory[Place("shard", instruction.piece)])
    return carry


def _around[C](
    schedule: Schedule,
    axis_name: str,
    rows: list[Array],
    visit: Callable[[C, Int[Array, ""], Array], C],
    carry: C,
) -> C:
    n, each, peers = schedule.num_ranks, schedule.pieces_per_rank, _neighbours(schedule)

    def visited(carry: C, turn: Int[Array, ""] | int, rows: list[Array]) -> C:
        rank = jax.lax.axis_index(axis_name)
        for index, (piece, peer) in enumerate(zip(rows, peers, strict=True)):
            carry = visit(carry, (rank - turn * peer) % n * each + index, piece)
        return carry

    def one(turn: Int[Array, ""], state: tuple[C, list[Array]]) -> tuple[C, list[Array]]:
        carry, rows = state
        ahead = [_passed_on(piece, axis_name, n, peer) for piece, peer in zip(rows, peers, strict=True)]
        return visited(carry, turn, rows), ahead

    carry, rows = jax.lax.fori_loop(0, n - 1, one, (carry, rows))
    return visited(carry, n - 1, rows)


def _neighbours(schedule: Schedule) -> list[int]:
    """Around rings: the neighbour, as a distance, to which a rank passes on each of the pieces of any owner, always."""
    found = {i.piece % schedule.pieces_per_rank: i.peer for i in schedule.programs[0] if isinstance(i, Send)}
    return [found[index] for index in range(schedule.pieces_per_rank)]


def _passed_on(piece: Array, axis_name: str, n: int, peer: int) -> Array:
    return jax.lax.ppermute(piece, axis_name, [(rank, (rank + peer) % n) for rank in range(n)])


def reduce(
    schedule: Schedule,
    axis_name: str,
    compute: Callable[[Int[Array, ""]], Float[Array, "B _ N"]],
    *,
    wire_dtype: jax.typing.DTypeLike,
) -> list[Piece]:
    """Sums of pieces over ranks: this rank's own, or of an all-reduce all; inside `shard_map` over `axis_name`.

    Of a reduce-scatter around rings it is a loop, as in `gather`.

    Args:
      compute: what this rank adds to a piece, by its number.
      wire_dtype: of partial sums while they travel; they are added in the dtype that `compute` returns.
    """
    rank = jax.lax.axis_index(axis_name)
    around = schedule.op == "matmul_reduce_scatter" and schedule.swizzle in ("ring", "bidirectional")
    if around and schedule.num_ranks > 1:
        return _reduce_around(schedule, axis_name, compute, wire_dtype)
    memory: dict[Place, Array] = {}
    arriving: dict[Place, deque[Array]] = {}
    outputs: dict[Place, Int[Array, ""]] = {}
    for step, instruction in enumerate(schedule.programs[0]):
        if isinstance(instruction, Send):
            _permute(schedule, step, axis_name, memory[instruction.source].astype(wire_dtype), arriving)
        elif isinstance(instruction, Wait) and instruction.until == "arrived":
            memory[instruction.place] = arriving[instruction.place].popleft()
            if instruction.place.kind == "output":
                outputs[instruction.place] = _number(schedule, step, rank)
        elif isinstance(instruction, Compute):
            number = _number(schedule, step, rank)
            memory[instruction.into] = compute(number)
            if instruction.into.kind == "output":
                outputs[instruction.into] = number
        elif isinstance(instruction, Reduce):
            into = memory[instruction.into]
            memory[instruction.into] = into + memory.pop(instruction.slot).astype(into.dtype)
    return [Piece(outputs[place], memory[place]) for place in sorted(outputs)]


def _reduce_around(
    schedule: Schedule,
    axis_name: str,
    compute: Callable[[Int[Array, ""]], Float[Array, "B _ N"]],
    wire_dtype: jax.typing.DTypeLike,
) -> list[Piece]:
    """A piece begins beside its owner and comes to it last, and each rank adds its part on the way."""
    n, each, peers = schedule.num_ranks, schedule.pieces_per_rank, _neighbours(schedule)
    rank = jax.lax.axis_index(axis_name)

    def computed(turn: Int[Array, ""] | int) -> list[Array]:
        return [compute((rank - (turn + 1) * peer) % n * each + index) for index, peer in enumerate(peers)]

    def one(turn: Int[Array, ""], sums: list[Array]) -> list[Array]:
        arrived = [_passed_on(s.astype(wire_dtype), axis_name, n, peer) for s, peer in zip(sums, peers, strict=True)]
        # Else XLA:TPU makes one of a matmul and the sum after it, which waits for what arrives before it multiplies.
        own, arrived = jax.lax.optimization_barrier((computed(turn), arrived))
        return [a + b.astype(a.dtype) for a, b in zip(own, arrived, strict=True)]

    sums = jax.lax.fori_loop(1, n, one, computed(0))
    return [Piece(rank * each + index, value) for index, value in enumerate(sums)]


def _permute(schedule: Schedule, step: int, axis_name: str, value: Array, arriving: dict[Place, deque[Array]]) -> None:
    """What all ranks send at this step; what reaches rank 0 waits in `arriving` where rank 0 looks for it."""
    same = [program[step] for program in schedule.programs]
    pairs = [(sender, send.peer) for sender, send in enumerate(same) if isinstance(send, Send)]
    target = next(send.target for send in same if isinstance(send, Send) and send.peer == 0)
    arriving.setdefault(target, deque()).append(jax.lax.ppermute(value, axis_name, pairs))


def _number(schedule: Schedule, step: int, rank: Int[Array, ""]) -> Int[Array, ""]:
    """Which piece an instruction of this rank's program is about."""
    found: list[int] = []
    for program in schedule.programs:
        instruction = program[step]
        assert isinstance(instruction, Wait | Compute)
        found.append(instruction.place.number if isinstance(instruction, Wait) else instruction.piece)
    return piece_of(found, schedule, rank)


def piece_of(numbers: Sequence[int], schedule: Schedule, rank: Int[Array, ""]) -> Int[Array, ""]:
    """This rank's of the pieces `numbers`, one per rank."""
    n, each = schedule.num_ranks, schedule.pieces_per_rank
    owner, index = divmod(numbers[0], each)
    if list(numbers) == [(r + owner) % n * each + index for r in range(n)]:
        return (rank + owner) % n * each + index
    return by_rank(numbers, rank)


def by_rank(numbers: Sequence[int], rank: Int[Array, ""]) -> Int[Array, ""]:
    """This rank's of `numbers`, one per rank, by arithmetic alone: a kernel has no table to look it up in."""
    n = len(numbers)
    if all(number == (numbers[0] + r) % n for r, number in enumerate(numbers)):
        return (rank + numbers[0]) % n
    if n == 1:
        return jnp.int32(numbers[0])
    return jnp.where(rank < n // 2, by_rank(numbers[: n // 2], rank), by_rank(numbers[n // 2 :], rank - n // 2))


def rows_of(x_BRK: Float[Array, "B _ K"], number: Int[Array, ""], each: int) -> Float[Array, "B _ K"]:
    """Rows of a piece, `each` of them, out of all rows."""
    return jax.lax.dynamic_slice_in_dim(x_BRK, number * each, each, axis=1)


def put(whole_BRN: Float[Array, "B _ _"], number: Int[Array, ""], rows: Array) -> Float[Array, "B _ _"]:
    """All rows, with those of a piece written."""
    return jax.lax.dynamic_update_slice_in_dim(whole_BRN, rows, number * rows.shape[1], axis=1)
