"""Callbacks: objects that watch the training loop. The built-in ones measure it; a run adds its own by name.

A config lists user callbacks as `callbacks=("my_callbacks.py:StopAtLoss",)`: a class, or a function that
returns a callback; either is called without arguments. Order of events in one attempt:

    __enter__                       before anything compiles
      with during("restore", 0): the newest checkpoint is read, or the first state is made
    on_start(context)               the state is initialised or restored, steps follow
      with during("step", k):
        with during("dispatch", k): state, metrics = train_step(state, batch)
        on_results(step k - 1)      results are read one step late: the device never waits for the host
        on_step(step k)             step k is dispatched and the next batch has arrived
      with during("evaluation", k), during("checkpoint", k): at the steps where they are due
    on_rewind(step)                 after bad numbers the run has gone back to `step`; later steps repeat
    on_end()                        all steps are done and saved
    on_error(error)                 instead: an exception ends the run; metrics can still be written
    __exit__                        always, also after an error

A callback must not change the state. An exception that it raises ends the run.
"""

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from jtrain.config.run import Run
from jtrain.data import Fed
from jtrain.errors import UserError
from jtrain.plan.job import Job
from jtrain.runtime.user_code import load_function
from jtrain.telemetry.metrics_writer import Metrics

type LoopPhase = Literal[
    "restore", "step", "dispatch", "device_wait", "data_wait", "evaluation", "checkpoint", "profile"
]
"""Phase of the training loop. `device_wait` is a wait for devices, or through a collective for other
processes; `data_wait` is the wait for a batch; `profile` is the profiler's own work. `restore` comes before
the steps; all phases but it and `step` may be nested in `step`."""


@dataclasses.dataclass(frozen=True)
class RunContext:
    """Facts of one attempt that callbacks may use.

    job: the model in its layout on this machine; plans are made from it.
    start_step: step of the restored checkpoint; 0 for a new run.
    started_s: start of the attempt, in seconds since the epoch.
    source_names: names of the data's sources, in the order of its counts.
    train_step: the jitted step.
    metrics: writer of metrics.jsonl; `metrics.say(text)` prints a line.
    during: announces a phase to all callbacks: `with context.during("profile", step): ...`.
    """

    run: Run
    job: Job
    mesh: Mesh
    workdir: Path
    start_step: int
    started_s: float
    source_names: tuple[str, ...]
    train_step: Any
    metrics: Metrics
    during: Callable[..., contextlib.AbstractContextManager[None]]


@dataclasses.dataclass(frozen=True)
class DispatchedStep:
    """A step that the devices are computing, at the moment when the next batch arrives.

    metrics: device arrays, possibly not computed yet.
    data_wait_ms: time that the host waited for the next batch.
    data_arrived_s: time at which that batch arrived, by time.perf_counter().
    idle: True if the devices had finished the step before the batch arrived, and waited for data.
    requested: True if a callback of any process has `requested` set.
    """

    step: int
    metrics: Mapping[str, jax.Array]
    data_wait_ms: float
    data_arrived_s: float
    idle: bool
    requested: bool


@dataclasses.dataclass(frozen=True)
class StepResults:
    """Results of a finished step, on the host.

    values: `loss_nats`, `grad_norm`, `learning_rate`, `tokens`, `batch_hash`.
    hash_hex: the batch hash as hex.
    batch: batch that fed the step, with the data plane's counts.
    """

    step: int
    values: Mapping[str, Any]
    hash_hex: str
    batch: Fed


class Callback:
    """Base class of callbacks. Every method does nothing; override the ones you need."""

    @property
    def requested(self) -> bool:
        """True if this callback wants to act; `DispatchedStep.requested` tells all processes so."""
        return False

    def __enter__(self) -> "Callback":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        return None

    def on_start(self, context: RunContext) -> None:
        """Called once, after the state is initialised or restored and before the first step."""

    def during(
        self, phase: LoopPhase, step: int, arguments: tuple[Any, ...]
    ) -> contextlib.AbstractContextManager[None]:
        """Context around a phase; `arguments` are the train step's in `dispatch`, and empty in other
        phases.
        """
        return contextlib.nullcontext()

    def on_results(self, results: StepResults) -> None:
        """Called with the results of each step, in order."""

    def on_rewind(self, step: int) -> None:
        """Called when the run has gone back to the state after `step`: later steps follow once more."""

    def on_step(self, dispatched: DispatchedStep) -> None:
        """Called once per step, at the end of its `step` phase."""

    def on_end(self) -> None:
        """Called once, after the last step is done and saved."""

    def on_error(self, error: Exception) -> None:
        """Called if an exception ends the run after on_start, before the metrics are closed."""


class Callbacks:
    """Group of all callbacks of one attempt, called in order; contexts close in reverse order.

    with Callbacks([...]) as callbacks:
        with callbacks.running(context): ...
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> "Callbacks":
        with contextlib.ExitStack() as stack:
            # A callback that fails to enter closes those before it:
            # `pop_all` moves them here only if all came in.
            for callback in self._callbacks:
                stack.enter_context(callback)
            self._entered = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, error, trace)

    @contextlib.contextmanager
    def running(self, context: RunContext) -> Iterator[None]:
        """Context around all steps: calls on_start before them, and after them on_end, or on_error if one
        failed.
        """
        # Before the `try`: an error in on_start is the start's, not the run's.
        for callback in self._callbacks:
            callback.on_start(context)
        try:
            yield
        except Exception as error:
            for callback in self._callbacks:
                callback.on_error(error)
            raise
        # Not after an error: on_end means that everything is done and saved.
        for callback in self._callbacks:
            callback.on_end()

    @contextlib.contextmanager
    def during(self, phase: LoopPhase, step: int, *arguments: Any) -> Iterator[None]:
        """Context around a phase, in which all callbacks' contexts are open."""
        # Contexts close in reverse order, also if one of them raises.
        with contextlib.ExitStack() as stack:
            for callback in self._callbacks:
                stack.enter_context(callback.during(phase, step, arguments))
            yield

    @property
    def requested(self) -> bool:
        """True if a callback of this process has `requested` set."""
        return any(callback.requested for callback in self._callbacks)

    def on_results(self, results: StepResults) -> None:
        """Passes the results of a finished step to all callbacks."""
        for callback in self._callbacks:
            with _annotated(callback):
                callback.on_results(results)

    def on_rewind(self, step: int) -> None:
        """Tells all callbacks that the run has gone back to `step`."""
        for callback in self._callbacks:
            callback.on_rewind(step)

    def on_step(self, dispatched: DispatchedStep) -> None:
        """Tells all callbacks that a step is dispatched."""
        for callback in self._callbacks:
            with _annotated(callback):
                callback.on_step(dispatched)


def _annotated(callback: Callback) -> contextlib.AbstractContextManager[None]:
    """Names a callback in a trace: a profile says which one the devices waited for."""
    return jax.profiler.TraceAnnotation(f"jtrain:callback {type(callback).__name__}")


def load_callbacks(names: Sequence[str]) -> list[Callback]:
    """Creates the callbacks that a config lists as `module:name` or `path/to/file.py:name`.

    Raises:
      UserError: the file, module or name does not exist, or calling it does not return a Callback.
    """
    return [_load(name) for name in names]


def _load(name: str) -> Callback:
    make, _ = load_function("callbacks", name)
    made = make()
    if not isinstance(made, Callback):
        raise UserError(
            f"callbacks={name!r} makes a {type(made).__name__}, but must make a "
            "jtrain.train.callbacks.Callback."
        )
    return made
