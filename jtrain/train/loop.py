"""Training loop: runs the steps, saves and evaluates; callbacks watch it.

Invariants:
- Step n is dispatched before the metrics of step n - 1 are read, so the device never waits for the host.
- The data state saved with a step resumes with the batch after that step.
- A state is saved only if its loss and gradient norm are good and all of it is finite (`bad_steps.py`).
- All processes save, stop and evaluate at the same steps.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jtrain.checkpoint import Checkpoints
from jtrain.checkpoint.local_memory import LocalMemory
from jtrain.data import Fed, Prefetch, share_batch
from jtrain.data.inspect.step_contents import documents_of_batch
from jtrain.errors import UserError
from jtrain.runtime.multihost import agree, same_everywhere
from jtrain.runtime.run_files import add_to_run_json
from jtrain.runtime.signals import StopRequest
from jtrain.step.guard import StepNumbers
from jtrain.step.state import TrainState
from jtrain.train.actions import Cadence
from jtrain.train.bad_steps.bad_steps import BadSteps, WentBack
from jtrain.train.bad_steps.noise_floor import measure, run_without_update
from jtrain.train.callbacks import (
    Callbacks,
    DispatchedStep,
    LoopPhase,
    RunContext,
    StepResults,
)
from jtrain.train.evaluation import Evaluation
from jtrain.train.integrity import IntegrityCheck
from jtrain.train.restart_point import RestartPoint
from jtrain.train.weight_stream import WeightStream


def _phase[**P, R](phase: LoopPhase) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator for methods of Loop: announces the call to the callbacks as a phase of the current step."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def announced(*args: P.args, **kwargs: P.kwargs) -> R:
            loop: Any = args[0]
            with loop.callbacks.during(phase, loop.step):
                return method(*args, **kwargs)

        return announced

    return decorate


@dataclasses.dataclass(frozen=True)
class Attempt:
    """Parts of one attempt of a run. Nothing here changes which parts there are once the loop runs.

    config_text: the flat config, kept in every checkpoint.
    open_batches: opens the batches from a data state (None for the start of the data) and the step that it
      follows.
    local: copies of the state in the hosts' memory; None if the run keeps none.
    weights: readers of the weights; None if there are none.
    """

    context: RunContext
    config_text: str
    open_batches: Callable[[dict[str, Any] | None, int], Prefetch]
    evaluation: Evaluation
    callbacks: Callbacks
    integrity: IntegrityCheck
    bad_steps: BadSteps
    restart: RestartPoint
    checkpoints: Checkpoints
    local: LocalMemory | None
    weights: WeightStream | None


@dataclasses.dataclass(frozen=True)
class UnreadStep:
    """Step that the devices are computing or have computed, and whose results the host has not read.

    data_before: returns the data state from which `batch` follows.
    """

    step: int
    metrics: Any
    batch: Fed
    data_before: Callable[[], dict[str, Any] | None]


class Loop:
    """Runs the steps of one attempt.

    step: number of the current step: completed updates, and during a step the update being computed.
    data_ended: True if the data has no batch for the next step.
    """

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.callbacks = attempt.callbacks
        self.step = attempt.context.start_step
        self.data_ended = False
        self._cadence = Cadence.of(attempt.context.run)
        self._unread: UnreadStep | None = None
        # Metrics of the first pass over this attempt's first step, until the second is read.
        self._first_pass: Any = None
        self._has_run_twice = False
        self._data_before: Callable[[], dict[str, Any] | None] = lambda: None

    def run(self, state: TrainState, data_state: dict[str, Any] | None, stop: StopRequest) -> int:
        """Runs steps as `run_steps` does; where bad numbers ask for it, goes back and runs them again."""
        while True:
            # A function, as `Fed.state` is at later steps: the
            # data state is computed only where it is needed.
            self._data_before = functools.partial(_unchanged, data_state)
            with self.attempt.open_batches(data_state, self.step) as batches:
                try:
                    return self.run_steps(self._with_decisions(state), batches, stop)
                except WentBack:
                    pass
            del state  # the devices have no room for two states
            state, data_state = self._go_back()
            self.attempt.context.metrics.rewind(self.step)
            self.callbacks.on_rewind(self.step)

    def run_steps(self, state: TrainState, batches: Prefetch, stop: StopRequest) -> int:
        """Runs steps until the run is complete, the data ends or a stop is requested, then saves; returns the
        step.

        The loop takes each batch one step ahead, so it knows which one is the last. All processes plan the
        same batches and reach the end together.
        """
        num_steps, bad_steps = self._cadence.num_steps, self.attempt.bad_steps
        checkpoints = self.attempt.checkpoints
        # `since` changes when a replay ends: then the state is given the new decisions.
        saved_step, is_save_due, decided_since = self.step, False, bad_steps.since
        is_send_due = has_last_weights = False
        next_batch = self._next(batches)
        if self._cadence.evaluate_first and self.step == 0:
            self._evaluate(state)
        # The data may be at its end before the first step: then nothing is saved, and the run is complete.
        self.data_ended = next_batch is None and self.step < num_steps
        while self.step < num_steps and next_batch is not None:
            batch = next_batch
            self.step += 1
            state, next_batch, stop_requested = self._run_step(state, batch, batches, stop)
            actions = self._cadence.decide(
                self.step,
                # A save that could not be made at its own step is still owed at the next good one.
                is_save_due=is_save_due or checkpoints.should_save(self.step),
                stop_requested=stop_requested,
                data_ended=self.data_ended,
                is_send_due=is_send_due,
            )
            # Before the state is saved or evaluated: bad results raise `WentBack`, or put the state in doubt.
            if actions.read_results:
                self._report()
            if decided_since != bad_steps.since:
                state, decided_since = self._with_decisions(state), bad_steps.since
            is_in_doubt = bad_steps.in_doubt(self.step)
            if actions.evaluate:
                self._evaluate(state)
            # No copy while numbers are suspicious: there are two generations, and it replaces the older one.
            if actions.copy and not checkpoints.hold and not is_in_doubt:
                self._copy(state, batch)
            # A save that is due waits for a step with good numbers, and so does a stop.
            is_save_due = actions.save and is_in_doubt
            if actions.save and not is_in_doubt:
                self._save(state, batch, is_last=actions.is_last)
                saved_step = self.step
            # After the save, which waits for no reader; and of no weights that the run may take back.
            is_send_due = actions.send and is_in_doubt
            has_last_weights = actions.send and actions.is_last
            if actions.send and not is_in_doubt and not actions.is_last:
                self._send(state, is_last=False)
            # After the step's own save: a save in flight may have failed, and its next try is decided here.
            checkpoints.check(self.step)
            if stop_requested and saved_step == self.step:
                self.data_ended = False
                break
        # Every way out of the loop has saved the state that it leaves.
        assert saved_step == self.step, (saved_step, self.step)
        self._wait_for_saves()
        # Only now: readers may take a minute, and whoever asked for a stop gives less for the save.
        if has_last_weights:
            self._send(state, is_last=True)
        elif self.attempt.weights is not None:
            self.attempt.weights.leave()
        return self.step

    @_phase("step")
    def _run_step(
        self, state: TrainState, fed: Fed, batches: Prefetch, stop: StopRequest
    ) -> tuple[TrainState, Fed | None, bool]:
        """Dispatches a step; returns the new state, the next batch, and True if a stop was requested in any
        process.
        """
        batch = share_batch(fed.batch, self.attempt.context.mesh)
        context = self.attempt.context
        train_step = context.train_step
        with self.callbacks.during("dispatch", self.step, state, batch):
            if not self._has_run_twice:
                self._has_run_twice = True
                state, self._first_pass = run_without_update(train_step, state, batch, context.mesh)
            state, metrics = train_step(state, batch)
        # While the devices compute this step, the host prepares a
        # save and reads the results of the previous step.
        self.attempt.checkpoints.prepare()
        self._report()
        for message in fed.messages:
            self._note(self.step - 1, message)
        self._unread = UnreadStep(self.step, metrics, fed, self._data_before)
        # The data state after this batch: the batch of the next step follows from it.
        self._data_before = fed.state
        has_next = self.step < self._cadence.num_steps
        next_batch = self._next(batches) if has_next else None
        # Taken after the batch arrived, so the wait counts to this step.
        arrived_s = time.perf_counter()
        wait_ms = 0.0 if next_batch is None else next_batch.wait_ms
        # A wait of at least 1 ms while the devices were already
        # done: only then was the device idle for lack of data.
        is_idle = wait_ms >= 1.0 and metrics["loss_nats"].is_ready()
        self.data_ended = has_next and next_batch is None
        # Last, because with several processes it waits for the step.
        stop_requested, callback_requested = self._agree(stop.requested)
        self.callbacks.on_step(
            DispatchedStep(self.step, metrics, wait_ms, arrived_s, is_idle, callback_requested)
        )
        return state, next_batch, stop_requested

    @_phase("data_wait")
    def _next(self, batches: Prefetch) -> Fed | None:
        """Returns the next batch, None after the last; before an error propagates, logs the data plane's
        messages.
        """
        try:
            # The name under which traces show the wait.
            with jax.profiler.TraceAnnotation("jtrain:data_wait"):
                return next(batches, None)
        except Exception:
            for message in batches.messages:
                self._note(self.step, message)
            raise

    @_phase("device_wait")
    def _agree(self, stop_requested: bool) -> tuple[bool, ...]:
        """Returns two flags that are equal in all processes: a stop is requested; a callback has `requested`
        set.

        With several processes the call waits for the step. That costs milliseconds, but all processes then
        stop at once: schedulers kill a job soon after their warning.
        """
        return agree(stop_requested, self.callbacks.requested)

    def _report(self) -> None:
        """Reads the results of the last dispatched step, checks them and passes them to the callbacks."""
        if self._unread is None:
            return
        unread, self._unread = self._unread, None
        step, values = unread.step, self._read(unread.metrics)
        # 32-bit words in hex.
        hash_hex = "".join(f"{word:08x}" for word in np.asarray(values["batch_hash"]).tolist())
        noise_line = None if self._first_pass is None else self._measure_noise(step, values, hash_hex)
        self.attempt.integrity.check(step, values)
        is_complete = self.step == self._cadence.num_steps or self.data_ended
        self.attempt.bad_steps.check(
            StepNumbers.of(step, values, hash_hex),
            dispatched=self.step,
            last=step == self.step and is_complete,
            # Of the step before, since a step's batch is planned from its data state.
            documents=lambda: documents_of_batch(
                self.attempt.restart.setup.dataset, unread.data_before(), step=step - 1
            ),
        )
        # After the checks, which may raise: then no callback sees the step.
        self.callbacks.on_results(StepResults(step, values, hash_hex, unread.batch))
        # Behind the line of the step that it is about.
        if noise_line is not None:
            self.attempt.context.metrics.say(noise_line)

    def _measure_noise(self, step: int, values: Any, hash_hex: str) -> str:
        """Compares both passes over the first step: replays and recomputations then know what is noise.

        Returns:
          What the comparison says, for the log.
        """
        first_values, self._first_pass = self._read(self._first_pass), None
        context, noise = self.attempt.context, measure(first_values, values)
        numbers = StepNumbers.of(step, values, hash_hex)
        self.attempt.bad_steps.begin(StepNumbers.of(step, first_values, hash_hex), numbers, noise)
        self.attempt.integrity.noise = noise
        if jax.process_index() == 0:
            add_to_run_json(context.workdir, "first_step_twice", {"step": step} | dataclasses.asdict(noise))
        return noise.line(step, platform=context.mesh.devices.flat[0].platform)

    def _with_decisions(self, state: TrainState) -> TrainState:
        bad_steps = self.attempt.bad_steps
        return self.attempt.restart.with_decisions(state, bad_steps.left_out, bad_steps.since)

    @_phase("checkpoint")
    def _go_back(self) -> tuple[TrainState, dict[str, Any] | None]:
        """Restores the state from which `bad_steps` has the steps run again."""
        # The unread results belong to a step that is taken back.
        self._unread, self.data_ended, self.step = None, False, self.attempt.bad_steps.origin
        if self.attempt.local is not None:
            # Copies of later steps would be newer than the run itself.
            self.attempt.local.forget_after(self.step)
        return self.attempt.restart.state_at(self.step)

    @_phase("device_wait")
    def _read(self, metrics: Any) -> Any:
        return jax.device_get(metrics)

    @_phase("evaluation")
    def _evaluate(self, state: TrainState) -> None:
        """Logs the losses on held-out text."""
        with jax.profiler.TraceAnnotation("jtrain:evaluate"):
            split, sets = self.attempt.evaluation(state.params)
            exact = self.attempt.evaluation.answer(state.params, self.attempt.context.workdir, self.step)
        self.attempt.context.metrics.evaluation(self.step, split, sets, exact)

    @_phase("checkpoint")
    def _send(self, state: TrainState, *, is_last: bool) -> None:
        """Sends the weights to readers."""
        assert self.attempt.weights is not None
        with jax.profiler.TraceAnnotation("jtrain:send_weights"):
            self.attempt.weights.send(self.step, state.params, is_last=is_last)

    @_phase("checkpoint")
    def _save(self, state: TrainState, fed: Fed, *, is_last: bool) -> None:
        """Saves the state, with the data state that resumes at the next batch.

        Raises:
          UserError: the processes plan different batches: one skipped documents that others could read, or
            their files differ.
        """
        attempt, data_state = self.attempt, _agreed_data_state(fed)
        with jax.profiler.TraceAnnotation("jtrain:checkpoint"):
            state = attempt.restart.saved_part(state)
            attempt.checkpoints.save(self.step, state, data_state, attempt.config_text, last=is_last)

    @_phase("checkpoint")
    def _copy(self, state: TrainState, fed: Fed) -> None:
        """Copies the state to local memory; raises UserError as `_save` does."""
        assert self.attempt.local is not None
        with jax.profiler.TraceAnnotation("jtrain:checkpoint"):
            state = self.attempt.restart.saved_part(state)
            self.attempt.local.save(self.step, state, _agreed_data_state(fed))

    @_phase("checkpoint")
    def _wait_for_saves(self) -> None:
        self.attempt.checkpoints.wait()

    def _note(self, step: int, message: str) -> None:
        """Prints a message of the data plane and appends it to data.log."""
        self.attempt.context.metrics.note(step, message)


def _agreed_data_state(fed: Fed) -> dict[str, Any]:
    """Returns the data state after a batch; raises UserError if the processes have different ones."""
    data_state = fed.state()
    # Compared as text: every difference shows, such as a skipped document.
    if not same_everywhere(json.dumps(data_state)):
        raise UserError(
            "the processes no longer plan the same batches: one of them skipped documents that others could "
            "read, or its files differ. data.log and the stderr of each process list the skipped documents. "
            "Nothing was saved. Fix the files, and run again from the last checkpoint."
        )
    return data_state


def _unchanged(data_state: dict[str, Any] | None) -> dict[str, Any] | None:
    return data_state
