"""Properties of the autoscaler's placements that hold for any measurements."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jtrain.data.autoscaler.placement import FULL, Placement, repair
from tests.data.autoscaler.autoscaling import even, on, scaler, windows


@st.composite
def histories(draw: st.DrawFn) -> dict[str, Any]:
    """Strategy for a machine, and for needs of its sources that change several times; 0 for one that is not
    read.
    """
    size = draw(st.integers(1, 12))
    need = st.one_of(st.just(0.0), st.floats(1e-6, 3.0))
    most = draw(st.integers(1, 6))
    needs = np.array(draw(st.lists(st.lists(need, min_size=size, max_size=size), min_size=1, max_size=8)))
    total = needs.sum(1, keepdims=True)
    return dict(max_loaders=most, needs=(needs * np.minimum(1.0, most / np.maximum(total, 1e-9))).tolist())


def play(history: dict[str, Any]) -> list[Placement]:
    """Repairs a placement for one need after another; checks the properties that every placement must
    have.
    """
    placement: Placement = {}
    found, next_loader = [], 0
    for at, need in enumerate(history["needs"]):
        most = history["max_loaders"]
        known = next_loader
        placement, next_loader = repair(
            placement, need, max_loaders=most, next_loader=next_loader, merge=bool(at % 2)
        )
        found.append(placement)
        assert len(placement) <= most
        assert all(placement.values()), "an empty loader costs a process"
        assert {s for held in placement.values() for s in held} == {s for s, n in enumerate(need) if n > 0}
        assert all(n < next_loader for n in placement)
        assert next_loader >= known
    return found


@given(history=histories())
@settings(max_examples=200)
def test_whatever_is_needed_the_cap_holds_and_each_source_that_is_read_has_a_loader(
    history: dict[str, Any],
) -> None:
    """The same history also gives the same placements."""
    assert play(history) == play(history)


@given(history=histories())
@settings(max_examples=100)
def test_what_does_not_change_is_left_alone(history: dict[str, Any]) -> None:
    """If the needs stay the same, nothing moves any more after a few repairs, regardless of the history."""
    placement: Placement = {}
    for need in history["needs"]:
        next_loader = 1 + max(placement, default=-1)
        for _ in range(4):
            placement, next_loader = repair(
                placement, need, max_loaders=history["max_loaders"], next_loader=next_loader, merge=True
            )
        again, _ = repair(
            placement, need, max_loaders=history["max_loaders"], next_loader=next_loader, merge=True
        )
        assert again == placement


@given(
    seed=st.integers(0, 2**32 - 1),
    sources=st.integers(1, 40),
    max_loaders=st.integers(1, 8),
    load=st.floats(0.01, 10.0),
)
@settings(max_examples=100)
def test_loaders_are_within_their_time_wherever_the_cap_allows(
    seed: int, sources: int, max_loaders: int, load: float
) -> None:
    """A loader has at most 1.1 of its planned time below max_loaders. At max_loaders the excess is shared."""
    random = np.random.default_rng(seed)
    policy = scaler(even(sources), max_loaders=max_loaders)
    windows(policy, 4, (load * random.dirichlet(np.full(sources, 0.5))).tolist())
    total = float(policy.needs.sum())
    needs = policy.needs * min(1.0, max_loaders / total)
    share = [sum(float(needs[s]) / len(on(policy, s)) for s in held) for held in policy.placement.values()]
    assert max(share) <= (FULL + 1e-6 if total <= 0.75 * max_loaders else 1.6)
