"""Collectives and matmuls of a traced function, read off its jaxpr: what each one sends or multiplies, and
where.

Equations are followed through calls and loops with a number for every value, so that a collective that is
repeated in the same computation with the same operand counts once, as compilers compute it once, and what a
value depends on is known.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

from jax.extend import core
from jax.interpreters import partial_eval

from jtrain.model import ops
from jtrain.step.description.jaxpr_places import (
    JaxprPlace,
    When,
    called_jaxpr,
    counted_branch,
    equations,
    inner_place,
)

type Kind = Literal[
    "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute"
]
"""Kind of collective, by XLA's name."""

COLLECTIVES: dict[str, Kind] = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
}

PRODUCTS = "dot_general", "ragged_dot_general"


@dataclasses.dataclass(frozen=True)
class TracedCollective:
    """One collective of a jaxpr.

    scope: names of `jax.named_scope` around it, without those of transformations.
    dims: shape of the whole array: the result of an all-gather, the operand of a reduce-scatter, an
      all-reduce, an all-to-all or a permute.
    ring: devices of a group, if the groups split the axes; None if a group has all of them.
    trips: lengths of the loops around it.
    repeats_products: True if a product of the recomputed forward pass reads its result.
    largest: True for an all-reduce that takes the largest number instead of the sum.
    """

    kind: Kind
    axes: tuple[str, ...]
    dtype: str
    dims: tuple[int, ...]
    ring: int | None
    scope: tuple[str, ...]
    when: When
    trips: tuple[int, ...]
    repeats_products: bool
    largest: bool


@dataclasses.dataclass(frozen=True)
class TracedProduct:
    """One matmul of a jaxpr. Products with batch dimensions are not listed: they are attention's, of
    activations alone.

    kept_dims: sizes of the dimensions of the first operand that the result has;
      reduced_dims, added_dims: of those that are summed over, and of those of the second operand that the
      result has.
    groups: groups of rows, each multiplied with a matrix of its own; 0 for one matrix.
    in_8_bits: True if both operands were rounded to 8 bits.
    when, trips: as in `TracedCollective`.
    """

    kept_dims: tuple[int, ...]
    reduced_dims: tuple[int, ...]
    added_dims: tuple[int, ...]
    groups: int
    in_8_bits: bool
    when: When
    trips: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Operation:
    """An equation of a jaxpr that calls no other, or a loop, or an attention kernel.

    operands, results: numbers of its values; literals are left out.
    """

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    place: JaxprPlace


@dataclasses.dataclass(frozen=True)
class TracedLoop:
    """A loop whose turns are the operations `first` to `end`, without `end`.

    carried: values that the first turn gets from before the loop, and later ones from the turn before.
    returned: values that a turn returns.
    """

    first: int
    end: int
    carried: tuple[int, ...]
    returned: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TracedWork:
    """Collectives and products of a jaxpr, in its order, and all its operations.

    recomputed_names: names (`checkpoint_name`) of the values that it computes a second time.
    arrays: number of a value -> its shape and dtype; returned: values that the jaxpr returns.
    """

    collectives: list[TracedCollective]
    products: list[TracedProduct]
    recomputed_names: frozenset[str]
    operations: list[Operation]
    loops: list[TracedLoop]
    arrays: dict[int, Any]
    returned: tuple[int, ...]


_KEEPS_BITS = (
    "convert_element_type",
    "mul",
    "reshape",
    "transpose",
    "squeeze",
    "dynamic_slice",
    "optimization_barrier",
)
"""Operations between the rounding of an operand to 8 bits and its product: a factor and a change of shape."""


@dataclasses.dataclass(frozen=True)
class _Value:
    """A value of the trace: its number, and the repeated collectives that it depends on, a bit for each.

    in_8_bits: True if it was rounded to 8 bits.
    """

    number: int
    marks: int
    in_8_bits: bool = False


type _SharedResults = dict[Any, list[_Value]]
"""Operand and settings of a collective of a computation -> its results."""


def traced_work(jaxpr: Any, *, unread: int = 0) -> TracedWork:
    """Work of a closed jaxpr, as far as its results are read.

    Args:
      unread: number of its last results that nobody reads; what only they need is left out.
    """
    num_read = len(jaxpr.jaxpr.outvars) - unread
    # Compilers drop dead code, so it must not count; this also drops what only unread results need.
    lean, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * num_read + [False] * unread)
    reader = _Reader()
    # Marks of 0: arguments depend on no collective.
    arguments = [reader.new(0, var.aval) for var in lean.invars]
    returned = reader.follow(lean, arguments, JaxprPlace((), (), "forward"), {})
    return TracedWork(
        reader.result(),
        reader.products,
        frozenset(reader.recomputed_names),
        reader.operations,
        reader.loops,
        reader.arrays,
        tuple(value.number for value in returned),
    )


class _Reader:
    """Follows jaxprs and collects what they do."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.marks = itertools.count()
        self.collectives: list[tuple[TracedCollective, int]] = []
        self.products: list[TracedProduct] = []
        self.recomputed_marks = 0
        self.recomputed_names = set[str]()
        self.operations: list[Operation] = []
        self.loops: list[TracedLoop] = []
        self.arrays: dict[int, Any] = {}

    def new(self, marks: int, array: Any = None, *, in_8_bits: bool = False) -> _Value:
        """A value that was not seen before; `marks` as in `_Value`. Literals have no array."""
        value = _Value(next(self.numbers), marks, in_8_bits)
        if array is not None:
            self.arrays[value.number] = array
        return value

    def record(
        self, name: str, operands: Sequence[_Value], results: list[_Value], place: JaxprPlace
    ) -> list[_Value]:
        """Adds an operation; returns its results."""
        numbers = (value.number for value in operands if value.number in self.arrays)
        self.operations.append(Operation(name, tuple(numbers), tuple(v.number for v in results), place))
        return results

    def result(self) -> list[TracedCollective]:
        return [
            # Only now, since the product that reads a collective comes after it in the jaxpr.
            dataclasses.replace(collective, repeats_products=bool(mark & self.recomputed_marks))
            if mark
            else collective
            for collective, mark in self.collectives
        ]

    def follow(
        self, jaxpr: Any, operands: Sequence[_Value], place: JaxprPlace, shared_results: _SharedResults
    ) -> list[_Value]:
        """Collects the work of a jaxpr's equations, in their order; returns the values of its results.

        Args:
          operands: values of its arguments.
          shared_results: results of the collectives before it that it need not repeat; its own are added.
        """
        values: dict[Any, _Value] = dict(zip(jaxpr.invars, operands, strict=True))
        values |= {var: self.new(0, var.aval) for var in jaxpr.constvars}

        def read(atom: Any) -> _Value:
            return self.new(0) if isinstance(atom, core.Literal) else values[atom]

        for eqn in jaxpr.eqns:
            results = self._results(eqn, [read(atom) for atom in eqn.invars], place, shared_results)
            values |= zip(eqn.outvars, results, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def _results(
        self, eqn: Any, operands: list[_Value], place: JaxprPlace, shared_results: _SharedResults
    ) -> list[_Value]:
        name, params = eqn.primitive.name, eqn.params
        inner = inner_place(eqn, place)
        marks = 0
        for value in operands:
            marks |= value.marks
        # Before calls are followed: loops and products inside of a kernel are not counted.
        if attention_scope(inner):
            results = [self.new(marks, var.aval) for var in eqn.outvars]
            return self.record(name, operands, results, inner)
        if name in COLLECTIVES:
            return self._collective(eqn, operands, inner, shared_results)
        if name == "name" and inner.when == "again":
            self.recomputed_names.add(params["name"])
        if name in ("name", "reduce_precision"):  # `jax.checkpoint` names and rounds what it keeps
            return operands
        if name == "scan":
            # Operands of a scan: constants, carried values, and arrays of which each turn gets a slice.
            num_consts = len(params["ft_in"].unpack()[0])
            body, length = params["jaxpr"].jaxpr, params["length"]
            if length == 0:  # a ring of two devices has no hop between the first and the last
                return [self.new(marks, var.aval) for var in eqn.outvars]
            looped, first = dataclasses.replace(inner, trips=(*inner.trips, length)), len(self.operations)
            # A carried value may depend on all operands after the first turn.
            carried = [self.new(marks, var.aval) for var in body.invars[num_consts:]]
            # {}: a turn repeats its collectives, and cannot take results from before the loop.
            returned = self.follow(body, [*operands[:num_consts], *carried], looped, {})
            # A turn returns the carried values first, then what the scan stacks.
            num_carried = len(params["ft_out"].unpack()[0])
            numbers = (tuple(v.number for v in values) for values in (carried[:num_carried], returned))
            self.loops.append(TracedLoop(first, len(self.operations), *numbers))
            pairs = zip(returned, eqn.outvars, strict=True)
            results = [self.new(value.marks | marks, var.aval) for value, var in pairs]
            return self.record(name, operands, results, inner)
        if name == "cond":
            branch = counted_branch(params).jaxpr
            # Operand 0 is the number of the branch.
            results = self.follow(branch, operands[1:], inner, shared_results)
            # The branch taken depends on all operands, the number included.
            return [dataclasses.replace(value, marks=value.marks | marks) for value in results]
        if (called := called_jaxpr(params)) is not None:
            # What a checkpoint computes again shares no collective with the computation around it.
            inner_results: _SharedResults = shared_results if name != "remat2" else {}
            if name == "remat2" and params.get("differentiated"):
                inner = dataclasses.replace(inner, when="backward")
            jaxpr, skipped = called, len(operands) - len(called.invars)
            return self.follow(jaxpr, operands[skipped:], inner, inner_results)
        # Trips of a while loop are not in the jaxpr, so collectives in one could not be counted.
        if name == "while":
            bodies = [params["body_jaxpr"].jaxpr, params["cond_jaxpr"].jaxpr]
            assert not any(e.primitive.name in COLLECTIVES for body in bodies for e in equations(body)), (
                "unknown trips"
            )
        if name in PRODUCTS:
            if inner.when == "again":
                self.recomputed_marks |= marks
            # Only with both operands in 8 bits does the product run at the rate of 8 bits.
            in_8_bits = all(value.in_8_bits for value in operands[:2])
            self.products += _product(eqn, inner, in_8_bits=in_8_bits)
        rounded = name in _KEEPS_BITS and (operands[0].in_8_bits or "float8" in str(eqn.invars[0].aval.dtype))
        results = [self.new(marks, var.aval, in_8_bits=rounded) for var in eqn.outvars]
        return self.record(name, operands, results, inner)

    def _collective(
        self, eqn: Any, operands: list[_Value], place: JaxprPlace, shared_results: _SharedResults
    ) -> list[_Value]:
        name, params = eqn.primitive.name, eqn.params
        axes = params.get("axes", params.get("axis_name"))
        axes = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
        groups = params.get("axis_index_groups")
        results: list[_Value] = []
        # These return one result per operand, all others one result of all operands.
        has_one_result = name not in ("psum", "psum_invariant", "pmax", "pmin", "ppermute")
        for index, out in enumerate(eqn.outvars):
            result_operands = operands if has_one_result else [operands[index]]
            # Groups are compared by themselves below, as text.
            settings = repr({key: value for key, value in params.items() if key != "axis_index_groups"})
            # Trips belong to the key: the same collective inside a loop is sent once per turn.
            key = name, place.trips, settings, str(groups), *(value.number for value in result_operands)
            if key not in shared_results:
                mark = 0
                if place.when == "again":
                    # One bit for each repeated collective, so that a value carries a set of them in one
                    # integer.
                    mark = 1 << next(self.marks)
                collective = TracedCollective(
                    COLLECTIVES[name],
                    axes,
                    str(eqn.invars[index].aval.dtype),
                    _whole_shape(name, eqn.invars[index].aval.shape, out.aval.shape),
                    # All groups have one size.
                    None if groups is None else len(groups[0]),
                    place.scope,
                    place.when,
                    place.trips,
                    False,
                    name == "pmax",
                )
                self.collectives.append((collective, mark))
                marks = mark
                for value in result_operands:
                    marks |= value.marks
                shared_results[key] = self.record(name, result_operands, [self.new(marks, out.aval)], place)
            results += shared_results[key]
        return results


def attention_scope(place: JaxprPlace) -> str:
    """Scope of the attention kernel that an equation belongs to; empty for all others."""
    return next(
        (name for name in place.scope if name.startswith((ops.ATTENTION_FORWARD, ops.ATTENTION_BACKWARD))), ""
    )


def _product(eqn: Any, place: JaxprPlace, *, in_8_bits: bool) -> list[TracedProduct]:
    """The product of an equation; none if it has batch dimensions."""
    numbers = eqn.params.get("dimension_numbers") or eqn.params["ragged_dot_dimension_numbers"]
    ((lhs_contracted, rhs_contracted), batch) = getattr(numbers, "dot_dimension_numbers", numbers)
    # Batch dimensions are those of attention: activations alone, without a weight.
    if any(batch):
        return []
    lhs, rhs = (var.aval.shape for var in eqn.invars[:2])
    grouped, groups = list[int](getattr(numbers, "rhs_group_dimensions", ())), 0
    if eqn.primitive.name == "ragged_dot_general":
        groups = eqn.invars[2].aval.shape[0]
    reduced_dims = tuple(lhs[dim] for dim in lhs_contracted)
    kept_dims = tuple(size for dim, size in enumerate(lhs) if dim not in lhs_contracted)
    added_dims = tuple(size for dim, size in enumerate(rhs) if dim not in (*rhs_contracted, *grouped))
    return [TracedProduct(kept_dims, reduced_dims, added_dims, groups, in_8_bits, place.when, place.trips)]


def _whole_shape(name: str, operand: tuple[int, ...], result: tuple[int, ...]) -> tuple[int, ...]:
    """Shape that `TracedCollective.dims` has; a ragged exchange's is the smaller, which is not padded."""
    if name == "all_gather":
        return result
    return min(operand, result, key=math.prod) if name == "ragged_all_to_all" else operand
