"""Collectives and matmuls of a traced function, read off its jaxpr: what each one sends or multiplies, and
where.

Equations are followed through calls and loops with a number for every value, so that a collective that is
repeated in the same computation with the same operand counts once, as compilers compute it once, and what a
value depends on is known.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from jax.extend import core
from jax.interpreters import partial_eval

type Kind = Literal[
    "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute"
]

type When = Literal["forward", "again", "backward"]
"""Pass of a collective or a product: `again` repeats one of the forward pass for the backward pass."""

_KINDS: dict[str, Kind] = {
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

_TRANSFORMATION = re.compile(r"\w+\(|\)")
"""What transformations add to a scope: `transpose(jvp(attention))`."""


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
class TracedWork:
    """Collectives and products of a jaxpr, in its order.

    recomputed_names: names (`checkpoint_name`) of the values that it computes a second time.
    """

    collectives: list[TracedCollective]
    products: list[TracedProduct]
    recomputed_names: frozenset[str]


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


@dataclasses.dataclass(frozen=True)
class _Place:
    """Position of a jaxpr in the trace: scope, trips and when as in `TracedCollective`."""

    scope: tuple[str, ...]
    trips: tuple[int, ...]
    when: When


def traced_work(jaxpr: Any, *, unread: int = 0) -> TracedWork:
    """Work of a closed jaxpr, as far as its results are read.

    Args:
      unread: number of its last results that nobody reads; what only they need is left out.
    """
    num_read = len(jaxpr.jaxpr.outvars) - unread
    # Compilers drop dead code, so it must not count; this also drops what only unread results need.
    lean, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * num_read + [False] * unread)
    reader = _Reader()
    reader.follow(lean, [reader.new(0) for _ in lean.invars], _Place((), (), "forward"), {})
    return TracedWork(reader.result(), reader.products, frozenset(reader.recomputed_names))


class _Reader:
    """Follows jaxprs and collects what they do."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.marks = itertools.count()
        self.collectives: list[tuple[TracedCollective, int]] = []
        self.products: list[TracedProduct] = []
        self.recomputed_marks = 0
        self.recomputed_names = set[str]()

    def new(self, marks: int) -> _Value:
        """A value that was not seen before; `marks` as in `_Value`."""
        return _Value(next(self.numbers), marks)

    def result(self) -> list[TracedCollective]:
        return [
            dataclasses.replace(collective, repeats_products=bool(mark & self.recomputed_marks))
            if mark
            else collective
            for collective, mark in self.collectives
        ]

    def follow(
        self, jaxpr: Any, operands: Sequence[_Value], place: _Place, shared_results: _SharedResults
    ) -> list[_Value]:
        """Collects the work of a jaxpr's equations, in their order; returns the values of its results.

        Args:
          operands: values of its arguments.
          shared_results: results of the collectives before it that it need not repeat; its own are added.
        """
        values: dict[Any, _Value] = dict(zip(jaxpr.invars, operands, strict=True))
        values |= {var: self.new(0) for var in jaxpr.constvars}

        def read(atom: Any) -> _Value:
            return self.new(0) if isinstance(atom, core.Literal) else values[atom]

        for eqn in jaxpr.eqns:
            results = self._results(eqn, [read(atom) for atom in eqn.invars], place, shared_results)
            values |= zip(eqn.outvars, results, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def _results(
        self, eqn: Any, operands: list[_Value], place: _Place, shared_results: _SharedResults
    ) -> list[_Value]:
        name, params = eqn.primitive.name, eqn.params
        inner_place = _inner_place(eqn, place)
        marks = 0
        for value in operands:
            marks |= value.marks
        if name in _KINDS:
            return self._collective(eqn, operands, inner_place, shared_results)
        if name == "name" and inner_place.when == "again":
            self.recomputed_names.add(params["name"])
        if name in ("name", "reduce_precision"):  # `jax.checkpoint` names and rounds what it keeps
            return operands
        if name == "scan":
            num_consts = len(params["ft_in"].unpack()[0])
            body, length = params["jaxpr"].jaxpr, params["length"]
            if length == 0:  # a ring of two devices has no hop between the first and the last
                return [self.new(marks) for _ in eqn.outvars]
            looped = dataclasses.replace(inner_place, trips=(*inner_place.trips, length))
            # A carried value may depend on all operands after the first turn.
            carried = [self.new(marks) for _ in operands[num_consts:]]
            results = self.follow(body, [*operands[:num_consts], *carried], looped, {})
            return [self.new(result.marks | marks) for result in results]
        if name == "cond":
            branch = _counted_branch(params).jaxpr
            return [
                self.new(v.marks | marks)
                for v in self.follow(branch, operands[1:], inner_place, shared_results)
            ]
        if (called := _called_jaxpr(params)) is not None:
            # What a checkpoint computes again shares no collective with the computation around it.
            inner_results: _SharedResults = shared_results if name != "remat2" else {}
            if name == "remat2" and params.get("differentiated"):
                inner_place = dataclasses.replace(inner_place, when="backward")
            jaxpr, skipped = called, len(operands) - len(called.invars)
            return self.follow(jaxpr, operands[skipped:], inner_place, inner_results)
        if name == "while":
            bodies = [params["body_jaxpr"].jaxpr, params["cond_jaxpr"].jaxpr]
            assert not any(e.primitive.name in _KINDS for body in bodies for e in equations(body)), (
                "unknown trips"
            )
        if name in ("dot_general", "ragged_dot_general"):
            if inner_place.when == "again":
                self.recomputed_marks |= marks
            in_8_bits = all(value.in_8_bits for value in operands[:2])
            self.products += _product(eqn, inner_place, in_8_bits=in_8_bits)
        rounded = name in _KEEPS_BITS and (operands[0].in_8_bits or "float8" in str(eqn.invars[0].aval.dtype))
        return [_Value(next(self.numbers), marks, rounded) for _ in eqn.outvars]

    def _collective(
        self, eqn: Any, operands: list[_Value], place: _Place, shared_results: _SharedResults
    ) -> list[_Value]:
        name, params = eqn.primitive.name, eqn.params
        axes = params.get("axes", params.get("axis_name"))
        axes = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
        groups = params.get("axis_index_groups")
        results: list[_Value] = []
        has_one_result = name not in ("psum", "psum_invariant", "pmax", "pmin", "ppermute")
        for index, out in enumerate(eqn.outvars):
            result_operands = operands if has_one_result else [operands[index]]
            # Groups are compared by themselves below, as text.
            settings = repr({key: value for key, value in params.items() if key != "axis_index_groups"})
            key = name, place.trips, settings, str(groups), *(value.number for value in result_operands)
            if key not in shared_results:
                mark = 0
                if place.when == "again":
                    # One bit for each repeated collective, so that a value carries a set of them in one integer.
                    mark = 1 << next(self.marks)
                collective = TracedCollective(
                    _KINDS[name],
                    axes,
                    str(eqn.invars[index].aval.dtype),
                    _whole_shape(name, eqn.invars[index].aval.shape, out.aval.shape),
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
                shared_results[key] = [self.new(marks)]
            results += shared_results[key]
        return results


def _product(eqn: Any, place: _Place, *, in_8_bits: bool) -> list[TracedProduct]:
    """The product of an equation; none if it has batch dimensions."""
    numbers = eqn.params.get("dimension_numbers") or eqn.params["ragged_dot_dimension_numbers"]
    ((first, second), batch) = getattr(numbers, "dot_dimension_numbers", numbers)
    # Batch dimensions are those of attention: activations alone, without a weight.
    if any(batch):
        return []
    lhs, rhs = (var.aval.shape for var in eqn.invars[:2])
    grouped, groups = list[int](getattr(numbers, "rhs_group_dimensions", ())), 0
    if eqn.primitive.name == "ragged_dot_general":
        groups = eqn.invars[2].aval.shape[0]
    reduced_dims = tuple(lhs[dim] for dim in first)
    kept_dims = tuple(size for dim, size in enumerate(lhs) if dim not in first)
    added_dims = tuple(size for dim, size in enumerate(rhs) if dim not in (*second, *grouped))
    return [TracedProduct(kept_dims, reduced_dims, added_dims, groups, in_8_bits, place.when, place.trips)]


def _whole_shape(name: str, operand: tuple[int, ...], result: tuple[int, ...]) -> tuple[int, ...]:
    """Shape that `TracedCollective.dims` has; a ragged exchange's is the smaller, which is not padded."""
    if name == "all_gather":
        return result
    return min(operand, result, key=math.prod) if name == "ragged_all_to_all" else operand


def _inner_place(eqn: Any, place: _Place) -> _Place:
    """Place of an equation, and of the jaxprs that it calls."""
    stack, when = str(eqn.source_info.name_stack), place.when
    names = list(place.scope)
    if "transpose(" in stack and when == "forward":
        when = "backward"
    for name in filter(None, _TRANSFORMATION.sub("", stack).split("/")):
        if name == "rematted_computation":
            when = "again"
        else:
            names.append(name)
    return _Place(tuple(names), place.trips, when)


def _counted_branch(params: dict[str, Any]) -> Any:
    """The branch of a conditional that counts.

    Where it chooses by platform, the branch with one product for all groups, else the one for GPUs: the other
    way to multiply groups is a loop of unknown length. Elsewhere the branch that does most.
    """
    branches, platforms = params["branches"], params.get("branches_platforms")
    if platforms is None:
        return max(branches, key=lambda branch: sum(1 for _ in equations(branch.jaxpr)))
    for branch in branches:
        if any(eqn.primitive.name == "ragged_dot_general" for eqn in branch.jaxpr.eqns):
            return branch
    return next(
        branch
        for branch, platform in zip(branches, platforms, strict=True)
        if platform is None or "cuda" in platform
    )


def _called_jaxpr(params: dict[str, Any]) -> Any:
    """The jaxpr that an equation calls once, or None."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = params.get(name)
        if inner is not None and hasattr(inner, "eqns"):
            return getattr(inner, "jaxpr", inner)
    return None


def equations(jaxpr: Any) -> Iterator[Any]:
    """Equations of a jaxpr and of all inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns"):
                    yield from equations(getattr(inner, "jaxpr", inner))
