"""Callback that writes all events of a run to events.json in the working directory."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any, Self

from jtrain.train.callbacks import Callback, DispatchedStep, RunContext, StepResults


class Recorder(Callback):
    """Records the events of a run; ends it at the results of step `stop_at`."""

    stop_at = -1

    def __enter__(self) -> Self:
        self.events: list[list[object]] = [["enter", 0]]
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.events.append(["exit", 0 if kind is None else 1])
        with open("events.json", "w") as file:
            json.dump(self.events, file)

    def on_start(self, context: RunContext) -> None:
        self.events.append(["start", context.start_step])

    @contextlib.contextmanager
    def during(self, phase: str, step: int, arguments: Any) -> Iterator[None]:
        if phase != "device_wait":
            self.events.append([phase, step])
        yield

    def on_results(self, results: StepResults) -> None:
        self.events.append(["results", results.step, float(results.values["loss_nats"])])
        if results.step == self.stop_at:
            raise RuntimeError("seen enough")

    def on_step(self, dispatched: DispatchedStep) -> None:
        self.events.append(["dispatched", dispatched.step])

    def on_end(self) -> None:
        self.events.append(["end", 0])


class StopsAt2(Recorder):
    """Ends the run by an error at the results of step 2."""

    stop_at = 2
