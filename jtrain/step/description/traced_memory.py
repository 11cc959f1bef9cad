"""Memory of a traced part of a step: passes over it, arrays that exist at the same time, calls of attention.

A pass is what the fusions between the same products and kernels read and store, each array once.

Compilers multiply gradients of weights last, after all that the gradient of the residual stream waits for, so
what those read exists until the end of a layer; or of a turn of a loop within it. Those of an adapter's
narrow matrices take no room that is worth a wait: they are multiplied as soon as they can be.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jtrain.layout.mesh import local_shape
from jtrain.model import ops
from jtrain.step.description.jaxpr_places import When
from jtrain.step.description.labelled_sizes import LabelledSizes
from jtrain.step.description.monomials import TOKENS, Monomial, labelled
from jtrain.step.description.stored_values import StoredValues, StoringStep
from jtrain.step.description.traced_work import PRODUCTS, TracedLoop, TracedWork
from jtrain.step.gradient_sums import sums_gradients


@dataclasses.dataclass(frozen=True)
class LabelledPass:
    """Bytes that passes over memory read and write, of all layers or of a part.

    of_experts: True for rows of tokens sorted by expert.
    """

    when: When
    of_experts: bool
    bytes: Monomial


@dataclasses.dataclass(frozen=True)
class LabelledMoment:
    """Arrays of tokens that exist at a moment of a layer's backward pass, besides those that layers save.

    shards: those of them that exist only where several devices split a sequence over `tensor`: the gathered
      array exists too.
    in_attention: True during the backward pass of attention's kernel, whose workspace comes on top.
    """

    bytes: tuple[Monomial, ...]
    shards: tuple[Monomial, ...]
    in_attention: bool


@dataclasses.dataclass(frozen=True)
class LabelledAttention:
    """Calls of attention's kernel that are alike.

    backward: True for its backward pass; causal: False where every query sees every key.
    sizes: sequences, positions, query heads, key heads, head size.
    """

    when: When
    backward: bool
    causal: bool
    count: Monomial
    sizes: tuple[Monomial, ...]


@dataclasses.dataclass(frozen=True)
class MemoryTrace:
    """Memory of a part, for a class of layouts.

    moments: those that can be the widest of a layer's backward pass.
    weight_inputs: what gradients of a layer's weights need: for each product its input and the gradient of
      its result.
    """

    passes: tuple[LabelledPass, ...]
    moments: tuple[LabelledMoment, ...]
    attention: tuple[LabelledAttention, ...]
    weight_inputs: tuple[Monomial, ...]


def trace_memory(sizes: LabelledSizes, work: TracedWork) -> MemoryTrace:
    """Memory of a part's trace."""
    values = StoredValues(work)
    # The loop over layers of the backward pass, where there is one.
    loops = [loop for loop in work.loops if any(_is_backward(step) for step in values.steps_of(loop))]
    # Inner loops, as of a ring or over pieces, lie within the one over layers and are smaller.
    largest = max(loops, key=lambda loop: loop.end - loop.first, default=None)
    used = {n for step in values.steps for n in (*step.reads, *step.results)}
    # What a loop carries takes memory, even if no step of it reads the value.
    used |= {n for loop in loops for n in loop.carried}
    array_bytes = {n: _bytes_of(sizes, values.arrays[n]) for n in used}
    moments = [] if largest is None else _moments(sizes, array_bytes, values, largest)
    return MemoryTrace(
        tuple(_passes(sizes, values)),
        tuple(_widest(moments)),
        tuple(_attention(sizes, values)),
        _weight_inputs(array_bytes, values),
    )


def _is_backward(step: StoringStep) -> bool:
    return step.place.when == "backward"


def _times(number: Monomial, *others: Monomial) -> Monomial:
    """Product of monomials."""
    factor, powers = number[0], collections.Counter(dict(number[1]))
    for other_factor, other_powers in others:
        factor *= other_factor
        powers.update(dict(other_powers))
    return factor, tuple(sorted(powers.items()))


def _bytes_of(sizes: LabelledSizes, array: Any) -> Monomial:
    return _times(sizes.monomial(math.prod(array.shape)), (array.dtype.itemsize, ()))


def _is_of_tokens(number: Monomial) -> bool:
    return not TOKENS.isdisjoint(dict(number[1]))


def _passes(sizes: LabelledSizes, values: StoredValues) -> Iterator[LabelledPass]:
    """Passes of all fusions, those that are alike together.

    Rows that other devices send are on average as many as this device sends: their buffer has room for all
    that any could. Additions of gradients to their sums are not listed: few layouts are traced with them.
    """
    sums_here = sums_gradients(sizes.layout) or sizes.layout.pipeline is not None
    totals: collections.Counter[tuple[When, Any]] = collections.Counter()
    choices = sizes.labels.get("c", 0)
    for (place_trips, when), numbers in values.passes():
        trips = sizes.monomial(math.prod(place_trips))
        counts = collections.Counter(
            (_rows_in_use(sizes, values.arrays[n]), values.is_gathered(n)) for n in numbers
        )
        for (size, is_gathered), count in counts.items():
            repeats: Monomial = count, ()
            if is_gathered and choices and "c" not in dict(size[1]) and count % choices == 0:
                repeats = count // choices, (("c", 1),)  # a sum over a token's choices is unrolled
            factor, powers = _times(size, trips, repeats)
            totals[when, powers] += factor
    for (when, powers), factor in totals.items():
        # Without tokens and in the backward pass: a gradient of a weight, and its sum.
        is_sum = sums_here and when == "backward" and not _is_of_tokens((factor, powers))
        if factor and not is_sum:
            of_experts = _is_of_tokens((factor, powers)) and "c" in dict(powers)
            yield LabelledPass(when, of_experts, (factor, powers))


def _rows_in_use(sizes: LabelledSizes, array: Any) -> Monomial:
    """Bytes of an array; of a buffer for rows of tokens those of as many rows as a device sends."""
    dims = [sizes.monomial(size) for size in array.shape]
    is_buffer = [_is_of_tokens(dim) and "e" in dict(dim[1]) for dim in dims]
    used = [_rows_sent(dim) if buffer else dim for dim, buffer in zip(dims, is_buffer, strict=True)]
    return _times((array.dtype.itemsize, ()), *used)


def _rows_sent(rows: Monomial) -> Monomial:
    """Rows that a device sends, of the rows that it has room for."""
    chosen = {"x": "c"}
    return rows[0], tuple((chosen.get(letter, letter), n) for letter, n in rows[1] if letter != "e")


def _moments(
    sizes: LabelledSizes, array_bytes: Mapping[int, Monomial], values: StoredValues, loop: TracedLoop
) -> Iterator[LabelledMoment]:
    """Arrays of tokens at each step of a turn of the backward loop that makes one."""
    steps = values.steps_of(loop)
    depth, narrow = min(len(step.place.trips) for step in steps), _elements_of_adapters(sizes)

    def is_late_gradient(step: StoringStep) -> bool:
        # A gradient of a weight has no tokens.
        is_gradient = step.name in PRODUCTS and not _is_of_tokens(array_bytes[step.results[0]])
        within_turn = len(step.place.trips) == depth
        return is_gradient and within_turn and math.prod(values.arrays[step.results[0]].shape) not in narrow

    is_late = [is_late_gradient(step) for step in steps]
    # Gradients of weights last, as compilers schedule them (see above).
    ordered = [step for step, late in zip(steps, is_late, strict=True) if not late]
    ordered += [step for step, late in zip(steps, is_late, strict=True) if late]
    starts, ends = collections.defaultdict[int, set[int]](set), collections.defaultdict[int, set[int]](set)
    for n, (first, last) in values.live_ranges(ordered, loop).items():
        if _is_of_tokens(array_bytes[n]):
            starts[first].add(n)
            ends[last].add(n)
    gathers = [step for step in steps if step.name in ("all_gather", "reduce_scatter")]
    # The shard and the gathered array, in either order: a reduce-scatter goes the other way.
    pairs = [(step.reads[0], step.results[0]) for step in gathers]
    pairs = [pair for pair in pairs if _differ_by_tensor(*(array_bytes[n] for n in pair))]
    alive = set[int]()
    for position, step in enumerate(ordered):
        alive |= starts[position]
        # The results of a loop take the places of what it carries.
        if starts[position] and step.name != "scan":
            shards = {
                # The shard is the one without the factor t, the devices along `tensor`.
                min(pair, key=lambda n: dict(array_bytes[n][1]).get("t", 0))
                for pair in pairs
                if alive.issuperset(pair)
            }
            yield LabelledMoment(
                _sums([array_bytes[n] for n in alive - shards]),
                _sums([array_bytes[n] for n in shards]),
                step.name == "attention" and step.attention.startswith(ops.ATTENTION_BACKWARD),
            )
        # After the moment: what a step reads last is still there while the step runs.
        alive -= ends[position]


def _elements_of_adapters(sizes: LabelledSizes) -> set[int]:
    """Elements of one layer's matrices of an adapter on a device, gathered from ZeRO's shards; without those
    of experts, whose gradients wait as others do.
    """
    mesh, counts = sizes.layout.mesh.shape, set[int]()
    for p in sizes.layout.params:
        if p.info.is_adapter and not p.info.is_experts:
            shape = local_shape(p.spec(zero_sharded=False), p.info.shape, mesh)
            counts.add(math.prod(shape[p.info.is_stacked :]))
    return counts


def _differ_by_tensor(first: Monomial, second: Monomial) -> bool:
    """True if one of two arrays is the other, gathered over `tensor`."""
    difference = collections.Counter(dict(first[1]))
    difference.subtract(dict(second[1]))
    return first[0] == second[0] and {n for n in difference.items() if n[1]} in ({("t", 1)}, {("t", -1)})


def _sums(numbers: list[Monomial]) -> tuple[Monomial, ...]:
    """Monomials of the same powers added up."""
    totals = collections.Counter[Any]()
    for factor, powers in numbers:
        totals[powers] += factor
    return tuple((factor, powers) for powers, factor in sorted(totals.items()))


def _widest(moments: Iterable[LabelledMoment]) -> list[LabelledMoment]:
    """Moments that are not within another one in every layout of the class."""
    lower_bytes, upper_bytes = dict[LabelledMoment, dict[Any, int]](), dict[LabelledMoment, dict[Any, int]]()
    for moment in moments:
        # With shards or without, by the layout: a moment lies within another for certain if its most
        # does not exceed the other's least.
        lower_bytes[moment] = {powers: factor for factor, powers in moment.bytes}
        upper_bytes[moment] = {powers: factor for factor, powers in _sums([*moment.bytes, *moment.shards])}
    widest: list[LabelledMoment] = []

    def is_within(moment: LabelledMoment, wider: LabelledMoment) -> bool:
        return moment.in_attention <= wider.in_attention and all(
            factor <= lower_bytes[wider].get(powers, 0) for powers, factor in upper_bytes[moment].items()
        )

    for moment in lower_bytes:
        if not any(is_within(moment, wider) for wider in widest):
            widest = [wider for wider in widest if not is_within(wider, moment)] + [moment]
    return widest


def _attention(sizes: LabelledSizes, values: StoredValues) -> Iterator[LabelledAttention]:
    """Calls of attention's kernel, those that are alike together."""
    counts: collections.Counter[LabelledAttention] = collections.Counter()
    for step in values.steps:
        if step.name != "attention":
            continue
        heads = [values.arrays[n].shape for n in step.operands if len(values.arrays[n].shape) == 4]
        # Masks have four dimensions too, the last of which is of positions.
        heads = [shape for shape in heads if shape[-1] in sizes.head_sizes and shape[1] > 1]
        if not heads:
            continue  # what is computed before the loop over layers
        # Dimension 2 is heads, of which keys have at most as many as queries.
        query, key = (choose(heads, key=lambda shape: shape[2]) for choose in (max, min))
        rows, length, num_heads, size = map(sizes.monomial, query)
        call = LabelledAttention(
            step.place.when,
            step.attention.startswith(ops.ATTENTION_BACKWARD),
            not step.attention.endswith(ops.UNMASKED),
            sizes.monomial(math.prod(step.place.trips)),
            (rows, length, num_heads, sizes.monomial(key[2]), size),
        )
        counts[call] += 1
    for call, times in counts.items():
        yield dataclasses.replace(call, count=(call.count[0] * times, call.count[1]))


def _weight_inputs(array_bytes: Mapping[int, Monomial], values: StoredValues) -> tuple[Monomial, ...]:
    """Arrays of tokens that the gradients of weights read."""
    products = [step for step in values.steps if step.name in PRODUCTS and _is_backward(step)]
    inputs = {n for step in products if not _is_of_tokens(array_bytes[step.results[0]]) for n in step.reads}
    return _sums([array_bytes[n] for n in inputs if _is_of_tokens(array_bytes[n])])


def memory_from_json(
    passes: list[dict[str, Any]],
    moments: list[dict[str, Any]],
    attention: list[dict[str, Any]],
    weight_inputs: list[Any],
) -> MemoryTrace:
    """A trace from its fields as JSON has them."""
    return MemoryTrace(
        tuple(_pass_from_json(**fields) for fields in passes),
        tuple(_moment_from_json(**fields) for fields in moments),
        tuple(_attention_from_json(**fields) for fields in attention),
        tuple(map(labelled, weight_inputs)),
    )


def _pass_from_json(bytes: Any, **fields: Any) -> LabelledPass:
    return LabelledPass(bytes=labelled(bytes), **fields)


def _moment_from_json(bytes: Any, shards: Any, **fields: Any) -> LabelledMoment:
    return LabelledMoment(bytes=tuple(map(labelled, bytes)), shards=tuple(map(labelled, shards)), **fields)


def _attention_from_json(count: Any, sizes: Any, **fields: Any) -> LabelledAttention:
    return LabelledAttention(count=labelled(count), sizes=tuple(map(labelled, sizes)), **fields)
