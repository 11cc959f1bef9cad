"""Helpers that feed an autoscaler with measurements."""

from collections.abc import Sequence

from jtrain.data.autoscaler.policy import WINDOW_S, Autoscaler
from jtrain.data.mixture.schedule import Constant


def scaler(weights: dict[str, float], *, max_loaders: int = 8) -> Autoscaler:
    """Returns an autoscaler of a constant mixture that was started, and whose first reading ahead is done."""
    policy = Autoscaler(tuple(weights), Constant(weights), max_loaders=max_loaders)
    policy.start(0)
    policy.update(0, steps=1, seconds=1.0, wait_s=0.0)
    return policy


def windows(policy: Autoscaler, count: int, loaders: Sequence[float], *, wait: float = 0.0) -> list[str]:
    """Measures `count` windows in which each source takes so many loaders for each second of computing.

    wait: share of the time that the trainer waits.
    """
    lines = []
    for _ in range(count):
        for source, busy in enumerate(loaders):
            policy.observe(source, busy * WINDOW_S * (1 - wait))
        lines += policy.update(5, steps=5, seconds=WINDOW_S, wait_s=WINDOW_S * wait)[1]
    return lines


def on(policy: Autoscaler, source: int) -> set[int]:
    """Returns the loaders of a source."""
    return {loader for loader, held in policy.placement.items() if source in held}


def even(count: int) -> dict[str, float]:
    """Returns equal weights of sources s0, s1, ..."""
    return {f"s{i}": 1 / count for i in range(count)}
