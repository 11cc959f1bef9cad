"""Progress of a build: a bar on a terminal, plain lines elsewhere."""

import time
from typing import IO, Protocol, cast, runtime_checkable

LINE_S = 10.0
"""Time between two lines."""


@runtime_checkable
class ProgressOutput(Protocol):
    """Text stream that progress is written to, such as sys.stderr."""

    def write(self, text: str, /) -> int: ...
    def flush(self) -> None: ...
    def isatty(self) -> bool: ...


class Progress:
    """Progress as plain lines, one every 10 s."""

    def __init__(self, stream: ProgressOutput, records: int) -> None:
        self._stream = stream
        self._records = records
        self._done = self._tokens = 0
        self._there = 0
        self._started_s = self._said_s = time.monotonic()

    def start(self) -> None:
        """Starts the clock; records counted so far were done by an earlier call and do not count for the
        speed.
        """
        self._there = self._done
        self._started_s = self._said_s = time.monotonic()

    def advance(self, records: int, tokens: int) -> None:
        """Adds to the records and tokens done; negative numbers take them back."""
        self._done += records
        self._tokens += tokens
        self._show()

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        pass

    def _show(self) -> None:
        if time.monotonic() - self._said_s >= LINE_S:
            self._said_s = time.monotonic()
            self.say(f"{self._done:,} of {self._records:,} records  {self._speed()}")

    def _speed(self) -> str:
        took_s = max(1e-3, time.monotonic() - self._started_s)
        done = self._done - self._there
        if done <= 0:
            return ""
        left_s = round((self._records - self._done) / (done / took_s))
        return f"{self._tokens / took_s / 1e6:.2f} M tokens/s  {left_s // 3600}h {left_s // 60 % 60:02}m left"


class ProgressBar(Progress):
    """Progress bar for a terminal."""

    def __init__(self, stream: ProgressOutput, records: int) -> None:
        super().__init__(stream, records)
        from rich.console import Console  # lazy: 0.1 s
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (TextColumn("records"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=Console(file=cast(IO[str], stream)))
        self._task = self._bar.add_task("", total=records)
        self._bar.start()

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()

    def _show(self) -> None:
        self._bar.update(self._task, completed=self._done, description=self._speed())
