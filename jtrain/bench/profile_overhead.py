"""What being watched costs: tokens/s with the always-on part over without it, inside a trace window over outside."""

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jtrain import config, leaves, loop
from jtrain.bench import Row, row
from jtrain.metrics import FILE, Metrics, read
from jtrain.profile import goodput
from jtrain.watch import Interval, Watch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--config", default="tiny", help="what to train (default: tiny, its own shape)")
    parser.add_argument("--steps", type=int, default=40, help="steps per measurement; lines are logged every ten")
    parser.add_argument("--rounds", type=int, default=5, help="both alternate this often; the median ratio counts")


def run(args: argparse.Namespace) -> list[Row]:
    """Alternates the two, so that a machine that slows down slows both; compilation is in neither."""
    last = 2 * args.steps
    watched, blind, inside, outside, stalls_s = [], [], [], [], []
    for _ in range(args.rounds + 1):
        blind.append(_trained(args.config, last, blind=True)[1])
        watched.append(_trained(args.config, last)[1])
        before, after, stall_s = _trained(args.config, last, window=(args.steps, last))
        outside.append(before)
        inside.append(after)
        stalls_s.append(stall_s)
    rows = [
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
    name: str, num_steps: int, *, blind: bool = False, window: tuple[int, int] | None = None
) -> tuple[float, float, float]:
    """Trains so many steps; tokens/s of the first half and of the second, and seconds beside training."""
    sets = [f"num_steps={num_steps}", "metrics.log_every_steps=10", "eval.every_steps=None", f"profile.steps={window}"]
    sets += ["checkpoint.every_steps=None", "optimizer.warmup_steps=0", *(["profile.clocks=none"] if blind else [])]
    run_config = config.load(name, (), sets)
    built, text = config.build(run_config), leaves.flat(run_config)
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()), _unwatched() if blind else contextlib.nullcontext():
            loop.train(built, workdir=Path(folder), config_text=text)
        lines = [line for line in read(Path(folder) / FILE) if line.get("tokens_per_s") and line["step"] > 1]
        file = Path(folder) / goodput.FILE
        idle_s = json.loads(file.read_text())["categories"]["idle"] if file.exists() else 0.0
    halves = [
        statistics.harmonic_mean(line["tokens_per_s"] for line in lines if (line["step"] > num_steps // 2) is second)
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


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """While it is entered, the loop trains without the always-on part."""
    before = loop.Watch
    loop.Watch = _Blind
    try:
        yield
    finally:
        loop.Watch = before
