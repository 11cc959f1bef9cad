"""Callback that sends alerts: spikes, stragglers, hangs, a disk that fills up and low goodput.

Alerts about numbers that are bad come from `bad_steps.py`.
"""

import collections
import contextlib
import math
import shutil
import statistics
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import jax

from jtrain.config.run import Run
from jtrain.train.callbacks import Callback, LoopPhase, RunContext, StepResults
from jtrain.train.goodput_ledger import GoodputLedger

_RECENT_STEPS = 128
_LEAST_STEPS = 16
"""Steps whose losses are compared, and how many there must be."""

_LEAST_RISE = 0.05
"""Rise of the loss over the median that counts as a spike at least: the deviation of a flat loss is almost
0."""

_STRAGGLER_LINES = 3


class AlertWatch(Callback):
    """Watches a run for `alerts` of its config, in process 0.

    Args:
      goodput: callback that keeps the ledger; it and the one that writes metrics lines come before this one.
    """

    def __init__(self, run: Run, goodput: GoodputLedger) -> None:
        self._run = run
        self._spec = run.alerts
        self._goodput = goodput
        # One process: all of them see the same losses, and their alerts would arrive once per host.
        self._active = run.alerts.is_active and jax.process_index() == 0
        self._losses: collections.deque[float] = collections.deque(maxlen=_RECENT_STEPS)
        self._slow_lines: collections.Counter[str] = collections.Counter()
        self._seconds: collections.deque[tuple[float, float]] = collections.deque()
        self._phases: list[tuple[str, int]] = []
        self._moved_s = time.monotonic()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        # Before the join: the thread waits on it.
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def on_start(self, context: RunContext) -> None:
        self._context = context
        if self._active:
            # From here on: the setup before may take minutes.
            self._moved_s = time.monotonic()
            self._thread = threading.Thread(target=self._watch_for_hangs, name="alert watch", daemon=True)
            self._thread.start()

    @contextlib.contextmanager
    def during(self, phase: LoopPhase, step: int, arguments: tuple[Any, ...]) -> Iterator[None]:
        self._phases.append((phase, step))
        self._moved_s = time.monotonic()
        try:
            yield
        finally:
            self._phases.pop()
            self._moved_s = time.monotonic()

    def on_results(self, results: StepResults) -> None:
        if not self._active:
            return
        step = results.step
        if results.values["applied"]:  # otherwise the guard has sent an alert
            self._check_loss(step, float(results.values["loss_nats"]))
        if self._run.metrics.is_logged(step, self._run.num_steps):
            self._check_disk(step)
            self._check_goodput(step)
            self._check_stragglers(step)

    def on_error(self, error: Exception) -> None:
        self._ended.set()

    def on_end(self) -> None:
        self._ended.set()

    def _check_loss(self, step: int, loss: float) -> None:
        """Looks for spikes that the guard lets pass, because it is off or its bound is wider."""
        # `inf` as a median would hide every later spike.
        if not math.isfinite(loss):
            return
        if len(self._losses) >= _LEAST_STEPS:
            median = statistics.median(self._losses)
            # 1.4826: the median deviation of a normal distribution is 1/1.4826 of its standard deviation.
            sigma = 1.4826 * statistics.median(abs(past_loss - median) for past_loss in self._losses)
            if loss - median > max(self._spec.spike_sigmas * sigma, _LEAST_RISE * abs(median)):
                self._context.metrics.alert(
                    "spike",
                    step,
                    f"loss_nats={loss:.4f}, but the median of the last {len(self._losses)} steps is "
                    f"{median:.4f} with a standard deviation of {sigma:.4f}",
                    loss_nats=loss,
                    median=median,
                    sigma=sigma,
                )
        # After the comparison: a spike would otherwise raise its own median.
        self._losses.append(loss)

    def _check_disk(self, step: int) -> None:
        workdir = self._context.workdir
        with contextlib.suppress(OSError):  # a disk that is away is reported by what writes to it
            usage = shutil.disk_usage(workdir)
            free_gib, total_gib = usage.free / 2**30, usage.total / 2**30
            if free_gib < self._spec.disk_free_gib:
                self._context.metrics.alert(
                    "disk",
                    step,
                    f"the disk of {workdir} has {free_gib:.2f} GiB free of {total_gib:.2f} GiB "
                    f"(alerts.disk_free_gib={self._spec.disk_free_gib:g})",
                    free_gib=free_gib,
                    total_gib=total_gib,
                )

    def _check_goodput(self, step: int) -> None:
        """Compares the ledger with what it was `goodput_minutes` ago; earlier attempts do not count."""
        # Differences of the ledger since the window began: earlier attempts are in both and cancel out.
        seconds = self._goodput.ledger.so_far()
        self._seconds.append((sum(seconds.values()), seconds["compute"]))
        window_s = 60 * self._spec.goodput_minutes
        while len(self._seconds) > 2 and self._seconds[-1][0] - self._seconds[1][0] >= window_s:
            self._seconds.popleft()
        (wall_before_s, compute_before_s), (wall_s, compute_s) = self._seconds[0], self._seconds[-1]
        # The window is not yet full right after a start.
        if wall_s - wall_before_s < window_s:
            return
        goodput = (compute_s - compute_before_s) / (wall_s - wall_before_s)
        if goodput < self._spec.goodput:
            self._context.metrics.alert(
                "goodput",
                step,
                f"only {goodput:.1%} of the last {(wall_s - wall_before_s) / 60:.1f} minutes were training "
                f"(alerts.goodput={self._spec.goodput:g}); goodput.json says what the others were",
                goodput=goodput,
                minutes=(wall_s - wall_before_s) / 60,
            )

    def _check_stragglers(self, step: int) -> None:
        line = self._context.metrics.last
        if line is None:
            return
        slow = {
            name: score for name, score in line.straggler_score.items() if score < self._spec.straggler_score
        }
        # Only lines in a row count: a host that was slow once drops out of the counter.
        self._slow_lines = collections.Counter({name: self._slow_lines[name] + 1 for name in slow})
        lasting = {name: slow[name] for name, lines in self._slow_lines.items() if lines >= _STRAGGLER_LINES}
        if lasting:
            worst = min(lasting, key=lambda name: lasting[name])
            self._context.metrics.alert(
                "straggler",
                step,
                f"{worst} has straggler_score {lasting[worst]:.2f} in {_STRAGGLER_LINES} lines of metrics or "
                f"more (1 = fastest; alerts.straggler_score={self._spec.straggler_score:g})",
                **lasting,
            )

    def _watch_for_hangs(self) -> None:
        limit_s = 60 * self._spec.hang_minutes
        said_for: float | None = None
        while not self._ended.wait(min(limit_s / 4, 10.0)):
            # Read once: the main thread moves both while this one works.
            moved_s, phases = self._moved_s, list(self._phases)
            still_s = time.monotonic() - moved_s
            if still_s < limit_s or said_for == moved_s:
                continue
            # Once per stall: the same moment is not reported again.
            said_for = moved_s
            phase, step = phases[-1] if phases else ("start", self._context.start_step)
            self._context.metrics.alert(
                "hang",
                step,
                f"no progress for {still_s:.0f} s, in phase {phase} of step {step} "
                f"(alerts.hang_minutes={self._spec.hang_minutes:g})",
                phase=phase,
                seconds=still_s,
            )
