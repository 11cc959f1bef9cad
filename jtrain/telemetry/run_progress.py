"""Progress of a run on its terminal: a bar, or one plain line per logged step."""

import math
from typing import IO, Protocol, cast, runtime_checkable

from jtrain.telemetry.metrics import TrainLine


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
        # The bar's constructor has it, and both are called alike.
        del start_step

    def train(self, line: TrainLine) -> None:
        self.say(f"step {line.step}/{self.num_steps}  {summary(line, self.num_steps)}")

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        pass


class RunProgressBar(PlainProgress):
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
    """Loss, speed and remaining time, as in `loss 2.1034 nats  12.3k tokens/s  MFU 41.2%  ETA 1m 20s`."""
    mfu = "" if line.mfu is None else f"  MFU {line.mfu:.1%}"
    remaining_s = (num_steps - line.step) * line.step_time_ms / 1e3
    # The first step's time is mostly compilation, so it gives no estimate.
    eta = "" if line.step in (1, num_steps) else f"  ETA {_duration(remaining_s)}"
    return f"loss {line.loss_nats:.4f} nats  {_count(line.tokens_per_s)} tokens/s{mfu}{eta}"


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
