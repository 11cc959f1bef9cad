"""Lowers a schedule to JAX: each send becomes a `ppermute`, each computation a call of the caller's function.

All ranks run one traced program, rank 0's; the rows of a piece, which differ between ranks, are computed from
the rank. Waits and barriers become data dependences, so XLA may keep permutes in flight while it multiplies.

Example: 4 ranks in a ring, gathering. Before turn t rank r holds piece (r - t) % 4: rank 1 visits 1, 0, 3, 2.
The loop body visits the piece at hand and permutes it to rank r + 1; after three turns the last piece is
visited without a permute. Reducing, rank r computes piece (r - t - 1) % 4 in turn t: rank 1 computes 0, 3, 2
and last its own piece 1, and adds to each but the first the sum that arrived from rank 0.
"""

from collections import deque
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels.overlap.schedule import Compute, OverlapSchedule, Place, Reduce, Send, Wait


def gather[C](
    schedule: OverlapSchedule,
    axis_name: str,
    shard: Float[Array, "B _ _"],
    visit: Callable[[C, Int[Array, ""], Array], C],
    carry: C,
) -> C:
    """Calls `visit` with every piece of x on every rank, its own first; inside `shard_map` over `axis_name`.

    Ring swizzles become a loop, whose body holds one permute per ring and the matmuls of the pieces that
    arrived before, so the two overlap. With the loop unrolled, XLA:TPU was seen to send the first half of all
    pieces at once and to wait for them.

    Args:
      shard: this rank's rows, [B, rows of a shard, K].
      visit: (carry, number of a piece, its rows) -> carry.
      carry: initial carry.
    """
    rank = jax.lax.axis_index(axis_name)
    rows = jnp.split(shard, schedule.pieces_per_rank, axis=1)
    # A ring of one rank has no permute, and the straight-line form below handles it.
    if schedule.swizzle in ("ring", "bidirectional") and schedule.num_ranks > 1:
        return _around(schedule, axis_name, rows, visit, carry)
    memory = {Place("shard", index): piece for index, piece in enumerate(rows)}  # rank 0's own pieces
    # First in, first out per place: copies into one place arrive in the order of the sends.
    arriving: dict[Place, deque[Array]] = {}
    for step, instruction in enumerate(schedule.programs[0]):
        # The permute starts here and is used at the Wait: XLA may overlap what lies between.
        if isinstance(instruction, Send):
            _permute(schedule, step, axis_name, memory[instruction.source], arriving)
        elif isinstance(instruction, Wait) and instruction.until == "arrived":
            memory[instruction.place] = arriving[instruction.place].popleft()
        elif isinstance(instruction, Compute):
            # Values are traced with rank 0's program, but numbers of pieces with this rank's.
            carry = visit(carry, _number(schedule, step, rank), memory[Place("shard", instruction.piece)])
    return carry


def _around[C](
    schedule: OverlapSchedule,
    axis_name: str,
    rows: list[Array],
    visit: Callable[[C, Int[Array, ""], Array], C],
    carry: C,
) -> C:
    n, pieces_per_rank, peers = schedule.num_ranks, schedule.pieces_per_rank, _neighbours(schedule)

    def visited(carry: C, turn: Int[Array, ""] | int, rows: list[Array]) -> C:
        rank = jax.lax.axis_index(axis_name)
        for index, (piece, peer) in enumerate(zip(rows, peers, strict=True)):
            # After `turn` hops a piece is from `turn` ranks back; peer, 1 or n - 1, is the direction.
            carry = visit(carry, (rank - turn * peer) % n * pieces_per_rank + index, piece)
        return carry

    def pass_and_visit(turn: Int[Array, ""], state: tuple[C, list[Array]]) -> tuple[C, list[Array]]:
        carry, rows = state
        # The permute before the visit: both read `rows`, and neither waits for the other.
        next_rows = [_passed_on(piece, axis_name, n, peer) for piece, peer in zip(rows, peers, strict=True)]
        return visited(carry, turn, rows), next_rows

    carry, rows = jax.lax.fori_loop(0, n - 1, pass_and_visit, (carry, rows))
    # The last piece goes nowhere, so its visit is outside the loop.
    return visited(carry, n - 1, rows)


def _neighbours(schedule: OverlapSchedule) -> list[int]:
    """Distance to the neighbour to which a ring sends each piece of a shard, the same for every owner."""
    distances = {
        i.piece % schedule.pieces_per_rank: i.peer for i in schedule.programs[0] if isinstance(i, Send)
    }
    return [distances[index] for index in range(schedule.pieces_per_rank)]


def _passed_on(piece: Array, axis_name: str, n: int, peer: int) -> Array:
    return jax.lax.ppermute(piece, axis_name, [(rank, (rank + peer) % n) for rank in range(n)])


def reduce(
    schedule: OverlapSchedule,
    axis_name: str,
    compute: Callable[[Int[Array, ""]], Float[Array, "B _ N"]],
    *,
    wire_dtype: jax.typing.DTypeLike,
) -> list[Float[Array, "B _ N"]]:
    """Sums over ranks of this rank's own pieces, in order, [B, rows, N]; inside `shard_map` over `axis_name`.

    Ring swizzles become a loop, as in `gather`.

    Args:
      compute: number of a piece -> this rank's summand.
      wire_dtype: dtype of partial sums while they are sent; they are added in the dtype that `compute`
        returns. Around a ring it is the dtype of the results too.
    """
    rank = jax.lax.axis_index(axis_name)
    if schedule.swizzle in ("ring", "bidirectional") and schedule.num_ranks > 1:
        return _reduce_around(schedule, axis_name, compute, wire_dtype)
    memory: dict[Place, Array] = {}
    arriving: dict[Place, deque[Array]] = {}
    for step, instruction in enumerate(schedule.programs[0]):
        if isinstance(instruction, Send):
            _permute(schedule, step, axis_name, memory[instruction.source].astype(wire_dtype), arriving)
        elif isinstance(instruction, Wait) and instruction.until == "arrived":
            memory[instruction.place] = arriving[instruction.place].popleft()
        elif isinstance(instruction, Compute):
            # Places are those of rank 0's program, which is traced for all; the number is this rank's.
            memory[instruction.into] = compute(_number(schedule, step, rank))
        elif isinstance(instruction, Reduce):
            # Partial sums arrive in wire_dtype and are added in the dtype of `compute`, normally float32.
            into = memory[instruction.into]
            memory[instruction.into] = into + memory.pop(instruction.slot).astype(into.dtype)
    # Sorted by number, so results are in the order of the rank's pieces.
    return [memory[buffer] for buffer in sorted(memory) if buffer.kind == "output"]


def _reduce_around(
    schedule: OverlapSchedule,
    axis_name: str,
    compute: Callable[[Int[Array, ""]], Float[Array, "B _ N"]],
    wire_dtype: jax.typing.DTypeLike,
) -> list[Array]:
    """Reduction around rings: a piece starts next to its owner; each rank adds its summand on the way."""
    n, pieces_per_rank, peers = schedule.num_ranks, schedule.pieces_per_rank, _neighbours(schedule)
    rank = jax.lax.axis_index(axis_name)

    def computed(turn: Int[Array, ""] | int) -> list[Array]:
        # In turn 0 a rank starts the piece that is farthest from home: its owner is one step back.
        return [
            compute((rank - (turn + 1) * peer) % n * pieces_per_rank + index)
            for index, peer in enumerate(peers)
        ]

    def pass_and_add(turn: Int[Array, ""], sums: list[Array]) -> list[Array]:
        arrived = [_passed_on(s, axis_name, n, peer) for s, peer in zip(sums, peers, strict=True)]
        # Without the barrier XLA:TPU fuses the matmul with the sum after it, and waits for the permute before
        # it multiplies.
        computed_sums, arrived = jax.lax.optimization_barrier((computed(turn), arrived))
        return [
            (a + b.astype(a.dtype)).astype(wire_dtype) for a, b in zip(computed_sums, arrived, strict=True)
        ]

    # The loop carries sums as they travel: carried wider, each turn would write them, read them and round
    # them.
    # Turn 0 needs no permute, so the loop starts at 1 with the first summands.
    return jax.lax.fori_loop(1, n, pass_and_add, [s.astype(wire_dtype) for s in computed(0)])


def _permute(
    schedule: OverlapSchedule, step: int, axis_name: str, value: Array, arriving: dict[Place, deque[Array]]
) -> None:
    """Sends of all ranks at this step as one permute; queued under the place where rank 0 receives it."""
    sends = [program[step] for program in schedule.programs]
    pairs = [(sender, send.peer) for sender, send in enumerate(sends) if isinstance(send, Send)]
    # Every rank receives at this step; rank 0's target stands for all, as its program is the one traced.
    target = next(send.target for send in sends if isinstance(send, Send) and send.peer == 0)
    arriving.setdefault(target, deque()).append(jax.lax.ppermute(value, axis_name, pairs))


def _number(schedule: OverlapSchedule, step: int, rank: Int[Array, ""]) -> Int[Array, ""]:
    """Number of the piece that this rank's instruction at `step` is about."""
    numbers: list[int] = []
    for program in schedule.programs:
        instruction = program[step]
        assert isinstance(instruction, Wait | Compute)
        numbers.append(instruction.place.number if isinstance(instruction, Wait) else instruction.piece)
    return piece_of(numbers, schedule, rank)


def piece_of(numbers: Sequence[int], schedule: OverlapSchedule, rank: Int[Array, ""]) -> Int[Array, ""]:
    """Entry for this rank of `numbers`, one piece per rank."""
    n, pieces_per_rank = schedule.num_ranks, schedule.pieces_per_rank
    # Rank 0's entry says which owner and piece all others are relative to.
    owner, index = divmod(numbers[0], pieces_per_rank)
    if list(numbers) == [(r + owner) % n * pieces_per_rank + index for r in range(n)]:
        return (rank + owner) % n * pieces_per_rank + index
    return by_rank(numbers, rank)


def by_rank(numbers: Sequence[int], rank: Int[Array, ""]) -> Int[Array, ""]:
    """Entry for this rank of `numbers`, one per rank, by arithmetic alone: a kernel has no look-up table."""
    n = len(numbers)
    # The common case is one rotation, a single addition modulo n.
    if all(number == (numbers[0] + r) % n for r, number in enumerate(numbers)):
        return (rank + numbers[0]) % n
    if n == 1:
        return jnp.int32(numbers[0])
    # Otherwise a binary tree of selects, log2(n) deep; halves are often rotations again.
    return jnp.where(
        rank < n // 2, by_rank(numbers[: n // 2], rank), by_rank(numbers[n // 2 :], rank - n // 2)
    )


def rows_of(
    x_BRK: Float[Array, "B _ K"], number: Int[Array, ""], rows_per_piece: int
) -> Float[Array, "B _ K"]:
    """The `rows_per_piece` rows of piece `number`, taken from all rows."""
    return jax.lax.dynamic_slice_in_dim(x_BRK, number * rows_per_piece, rows_per_piece, axis=1)


def put(whole_BRN: Float[Array, "B _ _"], number: Int[Array, ""], rows: Array) -> Float[Array, "B _ _"]:
    """All rows, with the rows of piece `number` replaced."""
    return jax.lax.dynamic_update_slice_in_dim(whole_BRN, rows, number * rows.shape[1], axis=1)
