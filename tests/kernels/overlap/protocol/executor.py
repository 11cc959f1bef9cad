"""Reference executor: runs a schedule on one device, with a random order of events, to verify its results."""

import random
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels.errors import UserError
from jtrain_kernels.overlap.schedule import OverlapSchedule, Place
from tests.kernels.overlap.protocol.simulator import Algebra, Fault, ProtocolError, Simulator


def execute(
    schedule: OverlapSchedule,
    x: Sequence[Float[Array, "_ _"]],
    kernel: Sequence[Float[Array, "_ _"]],
    *,
    seed: int = 0,
) -> list[Float[Array, "_ _"]]:
    """Output of every rank; the table in `schedule.py` gives the shapes.

    Args:
      x, kernel: one array per rank.
      seed: random seed of the order of events; the result is the same to the last bit for every seed.

    Raises:
      UserError: the number of arrays, or of rows, does not fit the ranks and pieces.
      ProtocolError: the schedule fails in this order of events.
    """
    n = schedule.num_ranks
    if len(x) != n or len(kernel) != n:
        raise UserError(
            f"{schedule.op}: {len(x)} x and {len(kernel)} kernels for {n} ranks. Give each rank one."
        )
    gathers = schedule.op == "all_gather_matmul"
    num_rows = x[0].shape[0] * (n if gathers else 1)
    schedule.piece_rows(num_rows)

    def shard(rank: int, piece: int) -> Array:
        first, end = schedule.rows(piece, num_rows)
        skipped = rank * (num_rows // n) if gathers else 0
        return x[rank][first - skipped : end - skipped]

    def compute(rank: int, piece: int, arrived: Array | None) -> Array:
        return jnp.matmul(shard(rank, piece) if arrived is None else arrived, kernel[rank])

    simulator = Simulator(schedule, Algebra(shard, compute, jnp.add))
    state, draw = simulator.start(), random.Random(seed)
    while events := simulator.events(state):
        state = simulator.happen(state, draw.choice(events))
    if not simulator.is_finished(state):
        raise ProtocolError(Fault.DEADLOCK, f"after {seed=}")
    outputs: list[Array] = []
    for rank in range(n):
        mine = [g for g in range(schedule.num_pieces) if gathers or schedule.owner(g) == rank]
        rows = [simulator.value(state, rank, Place("output", piece)) for piece in mine]
        outputs.append(jnp.concatenate([row for row in rows if row is not None]))
    return outputs
