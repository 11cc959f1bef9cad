"""Collectives of one train step by purpose: kind, axes, dtype, number of arrays and bytes.

They are read off abstract traces of the step (`jtrain.step.description`). A test compiles the real step and
finds the same arrays. Compilers may join several arrays into one instruction.
"""

import dataclasses
from typing import Any

from jtrain.hlo.device_groups import wire_bytes
from jtrain.layout.precision import itemsize
from jtrain.plan.job import Job
from jtrain.step.description.step_description import StepCollective
from jtrain.step.description.traced_parts import ONCE, UPDATE, WEIGHT_GRADIENTS
from jtrain.step.description.traced_work import Kind as Kind

BETWEEN_STAGES = "stage to stage"
"""Purpose of the permutes of activations and cotangents at the end of each tick."""

BESIDE_WEIGHTS = "activations, backward"
"""Purpose of the sums of gradients of activations, and of the gather of attention's: what the layer's
gradients of weights, or those of its feed-forward part, do not wait for."""

GATHERED_AGAIN = "activations, again"
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
    sent = job.step.collectives
    gathered = {one.parameter for one in sent if one.part == "loss" and one.kind == "all-gather"}
    totals: dict[tuple[Any, ...], list[Any]] = {}
    for one in sent:
        if one.part in ("end", "partitioner"):
            purpose = _at_end(one)
        elif one.parameter:
            purpose = _of_parameter(one, one.parameter in gathered)
        else:
            purpose = _of_activations(one)
        total = totals.setdefault((purpose, one.kind, one.axes, one.group, one.dtype), [0, 0, False, False])
        total[0] += one.count
        total[1] += one.elements * (4 if "int" in one.dtype else itemsize(one.dtype))
        total[2] |= one.part == "layers"
        total[3] |= one.repeats_products and "attention" in one.scope
    rows = [Collective(*key, *total) for key, total in totals.items()]
    return tuple(sorted(rows, key=lambda row: -row.wire_bytes))


def _at_end(one: StepCollective) -> str:
    """Purpose of a collective that a step has once."""
    if one.part == "partitioner":
        return "gradient norm"
    if one.kind == "all-to-all":
        return "shared key heads"
    if ONCE in one.scope:
        return "whole parameters"
    if one.kind == "all-gather" and (one.parameter or UPDATE in one.scope):
        return "updated parameters"
    if one.largest:
        return "scales"
    return "gradients" if "reduce_gradients" in one.scope and one.elements > 1 else "metrics"


def _of_parameter(one: StepCollective, gathered: bool) -> str:
    """Purpose of a collective that moves a parameter or its gradient.

    Args:
      gathered: True if the loss gathers the parameter.
    """
    if one.part == "loss":
        return "unembedding" if gathered else "gradients"
    if one.kind != "all-gather":
        return "gradients"
    first = one.when == "forward" and WEIGHT_GRADIENTS not in one.scope
    return "parameters, forward" if first else "parameters, backward"


def _of_activations(one: StepCollective) -> str:
    """Purpose of a collective of activations, of their gradients, or of numbers about tokens."""
    if one.part == "ticks":
        return BETWEEN_STAGES
    if one.part == "loss":
        return "last layer" if one.along == ("stage",) else "loss"
    if one.part == "embedding":
        return (
            "token ids"
            if one.dtype == "int32"
            else "activations"
            if one.along == ("tensor",)
            else "embedding"
        )
    if "expert" in one.along:
        return "rows to experts" if one.kind == "ragged-all-to-all" else "expert counts"
    if "router" in one.scope:
        return "routing"
    if one.kind == "all-reduce":
        return "scales"
    if one.along == ("context",):
        by_kind = {"collective-permute": "keys and values", "all-to-all": "heads for positions"}
        return by_kind.get(one.kind, "segments")
    if one.kind == "collective-permute" or one.when == "forward" or WEIGHT_GRADIENTS in one.scope:
        return "activations"
    if one.when == "again":
        return GATHERED_AGAIN if one.kind == "all-gather" else "activations"
    return BESIDE_WEIGHTS if one.kind == "reduce-scatter" or "attention" in one.scope else "activations"
