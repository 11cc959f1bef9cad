"""Ticks of a pipelined step: which packing of its schedule is the shortest for what the layers recompute."""

import functools

from jtrain.errors import UserError
from jtrain.layout.layout import Layout
from jtrain.pipeline.pipeline_layout import PipelineLayout, schedule_of
from jtrain.pipeline.tick_counts import TickCounts, count_ticks, family_counts, shortest
from jtrain.pipeline.tick_grid import Packing, pack
from jtrain.pipeline.ticks import Ticks, make_ticks


def layers_permute(layout: Layout) -> bool:
    """True if layers permute over `tensor` or `context`.

    A permute is one collective of all devices, so it cannot lie in a branch that only some workers take: the
    others would be waited for for ever (seen on CPUs). Every worker then computes all kinds of work in every
    tick.
    """
    return layout.spec.tensor_overlap or attention_is_a_ring(layout)


def chunk_passes(layout: Layout) -> int:
    """Forward passes of chunks that a device of a pipeline computes in a step; as many are backward.

    Layers that permute compute in every tick: see `layers_permute`.
    """
    counts = counts_of(layout)
    return counts.num_ticks if layers_permute(layout) else counts.microbatches * counts.chunks


def attention_is_a_ring(layout: Layout) -> bool:
    """True if attention is a loop in which devices along `context` send each other keys and values."""
    return layout.mesh.context > 1 and layout.spec.context_attention == "ring"


def counts_of(layout: Layout) -> TickCounts:
    """Sizes of the ticks of a pipelined step, without their table.

    Raises:
      UserError: the schedule cannot have this number of microbatches, or splits the backward pass where
        layers compute groups of sequences.
    """
    assert layout.pipeline is not None
    # If layers permute, all ticks take as long, and the fewest are the shortest.
    times = None if layers_permute(layout) else relative_costs(layout)
    counts = _counts_of_fastest_packing(layout.pipeline, layout.spec.microbatches, times)
    # Groups use each weight several times, but a split backward pass keeps one input per product.
    if counts.splits_backward and layout.spec.sequence_groups > 1:
        raise UserError(
            f"layout.sequence_groups={layout.spec.sequence_groups} with "
            f"pipeline.schedule={layout.pipeline.spec.schedule}, which splits the backward pass: each weight "
            "is then used once. Set layout.sequence_groups=1, or pipeline.schedule=1f1b."
        )
    if counts.splits_backward and layout.spec.mlp_chunk is not None:
        raise UserError(
            f"layout.mlp_chunk={layout.spec.mlp_chunk} with "
            f"pipeline.schedule={layout.pipeline.spec.schedule}, which splits the backward pass: each "
            "weight is then used once. Set layout.mlp_chunk=None, or pipeline.schedule=1f1b."
        )
    return counts


def ticks_of(layout: Layout, *, trains: bool = True) -> Ticks:
    """The ticks of a pipelined step; its forward passes alone unless it trains.

    Raises:
      UserError: as `counts_of`.
    """
    assert layout.pipeline is not None
    # Forward passes alone give the same ticks under every packing.
    packing = counts_of(layout).packing if trains else "fused"
    return _lower(layout.pipeline, layout.spec.microbatches, packing, trains)


def relative_costs(layout: Layout) -> tuple[float, float, float]:
    """Times of F (forward pass), I (gradient of the input) and W (gradient of the weights) in units of F, for
    which the packing is chosen.
    """
    # F, I and W have about the same matmuls; under remat=full I recomputes the forward pass, one F more.
    return 1.0, 2.0 if layout.spec.remat == "full" else 1.0, 1.0


@functools.cache
def _counts_of_fastest_packing(
    pipeline: PipelineLayout, microbatches: int, times: tuple[float, float, float] | None
) -> TickCounts:
    """Tick counts of the packing (`tick_grid.Packing`) with the shortest makespan.

    times: of F (forward pass), I (gradient of the input) and W (gradient of the weights), in any unit; None
      takes the packing `fused`.
    """
    spec = pipeline.spec

    def count_packing(packing: Packing) -> TickCounts:
        if spec.is_file:
            # A file may have any order: it is counted tick by tick, not continued from smaller numbers.
            return count_ticks(pack(schedule_of(pipeline, microbatches), packing))
        return family_counts(spec.schedule, pipeline.stages, microbatches, pipeline.chunks, packing)

    return count_packing("fused") if times is None else shortest(count_packing, *times)


@functools.cache
def _lower(pipeline: PipelineLayout, microbatches: int, packing: Packing, trains: bool) -> Ticks:
    schedule = schedule_of(pipeline, microbatches)
    return make_ticks(schedule if trains else schedule.forward_only, packing)
