"""Sizes of a pipelined step that follow from its schedule alone."""

from jtrain.layout import Layout
from jtrain.pipeline.ticks import Ticks
from jtrain.step.pipeline_ticks import ticks_of


def layers_here(layout: Layout, num_layers: int) -> int:
    """Number of places for layers on one device: all layers, or those of a stage with its identity layers."""
    return num_layers if layout.pipeline is None else layout.pipeline.places // layout.pipeline.stages


def ticks(layout: Layout) -> Ticks | None:
    """Returns the ticks of a pipelined step; None without stages.

    Raises:
      UserError: the schedule cannot have this number of microbatches.
    """
    return None if layout.pipeline is None else ticks_of(layout)


def kept_layers(layout: Layout, num_layers: int) -> int:
    """Number of layers for which a device keeps activations at its peak, each of one microbatch."""
    if layout.pipeline is None:
        return num_layers
    slots = ticks(layout)
    assert slots is not None
    return slots.num_inputs * layout.pipeline.layers_per_chunk
