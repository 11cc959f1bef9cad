"""Callback that measures goodput: the ledger counts every second of an attempt in one category."""

import contextlib
import time
import types
from collections.abc import Iterator
from typing import Any

import jax

from jtrain.config.run import Run
from jtrain.runtime.lease import LeaseLost
from jtrain.telemetry import goodput
from jtrain.telemetry.recompiles import CompileSeconds
from jtrain.telemetry.step_timer import StepTimes
from jtrain.train.callbacks import Callback, DispatchedStep, LoopPhase, RunContext, StepResults

_CATEGORIES: dict[LoopPhase, goodput.Category] = {
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "profile": "idle",
}


class GoodputLedger(Callback):
    """Keeps goodput.jsonl and goodput.json, and prints the sum at the end.

    Args:
      times: step times; a stall for data is counted from the median step time on.
    """

    def __init__(self, run: Run, times: StepTimes) -> None:
        self._run = run
        self._times = times
        self._compiled_before_s = 0.0
        self._compile_seconds = CompileSeconds(self._count_compilation)
        # Opened in on_start, which knows the step that the attempt begins at.
        self._opened: goodput.Ledger | None = None
        self._dispatched_s: float | None = None

    @property
    def ledger(self) -> goodput.Ledger:
        """Ledger of this attempt; on_start opens it."""
        assert self._opened is not None, "on_start opens the ledger"
        return self._opened

    def __enter__(self) -> "GoodputLedger":
        self._compile_seconds.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._compile_seconds.__exit__(kind, error, trace)
        # Without on_start no ledger was opened: the run ended before its first step.
        if self._opened is not None:
            if isinstance(error, LeaseLost):
                # Another run has the workdir: nothing more may be written there.
                self._opened.abandon()
            self._opened.close()

    def on_start(self, context: RunContext) -> None:
        self._context = context
        self._writes = jax.process_index() == 0 and context.start_step < self._run.num_steps
        # Only process 0 writes, and only if a step can follow: a complete run leaves its ledger alone.
        self._opened = goodput.Ledger(
            context.workdir,
            start_step=context.start_step,
            started_s=context.started_s,
            writes=self._writes,
            say=context.metrics.say,
        )
        # Compiled before the ledger was opened: those seconds are moved into it now.
        self._opened.move(self._compiled_before_s, "compile")

    @contextlib.contextmanager
    def during(self, phase: LoopPhase, step: int, arguments: tuple[Any, ...]) -> Iterator[None]:
        category = _CATEGORIES.get(phase)
        # The first dispatch compiles: its time is not training.
        if phase == "dispatch" and self._dispatched_s is None:
            self.ledger.training()
            category = "compile"
        with self.ledger.during(category) if category is not None else contextlib.nullcontext():
            yield
        if phase == "dispatch":
            # From here on the devices compute the step.
            self._dispatched_s = time.perf_counter()

    def on_step(self, dispatched: DispatchedStep) -> None:
        """Counts as `data_wait` the time in which the devices were idle for lack of data.

        The step is assumed to end one median step time after its dispatch.
        """
        if not dispatched.idle:
            return
        assert self._dispatched_s is not None
        percentiles = self._times.percentiles()
        step_s = percentiles[0] if percentiles else 0.0
        since_dispatch_s = dispatched.data_arrived_s - self._dispatched_s
        # The devices were busy for one step time after the dispatch; they idled for the rest of the wait.
        stalled_s = min(1e-3 * dispatched.data_wait_ms, since_dispatch_s - step_s)
        if stalled_s > 0:
            self.ledger.move(stalled_s, "data_wait")

    def on_results(self, results: StepResults) -> None:
        if self._run.metrics.is_logged(results.step, self._run.num_steps):
            self._context.metrics.goodput(results.step, self.ledger.write(results.step)["categories"])
        else:
            self.ledger.step_done(results.step)

    def on_rewind(self, step: int) -> None:
        self.ledger.go_back(step)

    def on_end(self) -> None:
        summary = self.ledger.close()
        if summary is not None and self._writes:
            self._context.metrics.say(goodput.line(summary))

    def _count_compilation(self, seconds: float) -> None:
        if self._opened is None:
            self._compiled_before_s += seconds
        # Compilation inside a phase that counts as compiling anyway is not counted twice.
        elif self._opened.current != "compile":
            self._opened.move(seconds, "compile")
