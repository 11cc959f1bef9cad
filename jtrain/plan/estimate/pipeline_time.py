"""Seconds of a pipeline's operations, and of the bubble between them.

Stages run one program and meet after every tick (the lockstep clock), so a tick takes as long as its slowest
worker. All workers have as many layers, so an operation takes equally long on each. Embedding and loss are
split over all stages, which compute them at the same time: they are no part of an operation, and no stage
waits for another in them.
"""

import dataclasses

from jtrain.layout.layout import Layout
from jtrain.pipeline.clocks import Costs
from jtrain.plan.estimate.pipeline import ticks
from jtrain.step.pipeline_ticks import chunk_passes, layers_permute


@dataclasses.dataclass(frozen=True)
class StageSeconds:
    """Seconds per step in which a device works on its own layers.

    forward_s, by_input_s, by_weight_s: all of F, I and W; a recomputed forward pass is part of I, and the sum
      over microbatches part of W.
    waits_s: collectives of the layers that nothing hides.
    """

    forward_s: float
    by_input_s: float
    by_weight_s: float
    waits_s: float

    @property
    def busy_s(self) -> float:
        """Seconds of all of it together."""
        return self.forward_s + self.by_input_s + self.by_weight_s + self.waits_s


def operation_costs(layout: Layout, spent: StageSeconds, *, message_s: float) -> Costs:
    """Seconds of F, I and W of one chunk and microbatch, half of what they wait for in F and half in I.

    Args:
      message_s: seconds of one activation or cotangent, from a stage to the next.
    """
    counts = ticks(layout)
    assert counts is not None
    num_operations = counts.microbatches * counts.chunks
    # `waits_s` is of all ticks in which layers send: where they permute, also of those without work.
    wait_s = spent.waits_s / 2 / chunk_passes(layout)
    forward_s, by_input_s, by_weight_s = (
        spent.forward_s / num_operations,
        spent.by_input_s / num_operations,
        spent.by_weight_s / num_operations,
    )
    num_chunks = counts.stages * counts.chunks
    return Costs(
        (forward_s + wait_s,) * num_chunks,
        (by_input_s + wait_s,) * num_chunks,
        (by_weight_s,) * num_chunks,
        message_s,
    )


def bubble_s(layout: Layout, spent: StageSeconds, costs: Costs) -> float:
    """Seconds per step in which a stage waits for others.

    Permutes between stages are not counted: all stages take part in them at the end of each tick.
    """
    counts = ticks(layout)
    assert counts is not None
    num_operations = counts.microbatches * counts.chunks
    if layers_permute(
        layout
    ):  # every stage computes in every tick, and `collectives` counts what it sends in all
        return (counts.num_ticks - num_operations) / num_operations * (spent.busy_s - spent.waits_s)
    return counts.makespan(costs.forward[0], costs.by_input[0], costs.by_weight[0]) - spent.busy_s
