"""Progress of a run on its terminal: a table above a bar, or one plain line per logged step."""

import itertools
import math
import statistics
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple, Protocol, cast, runtime_checkable

from jtrain.telemetry.metrics import FILE, TrainLine, read

WIDE = 120
"""Columns of a terminal from which a step has more figures."""

SAMPLE_LINES = 6
"""Lines of a sampled text that a terminal shows."""


class ContinuedText(NamedTuple):
    """Text that a trained model continued.

    seconds: what sampling it took, compilation included.
    """

    prompt: str
    text: str
    seconds: float


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


class PlainProgress:
    """Progress as one plain line per logged step."""

    def __init__(self, stream: ProgressStream, num_steps: int, start_step: int) -> None:
        self.num_steps = num_steps
        self._stream = stream
        self._has_line = False
        # The bar's constructor has it, and both are called alike.
        del start_step

    def train(self, line: TrainLine) -> None:
        text = summary(line, self.num_steps, is_first=not self._has_line)
        self._has_line = True
        self.say(f"step {line.step}/{self.num_steps}  {text}")

    def evaluation(self, step: int, name: str, text: str) -> None:
        self.say(f"step {step}/{self.num_steps}  {name} {text}")

    def end(
        self,
        workdir: Path,
        home: Path,
        next_commands: Sequence[str],
        sample: Callable[[], ContinuedText | str | None],
    ) -> None:
        """Says what a run left, and what a user would do next.

        Args:
          workdir: folder on this machine that has the run's files.
          home: the folder that the user named; `workdir`, or one in an object store.
          sample: samples a text from the trained model, for a user who watches; or says why there is none,
            or is silent about it.
        """
        del workdir, home, sample
        self.say(f"next: {next_commands[0]}")

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        pass


class RunProgressBar(PlainProgress):
    """Table of the logged steps on a terminal, above a bar that moves while a step compiles."""

    def __init__(self, stream: ProgressStream, num_steps: int, start_step: int) -> None:
        super().__init__(stream, num_steps, start_step)
        from rich.console import Console  # lazy: 0.1 s
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        console = Console(file=cast(IO[str], stream))
        # The default spinner is of braille, which only Unicode encodings have; rich itself replaces the bar
        # alone.
        spinner = SpinnerColumn("dots" if _is_unicode(console.encoding) else "line")
        count, bar = (spinner, TextColumn("step"), MofNCompleteColumn()), BarColumn()
        # Two pictures a second, by a thread: it shows that a long compilation is alive, and costs no step
        # anything.
        self._bar = Progress(
            *(*count, bar, TextColumn("{task.description}"), TimeElapsedColumn()),
            console=console,
            refresh_per_second=2,
            transient=True,
        )
        self._console = console
        self._step_width = max(7, 2 * len(str(num_steps)) + 1)
        self._best_tokens_per_s = 0.0
        self._column_names: list[str] = []
        self._task = self._bar.add_task("compiling", total=num_steps, completed=start_step)
        self._bar.start()

    def train(self, line: TrainLine) -> None:
        cells = self._cells(line)
        self._has_line = True
        names = [f"{name:>{width}}" for name, _, width in cells]
        # Again where a column changes its meaning: the first trace window measures the machine's peak.
        if names != self._column_names:
            self._column_names = names
            self._print(f"{'step':>{self._step_width}} {' '.join(names)}", "dim")
        step = f"{line.step}/{self.num_steps}"
        texts = " ".join(f"{text:>{width}}" for _, text, width in cells)
        self._print(f"{step:>{self._step_width}} {texts}")
        self._bar.update(self._task, completed=line.step, description="training")

    def _cells(self, line: TrainLine) -> list[tuple[str, str, int]]:
        """Name, text and width of each column after the step; wide terminals have more of them."""
        left_s = (self.num_steps - line.step) * line.step_time_ms / 1e3
        # The speed of an attempt's first line is mostly that of the compiler.
        if self._has_line:
            self._best_tokens_per_s = max(self._best_tokens_per_s, line.tokens_per_s)
        name, share = self._share(line)
        host_gib = None if line.host_rss_mib is None else line.host_rss_mib / 1024
        gib = host_gib if line.device_memory_peak_gib is None else line.device_memory_peak_gib
        cells = [
            ("loss", f"{line.loss_nats:.4f}", 9),
            ("gradient", f"{line.grad_norm:.4g}", 9),
            ("rate", f"{line.learning_rate:.2e}", 9),
            ("tokens/s", _count(line.tokens_per_s), 9),
            (name, "-" if share is None else f"{share:.1%}", 8),
            ("memory", "-" if gib is None else f"{gib:.1f} GiB", 10),
            ("left", _duration(left_s) if self._has_line else "-", 8),
        ]
        if self._console.width >= WIDE:
            cells[4:4] = [
                ("step", f"{line.step_time_ms:.1f} ms", 11),
                ("data wait", f"{line.data_wait_ms:.1f} ms", 10),
            ]
            cells.insert(-1, ("clock", "-" if line.clock_mhz is None else f"{line.clock_mhz:.0f} MHz", 10))
        return cells

    def _share(self, line: TrainLine) -> tuple[str, float | None]:
        """Share of the published peak, else of the measured one, else of the best speed of this run; None
        before there is one.
        """
        if line.mfu is not None:
            return "MFU", line.mfu
        if line.measured_peak_share is not None:
            return "of peak", line.measured_peak_share
        best = self._best_tokens_per_s
        # 0 where no line had targets.
        return "of best", line.tokens_per_s / best if best else None

    def evaluation(self, step: int, name: str, text: str) -> None:
        # Its own step: rows of train steps come at other steps than evaluations do.
        step_text = f"{step}/{self.num_steps}"
        loss, _, tail = text.removeprefix("loss ").partition(" ")
        self._print(f"{step_text:>{self._step_width}} {loss:>9} {tail}  {name}", "cyan")

    def end(
        self,
        workdir: Path,
        home: Path,
        next_commands: Sequence[str],
        sample: Callable[[], ContinuedText | str | None],
    ) -> None:
        losses = [line["loss_nats"] for line in read(workdir / FILE) if line.get("loss_nats") is not None]
        if len(losses) > 1 and _is_unicode(self._console.encoding):
            self._print(f"loss {losses[0]:.4f} {sparkline(losses)} {losses[-1]:.4f}")
        self._bar.update(self._task, description="sampling a text")
        self._print_sample(sample())
        # Not those of `home`: clients of stores raise errors of their own, and the run is complete.
        self._print(f"in {home}: {', '.join(sorted(path.name for path in workdir.glob('[!.]*')))}")
        for command in next_commands:
            self._print(f"next: {command}", "bold")

    def _print_sample(self, sample: ContinuedText | str | None) -> None:
        """Prints the first lines of a sampled text, within the terminal's width."""
        if not isinstance(sample, ContinuedText):
            if sample is not None:
                self._print(sample)
            return
        self._print(f"a text by the model, in {sample.seconds:.1f} s:")
        rows: list[str] = []
        for line in f"{sample.prompt}{sample.text}".splitlines():
            # A model may write control characters, which a terminal would obey.
            visible = "".join(c if c.isprintable() else "?" for c in line.expandtabs(4))
            visible = visible.encode(self._console.encoding, "replace").decode(self._console.encoding)
            rows += textwrap.wrap(visible, self._console.width - 3, drop_whitespace=False) or [""]
        for row in rows[:SAMPLE_LINES]:
            self._print(f"  {row}".rstrip(), "green")

    def say(self, text: str) -> None:
        self._print(text, "yellow" if text.lower().startswith("warning") else "")

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Means of up to `width` parts of the finite values, as blocks of eight heights."""
    finite = [value for value in values if math.isfinite(value)]
    parts = min(width, len(finite))
    bounds = [len(finite) * part // parts for part in range(parts + 1)] if parts else []
    means = [statistics.fmean(finite[start:end]) for start, end in itertools.pairwise(bounds)]
    low, span = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (mean - low) / (span or 1.0))] for mean in means)


def summary(line: TrainLine, num_steps: int, *, is_first: bool) -> str:
    """Loss, speed and remaining time, as in `loss 2.1034 nats  12.3k tokens/s  MFU 41.2%  ETA 1m 20s`.

    Args:
      is_first: True for the first line of an attempt.
    """
    share = line.measured_peak_share
    of_peak = "" if share is None else f"  {share:.1%} of the measured peak"
    mfu = of_peak if line.mfu is None else f"  MFU {line.mfu:.1%}"
    remaining_s = (num_steps - line.step) * line.step_time_ms / 1e3
    # The time of an attempt's first line is mostly compilation, so it gives no estimate.
    eta = "" if is_first or line.step == num_steps else f"  ETA {_duration(remaining_s)}"
    return f"loss {line.loss_nats:.4f} nats  {_count(line.tokens_per_s)} tokens/s{mfu}{eta}"


def _is_unicode(encoding: str) -> bool:
    return encoding.lower().startswith("utf")


def _count(number: float) -> str:
    for power, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= power:
            return f"{number / power:.1f}{letter}"
    return f"{number:.1f}"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "unknown"
    minutes, remaining_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = ((days, "d"), (hours, "h"), (minutes, "m"), (remaining_seconds, "s"))
    words = [f"{value}{letter}" for value, letter in parts if value]
    # Two units are precise enough: 3d 4h.
    return " ".join(words[:2]) or "0s"
