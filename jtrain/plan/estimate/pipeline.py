"""Sizes of a pipelined step that follow from its schedule alone."""

from jtrain.layout.layout import Layout
from jtrain.pipeline.tick_counts import TickCounts
from jtrain.step.pipeline_ticks import chunk_passes, counts_of


def device_layers(layout: Layout, num_layers: int) -> int:
    """Number of places for layers on one device: all layers, or those of a stage with its identity layers."""
    # Identity layers fill all stages up to the same number of places.
    return num_layers if layout.pipeline is None else layout.pipeline.places // layout.pipeline.stages


def ticks(layout: Layout) -> TickCounts | None:
    """Returns the sizes of a pipelined step's ticks; None without stages.

    Raises:
      UserError: the schedule cannot have this number of microbatches.
    """
    return None if layout.pipeline is None else counts_of(layout)


def kept_layers(layout: Layout, num_layers: int) -> int:
    """Number of layers for which a device keeps activations at its peak, each of one microbatch."""
    if layout.pipeline is None:
        return num_layers
    counts = ticks(layout)
    assert counts is not None
    # A slot of an input stands for one chunk of one microbatch, with all layers of the chunk.
    return counts.num_inputs * layout.pipeline.layers_per_chunk


def layer_passes(layout: Layout, num_layers: int) -> int:
    """Forward passes of single layers that a device computes in a step, identity layers with them."""
    if layout.pipeline is None:
        return num_layers * layout.spec.microbatches
    return chunk_passes(layout) * layout.pipeline.layers_per_chunk


def splits_backward(layout: Layout) -> bool:
    """True if a pipeline computes gradients of weights later than those of the layers' inputs."""
    counts = ticks(layout)
    return counts is not None and counts.splits_backward
