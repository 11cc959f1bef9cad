"""Helpers that make an autoscaler and feed it measurements."""

from collections.abc import Sequence

import numpy as np

from jtrain.data.autoscaler.placement import Placement
from jtrain.data.autoscaler.policy import Autoscaler
from jtrain.data.autoscaler.source_profile import LoaderLoad, SourceProfile

MIB = 1 << 20


def scaler(names: str, *, max_loaders: int = 8, memory_bytes: int = 1 << 30, window_s: float = 5.0) -> Autoscaler:
    return Autoscaler(names.split(), max_loaders=max_loaders, memory_bytes=memory_bytes, window_s=window_s)


def profile(s_per_document: float, open_bytes: int = MIB) -> SourceProfile:
    found = SourceProfile()
    found.observe(documents=100, tokens=60_000, bytes=240_000, read_s=100 * s_per_document, open_bytes=open_bytes)
    return found


def loads_of(placement: Placement, *, dead: Sequence[int] = (), busy: float = 0.5) -> dict[int, LoaderLoad]:
    return {n: LoaderLoad(busy_share=busy, queued=0, alive=n not in dead, rss_bytes=MIB) for n in placement}


def started(
    policy: Autoscaler, weights: Sequence[float], *, documents: float = 100, open_bytes: Sequence[float] | None = None
) -> tuple[Placement, list[str]]:
    weight = np.array(weights, float)
    size = np.full(len(weight), 1e4)
    return policy.initial(
        step_s=1.0, weights=weight, documents_per_step=weight * documents, source_bytes=size * 2000,
        source_documents=size, open_bytes=None if open_bytes is None else np.array(open_bytes, float),
    )  # fmt: skip


def windows(
    policy: Autoscaler,
    count: int,
    *,
    weights: Sequence[float],
    costs: Sequence[float],
    documents: float = 100,
    first: int = 0,
    step_s: float = 1.0,
    wait_s: float = 0.0,
    open_bytes: Sequence[int] | None = None,
    dead: Sequence[int] = (),
    busy: float = 0.5,
) -> list[str]:
    """Calls `update` once per window, with these measurements each time."""
    lines = []
    weight = np.array(weights, float)
    held = open_bytes if open_bytes is not None else [MIB] * len(costs)
    for i in range(first, first + count):
        _, said = policy.update(
            now_s=10.0 * i, step=10 * i, step_s=step_s, wait_s=wait_s, weights=weight,
            documents_per_step=weight * documents, loads=loads_of(policy.placement, dead=dead, busy=busy),
            profiles=[profile(cost, held) for cost, held in zip(costs, held, strict=True)],
        )  # fmt: skip
        lines += said
    return lines
