"""Every metric once, and the three places that show it: metrics.jsonl, TensorBoard, the terminal."""

import dataclasses
import json
import math
import os
import sys
import types
from pathlib import Path
from typing import IO, Any, Literal, Protocol, cast, runtime_checkable

FILE = "metrics.jsonl"
EVENTS = "tensorboard"

type Reduced = Literal[
    "this step", "mean since the last line", "last 1000 steps", "highest so far", "so far", "held-out batches"
]


@dataclasses.dataclass(frozen=True)
class Metric:
    """One metric. `reduced`: over which steps or batches its value is taken; always over all devices and processes."""

    name: str
    unit: str
    reduced: Reduced
    meaning: str


TRAIN_METRICS = (
    Metric("step", "steps", "this step", "completed updates"),
    Metric("loss_nats", "nats/token", "this step", "cross entropy over the batch's valid targets, without z-loss"),
    Metric("grad_norm", "", "this step", "global norm of the gradient before clipping"),
    Metric("learning_rate", "", "this step", "the rate that this update used"),
    Metric("tokens", "tokens", "this step", "valid targets in the global batch"),
    Metric("tokens_per_s", "tokens/s", "mean since the last line", "valid targets per second of wall time"),
    Metric("step_time_ms", "ms", "mean since the last line", "wall time per step, all included"),
    Metric("data_wait_ms", "ms", "mean since the last line", "part of it spent waiting for the next batch"),
    Metric("batch_hash", "hex", "this step", "hash of the global batch that fed this step, as the devices got it"),
    Metric("mfu", "", "mean since the last line", "model FLOP/s over the devices' peak; null where that is unknown"),
    Metric(
        "device_memory_peak_gib",
        "GiB",
        "highest so far",
        "of process 0's fullest device; null where it cannot be asked",
    ),
    Metric("data_fill", "", "this step", "share of the batch's positions that hold a token"),
    Metric("data_cost_spread", "", "this step", "largest over mean work of a data rank: 1 is perfect balance"),
    Metric("data_drift", "", "this step", "largest distance of a source's share so far from what the schedule asks"),
    Metric("data_skipped", "documents", "this step", "bad documents left out so far, over all attempts"),
    Metric("data_tokens", "tokens", "this step", "by source; those that gave none are left out"),
    Metric("data_queue", "runs", "this step", "asked of each Source Loader of process 0 and not yet read"),
    Metric("data_memory_mib", "MiB", "this step", "resident in each Source Loader of process 0, shared pages included"),
    Metric("step_time_p50_ms", "ms", "last 1000 steps", "half of the steps are no longer; evaluations, saves left out"),
    Metric("step_time_p90_ms", "ms", "last 1000 steps", "nine steps of ten are no longer"),
    Metric("step_time_p99_ms", "ms", "last 1000 steps", "99 steps of 100 are no longer"),
    Metric(
        "straggler_score",
        "",
        "mean since the last line",
        "of each host and device, 1 as quick as the quickest: share of a step that would be left, were it so; of "
        "devices by their clocks, where those are known",
    ),
    Metric("clock_mhz", "MHz", "mean since the last line", "of a device's cores; null where nothing says"),
    Metric("power_w", "W", "mean since the last line", "of a device; null where nothing says"),
    Metric("joules_per_token", "J/token", "mean since the last line", "of all devices; null where nothing says"),
    Metric("host_rss_mib", "MiB", "this step", "resident in process 0, shared pages included; null where /proc is not"),
    Metric("compile_count", "programs", "so far", "train steps compiled by this attempt; 1 unless an argument changed"),
)
"""What every line of a train step holds, in this order."""

EVAL_METRICS = (
    Metric("step", "steps", "this step", "completed updates"),
    Metric("eval_loss_nats", "nats/token", "held-out batches", "cross entropy over all their valid targets"),
)
"""What a line of an evaluation holds."""


@dataclasses.dataclass(frozen=True)
class TrainLine:
    """One line of a train step: `TRAIN_METRICS` says what each field is."""

    step: int
    loss_nats: float
    grad_norm: float
    learning_rate: float
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
    """What a run reports.

    log_every_steps: train steps per line; the first and the last step always have one.
    tensorboard: also write event files.
    """

    log_every_steps: int = 10
    tensorboard: bool = True

    def __post_init__(self) -> None:
        if self.log_every_steps < 1:
            raise ValueError(f"metrics.log_every_steps={self.log_every_steps} must be at least 1.")

    def is_logged(self, step: int, num_steps: int) -> bool:
        """Whether `step` gets a line. The same for a resumed run as for an unbroken one."""
        return step in (1, num_steps) or step % self.log_every_steps == 0


@runtime_checkable
class Stream(Protocol):
    """What progress needs of sys.stdout; a notebook's and a test's have it, too."""

    def write(self, text: str, /) -> object:
        """Takes text."""
        ...

    def flush(self) -> object:
        """Shows it."""
        ...

    def isatty(self) -> bool:
        """Whether a person watches."""
        ...


class Metrics:
    """Writes a run's metrics; in processes other than 0 every method does nothing.

    A line is in the kernel's hands when the method returns: a SIGKILL later does not lose it.

    Args:
      workdir: gets metrics.jsonl and tensorboard/.
      num_steps: of the whole run.
      start_step: the step restored from, 0 for a new run. What earlier attempts logged after it is dropped, so that
        the file is one history.
      stream: where progress goes: a bar on a terminal, else a line per logged step.
    """

    def __init__(
        self, workdir: Path, spec: MetricsSpec, *, num_steps: int, start_step: int, stream: Stream | None = None
    ) -> None:
        import jax  # lazy: whoever only reads a spec or a file needs none

        self._file: int | None = None
        self._events: Any = None
        self._progress: _Progress | None = None
        if jax.process_index() != 0:
            return
        path = workdir / FILE
        drop_after(path, start_step)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if spec.tensorboard:
            from tensorboardX import SummaryWriter  # lazy: 0.4 s

            # purge_step: readers drop what earlier attempts wrote from that step on.
            # The suffix: names count whole seconds, and the same name would overwrite.
            self._events = SummaryWriter(
                str(workdir / EVENTS), purge_step=start_step + 1, filename_suffix=f".from{start_step}"
            )
        shown_on = sys.stdout if stream is None else stream
        self._progress = (_Bar if shown_on.isatty() else _Progress)(shown_on, num_steps, start_step)

    def train(self, line: TrainLine) -> None:
        """Writes the line of a train step."""
        self._write(dataclasses.asdict(line), "train")
        if self._progress is not None:
            self._progress.train(line)

    def evaluation(self, step: int, eval_loss_nats: float) -> None:
        """Writes the line of an evaluation after `step`."""
        self._write({"step": step, "eval_loss_nats": eval_loss_nats}, "eval")
        if self._progress is not None:
            self._progress.say(f"step {step}/{self._progress.num_steps}  eval loss {eval_loss_nats:.4f} nats")

    def goodput(self, step: int, seconds_by_category: dict[str, float]) -> None:
        """Shows in TensorBoard where the run's wall time went so far; goodput.json holds it."""
        if self._events is not None:
            for name, seconds in seconds_by_category.items():
                self._events.add_scalar(f"goodput/{name}_s", seconds, step)

    def say(self, text: str) -> None:
        """Prints a line of text, above the bar if there is one."""
        if self._progress is not None:
            self._progress.say(text)

    def close(self) -> None:
        """Ends the bar and closes the files."""
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
            for name, value in values.items():
                named = value if isinstance(value, dict) else {"": value}
                for part, number in named.items():
                    if name != "step" and isinstance(number, int | float):
                        self._events.add_scalar(f"{folder}/{name}/{part}".rstrip("/"), number, values["step"])
            self._events.flush()


def encode(values: dict[str, Any]) -> str:
    """One line of valid JSON.

    Floats by `repr`, so they come back to the bit; NaN and infinities, which JSON lacks, as null, with a `message` that
    says what they were.
    """
    lost = {name: value for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    if lost:
        message = ", ".join(f"{name} is {value}" for name, value in lost.items())
        values = values | dict.fromkeys(lost) | {"message": message}
    return json.dumps(values, allow_nan=False) + "\n"


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; without the last if a kill, or a full disk, cut it short."""
    complete, _, _ = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in complete.splitlines()]


def drop_after(path: Path, step: int) -> None:
    """Drops the lines of `path` after `step`, and a last line cut short. A kill leaves the old file or the new one."""
    if not path.exists():
        return
    before = path.read_bytes()
    kept = "".join(json.dumps(line) + "\n" for line in read(path) if line["step"] <= step).encode()
    if kept == before:
        return
    whole = path.with_name(path.name + ".new")
    with open(whole, "wb") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    whole.replace(path)


def _write_line(file: int, line: bytes) -> None:
    """Hands all of `line` to the kernel in one call, so that a kill leaves it whole or absent."""
    written = os.write(file, line)
    while written < len(line):  # a full disk takes a part; the next call says so
        written += os.write(file, line[written:])


class _Progress:
    """One plain line per logged step."""

    def __init__(self, stream: Stream, num_steps: int, start_step: int) -> None:
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
    """A progress bar, for a terminal."""

    def __init__(self, stream: Stream, num_steps: int, start_step: int) -> None:
        super().__init__(stream, num_steps, start_step)
        from rich.console import Console  # lazy: 0.1 s
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
        # rich's own estimate of the time left would count the compilation as a step.
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
    """Loss, speed and time left, as in `loss 2.1034 nats  12.3k tokens/s  MFU 41.2 %  ETA 1m 20s`."""
    mfu = "" if line.mfu is None else f"  MFU {line.mfu:.1%}"
    left_s = (num_steps - line.step) * line.step_time_ms / 1e3
    # The first step's time is mostly compilation: no estimate from it.
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
