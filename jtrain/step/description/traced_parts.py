"""Abstract traces of a train step's own functions, one per part of the step and class of layouts.

A trace has sizes that tell each other apart (`labelled_sizes.py`), so its numbers scale to every layout of
its class. It takes a few tenths of a second, and is kept in memory and on disk (`trace_cache.py`). Layers are
traced once for all choices of what they keep (`kept_values.py`).
"""

import collections
import dataclasses
import functools
import math
from typing import Any, Literal

from jtrain.step.description.jaxpr_places import When
from jtrain.step.description.kept_values import keep_values
from jtrain.step.description.labelled_sizes import LabelledSizes, label_sizes
from jtrain.step.description.layout_class import LayoutClass, input_keeping_class
from jtrain.step.description.monomials import TOKENS, Monomial, labelled
from jtrain.step.description.part_jaxprs import jaxpr_of, unread_losses
from jtrain.step.description.saved_arrays import trace_saved
from jtrain.step.description.trace_cache import cached_trace
from jtrain.step.description.traced_memory import MemoryTrace, memory_from_json, trace_memory
from jtrain.step.description.traced_work import Kind, TracedProduct, TracedWork, traced_work

type Gradient = Literal["forward", "again", "by_input", "by_weight"]
"""Pass of a product with a weight; the backward pass has one for the gradient of the input and one for the
weight's."""


@dataclasses.dataclass(frozen=True)
class LabelledCollective:
    """A `StepCollective` of a class of layouts: `ring` is the number of a torus dimension, None for whole
    axes.
    """

    scope: tuple[str, ...]
    parameter: str
    kind: Kind
    along: tuple[str, ...]
    ring: int | None
    dtype: str
    count: Monomial
    elements: Monomial
    when: When
    repeats_products: bool
    largest: bool


@dataclasses.dataclass(frozen=True)
class LabelledProduct:
    """A `StepProduct` of a class of layouts; `sizes` are its rows, depth, columns and groups."""

    when: Gradient
    in_8_bits: bool
    count: Monomial
    sizes: tuple[Monomial, ...]


@dataclasses.dataclass(frozen=True)
class PartTrace:
    """Collectives, products and memory of one part of a step, for a class of layouts.

    recomputed_names: names of the activations that the backward pass computes a second time.
    memory: of layers; empty for other parts.
    """

    collectives: tuple[LabelledCollective, ...]
    products: tuple[LabelledProduct, ...]
    recomputed_names: tuple[str, ...]
    memory: MemoryTrace


@functools.cache
def trace_part(layout_class: LayoutClass) -> PartTrace:
    """The trace of one part of the step, in a class of layouts."""
    return cached_trace(layout_class, trace_class, _part_from_json)


def _part_from_json(
    collectives: list[dict[str, Any]],
    products: list[dict[str, Any]],
    recomputed_names: list[str],
    memory: dict[str, Any],
) -> PartTrace:
    """A trace from its fields as JSON has them."""
    labelled_products = (_product_from_json(**fields) for fields in products)
    return PartTrace(
        tuple(_collective_from_json(**fields) for fields in collectives),
        tuple(labelled_products),
        tuple(recomputed_names),
        memory_from_json(**memory),
    )


def _product_from_json(count: Any, sizes: Any, **fields: Any) -> LabelledProduct:
    return LabelledProduct(count=labelled(count), sizes=tuple(map(labelled, sizes)), **fields)


def _collective_from_json(
    scope: list[str], along: list[str], count: Any, elements: Any, **fields: Any
) -> LabelledCollective:
    sizes: Any = dict(count=labelled(count), elements=labelled(elements))
    return LabelledCollective(scope=tuple(scope), along=tuple(along), **sizes, **fields)


def forget_traces() -> None:
    """Forgets the traces in memory."""
    trace_part.cache_clear()
    trace_saved.cache_clear()
    jaxpr_of.cache_clear()


def trace_class(layout_class: LayoutClass) -> PartTrace:
    """Returns the trace of a class of parts, made anew."""
    if layout_class.part != "layers":
        return describe_jaxpr(layout_class, jaxpr_of(layout_class))
    # One jaxpr serves every choice of names: it keeps the input alone, and `keep_values` marks the rest.
    names = None if layout_class.spec.remat == "none" else layout_class.spec.remat_save
    jaxpr = keep_values(jaxpr_of(input_keeping_class(layout_class)), names)
    return describe_jaxpr(layout_class, jaxpr, unread=0 if names is None else unread_losses(layout_class))


def describe_jaxpr(layout_class: LayoutClass, jaxpr: Any, *, unread: int = 0) -> PartTrace:
    """Describes the jaxpr of a part.

    Args:
      unread: number of its last results that nobody reads.
    """
    sizes, work = label_sizes(layout_class), traced_work(jaxpr, unread=unread)
    paths = [p.info.path for p in sizes.layout.params]
    collectives = (
        LabelledCollective(
            collective.scope,
            # The step opens a scope named after the parameter around its collectives.
            next((path for path in paths if ".".join(collective.scope).endswith(path)), ""),
            collective.kind,
            collective.axes,
            None if collective.ring is None else sizes.layout.rings.index(collective.ring),
            collective.dtype,
            sizes.monomial(math.prod(collective.trips)),
            sizes.monomial(math.prod(collective.dims)),
            collective.when,
            collective.repeats_products,
            collective.largest,
        )
        for collective in work.collectives
    )
    names = tuple(sorted(work.recomputed_names))
    memory = trace_memory(sizes, work) if layout_class.part == "layers" else MemoryTrace((), (), (), ())
    return PartTrace(tuple(collectives), _products(sizes, work), names, memory)


def _products(sizes: LabelledSizes, work: TracedWork) -> tuple[LabelledProduct, ...]:
    """Products of a trace, those that are alike together."""
    counts = collections.Counter(_labelled_product(sizes, product) for product in work.products)
    return tuple(
        dataclasses.replace(product, count=(product.count[0] * repeats, product.count[1]))
        for product, repeats in counts.items()
    )


def _labelled_product(sizes: LabelledSizes, product: TracedProduct) -> LabelledProduct:
    """A product with its sizes as labels.

    The loss's loops over chunks of tokens and over parts of the vocabulary count as one product of all of
    them. Rows that other devices send are on average as many as this device sends: their buffer has room for
    all that any could.
    """
    trips = math.prod(product.trips)
    chunk_loops = [
        (loop, chunk) for loop, chunk in (("m", "q"), ("n", "o")) if loop in dict(sizes.monomial(trips)[1])
    ]

    def size_of(dims: tuple[int, ...]) -> Monomial:
        number, powers = sizes.monomial(math.prod(dims))
        return number, powers + tuple((loop, 1) for loop, chunk in chunk_loops if chunk in dict(powers))

    kept_sizes, reduced_sizes, added_sizes = map(
        size_of, (product.kept_dims, product.reduced_dims, product.added_dims)
    )
    # Only the gradient of a weight sums over rows.
    by_weight = not TOKENS.isdisjoint(dict(reduced_sizes[1]))
    rows, depth = (reduced_sizes, kept_sizes) if by_weight else (kept_sizes, reduced_sizes)
    if product.groups:
        # On average a device receives as many rows as it sends: its tokens' choices.
        chosen = {"x": "c"}
        rows = rows[0], tuple((chosen.get(letter, letter), n) for letter, n in rows[1] if letter != "e")
    # Of a jaxpr's backward products that sum over something else, all are gradients of an input.
    when: Gradient = "by_weight" if by_weight else "by_input" if product.when == "backward" else product.when
    # Loops whose turns are in the sizes now are no longer in the count.
    count = sizes.monomial(trips // math.prod(sizes.labels[loop] for loop, _ in chunk_loops))
    return LabelledProduct(
        when, product.in_8_bits, count, (rows, depth, added_sizes, sizes.monomial(product.groups))
    )
