"""Jaxprs of layers that keep activations, made from the jaxpr of layers that keep their input alone.

What a layer keeps decides nothing but what its backward pass computes again. So layers are traced once, under
`layout.remat=full`, and each other choice is that jaxpr without what computes the kept values again: a few
hundredths of a second instead of most of one.
"""

from collections.abc import Collection
from typing import Any

from jax.extend import core

KEPT = core.Primitive("kept")
"""A value that is there when the backward pass begins. `name` is its `checkpoint_name` or empty, `shard` the
value that it was gathered from or None.
"""
KEPT.multiple_results = True

_FREE = ("reshape", "broadcast_in_dim", "jit")
"""Operations whose results no layer keeps: the same array in another shape, a repeated one, and a call, which
may keep values inside it.
"""

RECOMPUTATION = "rematted_computation"
"""Name that `jax.checkpoint` gives to the scope of what it computes again."""


def keep_values(jaxpr: Any, names: Collection[str] | None) -> Any:
    """A closed jaxpr whose backward passes find the values of these names instead of computing them again.

    Args:
      jaxpr: of layers under `jax.checkpoint` that keep no named value.
      names: of `checkpoint_name`; None for all values.
    """
    return jaxpr.replace(jaxpr=_replace_kept(jaxpr.jaxpr, names, recomputes=False))


def _replace_kept(jaxpr: Any, names: Collection[str] | None, *, recomputes: bool) -> Any:
    """A jaxpr, of a recomputation if `recomputes`, with the kept values as results of no operand.

    What computed them stays, with results that nobody reads.
    """
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        is_recomputed = recomputes or RECOMPUTATION in str(eqn.source_info.name_stack)
        named = eqn.primitive.name == "name"
        has_kept_name = named and names is not None and eqn.params["name"] in names
        if is_recomputed and (has_kept_name or (names is None and eqn.primitive.name not in _FREE)):
            shard = eqn.invars[0] if eqn.primitive.name == "all_gather" else None
            params = dict(name=eqn.params["name"] if named else "", shard=shard)
            # One each, because nobody may read some of them.
            eqns += [
                eqn.replace(invars=[], outvars=[var], primitive=KEPT, params=params) for var in eqn.outvars
            ]
        else:
            params = {
                key: _replaced_param(value, names, recomputes=is_recomputed)
                for key, value in eqn.params.items()
            }
            eqns.append(eqn.replace(params=params))
    return jaxpr.replace(eqns=eqns)


def _replaced_param(value: Any, names: Collection[str] | None, *, recomputes: bool) -> Any:
    """A parameter of an equation, with the jaxprs in it changed."""
    if isinstance(value, core.Jaxpr):
        return _replace_kept(value, names, recomputes=recomputes)
    if hasattr(value, "eqns"):  # a closed one
        return value.replace(jaxpr=_replace_kept(value.jaxpr, names, recomputes=recomputes))
    if isinstance(value, tuple) and any(hasattr(element, "eqns") for element in value):
        return tuple(_replaced_param(element, names, recomputes=recomputes) for element in value)
    return value
