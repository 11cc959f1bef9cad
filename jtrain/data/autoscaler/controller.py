"""Controller of the autoscaler: gives it schedule and measurements of a run, and names the loaders."""

import time
from typing import Any

import numpy as np
from jaxtyping import Float

from jtrain.data.autoscaler.placement import Placement
from jtrain.data.autoscaler.policy import Autoscaler
from jtrain.data.autoscaler.source_profile import LoaderLoad, SourceProfile
from jtrain.data.loaders.messages import ChunkRun, LoaderState
from jtrain.data.planner.planner import PlannerSpec

LOADER_MEMORY_BYTES = 1 << 30
"""Memory limit of one loader; beyond it, its sources are spread over more loaders."""

FIRST_STEP_S = 1.0
"""Assumed duration of a step until two windows of steps have been measured."""

_SCHEDULE_SAMPLES = 16


class Scaling:
    """Follows a run and decides which loader reads which sources.

    Args:
      spec: names, schedule and sizes of the sources.
      chunk_bytes: mean size of a document, by source.
      max_loaders: largest number of loaders.
    """

    def __init__(self, spec: PlannerSpec, chunk_bytes: tuple[int, ...], *, max_loaders: int) -> None:
        self._spec = spec
        self._scaler = Autoscaler(spec.names, max_loaders=max_loaders, memory_bytes=LOADER_MEMORY_BYTES)
        self._bytes = np.maximum(np.asarray(chunk_bytes, np.float64), 1)
        self._profiles = [SourceProfile() for _ in spec.names]
        self._step_s = FIRST_STEP_S
        self._busy: dict[str, tuple[float, float]] = {}
        self._placement: Placement = {}

    def start(self, step: int) -> tuple[dict[str, tuple[int, ...]], list[str]]:
        """Returns the first placement, and the reasons for it."""
        weights = self._weights_ahead(step)
        per_epoch = np.asarray(self._spec.chunks_per_epoch, np.float64)
        self._placement, why = self._scaler.initial(
            step_s=self._step_s,
            weights=weights,
            documents_per_step=self._documents_per_step(weights),
            source_bytes=self._bytes * per_epoch,
            source_documents=per_epoch,
        )
        return _named(self._placement), why

    def observe(self, run: ChunkRun) -> None:
        """Records the cost of a run that was read."""
        self._profiles[run.source].observe(
            documents=len(run.numbers), tokens=len(run.ids), bytes=run.ids.nbytes, read_s=run.read_s
        )

    def after_step(
        self, step: int, *, step_s: float, wait_s: float, loaders: list[LoaderState]
    ) -> tuple[dict[str, tuple[int, ...]] | None, list[str]]:
        """Returns a new placement, or None if it is unchanged; and the decisions, as lines for the log."""
        now_s = time.monotonic()
        self._step_s = 0.9 * self._step_s + 0.1 * step_s
        weights = self._weights_ahead(step)
        loads = {}
        for loader in loaders:
            before_s, before_busy_s = self._busy.get(loader.name, (now_s - 1.0, 0.0))
            share = min(1.0, max(0.0, (loader.busy_s - before_busy_s) / max(now_s - before_s, 1e-3)))
            if now_s - before_s > 1.0:
                self._busy[loader.name] = (now_s, loader.busy_s)
            number = int(loader.name.rpartition("-")[2])
            loads[number] = LoaderLoad(share, loader.queued, alive=True, rss_bytes=loader.memory_bytes)
        placement, lines = self._scaler.update(
            now_s=now_s,
            step=step,
            step_s=step_s,
            wait_s=min(wait_s, step_s),
            weights=weights,
            documents_per_step=self._documents_per_step(weights),
            profiles=self._profiles,
            loads=loads,
        )
        changed = placement != self._placement
        self._placement = placement
        return (_named(placement) if changed else None), lines

    def _weights_ahead(self, step: int) -> Float[np.ndarray, " sources"]:
        """Returns each source's largest share between `step` and the step at which a new loader would be ready."""
        ahead = self._scaler.lookahead_steps(self._step_s)
        steps = sorted({step + ahead * i // _SCHEDULE_SAMPLES for i in range(_SCHEDULE_SAMPLES + 1)})
        found: Any = np.max([self._spec.schedule.weights(at, self._spec.names) for at in steps], axis=0)
        return found

    def _documents_per_step(self, weights: Float[np.ndarray, " sources"]) -> Float[np.ndarray, " sources"]:
        """Estimates the documents that a step draws, by measured tokens per document or else by bytes."""
        tokens = self._spec.global_batch * self._spec.seq_len
        per_document = np.asarray([p.tokens_per_document if p.documents else np.nan for p in self._profiles])
        per_document = np.maximum(np.where(np.isnan(per_document), self._bytes, per_document), 1)
        if self._spec.unit == "samples":
            return weights * tokens / max(1.0, float(weights @ per_document))
        return weights * tokens / per_document


def _named(placement: Placement) -> dict[str, tuple[int, ...]]:
    return {f"loader-{number}": sources for number, sources in placement.items()}
