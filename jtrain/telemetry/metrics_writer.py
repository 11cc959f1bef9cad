"""Writer of a run's metrics: metrics.jsonl, TensorBoard, data.log, terminal; no failed write ends a run."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jtrain.runtime.secrets import without_secrets
from jtrain.telemetry.alerts import AlertKind, Alerts, AlertsSpec
from jtrain.telemetry.append_file import AppendFile, damaged_text
from jtrain.telemetry.event_file import EventFile
from jtrain.telemetry.metrics import (
    EVENTS,
    FILE,
    NOTES,
    EvalLine,
    EvalResult,
    MetricsSpec,
    TrainLine,
    drop_after,
    encode,
)
from jtrain.telemetry.run_progress import ContinuedText, PlainProgress, ProgressStream, RunProgressBar


class Metrics:
    """Writes a run's metrics; in processes other than 0 every method does nothing.

    Each line is written to the operating system before the method returns, so that a later SIGKILL does not
    lose it. No method raises OSError: a full disk or a closed terminal costs lines, which is said
    (`AppendFile`), not the run.

    Args:
      workdir: folder for metrics.jsonl, data.log and tensorboard/.
      num_steps: number of steps of the whole run.
      start_step: the restored step, 0 for a new run. Later lines of earlier attempts are dropped, so that the
        file is one history; lines that cannot be read are moved to metrics.jsonl.damaged.
      stream: stream for progress: a bar on a terminal, else a line per logged step.
      alerts: who gets alerts; None for nobody.

    Attributes:
      last: the newest line of a train step; None before the first, and in processes other than 0.
    """

    def __init__(
        self,
        workdir: Path,
        spec: MetricsSpec,
        *,
        num_steps: int,
        start_step: int,
        stream: ProgressStream | None = None,
        alerts: AlertsSpec | None = None,
    ) -> None:
        import jax  # lazy: reading a spec or a file does not need it

        self.last: TrainLine | None = None
        self._lines: AppendFile | None = None
        self._notes: AppendFile | None = None
        self._events: EventFile | None = None
        self._progress: PlainProgress | None = None
        self._alerts: Alerts | None = None
        # Files and progress are process 0's; the others compute the same values.
        if jax.process_index() != 0:
            return
        self._workdir, self._tensorboard = workdir, spec.tensorboard
        progress_stream = sys.stdout if stream is None else stream
        # A bar redraws its line; in a file or a pipe that would be thousands of lines.
        self._progress = (RunProgressBar if progress_stream.isatty() else PlainProgress)(
            progress_stream, num_steps, start_step
        )
        self._open(start_step)
        # 0600: it names files of the data, and an address may hold a secret that nothing marks as one.
        self._notes = AppendFile(workdir / NOTES, say=self.say, mode=0o600)
        self._alerts = Alerts(alerts, workdir, say=self.say) if alerts is not None else None

    def _open(self, start_step: int) -> None:
        """Opens the files that hold a history of steps, without what is after `start_step`."""
        num_bad = drop_after(self._workdir / FILE, start_step)
        if num_bad:
            self.say(damaged_text(self._workdir / FILE, num_bad))
        self._reopen(start_step)

    def _reopen(self, start_step: int) -> None:
        self._lines = AppendFile(self._workdir / FILE, say=self.say)
        if self._tensorboard:
            self._events = EventFile(self._workdir / EVENTS, start_step=start_step, say=self.say)

    def rewind(self, step: int) -> None:
        """Drops the lines after `step`: the run has gone back, and writes them once more."""
        if self._lines is None:
            return
        # Closed before lines are dropped, which replaces the file under its name.
        for file in (self._lines, self._events):
            if file is not None:
                file.close()
        try:
            self._open(step)
        except OSError as error:
            self.say(
                f"warning: {self._workdir / FILE} keeps lines after step {step}, which come again: {error}"
            )
            self._reopen(step)

    def train(self, line: TrainLine) -> None:
        """Writes the line of a train step."""
        self._write(dataclasses.asdict(line), "train")
        if self._progress is not None:
            self.last = line
            with _broken_stream_allowed():
                self._progress.train(line)

    def evaluation(
        self,
        step: int,
        split: EvalResult | None,
        sets: dict[str, EvalResult],
        exact: dict[str, float] | None = None,
    ) -> None:
        """Writes the line of an evaluation after `step`: results on the split, if any, and `eval.sets`.

        Args:
          exact: share of exact answers to held-out samples, by set; None if the model gives none.
        """
        line = EvalLine(step, split, sets, exact or {}).to_dict()
        self._write(line, "eval")
        if self._progress is not None:
            named_results = [] if split is None else [("eval", split)]
            for name, result in [
                *named_results,
                *((f"eval {name}", result) for name, result in sets.items()),
            ]:
                with _broken_stream_allowed():
                    self._progress.evaluation(step, name, result.summary())
            for name, share in (exact or {}).items():
                self.say(f"step {step}/{self._progress.num_steps}  answers of {name}: {share:.1%} exact")

    def own(self, step: int, values: dict[str, float]) -> None:
        """Writes a line of a callback's own numbers after `step`, each as `own_NAME`."""
        self._write({"step": step} | {f"own_{name}": value for name, value in values.items()}, "own")

    def goodput(self, step: int, seconds_by_category: dict[str, float]) -> None:
        """Writes the run's wall time so far by goodput category to TensorBoard; goodput.json has it too."""
        if self._events is not None:
            self._events.add(
                step, ((f"goodput/{name}_s", seconds) for name, seconds in seconds_by_category.items())
            )

    def say(self, text: str) -> None:
        """Prints a line of text, above the bar if there is one."""
        if self._progress is not None:
            with _broken_stream_allowed():
                self._progress.say(text)

    def end(
        self, home: Path, next_commands: Sequence[str], sample: Callable[[], ContinuedText | str | None]
    ) -> None:
        """Says what the run left in `home`, and which commands a user would type next; on a terminal shows
        what `sample` returns as well.
        """
        if self._progress is not None:
            # A stream may be broken, and so may the disk that keeps the lines.
            with _broken_stream_allowed():
                self._progress.end(self._workdir, home, next_commands, sample)

    def note(self, step: int, text: str) -> None:
        """Prints a data plane's message and appends it to data.log, without secrets in addresses."""
        # A source's error may quote its address with a signature or a password.
        text = without_secrets(text)
        self.say(text)
        if self._notes is not None:
            self._notes.append(f"step {step}: {text}\n".encode())

    def alert(self, kind: AlertKind, step: int, message: str, **values: Any) -> None:
        """Sends an alert (`Alerts.send`) to those that the config names; any thread may."""
        alerts = self._alerts  # another thread may close it
        if alerts is not None:
            alerts.send(kind, step, message, **values)

    def close(self) -> None:
        """Closes the files and ends the progress bar."""
        # Alerts first: closing them may still print a line, which needs the progress.
        for file in (self._alerts, self._lines, self._notes, self._events):
            if file is not None:
                file.close()
        if self._progress is not None:
            with _broken_stream_allowed():
                self._progress.close()
        self._alerts = self._lines = self._notes = self._events = self._progress = None

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, values: dict[str, Any], tag: str) -> None:
        """Appends a line to metrics.jsonl and its numbers to TensorBoard: `loss_nats` as `train/loss_nats`.

        Args:
          values: the line, with its `step`.
          tag: first part of the names in TensorBoard, `train` or `eval`.
        """
        if self._lines is not None:
            self._lines.append(encode(values).encode())
        if self._events is not None:
            # The step is the event's own field.
            numbers = {name: value for name, value in values.items() if name != "step"}
            self._events.add(values["step"], _numbers(numbers, tag))


def _broken_stream_allowed() -> contextlib.AbstractContextManager[None]:
    """Context in which a stream may be broken: reader gone, terminal closed, disk full."""
    return contextlib.suppress(OSError)


def _numbers(value: Any, tag: str) -> Iterator[tuple[str, float]]:
    """Yields every number in nested dicts, tagged by the path of its keys."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _numbers(part, f"{tag}/{name}")
    elif isinstance(value, int | float):
        yield tag, value
