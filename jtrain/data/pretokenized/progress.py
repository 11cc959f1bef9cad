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
        self._records_done = self._tokens = 0
        self._done_at_start = 0
        self._started_s = self._last_line_s = time.monotonic()

    def start(self) -> None:
        """Starts the clock; records counted so far are an earlier call's and do not count for the speed."""
        self._done_at_start = self._records_done
        self._started_s = self._last_line_s = time.monotonic()

    def advance(self, records: int, tokens: int) -> None:
        """Adds to the records and tokens done; negative numbers take them back."""
        self._records_done += records
        self._tokens += tokens
        self._show()

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        pass

    def _show(self) -> None:
        if time.monotonic() - self._last_line_s >= LINE_S:
            self._last_line_s = time.monotonic()
            self.say(f"{self._records_done:,} of {self._records:,} records  {self._speed()}")

    def _speed(self) -> str:
        # Never 0: the first call may come at once.
        elapsed_s = max(1e-3, time.monotonic() - self._started_s)
        records_done = self._records_done - self._done_at_start
        # No speed yet, or a dead worker's records were taken back.
        if records_done <= 0:
            return ""
        remaining_s = round((self._records - self._records_done) / (records_done / elapsed_s))
        remaining = f"{remaining_s // 3600}h {remaining_s // 60 % 60:02}m left"
        return f"{self._tokens / elapsed_s / 1e6:.2f} M tokens/s  {remaining}"


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
        self._bar.update(self._task, completed=self._records_done, description=self._speed())
