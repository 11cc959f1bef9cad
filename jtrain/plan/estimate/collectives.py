"""Collectives of one train step by purpose: kind, axes, dtype, number of arrays and bytes.

They are read off abstract traces of the step (`jtrain.step.description`). A test compiles the real step and
finds the same arrays. Compilers may join several arrays into one instruction.
"""

import dataclasses
from typing import Any

from jtrain.hlo.device_groups import wire_bytes
from jtrain.layout.precision import itemsize
from jtrain.plan.job import Job
from jtrain.step.description.part_jaxprs import ONCE, UPDATE, WEIGHT_GRADIENTS
from jtrain.step.description.step_description import StepCollective
from jtrain.step.description.traced_work import Kind as Kind

BETWEEN_STAGES = "stage to stage"
"""Purpose of the permutes of activations and cotangents at the end of each tick."""

DURING_WEIGHT_GRADIENTS = "activations, backward"
"""Purpose of the sums of gradients of activations, and of the gather of attention's: what the layer's
gradients of weights, or those of its feed-forward part, do not wait for."""

REGATHERED = "activations, again"
"""Purpose of the gathers of activations that the backward pass repeats, because a layer keeps no gathered
input."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of a step that share a purpose, as one device sees them.

    axes: mesh axes that a group spans.
    group: devices of a group; fewer than the axes have if `Layout.rings` splits an axis.
    count: arrays per step.
    array_bytes: sum of the sizes of the whole arrays: results of all-gathers, operands of reduce-scatters and
      all-reduces, a device's operands of all-to-alls and collective-permutes. A ragged all-to-all counts with
      all experts chosen equally often.
    in_layers: True if every pass of a layer has them.
    feeds_products: True if the backward pass computes products of attention again from what they gather.
    """

    purpose: str
    kind: Kind
    axes: tuple[str, ...]
    group: int
    dtype: str
    count: int
    array_bytes: int
    in_layers: bool = False
    feeds_products: bool = False

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends per step, on a ring: (n - 1) / n of the array, twice for an
        all-reduce.
        """
        return wire_bytes(self.kind, self.array_bytes, self.group)


def collectives(job: Job) -> tuple[Collective, ...]:
    """The collectives of one train step with an elementwise optimizer, the most bytes on the wire first.

    Raises:
      UserError: the batch does not split evenly over the mesh and the microbatches.
    """
    step_collectives = job.step.collectives
    # The loss gathers the unembedding if it takes it in parts; its gradient then has the same purpose.
    gathered_parameters = {
        collective.parameter
        for collective in step_collectives
        if collective.part == "loss" and collective.kind == "all-gather"
    }
    totals: dict[tuple[Any, ...], list[Any]] = {}
    for collective in step_collectives:
        # The order matters: an end's collective may name a parameter, but is told by its scope.
        if collective.part in ("end", "partitioner"):
            purpose = _end_purpose(collective)
        elif collective.parameter:
            purpose = _parameter_purpose(collective, collective.parameter in gathered_parameters)
        else:
            purpose = _activation_purpose(collective)
        total = totals.setdefault(
            (purpose, collective.kind, collective.axes, collective.group, collective.dtype),
            [0, 0, False, False],
        )
        total[0] += collective.count
        total[1] += collective.elements * (4 if "int" in collective.dtype else itemsize(collective.dtype))
        total[2] |= collective.part == "layers"
        # Attention that is computed again from a gathered input waits for the gather.
        total[3] |= collective.repeats_products and "attention" in collective.scope
    rows = [Collective(*key, *total) for key, total in totals.items()]
    return tuple(sorted(rows, key=lambda row: -row.wire_bytes))


def _end_purpose(collective: StepCollective) -> str:
    """Purpose of a collective that a step has once."""
    if collective.part == "partitioner":
        return "gradient norm"
    if collective.kind == "all-to-all":
        # Devices that share a key head exchange its kernels once per step.
        return "shared key heads"
    if ONCE in collective.scope:
        return "whole parameters"
    if collective.kind == "all-gather" and (collective.parameter or UPDATE in collective.scope):
        return "updated parameters"
    # Amax histories alone take the largest number over devices.
    if collective.largest:
        return "scales"
    # Single numbers in that scope are the loss and counts of tokens, which are metrics.
    return "gradients" if "reduce_gradients" in collective.scope and collective.elements > 1 else "metrics"


def _parameter_purpose(collective: StepCollective, is_gathered: bool) -> str:
    """Purpose of a collective that moves a parameter or its gradient.

    Args:
      is_gathered: True if the loss gathers the parameter.
    """
    if collective.part == "loss":
        return "unembedding" if is_gathered else "gradients"
    if collective.kind != "all-gather":
        return "gradients"
    # A pipeline gathers once more for the gradients of weights that it computes later.
    is_forward = collective.when == "forward" and WEIGHT_GRADIENTS not in collective.scope
    return "parameters, forward" if is_forward else "parameters, backward"


def _activation_purpose(collective: StepCollective) -> str:
    """Purpose of a collective of activations, of their gradients, or of numbers about tokens."""
    if collective.part == "ticks":
        return BETWEEN_STAGES
    if collective.part == "loss":
        return "last layer" if collective.along == ("stage",) else "loss"
    if collective.part == "embedding":
        return (
            "token ids"
            if collective.dtype == "int32"
            else "activations"
            if collective.along == ("tensor",)
            else "embedding"
        )
    # Experts first: rows and counts pass other tests below as well.
    if "expert" in collective.along:
        return "rows to experts" if collective.kind == "ragged-all-to-all" else "expert counts"
    if "router" in collective.scope:
        return "routing"
    if collective.kind == "all-reduce":
        return "scales"
    if collective.along == ("context",):
        # A ring permutes keys and values, Ulysses exchanges heads; what remains are ids of segments.
        by_kind = {"collective-permute": "keys and values", "all-to-all": "heads for positions"}
        return by_kind.get(collective.kind, "segments")
    if (
        collective.kind == "collective-permute"
        or collective.when == "forward"
        or WEIGHT_GRADIENTS in collective.scope
    ):
        return "activations"
    if collective.when == "again":
        return REGATHERED if collective.kind == "all-gather" else "activations"
    return (
        DURING_WEIGHT_GRADIENTS
        if collective.kind == "reduce-scatter" or "attention" in collective.scope
        else "activations"
    )
