"""What being watched costs: by its own seconds, and in tokens/s with it over without, in a trace window over outside.

Two runs of the same steps differ by more than the half per cent that is asked about, on a machine that others share,
even by the median over steps.
So the always-on part is also timed from within: the wall time that it keeps the loop from the next step, and the CPU
time of the sampler's process, which on a CPU the devices want too.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from jtrain import config, leaves, loop
from jtrain.bench import Row, row
from jtrain.metrics import FILE, Metrics, read
from jtrain.profile import goodput
from jtrain.watch import Interval, Watch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--config", default="tiny", help="what to train (default: tiny, its own shape)")
    parser.add_argument("--steps", type=int, default=40, help="steps per measurement; speeds are medians over them")
    parser.add_argument("--rounds", type=int, default=5, help="both alternate this often; the median ratio counts")


def run(args: argparse.Namespace) -> list[Row]:
    """Alternates the two, so that a machine that slows down slows both; compilation is in neither."""
    last = 2 * args.steps
    watched, blind, inside, outside, stalls_s = [], [], [], [], []
    for number in range(args.rounds + 1):
        order: list[tuple[type[Watch], list[float]]] = [(_Blind, blind), (Watch, watched)]
        for watch, into in order if number % 2 else order[::-1]:  # what drifts within a round favours neither
            into.append(_trained(args.config, last, watch=watch)[1])
        before, after, stall_s = _trained(args.config, last, window=(args.steps, last))
        outside.append(before)
        inside.append(after)
        stalls_s.append(stall_s)
    _trained(args.config, last, watch=_Timed)
    timed = _Timed.made[-1]
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
    name: str, num_steps: int, *, watch: type[Watch] = Watch, window: tuple[int, int] | None = None
) -> tuple[float, float, float]:
    """Trains so many steps; tokens/s of the first half and of the second, and seconds beside training."""
    sets = [
        f"num_steps={num_steps}",
        f"metrics.log_every_steps={10 if watch is _Timed else 1}",
        "eval.every_steps=None",
        f"profile.steps={window}",
    ]
    sets += [
        "checkpoint.every_steps=None",
        "optimizer.warmup_steps=0",
        *(["profile.clocks=none"] if watch is _Blind else []),
    ]
    run_config = config.load(name, (), sets)
    built, text = config.build(run_config), leaves.flat(run_config)
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()), _watched_by(watch):
            loop.train(built, workdir=Path(folder), config_text=text)
        lines = [line for line in read(Path(folder) / FILE) if line.get("tokens_per_s") and line["step"] > 1]
        file = Path(folder) / goodput.FILE
        idle_s = json.loads(file.read_text())["categories"]["idle"] if file.exists() else 0.0
    halves = [
        statistics.median(line["tokens_per_s"] for line in lines if (line["step"] > num_steps // 2) is second)
        for second in (False, True)
    ]
    return halves[0], halves[1], idle_s


class _Blind(Watch):
    """Only what a loop needs to log its speed: no ledger, no sampler, no signal, nothing counted."""

    def __enter__(self) -> "_Blind":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, start_step: int, metrics: Metrics, train_step: Any) -> None:
        self._metrics, self._train_step = metrics, train_step
        self._outside_s, self._last_s = 0.0, time.perf_counter()
        self._interval = Interval(self._last_s, time.time_ns())

    @contextlib.contextmanager
    def outside(self, category: goodput.Category) -> Iterator[None]:
        before_s = time.perf_counter()
        yield
        self._outside_s += time.perf_counter() - before_s

    def step(self, step: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def device_wait(self) -> Iterator[None]:
        yield

    def dispatch(self, *arguments: Any) -> Any:
        return self._train_step(*arguments)

    def wait_in_window(self, results: Any) -> None:
        pass

    def data_waited(self, wait_ms: float, running: Any) -> None:
        pass

    def after(self, step: int, results: Any, *, asked: bool, last: bool) -> None:
        pass

    def end(self) -> None:
        pass

    def _light(self, step_s: float) -> dict[str, Any]:
        numbers = dict.fromkeys(("step_time_p50_ms", "step_time_p90_ms", "step_time_p99_ms"), 0.0)
        unknown = dict.fromkeys(("clock_mhz", "power_w", "joules_per_token", "host_rss_mib"))
        return numbers | unknown | {"straggler_score": {}, "compile_count": 1}

    def _account(self, step: int, *, logged: bool) -> None:
        pass


class _Timed(Watch):
    """As always, and counts the seconds that it takes itself, and those of the sampler, after the first step."""

    made: ClassVar[list["_Timed"]] = []

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.own_s = self.sampler_s = self._training_s = 0.0
        self.made.append(self)

    def begin(self, start_step: int, metrics: Metrics, train_step: Any) -> None:
        super().begin(start_step, metrics, _TimedStep(train_step, self))

    def step_called(self, seconds: float) -> None:
        """The train step itself took so long to dispatch, which is not for watching."""
        self._training_s += seconds

    def dispatch(self, *arguments: Any) -> Any:
        with self._own():
            return super().dispatch(*arguments)

    def data_waited(self, wait_ms: float, running: Any) -> None:
        with self._own():
            super().data_waited(wait_ms, running)

    def after(self, step: int, results: Any, *, asked: bool, last: bool) -> None:
        with self._own():
            super().after(step, results, asked=asked, last=last)
        self.until_s = time.perf_counter()
        if step == 1:
            self.since_s, self.own_s, self._training_s = self.until_s, 0.0, 0.0
            self._sampler_before_s = _cpu_s(self._sampler.pid)
        self.sampler_s = _cpu_s(self._sampler.pid) - self._sampler_before_s

    def _light(self, step_s: float) -> dict[str, Any]:
        with self._own():
            return super()._light(step_s)

    def _account(self, step: int, *, logged: bool) -> None:
        with self._own():
            super()._account(step, logged=logged)

    @contextlib.contextmanager
    def _own(self) -> Iterator[None]:
        before_s, training_s = time.perf_counter(), self._training_s
        yield
        self.own_s += time.perf_counter() - before_s - (self._training_s - training_s)


class _TimedStep:
    """A jitted step that tells how long its calls took."""

    def __init__(self, train_step: Any, watch: _Timed) -> None:
        self._train_step, self._watch = train_step, watch

    def __call__(self, *arguments: Any) -> Any:
        before_s = time.perf_counter()
        returned = self._train_step(*arguments)
        self._watch.step_called(time.perf_counter() - before_s)
        return returned

    def __getattr__(self, name: str) -> Any:
        return getattr(self._train_step, name)


def _cpu_s(pid: int | None) -> float:
    """Seconds of CPU that a process has had."""
    assert pid is not None
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _watched_by(watch: type[Watch]) -> Iterator[None]:
    """While it is entered, the loop is watched by this."""
    before = loop.Watch
    loop.Watch = watch
    try:
        yield
    finally:
        loop.Watch = before
