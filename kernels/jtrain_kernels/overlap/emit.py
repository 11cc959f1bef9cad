"""A schedule as JAX: each send a `ppermute`, each computation whatever the caller makes of a piece.

All ranks run one traced program, rank 0's; what differs between ranks, which rows a piece is, is looked up by rank.
Waits and barriers are the data's own dependences, so XLA may keep several permutes in flight while it multiplies.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels.overlap.schedule import Compute, Place, Reduce, Schedule, Send, Wait


class Piece(NamedTuple):
    """A piece of the result on each rank.

    number: which one it is of this rank.
    value: what was computed of it: rows, [B, rows, N], or a tuple of such.
    """

    number: Int[Array, ""]
    value: Any


def emit(
    schedule: Schedule,
    axis_name: str,
    shard: Float[Array, "B _ _"] | None,
    compute: Callable[[Int[Array, ""], Array | None], Any],
    *,
    wire_dtype: jax.typing.DTypeLike,
) -> list[Piece]:
    """What the schedule leaves in each output of this rank, its own first; inside `shard_map` over `axis_name`.

    Args:
      shard: this rank's rows where the op gathers, [B, rows of a shard, K]; else None.
      compute: what is computed of a piece, by its number, and its gathered rows or None where the op does not gather.
      wire_dtype: of partial sums while they travel; they are added in the dtype that `compute` returns.
    """
    rank = jax.lax.axis_index(axis_name)
    program = schedule.programs[0]
    memory: dict[Place, Any] = {}
    arriving: dict[Place, deque[Array]] = {}
    outputs: dict[Place, Array] = {}
    if shard is not None:
        for index, rows in enumerate(jnp.split(shard, schedule.pieces_per_rank, axis=1)):
            memory[Place("shard", index)] = rows  # of rank 0: owner 0
    for step, instruction in enumerate(program):
        if isinstance(instruction, Send):
            value = memory[instruction.source]
            if schedule.op != "all_gather_matmul":
                value = value.astype(wire_dtype)
            same = [other[step] for other in schedule.programs]
            pairs = [(sender, send.peer) for sender, send in enumerate(same) if isinstance(send, Send)]
            target = next(send.target for send in same if isinstance(send, Send) and send.peer == 0)
            arriving.setdefault(target, deque()).append(jax.lax.ppermute(value, axis_name, pairs))
        elif isinstance(instruction, Wait) and instruction.until == "arrived":
            memory[instruction.place] = arriving[instruction.place].popleft()
            if instruction.place.kind == "output":
                outputs[instruction.place] = _number(schedule, step, rank)
        elif isinstance(instruction, Compute):
            number = _number(schedule, step, rank)
            memory[instruction.into] = compute(number, memory.get(Place("shard", instruction.piece)))
            if instruction.into.kind == "output":
                outputs[instruction.into] = number
        elif isinstance(instruction, Reduce):
            into = memory[instruction.into]
            memory[instruction.into] = into + memory.pop(instruction.slot).astype(into.dtype)
    return [Piece(outputs[place], memory[place]) for place in sorted(outputs)]


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


def joined(pieces: Sequence[tuple[Int[Array, ""], Array]]) -> Float[Array, "B _ _"]:
    """All rows, from all pieces: number and rows of each."""
    batch, each, columns = pieces[0][1].shape
    whole = jax.lax.empty((batch, len(pieces) * each, columns), pieces[0][1].dtype)
    for number, rows in pieces:
        whole = jax.lax.dynamic_update_slice_in_dim(whole, rows, number * each, axis=1)
    return whole
