"""Callbacks that time every step, count recompilations and write a line of metrics.jsonl for each logged
step.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jtrain.config.run import Run
from jtrain.data.mixture.schedule import own_weights
from jtrain.layout.mesh import BATCH_AXES
from jtrain.plan.estimate.flops import flops_per_token, mfu
from jtrain.runtime.multihost import gather
from jtrain.runtime.platform import resident_bytes
from jtrain.step.preferences.pair_loss import PAIR_MEANS
from jtrain.telemetry import step_timer
from jtrain.telemetry.metrics import TrainLine
from jtrain.telemetry.recompiles import Compilations
from jtrain.telemetry.step_timer import StepTimes
from jtrain.train.callbacks import Callback, LoopPhase, RunContext, StepResults
from jtrain.train.trace_windows import TraceWindows

_OUTSIDE: tuple[LoopPhase, ...] = ("evaluation", "checkpoint", "profile")
"""Phases outside training; step times exclude them."""


@dataclasses.dataclass
class Interval:
    """Sums since the last logged line.

    since_s, since_ns: start of the interval, by time.perf_counter() and time.time_ns().
    device_s: time in which the host waited for its devices.
    outside_s: time in evaluations, saves and the profiler's own work.
    """

    since_s: float
    since_ns: int
    steps: int = 0
    tokens: int = 0
    wait_ms: float = 0.0
    device_s: float = 0.0
    outside_s: float = 0.0


class RecompileWatch(Callback):
    """Reports each recompilation of the train step, and which argument changed."""

    @property
    def count(self) -> int:
        """Compilations of the train step so far."""
        return self._compilations.count

    def on_start(self, context: RunContext) -> None:
        self._metrics = context.metrics
        self._compilations = Compilations(context.train_step, ("state", "batch"))

    @contextlib.contextmanager
    def during(self, phase: LoopPhase, step: int, arguments: tuple[Any, ...]) -> Iterator[None]:
        yield
        # After the dispatch: the call itself tells what was compiled.
        if phase == "dispatch" and (recompilation := self._compilations.called(*arguments)) is not None:
            self._metrics.say(f"the train step was {recompilation}")


class StepLog(Callback):
    """Times steps, and writes a metrics line every `metrics.log_every_steps` steps.

    Args:
      times: receives the time of every step.
      windows: has the sampler of clocks, power and energy of this process's devices, and the devices' peaks.
    """

    def __init__(self, run: Run, times: StepTimes, windows: TraceWindows, recompiles: RecompileWatch) -> None:
        self._run = run
        self._times = times
        self._windows = windows
        self._recompiles = recompiles
        self._flops = flops_per_token(run.model, seq_len=run.data.seq_len, infos=run.param_infos())
        source_weights = {name: source.weight for name, source in run.data.named_sources.items()}
        self._mixture = own_weights(run.data.mixture, source_weights)
        self._dispatches = 0
        self._compiling = True
        self._outside_s = 0.0

    def on_start(self, context: RunContext) -> None:
        self._context = context
        self._last_s = time.perf_counter()
        self._interval = Interval(self._last_s, time.time_ns())

    @contextlib.contextmanager
    def during(self, phase: LoopPhase, step: int, arguments: tuple[Any, ...]) -> Iterator[None]:
        before_s = time.perf_counter()
        yield
        seconds = time.perf_counter() - before_s
        if phase in _OUTSIDE:
            self._outside_s += seconds
        elif phase == "dispatch":
            self._dispatches += 1
            # The first call compiles.
            if self._dispatches > 1:  # a call waits while the devices' queue is full
                self._interval.device_s += seconds
        elif phase == "device_wait":
            self._interval.device_s += seconds

    def on_results(self, results: StepResults) -> None:
        interval, now_s = self._interval, time.perf_counter()
        # The first interval contains the compilation, and would be the longest of all.
        if not self._compiling:
            self._times.add(now_s - self._last_s - self._outside_s)
        interval.steps += 1
        interval.tokens += int(results.values["tokens"])
        interval.wait_ms += results.batch.wait_ms
        interval.outside_s += self._outside_s
        self._last_s, self._outside_s = now_s, 0.0
        logged = self._run.metrics.is_logged(results.step, self._run.num_steps)
        if logged:
            self._log(results, now_s)
        if logged or self._compiling:  # an interval does not contain the compilation of the step
            self._interval = Interval(now_s, time.time_ns())
        self._compiling = False

    def on_rewind(self, step: int) -> None:
        self._last_s, self._outside_s = time.perf_counter(), 0.0
        self._interval = Interval(self._last_s, time.time_ns())

    def _log(self, results: StepResults, now_s: float) -> None:
        interval, run, stats, values = self._interval, self._run, results.batch.stats, results.values
        mesh = self._context.mesh
        seconds = now_s - interval.since_s - interval.outside_s
        peaks = self._windows.peaks
        measured = peaks.measured if peaks.published_flops is None else None
        # Rows count in full: padding costs the same FLOPs.
        speed: dict[str, Any] = dict(
            tokens_per_s=interval.steps * run.data.global_batch * run.data.seq_len / seconds,
            num_devices=mesh.devices.size,
        )
        self._context.metrics.train(
            TrainLine(
                step=results.step,
                loss_nats=float(values["loss_nats"]),
                grad_norm=float(values["grad_norm"]),
                learning_rate=float(values["learning_rate"]),
                skipped_updates=int(values["skipped_updates"]),
                tokens=int(values["tokens"]),
                tokens_per_s=interval.tokens / seconds,
                step_time_ms=1e3 * seconds / interval.steps,
                data_wait_ms=interval.wait_ms / interval.steps,
                batch_hash=results.hash_hex,
                mfu=mfu(self._flops, **speed, peak_flops=peaks.published_flops),
                measured_peak_share=mfu(
                    self._flops, **speed, peak_flops=None if measured is None else measured.flops_per_s
                ),
                device_memory_peak_gib=_memory_peak_gib(mesh),
                data_fill=stats.fill,
                data_cost_spread=stats.spread(math.prod(mesh.shape[axis] for axis in BATCH_AXES)),
                data_drift=stats.drift,
                data_skipped=stats.skipped,
                data_retries=stats.retries,
                data_tokens=stats.tokens(self._context.source_names),
                data_planned=self._planned_shares(results.step - 1),
                data_queue={loader.name: loader.queued for loader in stats.loaders},
                data_memory_mib={loader.name: loader.memory_bytes / 2**20 for loader in stats.loaders},
                **{name: float(values[name]) for name in PAIR_MEANS if name in values},
                **self._machine_fields(seconds / interval.steps),
            )
        )

    def _planned_shares(self, step: int) -> dict[str, float]:
        """Share by source that the mixture schedule has for the batch of `step`."""
        names = self._context.source_names
        shares = self._mixture.weights(step, names).tolist()
        return {name: share for name, share in zip(names, shares, strict=True) if share}

    def _machine_fields(self, step_s: float) -> dict[str, Any]:
        """Returns the fields of a metrics line about hosts and devices; a collective with several
        processes.
        """
        interval = self._interval
        # Before any step was timed, the mean stands in.
        percentiles_s = self._times.percentiles() or (step_s,) * len(step_timer.PERCENTILES)
        means = self._windows.sampler.means(interval.since_ns, time.time_ns())
        # What is not device time is the host's: that is what a straggler loses.
        own_s = max(0.0, step_s - interval.device_s / interval.steps)
        values = [own_s, *means.sm_mhz, *means.power_w, *means.energy_j]
        # NaN for unknown: arrays carry no None.
        measured = gather(np.asarray([math.nan if value is None else value for value in values], np.float32))
        mhz, power_w, energy_j = (
            [None if math.isnan(number) else float(number) for number in part.ravel()]
            for part in np.split(measured[:, 1:], 3, axis=1)
        )
        energy = (
            None
            if None in energy_j or not energy_j
            else sum(number for number in energy_j if number is not None)
        )
        resident = resident_bytes()
        return {
            "step_time_p50_ms": 1e3 * percentiles_s[0],
            "step_time_p90_ms": 1e3 * percentiles_s[1],
            "step_time_p99_ms": 1e3 * percentiles_s[2],
            "straggler_score": step_timer.host_scores([float(host_s) for host_s in measured[:, 0]], step_s)
            | step_timer.device_scores(mhz),
            "clock_mhz": _mean(mhz),
            "power_w": _mean(power_w),
            "joules_per_token": None if energy is None else energy / max(interval.tokens, 1),
            "host_rss_mib": None if resident is None else resident / 2**20,
            "compile_count": self._recompiles.count,
        }


def _mean(values: list[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return sum(measured) / len(measured) if measured else None


def _memory_peak_gib(mesh: Mesh) -> float | None:
    """Peak memory in use on any of this process's devices; None if they report none, as on a CPU."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in mesh.local_devices]
    peak_bytes = [peak for peak in peaks if peak is not None]
    return max(peak_bytes) / 2**30 if peak_bytes else None
