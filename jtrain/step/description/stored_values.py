"""Values of a trace that are in memory, and how long: compilers fuse the operations between them.

A value is stored if a product, a collective or a kernel reads or returns it, if a loop carries it, or if a
later fusion reads it with fewer bytes than what it is computed from.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from jtrain.step.description.jaxpr_places import JaxprPlace, When
from jtrain.step.description.kept_values import KEPT
from jtrain.step.description.part_jaxprs import WEIGHT_GRADIENTS
from jtrain.step.description.traced_work import (
    COLLECTIVES,
    PRODUCTS,
    Operation,
    TracedLoop,
    TracedWork,
    attention_scope,
)

_VIEWS = ("reshape", "squeeze", "transpose", "broadcast_in_dim", "convert_element_type", "copy", "name")
_VIEWS += ("layout_constraint", "stop_gradient", "pvary")
"""Operations that change no bytes where dtype and number of elements stay."""

_SLICES = ("slice", "dynamic_slice", "split")
"""Operations of which a fusion reads no more than the result."""

_ENDS = ("add", "add_any", "convert_element_type")
"""Operations that products do on their results before they write them."""

_LOOPS = ("scan", "while")

_KERNELS = ("sort", "scatter", "scatter-add", "cumsum", "pallas_call", "ffi_call")
"""Operations that read and write memory on their own, besides products, collectives and attention."""


@dataclasses.dataclass(frozen=True)
class StoringStep:
    """An operation, or those of one attention kernel.

    index: of the operation in the trace.
    operands: values as they are passed; reads: the same as they lie in memory, without views.
    attention: scope of the kernel; empty for all others.
    """

    name: str
    index: int
    operands: tuple[int, ...]
    reads: tuple[int, ...]
    results: tuple[int, ...]
    place: JaxprPlace
    attention: str = ""

    @property
    def is_alone(self) -> bool:
        """True if compilers fuse the operation with no other."""
        return self.name in ("attention", *PRODUCTS, *COLLECTIVES, *_LOOPS, *_KERNELS)


class StoredValues:
    """Steps of a trace, and the values that are in memory.

    arrays: number of a value -> its shape and dtype.
    """

    def __init__(self, work: TracedWork) -> None:
        self.arrays, self._views = work.arrays, dict[int, int]()
        self._made_by, self._written = dict[int, StoringStep](), set[int]()
        self.steps = [step for step in map(self._without_views, _joined(work)) if step is not None]
        # Values made of literals alone, such as masks of positions: a fusion makes them again for free.
        self._constants = set[int]()
        for step in self.steps:
            if not step.is_alone and step.name != KEPT.name and self._constants.issuperset(step.reads):
                self._constants |= set(step.results)
        self._sources = dict[int, frozenset[int]]()
        self._levels = collections.defaultdict[int, int](int)
        for step in self.steps:
            # Products, kernels and collectives before a value: fusions of one level can be one pass.
            level = max((self._levels[n] for n in step.reads), default=0) + step.is_alone
            self._levels |= dict.fromkeys(step.results, level)
        returned = (work.returned, *(loop.returned for loop in work.loops))
        self._stored = {self._resolved(n) for numbers in returned for n in numbers} | self._written
        for step in self.steps:
            # A turn of a loop reads a part where it lies.
            in_place = _SLICES if step.name in _LOOPS else ()
            self._stored |= {n for n in step.reads if step.is_alone and self._name(n) not in in_place}
        for step in self.steps:
            self._stored |= {n for n in step.reads if self._is_worth_storing(n, step)}
        self._sources.clear()  # they end at values that are known to be stored by now

    def steps_of(self, loop: TracedLoop) -> list[StoringStep]:
        """Steps of a turn of a loop."""
        return [step for step in self.steps if loop.first <= step.index < loop.end]

    def passes(self) -> Iterator[tuple[tuple[tuple[int, ...], When], list[int]]]:
        """Yields trips and pass of each group of fusions, with the values that it reads and stores."""
        groups: dict[Any, tuple[set[int], set[int], list[int]]] = {}
        for step in self.steps:
            if not step.results:
                continue
            # Gradients of weights that a pipeline computes later are no transposed operations.
            when = "backward" if WEIGHT_GRADIENTS in step.place.scope else step.place.when
            key = step.place.trips, when, self._levels[step.results[0]]
            reads, writes, accesses = groups.setdefault(key, (set(), set(), []))
            results = [n for n in step.results if n in self._stored]
            if step.name in _KERNELS:
                # A kernel of its own shares no read with the fusions beside it.
                accesses += (*step.reads, *step.results)
            elif results and not step.is_alone and step.name != KEPT.name:
                sources = self._sources_of(step)
                if all(map(self._ends_product, (*step.reads, *sources))) and step.name in _ENDS:
                    accesses += [*sources][1:]  # products add their results to those of the first
                elif sources and sources <= set(results):
                    accesses += [*results, *results]  # a copy of a part
                elif sources:
                    reads |= sources
                    writes |= set(results)
        # A value that the pass itself writes is read from registers, not from memory.
        for (trips, when, _), (reads, writes, accesses) in groups.items():
            yield (trips, when), [*self._without_overlap(reads - writes), *writes, *accesses]

    def _without_overlap(self, reads: set[int]) -> Iterator[int]:
        """Yields what a pass reads, with an array instead of parts of it that overlap."""
        parts = collections.defaultdict[int, list[int]](list)
        for n in reads:
            is_slice = not self._in_memory(n) and self._name(n) in _SLICES
            parts[self._made_by[n].reads[0] if is_slice else n].append(n)
        for array_number, numbers in parts.items():
            yield from (
                [array_number] if sum(map(self._bytes, numbers)) > self._bytes(array_number) else numbers
            )

    def _name(self, number: int) -> str:
        """Name of the operation that makes a value; empty for arguments."""
        return self._made_by[number].name if number in self._made_by else ""

    def is_gathered(self, number: int) -> bool:
        """True for rows that were gathered from an array."""
        return self._name(number) == "gather"

    def _ends_product(self, number: int) -> bool:
        """True for a product's result, and for sums of them in any dtype: products write both themselves."""
        step = self._made_by.get(number)
        if step is None or step.name in PRODUCTS:
            return step is not None
        return step.name in _ENDS and all(map(self._ends_product, step.reads))

    def live_ranges(self, steps: list[StoringStep], loop: TracedLoop) -> dict[int, tuple[int, int]]:
        """Value -> first and last of these steps at which it is in memory, for a turn of a loop.

        Arrays from outside of the loop take no memory in it, but for what it carries, and for copies of those
        that products and kernels read: they lie in a stack of all layers.
        """
        carried = {self._resolved(n) for n in loop.carried}
        first: dict[int, int] = dict.fromkeys(carried, 0)
        last: dict[int, int] = {}
        for position, step in enumerate(steps):
            if not step.is_alone and self._stored.isdisjoint({*step.results} - self._constants):
                continue
            sources = map(self._whole, step.reads if step.is_alone else self._sources_of(step))
            for n in frozenset[int]().union(*sources) - self._constants:
                last[n] = position
                if step.is_alone:
                    first.setdefault(n, position)
            if step.name != KEPT.name:
                first |= dict.fromkeys(step.results, position)
                last |= dict.fromkeys(step.results, position)
        # What a turn returns lives to its end.
        last |= {n: len(steps) for n in map(self._resolved, loop.returned) if n in last}
        return {n: (first[n], last[n]) for n in first if n in last}

    def _resolved(self, number: int) -> int:
        """The value whose bytes a view shows."""
        while number in self._views:
            number = self._views[number]
        return number

    def _without_views(self, step: StoringStep) -> StoringStep | None:
        """The step with what it reads as it lies in memory; None if it is a view itself."""
        reads, results = tuple(map(self._resolved, step.reads)), step.results
        if step.name == "optimization_barrier" and len(reads) == len(results):
            self._views |= zip(results, reads, strict=True)
            return None
        if step.name == "dynamic_update_slice":  # in place
            self._views[results[0]] = reads[0]
            self._written.add(reads[1])
            return None
        if step.name in ("mul", "convert_element_type") and reads and self._is_in_8_bits(reads[0]):
            self._views[results[0]] = reads[0]  # products read 8 bits and multiply their results
            return None
        if step.name in _VIEWS and len(reads) == 1:
            made_by = self._made_by.get(reads[0])
            operand, view, result = reads[0], self.arrays[reads[0]], self.arrays[results[0]]
            if made_by is not None and step.name == made_by.name == "convert_element_type":
                # Rounded to the dtype that it was widened from, a value is what it was.
                narrow = self.arrays[made_by.reads[0]]
                if view.dtype.itemsize > narrow.dtype.itemsize:
                    operand, view = made_by.reads[0], narrow
            if view.dtype == result.dtype and math.prod(view.shape) == math.prod(result.shape):
                self._views[results[0]] = operand
                return None
        step = dataclasses.replace(step, reads=reads)
        self._made_by |= dict.fromkeys(results, step)
        return step

    def _is_in_8_bits(self, number: int) -> bool:
        return "float8" in str(self.arrays[number].dtype)

    def _in_memory(self, number: int) -> bool:
        step = self._made_by.get(number)
        return step is None or step.is_alone or step.name == KEPT.name or number in self._stored

    def _is_worth_storing(self, number: int, reader: StoringStep) -> bool:
        """True if a fusion after a product reads a value that has fewer bytes than what it is made of."""
        if self._in_memory(number) or self._levels[number] == self._levels[reader.results[0]]:
            return False
        return sum(map(self._bytes, self._sources_of(self._made_by[number]))) > self._bytes(number)

    def _bytes(self, number: int) -> int:
        """Bytes of a value in the trace, whose sizes are in proportions like those of a layout."""
        array = self.arrays[number]
        return math.prod(array.shape) * array.dtype.itemsize

    def _sources_of(self, step: StoringStep) -> frozenset[int]:
        """Values in memory that a fused step reads: parts of arrays by their own number."""
        if self._is_part(step):
            return frozenset(step.results[:1])
        return frozenset[int]().union(*map(self._sources_behind, step.reads))

    def _is_part(self, step: StoringStep) -> bool:
        """True if a fusion reads the result alone; rows that are gathered are read as often as they are
        taken.
        """
        return step.name == "gather" or (step.name in _SLICES and self._in_memory(step.reads[0]))

    def _sources_behind(self, number: int) -> frozenset[int]:
        """Values in memory that a fusion reads to know a value."""
        if number in self._constants:
            return frozenset()
        if self._in_memory(number):
            return frozenset([number])
        if number not in self._sources:
            step = self._made_by[number]
            self._sources[number] = frozenset([number]) if self._is_part(step) else self._sources_of(step)
        return self._sources[number]

    def _whole(self, number: int) -> frozenset[int]:
        """Arrays that a part is read from; any other value itself."""
        if self._in_memory(number):
            return frozenset([number])
        return frozenset[int]().union(*map(self._whole, self._sources_behind(self._made_by[number].reads[0])))


def _joined(work: TracedWork) -> Iterator[StoringStep]:
    """Yields the operations, those of one call of attention's kernel as one step."""
    readers = collections.defaultdict[int, set[int]](set)
    for index, operation in enumerate(work.operations):
        for n in operation.operands:
            readers[n].add(index)
    for n in itertools.chain(work.returned, *(loop.returned for loop in work.loops)):
        readers[n].add(-1)  # no operation, but a loop or the caller
    kernel: dict[int, Operation] = {}
    for index, operation in enumerate(work.operations):
        scope = attention_scope(operation.place)
        if kernel:
            latest = list(kernel.values())[-1]
            # The kernel ends where something needs its results, or at a product or a collective.
            results = {n for o in kernel.values() for n in o.results}
            is_next = scope == attention_scope(latest.place) and operation.place.trips == latest.place.trips
            waits = not results.isdisjoint(operation.operands) or operation.name in (*PRODUCTS, *COLLECTIVES)
            if (scope and not is_next) or (not scope and waits):
                yield _kernel(kernel, readers)
                kernel = {}
        if scope:
            kernel[index] = operation
        else:
            operands = operation.operands
            yield StoringStep(operation.name, index, operands, operands, operation.results, operation.place)
    if kernel:
        yield _kernel(kernel, readers)


def _kernel(operations: dict[int, Operation], readers: dict[int, set[int]]) -> StoringStep:
    """The step of an attention kernel, which returns what others read."""
    results = [n for operation in operations.values() for n in operation.results]
    made = set(results)
    operands = tuple(dict.fromkeys(n for o in operations.values() for n in o.operands if n not in made))
    # Values that only the kernel itself reads never leave the chip.
    returned = tuple(n for n in results if readers[n] - operations.keys())
    place = next(iter(operations.values())).place
    return StoringStep(
        "attention", max(operations), operands, operands, returned, place, attention_scope(place)
    )
