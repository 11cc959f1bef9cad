"""Arrays that a layer saves for its backward pass, read off the jaxpr of a layer that saves its input alone.

`jax.checkpoint` computes in the backward pass again what the forward pass could have saved. So the values
that such a backward pass computes again, and reads, are those that a layer saves without it.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

from jax.interpreters import partial_eval

from jtrain.model.expert_dispatch import MAX_PIECES
from jtrain.model.forward_placement import SAVEABLE
from jtrain.model.layer_scan import LAYER_INPUT
from jtrain.step.description.jaxpr_places import equations
from jtrain.step.description.kept_values import KEPT, keep_values
from jtrain.step.description.labelled_sizes import LabelledSizes, label_sizes
from jtrain.step.description.layout_class import LayoutClass, input_keeping_class
from jtrain.step.description.monomials import TOKENS, Monomial, labelled
from jtrain.step.description.part_jaxprs import jaxpr_of, residual_stream, unread_losses
from jtrain.step.description.trace_cache import cached_trace


@dataclasses.dataclass(frozen=True)
class LabelledArray:
    """Arrays of one layer on one device that are alike.

    bytes: of all of them.
    of_weights: True for copies of weights, of which there is one for all microbatches.
    beside_shard: True if they were gathered over `tensor` and this device's shards are saved too: the same
      arrays on one device.
    """

    name: str
    dtype: str
    bytes: Monomial
    of_weights: bool
    beside_shard: bool


@dataclasses.dataclass(frozen=True)
class SavedTrace:
    """Arrays that layers of a class can save.

    named: those with a `checkpoint_name`, which layers can save one by one; the layer's input is the first.
    every: those that a layer saves without `jax.checkpoint`, with copies of weights.
    """

    named: tuple[LabelledArray, ...]
    every: tuple[LabelledArray, ...]


def saving_class(layout_class: LayoutClass) -> LayoutClass:
    """The class whose trace says what layers of a class can save: several pieces of an exchange save the same
    bytes, whatever their number.

    That number is the largest, which large batches have anyway. One piece is traced faster.
    """
    several = layout_class.pieces > 1 and layout_class.pattern is None
    pieces = MAX_PIECES if several else layout_class.pieces
    return dataclasses.replace(input_keeping_class(layout_class), pieces=pieces)


@functools.cache
def trace_saved(layout_class: LayoutClass) -> SavedTrace:
    """The arrays that layers of a `saving_class` can save."""
    return cached_trace(("saved", layout_class), lambda _: _trace(layout_class), _from_json)


def _trace(layout_class: LayoutClass) -> SavedTrace:
    sizes, jaxpr = label_sizes(layout_class), jaxpr_of(layout_class)
    # The input of a layer is saved in any case, and is no value that the layer computes.
    stream = LAYER_INPUT, residual_stream(sizes), False
    recomputing = _lean(jaxpr, unread=unread_losses(layout_class))
    # What a layer without `jax.checkpoint` saves depends on no name.
    every = _lean(keep_values(recomputing, None))
    return SavedTrace(
        _labelled(sizes, [stream, *_kept(keep_values(recomputing, SAVEABLE))]),
        _labelled(sizes, [stream, *_kept(every)]),
    )


def _lean(jaxpr: Any, *, unread: int = 0) -> Any:
    """A closed jaxpr without what only its last `unread` results need."""
    num_read = len(jaxpr.jaxpr.outvars) - unread
    lean, used = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * num_read + [False] * unread)
    del used
    return jaxpr.replace(jaxpr=lean)


def _kept(jaxpr: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yields every value that is there when the backward pass begins: name, shape, `beside_shard`."""
    params_of = {eqn.outvars[0]: eqn.params for eqn in equations(jaxpr.jaxpr) if eqn.primitive is KEPT}
    for var, params in params_of.items():
        yield params["name"], var.aval, params["shard"] in params_of


def _labelled(sizes: LabelledSizes, arrays: list[tuple[str, Any, bool]]) -> tuple[LabelledArray, ...]:
    array_bytes: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for name, aval, beside_shard in arrays:
        factor, powers = sizes.monomial(math.prod(aval.shape))
        # Arrays of the same powers of labels have the same size in every layout, up to a factor.
        array_bytes[name, str(aval.dtype), powers, beside_shard] += factor * aval.dtype.itemsize
    return tuple(
        # A size without a label of tokens does not grow with the batch: a copy of weights.
        LabelledArray(name, dtype, (factor, powers), TOKENS.isdisjoint(dict(powers)), beside_shard)
        for (name, dtype, powers, beside_shard), factor in array_bytes.items()
        if factor
    )


def _from_json(named: list[dict[str, Any]], every: list[dict[str, Any]]) -> SavedTrace:
    """A trace from its fields as JSON has them."""
    return SavedTrace(
        *(tuple(_array_from_json(**fields) for fields in array_list) for array_list in (named, every))
    )


def _array_from_json(bytes: Any, **fields: Any) -> LabelledArray:
    return LabelledArray(bytes=labelled(bytes), **fields)
