"""Equations of jaxprs: what they call, and where they stand in a step."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, Literal

type When = Literal["forward", "again", "backward"]
"""Pass of an equation: `again` repeats one of the forward pass for the backward pass."""

_TRANSFORMATION = re.compile(r"\w+\(|\)")
"""What transformations add to a scope: `transpose(jvp(attention))`."""


@dataclasses.dataclass(frozen=True)
class JaxprPlace:
    """Position of an equation in a trace.

    scope: names of `jax.named_scope` around it, without those of transformations.
    trips: lengths of the loops around it.
    """

    scope: tuple[str, ...]
    trips: tuple[int, ...]
    when: When


def inner_place(eqn: Any, place: JaxprPlace) -> JaxprPlace:
    """Place of an equation, and of the jaxprs that it calls."""
    stack, when = str(eqn.source_info.name_stack), place.when
    names = list(place.scope)
    # Transposed equations are the backward pass; `again` stays, although it runs within one.
    if "transpose(" in stack and when == "forward":
        when = "backward"
    for name in filter(None, _TRANSFORMATION.sub("", stack).split("/")):
        # JAX's own scope around what `jax.checkpoint` computes a second time.
        if name == "rematted_computation":
            when = "again"
        else:
            names.append(name)
    return JaxprPlace(tuple(names), place.trips, when)


def counted_branch(params: dict[str, Any]) -> Any:
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


def called_jaxpr(params: dict[str, Any]) -> Any:
    """The jaxpr that an equation calls once, or None."""
    # Primitives name the parameter differently.
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = params.get(name)
        # Closed or open jaxpr: both have equations, and the closed one holds the open one.
        if inner is not None and hasattr(inner, "eqns"):
            return getattr(inner, "jaxpr", inner)
    return None


def equations(jaxpr: Any) -> Iterator[Any]:
    """Equations of a jaxpr and of all inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            # Branches of a conditional are a tuple of jaxprs.
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns"):
                    yield from equations(getattr(inner, "jaxpr", inner))
