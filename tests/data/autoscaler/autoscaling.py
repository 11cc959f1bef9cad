"""Helpers that feed an autoscaler with measurements."""

from collections.abc import Sequence
from typing import Any

from jtrain.data.autoscaler.policy import WINDOW_S, Autoscaler
from jtrain.data.mixture.schedule import Constant

STEP_TOKENS = 10_000
STEPS = 5
"""Steps in a window."""


def policy_of(
    names: Sequence[str], schedule: Any, *, max_loaders: int = 8, unit: Any = "tokens"
) -> Autoscaler:
    """Returns an autoscaler that was started."""
    policy = Autoscaler(names, schedule, step_tokens=STEP_TOKENS, unit=unit, max_loaders=max_loaders)
    policy.start(0)
    return policy


def scaler(weights: dict[str, float], *, max_loaders: int = 8) -> Autoscaler:
    """Returns an autoscaler of a constant mixture that was started."""
    return policy_of(tuple(weights), Constant(weights), max_loaders=max_loaders)


def windows(policy: Autoscaler, count: int, loaders: Sequence[float], *, wait: float = 0.0) -> list[str]:
    """Measures `count` windows in which each source takes so many loaders for each second of computing.

    wait: share of the time that the trainer waits.
    """
    lines = []
    weights = policy.schedule.weights(0, policy.names).tolist()
    for _ in range(count):
        for source, (busy, weight) in enumerate(zip(loaders, weights, strict=False)):
            tokens = round(STEPS * STEP_TOKENS * weight)
            read_s = busy * WINDOW_S * (1 - wait)
            policy.observe(source, read_s=read_s, tokens=tokens if busy else 0, documents=tokens // 100)
        lines += policy.update(5, steps=STEPS, seconds=WINDOW_S, wait_s=WINDOW_S * wait)[1]
    return lines


def on(policy: Autoscaler, source: int) -> set[int]:
    """Returns the loaders of a source."""
    return {loader for loader, held in policy.placement.items() if source in held}


def even(count: int) -> dict[str, float]:
    """Returns equal weights of sources s0, s1, ..."""
    return {f"s{i}": 1 / count for i in range(count)}
