"""Callback that tells the supervisor's heartbeat where the loop is, and which collectives its step has."""

import contextlib
from collections.abc import Iterator
from typing import Any

from jtrain.hlo.traffic import traffic
from jtrain.profile.capture.trace import compiled_text
from jtrain.supervise.heart import Heart
from jtrain.train.callbacks import Callback, LoopPhase, RunContext, StepResults
from jtrain.train.trace_windows import MODULE


class Heartbeat(Callback):
    """Announces every phase of the loop; after the first step also the collectives of the compiled
    program.
    """

    def __init__(self, heart: Heart) -> None:
        self._heart = heart
        self._described = False

    def on_start(self, context: RunContext) -> None:
        self._mesh_shape = dict(context.mesh.shape)
        self._heart.started(context.start_step)

    @contextlib.contextmanager
    def during(self, phase: LoopPhase, step: int, arguments: tuple[Any, ...]) -> Iterator[None]:
        with self._heart.during(phase, step):
            yield

    def on_results(self, results: StepResults) -> None:
        if not self._described:
            self._described = True
            self._heart.describe(self._collectives)

    def on_end(self) -> None:
        self._heart.enter("ending")

    def _collectives(self) -> str:
        """Collectives of the compiled step in words; the heart's thread calls it, and must not end by an
        error.
        """
        try:
            rows = traffic(compiled_text(MODULE)[MODULE], self._mesh_shape)
        except Exception as error:
            return f"those of {MODULE} are not known ({error})"
        # A group of one device moves nothing over the network.
        rows = [row for row in rows if row.group > 1]
        parts = [
            f"{row.count} x {row.kind} over {', '.join(row.axes)} ({row.group} devices, {row.dtype})"
            for row in rows
        ]
        return f"{MODULE} has {'; '.join(parts)}" if parts else ""
