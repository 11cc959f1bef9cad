"""Ticks of a pipelined step: which packing of its schedule is the shortest for what the layers recompute."""

import functools

from jtrain.errors import UserError
from jtrain.layout import Layout
from jtrain.pipeline.clocks import best_ticks, equal_costs
from jtrain.pipeline.pipeline_layout import schedule_of
from jtrain.pipeline.schedule import PipelineSchedule
from jtrain.pipeline.ticks import Ticks, make_ticks


def layers_permute(layout: Layout) -> bool:
    """True if layers permute over `tensor` or `context`.

    A permute is one collective of all devices, so it cannot lie in a branch that only some workers take: the others
    would be waited for for ever (seen on CPUs). Every worker then computes all kinds of work in every tick.
    """
    ring = layout.mesh.context > 1 and layout.spec.context_attention == "ring"
    return layout.spec.tensor_overlap or ring


def ticks_of(layout: Layout, *, trains: bool = True) -> Ticks:
    """The ticks of a pipelined step; its forward passes alone unless it trains.

    Raises:
      UserError: the schedule cannot have this number of microbatches, or splits the backward pass where layers compute
        groups of sequences.
    """
    assert layout.pipeline is not None
    schedule = schedule_of(layout.pipeline, layout.spec.microbatches)
    if schedule.splits_backward and layout.spec.sequence_groups > 1:
        raise UserError(
            f"layout.sequence_groups={layout.spec.sequence_groups} with pipeline.schedule="
            f"{layout.pipeline.spec.schedule}, which splits the backward pass: each weight is then used once. Set "
            "layout.sequence_groups=1, or pipeline.schedule=1f1b."
        )
    if not trains:
        return _fewest(schedule.forward_only)
    if layers_permute(layout):
        return _fewest(schedule)  # all ticks take as long
    return _shortest(schedule, relative_costs(layout))


def relative_costs(layout: Layout) -> tuple[float, float, float]:
    """Times of F, I and W in units of F, for which the packing is chosen."""
    return 1.0, 2.0 if layout.spec.remat == "full" else 1.0, 1.0


@functools.cache
def _fewest(schedule: PipelineSchedule) -> Ticks:
    return make_ticks(schedule)


@functools.cache
def _shortest(schedule: PipelineSchedule, times: tuple[float, float, float]) -> Ticks:
    """The packing that takes the least time, where F, I and W of every chunk take these."""
    return best_ticks(schedule, equal_costs(schedule, *times))
