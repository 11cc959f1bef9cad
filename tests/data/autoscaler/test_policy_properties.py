"""Properties of the autoscaler's placements that hold for any measurements."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jtrain.data.autoscaler.placement import PROCESS_BYTES, Placement
from tests.data.autoscaler.autoscaling import MIB, scaler, started, windows


@st.composite
def histories(draw: st.DrawFn) -> dict[str, Any]:
    """Strategy for a machine, its sources, and the measurements and schedule of several windows."""
    size = draw(st.integers(1, 12))
    cost = st.floats(1e-6, 1.0)
    weight = st.one_of(st.just(0.0), st.floats(1e-3, 1.0))
    window = st.fixed_dictionaries(
        dict(
            weights=st.lists(weight, min_size=size, max_size=size),
            costs=st.lists(cost, min_size=size, max_size=size),
            open_bytes=st.lists(st.integers(1, 120 * MIB), min_size=size, max_size=size),
            wait_s=st.sampled_from([0.0, 0.5]),
            busy=st.floats(0, 1),
            kill=st.one_of(st.none(), st.integers(0, 7)),
        )
    )
    return dict(
        size=size,
        max_loaders=draw(st.integers(1, 6)),
        memory_bytes=draw(st.integers(40, 600)) * MIB,
        windows=draw(st.lists(window, min_size=1, max_size=8)),
    )


def play(history: dict[str, Any]) -> list[tuple[Placement, list[str]]]:
    """Runs a history; after each window, checks the properties that every placement must have."""
    policy = scaler(
        " ".join(f"s{i}" for i in range(history["size"])),
        max_loaders=history["max_loaders"],
        memory_bytes=history["memory_bytes"],
    )
    weights = history["windows"][0]["weights"]
    placement, lines = started(policy, weights)
    told = [(placement, lines)]
    dead: set[int] = set()
    for i, window in enumerate(history["windows"]):
        window = dict(window)
        alive = sorted(policy.placement)
        kill = window.pop("kill")
        fresh = [alive[kill % len(alive)]] if kill is not None and alive else []
        dead.update(fresh)
        lines = windows(policy, 1, first=i, step_s=1.0, dead=fresh, **window)
        placement = policy.placement
        told.append((placement, lines))

        assert len(placement) <= history["max_loaders"]
        assert not dead & placement.keys()
        placed = {s for held in placement.values() for s in held}
        assert {s for s, weight in enumerate(window["weights"]) if weight > 0} <= placed
        assert all(placement.values()), "an empty loader costs a process"

        held_bytes = policy._open.value[0]
        fullest = max((sum(held_bytes[list(held)]) for held in placement.values()), default=0.0)
        room = history["memory_bytes"] - PROCESS_BYTES
        used = held_bytes[sorted(placed)]
        if len(used) and used.max() <= room / 2 and used.sum() <= history["max_loaders"] * room / 2:
            assert fullest <= room + 1, "first-fit-decreasing always succeeds here"
        said = any("allows no better placement" in line for _, said in told for line in said)
        assert fullest <= room + 1 or said
    return told


@given(history=histories())
@settings(max_examples=100)
def test_whatever_is_measured_the_caps_hold_and_each_drawn_source_is_on_a_live_loader(history: dict[str, Any]) -> None:
    """The same history also gives the same placements and the same messages."""
    assert play(history) == play(history)


@given(
    seed=st.integers(0, 2**32 - 1),
    sources=st.integers(1, 40),
    max_loaders=st.integers(1, 8),
    documents=st.floats(10, 10_000),
)
@settings(max_examples=100)
def test_loaders_are_within_their_time_wherever_the_cap_allows(
    seed: int, sources: int, max_loaders: int, documents: float
) -> None:
    """With enough memory, a loader has at most 1.1 of its planned time below max_loaders. At max_loaders the excess is
    shared: the worst of 12,000 random mixtures had 1.32 times its fair part.
    """
    random = np.random.default_rng(seed)
    weights = random.dirichlet(np.full(sources, 0.5))
    costs = random.lognormal(-6, 1.5, sources)
    policy = scaler(" ".join(f"s{i}" for i in range(sources)), max_loaders=max_loaders)
    started(policy, weights.tolist(), documents=documents)
    windows(policy, 4, weights=weights.tolist(), costs=costs.tolist(), documents=documents)

    total = float(policy.needs.sum())
    needs = policy.needs * min(1.0, max_loaders / total)
    copies = np.array([sum(s in held for held in policy.placement.values()) for s in range(sources)])
    share = [sum(float(needs[s] / copies[s]) for s in held) for held in policy.placement.values()]
    assert max(share) <= (1.1 + 1e-6 if total <= 0.75 * max_loaders else 1.6)


@given(history=histories())
@settings(max_examples=50)
def test_what_does_not_change_is_left_alone(history: dict[str, Any]) -> None:
    """If the measurements stay the same, nothing moves any more after some windows, regardless of the history."""
    policy = scaler(
        " ".join(f"s{i}" for i in range(history["size"])),
        max_loaders=history["max_loaders"],
        memory_bytes=history["memory_bytes"],
    )
    started(policy, history["windows"][0]["weights"])
    for i, window in enumerate(history["windows"]):
        steady = {**window, "wait_s": 0.0}
        del steady["kill"]
        windows(policy, 5, first=10 * i, **steady)
        before = policy.placement
        assert windows(policy, 5, first=10 * i + 5, **steady) == []
        assert policy.placement == before
