"""What being watched costs: by its own seconds, and in tokens/s with it over without, in a trace window over outside.

Two runs of the same steps differ by more than the half per cent that is asked about, on a machine that others share,
even by the median over steps.
So the always-on part is also timed from within: the wall time that it keeps the loop from the next step, and the CPU
time of the sampler's process, which on a CPU the devices want too.
"""

import contextlib
import io
import json
import os
import statistics
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jtrain.bench import Options, Row, option, row
from jtrain.config import tree
from jtrain.config.devices import settle_mesh
from jtrain.config.load import load_config
from jtrain.config.run import Run, build_run
from jtrain.profile.clocks.sampler import Sampler
from jtrain.runtime.workdir_lock import WorkdirLock
from jtrain.telemetry import goodput
from jtrain.telemetry.metrics import FILE, read
from jtrain.telemetry.step_timer import StepTimes
from jtrain.train import attempt
from jtrain.train.callbacks import Callback, DispatchedStep, LoopPhase, RunContext, StepResults
from jtrain.train.step_metrics import RecompileWatch, StepLog
from jtrain.train.trace_windows import TraceWindows

OPTIONS = (
    option("--config", default="tiny", help="what to train (default: tiny, its own shape)"),
    option("--steps", type=int, default=40, help="steps per measurement; speeds are medians over them"),
    option("--rounds", type=int, default=5, help="both alternate this often; the median ratio counts"),
)


def run(args: Options) -> list[Row]:
    """Alternates the two, so that a machine that slows down slows both; compilation is in neither."""
    last = 2 * args.steps
    watched, blind, inside, outside, stalls_s = [], [], [], [], []
    for number in range(args.rounds + 1):
        order = [(_blind, blind), (attempt.built_in_callbacks, watched)]
        for watch, into in order if number % 2 else order[::-1]:  # what drifts within a round favours neither
            into.append(_trained(args.config, last, watch=watch)[1])
        before, after, stall_s = _trained(args.config, last, window=(args.steps, last))
        outside.append(before)
        inside.append(after)
        stalls_s.append(stall_s)
    timed = _Total()

    def clocked(run: Run, workdir: Path, lock: WorkdirLock) -> list[Callback]:
        callbacks = built_in(run, workdir, lock)
        timed.sampler = next(one.sampler for one in callbacks if isinstance(one, TraceWindows))
        return [_Timed(one, timed) for one in callbacks]

    built_in = attempt.built_in_callbacks
    _trained(args.config, last, watch=clocked)
    wall_s = timed.until_s - timed.since_s
    own = f"{timed.own_s:.3f} s of the loop and {timed.sampler_s:.3f} s of the sampler in {wall_s:.1f} s"
    rows = [
        row(
            f"{args.config}: what the always-on part leaves ({own})",
            wall_s - timed.own_s - timed.sampler_s,
            "s",
            baseline=wall_s,
            bar=">= 0.995",
        ),
        _ratio(f"{args.config}: watched all the time", watched, blind, ">= 0.995"),
        _ratio(f"{args.config}: inside a trace window", inside, outside, ">= 0.95"),
    ]
    what = "start, stop and report of a window, waited for as the run ends with it"
    return [*rows, row(what, statistics.median(stalls_s[1:]), "s")]


def _ratio(what: str, new: list[float], base: list[float], bar: str) -> Row:
    ratios = [a / b for a, b in zip(new[1:], base[1:], strict=True)]  # the first round fills caches
    spread = f"{min(ratios):.3f} .. {max(ratios):.3f} over {len(ratios)} rounds"
    median = statistics.median(base[1:])
    return row(f"{what} ({spread})", statistics.median(ratios) * median, "tokens/s", baseline=median, bar=bar)


def _trained(
    name: str,
    num_steps: int,
    *,
    watch: Callable[[Run, Path, WorkdirLock], list[Callback]] | None = None,
    window: tuple[int, int] | None = None,
) -> tuple[float, float, float]:
    """Trains so many steps; tokens/s of the first half and of the second, and seconds beside training."""
    sets = [
        f"num_steps={num_steps}",
        f"metrics.log_every_steps={1 if watch in (None, _blind, attempt.built_in_callbacks) else 10}",
        "eval.every_steps=None",
        f"profile.steps={window}",
    ]
    sets += [
        "checkpoint.every_steps=None",
        "optimizer.warmup_steps=0",
        *(["profile.clocks=none"] if watch is _blind else []),
    ]
    run_config = load_config(name, (), sets)
    settle_mesh(run_config, jax.devices())
    built, text = build_run(run_config), tree.flat(run_config)
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()), _watched_by(watch or attempt.built_in_callbacks):
            attempt.train(built, workdir=Path(folder), config_text=text)
        lines = [line for line in read(Path(folder) / FILE) if line.get("tokens_per_s") and line["step"] > 1]
        file = Path(folder) / goodput.FILE
        idle_s = json.loads(file.read_text())["categories"]["idle"] if file.exists() else 0.0
    halves = [
        statistics.median(line["tokens_per_s"] for line in lines if (line["step"] > num_steps // 2) is second)
        for second in (False, True)
    ]
    return halves[0], halves[1], idle_s


class _Timed(Callback):
    """Another callback, and the seconds that its methods take after the first step, the loop's own work left out."""

    def __init__(self, watched: Callback, total: "_Total") -> None:
        self._watched, self._total = watched, total

    @property
    def requested(self) -> bool:
        return self._watched.requested

    def __enter__(self) -> "_Timed":
        self._watched.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._watched.__exit__(kind, error, trace)

    def on_start(self, context: RunContext) -> None:
        self._watched.on_start(context)

    @contextlib.contextmanager
    def during(self, phase: LoopPhase, step: int, arguments: tuple[Any, ...]) -> Iterator[None]:
        inner = self._watched.during(phase, step, arguments)
        with self._total.own():
            inner.__enter__()
        yield
        with self._total.own():
            inner.__exit__(None, None, None)

    def on_results(self, results: StepResults) -> None:
        with self._total.own():
            self._watched.on_results(results)

    def on_step(self, dispatched: DispatchedStep) -> None:
        with self._total.own():
            self._watched.on_step(dispatched)
        self._total.step_done(dispatched.step)

    def on_end(self) -> None:
        self._watched.on_end()


class _Total:
    """Seconds of all callbacks of one run, and CPU seconds of its sampler, after the first step."""

    def __init__(self) -> None:
        self.own_s = self.sampler_s = self.since_s = self.until_s = self._sampler_before_s = 0.0
        self.sampler: Sampler | None = None
        self._depth = 0

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Around a callback's work; one that announces a phase runs others inside, which count once."""
        before_s = time.perf_counter()
        self._depth += 1
        yield
        self._depth -= 1
        if self._depth == 0:
            self.own_s += time.perf_counter() - before_s

    def step_done(self, step: int) -> None:
        """Starts to count after the first step."""
        self.until_s = time.perf_counter()
        assert self.sampler is not None
        if step == 1:
            self.since_s, self.own_s = self.until_s, 0.0
            self._sampler_before_s = _cpu_s(self.sampler.pid)
        self.sampler_s = _cpu_s(self.sampler.pid) - self._sampler_before_s


def _blind(run: Run, workdir: Path, lock: WorkdirLock) -> list[Callback]:
    """Only what a loop needs to log its speed: no ledger, no sampler, no signal."""
    sampler = Sampler(workdir, source="none", platform="cpu", devices=[0])
    return [recompiles := RecompileWatch(), StepLog(run, StepTimes(), sampler, recompiles)]


def _cpu_s(pid: int | None) -> float:
    """Seconds of CPU that a process has had."""
    assert pid is not None
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _watched_by(callbacks: Callable[[Run, Path, WorkdirLock], list[Callback]]) -> Iterator[None]:
    """While it is entered, these callbacks watch the loop."""
    before = attempt.built_in_callbacks
    attempt.built_in_callbacks = callbacks
    try:
        yield
    finally:
        attempt.built_in_callbacks = before
