"""The reference: a schedule carried out on one device, with an order of events drawn at random."""

import random
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels.overlap.machine import Algebra, Fault, Machine, ProtocolError
from jtrain_kernels.overlap.schedule import Place, Schedule


def execute(
    schedule: Schedule,
    x: Sequence[Float[Array, "_ _"]],
    kernel: Sequence[Float[Array, "_ _"]],
    *,
    seed: int = 0,
) -> list[Float[Array, "_ _"]]:
    """What every rank is left with; the schedule's table of ops gives the shapes.

    Args:
      x, kernel: of each rank.
      seed: of the order of events; none changes the result, not in the last bit.

    Raises:
      ValueError: the number of arrays, or of rows, does not fit the ranks and pieces.
      ProtocolError: the schedule goes wrong in this order of events.
    """
    n = schedule.num_ranks
    if len(x) != n or len(kernel) != n:
        raise ValueError(f"{schedule.op}: {len(x)} x and {len(kernel)} kernels for {n} ranks. Give each rank one.")
    gathers = schedule.op == "all_gather_matmul"
    num_rows = x[0].shape[0] * (n if gathers else 1)
    schedule.piece_rows(num_rows)

    def shard(rank: int, piece: int) -> Array:
        first, end = schedule.rows(piece, num_rows)
        skipped = rank * (num_rows // n) if gathers else 0
        return x[rank][first - skipped : end - skipped]

    def compute(rank: int, piece: int, arrived: Array | None) -> Array:
        return jnp.matmul(shard(rank, piece) if arrived is None else arrived, kernel[rank])

    machine = Machine(schedule, Algebra(shard, compute, jnp.add))
    state, draw = machine.start(), random.Random(seed)
    while events := machine.events(state):
        state = machine.happen(state, draw.choice(events))
    if not machine.is_finished(state):
        raise ProtocolError(Fault.DEADLOCK, f"after {seed=}")
    scatters = schedule.op == "matmul_reduce_scatter"
    outputs: list[Array] = []
    for rank in range(n):
        mine = [g for g in range(schedule.num_pieces) if not scatters or schedule.owner(g) == rank]
        rows = [machine.value(state, rank, Place("output", piece)) for piece in mine]
        outputs.append(jnp.concatenate([row for row in rows if row is not None]))
    return outputs
