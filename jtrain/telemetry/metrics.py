"""Metrics of a run: their definitions, and their writers to metrics.jsonl, TensorBoard and the terminal."""

import dataclasses
import json
import math
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal, Protocol, cast, runtime_checkable

from jtrain.errors import UserError
from jtrain.runtime.atomic_io import write_whole

FILE = "metrics.jsonl"
EVENTS = "tensorboard"

type Reduced = Literal[
    "this step", "mean since the last line", "last 1000 steps", "highest so far", "so far", "held-out batches"
]


@dataclasses.dataclass(frozen=True)
class Metric:
    """Definition of a metric.

    reduced: steps or batches over which its value is taken; always over all devices and processes.
    """

    name: str
    unit: str
    reduced: Reduced
    meaning: str


TRAIN_METRICS = (
    Metric("step", "steps", "this step", "completed updates"),
    Metric("loss_nats", "nats/token", "this step", "cross entropy over the batch's valid targets, without z-loss"),
    Metric("grad_norm", "", "this step", "global norm of the gradient before clipping"),
    Metric("learning_rate", "", "this step", "learning rate of this update"),
    Metric("skipped_updates", "updates", "so far", "updates not applied because of bad numbers, over all attempts"),
    Metric("tokens", "tokens", "this step", "valid targets in the global batch"),
    Metric("tokens_per_s", "tokens/s", "mean since the last line", "valid targets per second of wall time"),
    Metric("step_time_ms", "ms", "mean since the last line", "wall time per step, everything included"),
    Metric("data_wait_ms", "ms", "mean since the last line", "part of step_time_ms spent waiting for the next batch"),
    Metric("batch_hash", "hex", "this step", "hash of this step's global batch, computed on the devices' copy"),
    Metric("mfu", "", "mean since the last line", "model FLOP/s over the devices' peak; null if the peak is unknown"),
    Metric(
        "device_memory_peak_gib",
        "GiB",
        "highest so far",
        "peak memory of process 0's fullest device; null if the device does not report it",
    ),
    Metric("data_fill", "", "this step", "share of the batch's positions that hold a token"),
    Metric("data_cost_spread", "", "this step", "largest over mean work of a data rank: 1 is perfect balance"),
    Metric("data_drift", "", "this step", "largest deviation of a source's share so far from the mixture schedule"),
    Metric("data_skipped", "documents", "this step", "bad documents left out so far, over all attempts"),
    Metric("data_retries", "reads", "this step", "reads repeated so far by process 0's Source Loaders"),
    Metric("data_tokens", "tokens", "this step", "tokens by source; sources without tokens are left out"),
    Metric("data_queue", "runs", "this step", "runs requested from each Source Loader of process 0 and not yet read"),
    Metric("data_memory_mib", "MiB", "this step", "resident memory of process 0's Source Loaders, with shared pages"),
    Metric("step_time_p50_ms", "ms", "last 1000 steps", "median step time, without evaluations and saves"),
    Metric("step_time_p90_ms", "ms", "last 1000 steps", "90th percentile of step times"),
    Metric("step_time_p99_ms", "ms", "last 1000 steps", "99th percentile of step times"),
    Metric(
        "straggler_score",
        "",
        "mean since the last line",
        "per host and device, 1 = fastest, lower = straggler; hosts: share of the step time that would remain if the "
        "host were as fast as the fastest; devices: clock over the highest clock, if clocks are known",
    ),
    Metric("clock_mhz", "MHz", "mean since the last line", "clock of the cores, mean over devices; null if unknown"),
    Metric("power_w", "W", "mean since the last line", "power of a device, mean over devices; null if unknown"),
    Metric("joules_per_token", "J/token", "mean since the last line", "energy per token, all devices; null if unknown"),
    Metric("host_rss_mib", "MiB", "this step", "resident memory of process 0, with shared pages; null without /proc"),
    Metric("compile_count", "programs", "so far", "train steps compiled by this attempt; 1 unless an argument changed"),
)
"""Fields of the line of a train step, in this order."""

EVAL_METRICS = (
    Metric("step", "steps", "this step", "completed updates"),
    Metric("eval_loss_nats", "nats/token", "held-out batches", "cross entropy over all their valid targets"),
    Metric(
        "eval_loss_standard_error", "nats/token", "held-out batches", "of the loss, over documents; null if only one"
    ),
    Metric("eval_bits_per_byte", "bits/byte", "held-out batches", "all nats over the targets' UTF-8; null if unknown"),
    Metric("eval_tokens", "tokens", "held-out batches", "valid targets"),
    Metric("eval_documents", "documents", "held-out batches", "documents of these targets"),
    Metric("eval_sets", "", "held-out batches", "eval.sets by name: the same five, without their prefix"),
)
"""Fields of the line of an evaluation; those of the split are null if data.eval_fraction=0."""


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """Result on one held-out set; `EVAL_METRICS` describes the fields."""

    loss_nats: float
    loss_standard_error: float | None
    bits_per_byte: float | None
    tokens: int
    documents: int

    def summary(self) -> str:
        """Loss and bits per byte, as in `loss 1.4123 +- 0.0113 nats  2.0375 bits/byte`."""
        error = "" if self.loss_standard_error is None else f" +- {self.loss_standard_error:.4f}"
        bits = "" if self.bits_per_byte is None else f"  {self.bits_per_byte:.4f} bits/byte"
        return f"loss {self.loss_nats:.4f}{error} nats{bits}"


@dataclasses.dataclass(frozen=True)
class TrainLine:
    """Line of a train step in metrics.jsonl; `TRAIN_METRICS` describes the fields."""

    step: int
    loss_nats: float
    grad_norm: float
    learning_rate: float
    skipped_updates: int
    tokens: int
    tokens_per_s: float
    step_time_ms: float
    data_wait_ms: float
    batch_hash: str
    mfu: float | None
    device_memory_peak_gib: float | None
    data_fill: float
    data_cost_spread: float
    data_drift: float
    data_skipped: int
    data_retries: int
    data_tokens: dict[str, int]
    data_queue: dict[str, int]
    data_memory_mib: dict[str, float]
    step_time_p50_ms: float
    step_time_p90_ms: float
    step_time_p99_ms: float
    straggler_score: dict[str, float]
    clock_mhz: float | None
    power_w: float | None
    joules_per_token: float | None
    host_rss_mib: float | None
    compile_count: int


@dataclasses.dataclass(frozen=True)
class MetricsSpec:
    """Reporting settings of a run.

    log_every_steps: train steps per line; the first and the last step always have a line.
    tensorboard: also write event files for TensorBoard.
    """

    log_every_steps: int = 10
    tensorboard: bool = True

    def __post_init__(self) -> None:
        if self.log_every_steps < 1:
            raise UserError(f"metrics.log_every_steps={self.log_every_steps} must be at least 1.")

    def is_logged(self, step: int, num_steps: int) -> bool:
        """True if `step` gets a line; the same for a resumed run as for an uninterrupted one."""
        return step in (1, num_steps) or step % self.log_every_steps == 0


@runtime_checkable
class ProgressStream(Protocol):
    """Part of sys.stdout's interface that progress needs; the streams of notebooks and tests have it too."""

    def write(self, text: str, /) -> object:
        """Writes text."""
        ...

    def flush(self) -> object:
        """Shows the written text."""
        ...

    def isatty(self) -> bool:
        """True if the stream is an interactive terminal."""
        ...


class Metrics:
    """Writes a run's metrics; in processes other than 0 every method does nothing.

    Each line is written to the operating system before the method returns, so that a later SIGKILL does not lose it.

    Args:
      workdir: folder for metrics.jsonl and tensorboard/.
      num_steps: number of steps of the whole run.
      start_step: the restored step, 0 for a new run. Later lines of earlier attempts are dropped, so that the file is
        one history.
      stream: stream for progress: a bar on a terminal, else a line per logged step.
    """

    def __init__(
        self, workdir: Path, spec: MetricsSpec, *, num_steps: int, start_step: int, stream: ProgressStream | None = None
    ) -> None:
        import jax  # lazy: reading a spec or a file does not need it

        self._file: int | None = None
        self._events: Any = None
        self._progress: _Progress | None = None
        if jax.process_index() != 0:
            return
        self._workdir, self._tensorboard, self._openings = workdir, spec.tensorboard, 0
        self._open(start_step)
        shown_on = sys.stdout if stream is None else stream
        self._progress = (_Bar if shown_on.isatty() else _Progress)(shown_on, num_steps, start_step)

    def _open(self, start_step: int) -> None:
        """Opens the files, without the lines after `start_step`."""
        path = self._workdir / FILE
        drop_after(path, start_step)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if self._tensorboard:
            from tensorboardX import SummaryWriter  # lazy: 0.4 s

            # purge_step: readers drop what earlier attempts wrote from that step on.
            # filename_suffix: file names have whole seconds only, and an equal name would overwrite an earlier file.
            suffix = f".from{start_step}" + f".{self._openings}" * bool(self._openings)
            self._events = SummaryWriter(str(self._workdir / EVENTS), purge_step=start_step + 1, filename_suffix=suffix)

    def rewind(self, step: int) -> None:
        """Drops the lines after `step`: the run has gone back, and writes them once more."""
        if self._file is None:
            return
        os.close(self._file)
        if self._events is not None:
            self._events.close()
        self._openings += 1
        self._open(step)

    def train(self, line: TrainLine) -> None:
        """Writes the line of a train step."""
        self._write(dataclasses.asdict(line), "train")
        if self._progress is not None:
            self._progress.train(line)

    def evaluation(self, step: int, split: EvalResult | None, sets: dict[str, EvalResult]) -> None:
        """Writes the line of an evaluation after `step`: the result on the split, if any, and on `eval.sets`."""
        names = [field.name for field in dataclasses.fields(EvalResult)]
        line: dict[str, Any] = {"step": step, **{f"eval_{name}": getattr(split, name, None) for name in names}}
        line["eval_sets"] = {name: dataclasses.asdict(result) for name, result in sets.items()}
        self._write(line, "eval")
        if self._progress is not None:
            shown = [] if split is None else [("eval", split)]
            for name, result in [*shown, *((f"eval {name}", result) for name, result in sets.items())]:
                self._progress.say(f"step {step}/{self._progress.num_steps}  {name} {result.summary()}")

    def goodput(self, step: int, seconds_by_category: dict[str, float]) -> None:
        """Writes the run's wall time so far by goodput category to TensorBoard; goodput.json has it too."""
        if self._events is not None:
            for name, seconds in seconds_by_category.items():
                self._events.add_scalar(f"goodput/{name}_s", seconds, step)

    def say(self, text: str) -> None:
        """Prints a line of text, above the bar if there is one."""
        if self._progress is not None:
            self._progress.say(text)

    def close(self) -> None:
        """Ends the progress bar and closes the files."""
        if self._progress is not None:
            self._progress.close()
        if self._events is not None:
            self._events.close()
        if self._file is not None:
            os.close(self._file)
        self._file = self._events = self._progress = None

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.close()

    def _write(self, values: dict[str, Any], folder: str) -> None:
        if self._file is not None:
            _write_line(self._file, encode(values).encode())
        if self._events is not None:
            for tag, number in _numbers({name: value for name, value in values.items() if name != "step"}, folder):
                self._events.add_scalar(tag, number, values["step"])
            self._events.flush()


def encode(values: dict[str, Any]) -> str:
    """Encodes values as one line of valid JSON.

    Floats are written by `repr`, so reading them gives the same bits. NaN and infinities, which JSON does not have,
    become null, and a field `message` names them.
    """
    lost: dict[str, float] = {}

    def kept(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: kept(f"{name}.{key}", item) for key, item in value.items()}
        if isinstance(value, float) and not math.isfinite(value):
            lost[name] = value
            return None
        return value

    values = {name: kept(name, value) for name, value in values.items()}
    if lost:
        values["message"] = ", ".join(f"{name} is {value}" for name, value in lost.items())
    return json.dumps(values, allow_nan=False) + "\n"


def read(path: Path) -> list[dict[str, Any]]:
    """Reads the lines of a metrics.jsonl, without a last line cut short by a kill or a full disk."""
    complete, _, _ = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in complete.splitlines()]


def _numbers(value: Any, tag: str) -> Iterator[tuple[str, float]]:
    """Yields every number in nested dicts, tagged by the path of its keys."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _numbers(part, f"{tag}/{name}")
    elif isinstance(value, int | float):
        yield tag, value


def drop_after(path: Path, step: int) -> None:
    """Drops the lines of `path` after `step`, and a last line cut short. Atomic: a kill leaves the old or new file."""
    if not path.exists():
        return
    before = path.read_bytes()
    kept = "".join(json.dumps(line) + "\n" for line in read(path) if line["step"] <= step).encode()
    if kept == before:
        return
    write_whole(path, kept)


def _write_line(file: int, line: bytes) -> None:
    """Writes `line` in one system call, so that after a kill it is complete or absent."""
    written = os.write(file, line)
    while written < len(line):  # a full disk accepts a part, and the next call raises the error
        written += os.write(file, line[written:])


class _Progress:
    """Progress as one plain line per logged step."""

    def __init__(self, stream: ProgressStream, num_steps: int, start_step: int) -> None:
        self.num_steps = num_steps
        self._stream = stream
        del start_step

    def train(self, line: TrainLine) -> None:
        self.say(f"step {line.step}/{self.num_steps}  {summary(line, self.num_steps)}")

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        pass


class _Bar(_Progress):
    """Progress bar for a terminal."""

    def __init__(self, stream: ProgressStream, num_steps: int, start_step: int) -> None:
        super().__init__(stream, num_steps, start_step)
        from rich.console import Console  # lazy: 0.1 s
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
        # rich's own estimate of the remaining time would count the compilation as a step.
        self._bar = Progress(*columns, console=Console(file=cast(IO[str], stream)), auto_refresh=False)
        self._task = self._bar.add_task("compiling", total=num_steps, completed=start_step)
        self._bar.start()
        self._bar.refresh()

    def train(self, line: TrainLine) -> None:
        text = summary(line, self.num_steps)
        self._bar.update(self._task, completed=line.step, description=text, refresh=True)

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()


def summary(line: TrainLine, num_steps: int) -> str:
    """Loss, speed and remaining time, as in `loss 2.1034 nats  12.3k tokens/s  MFU 41.2 %  ETA 1m 20s`."""
    mfu = "" if line.mfu is None else f"  MFU {line.mfu:.1%}"
    left_s = (num_steps - line.step) * line.step_time_ms / 1e3
    # The first step's time is mostly compilation, so it gives no estimate.
    eta = "" if line.step in (1, num_steps) else f"  ETA {_duration(left_s)}"
    return f"loss {line.loss_nats:.4f} nats  {_count(line.tokens_per_s)} tokens/s{mfu}{eta}"


def _count(number: float) -> str:
    for power, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= power:
            return f"{number / power:.1f}{letter}"
    return f"{number:.1f}"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = ((days, "d"), (hours, "h"), (minutes, "m"), (rest, "s"))
    shown = [f"{value}{letter}" for value, letter in parts if value]
    return " ".join(shown[:2]) or "0s"
