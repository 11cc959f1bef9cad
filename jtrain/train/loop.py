"""Training loop: runs the steps, saves and evaluates; callbacks watch it.

Invariants:
- Step n is dispatched before the metrics of step n - 1 are read, so the device never waits for the host.
- The data state saved with a step resumes with the batch after that step.
- A state is saved only if its loss and gradient norm are good and all of it is finite (`bad_steps.py`).
- All processes save, stop and evaluate at the same steps.
"""

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
from jtrain.runtime.signals import StopRequest
from jtrain.step.state import TrainState
from jtrain.train.bad_steps import BadSteps, Numbers, WentBack
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


class Loop:
    """Runs the steps of one attempt.

    step: number of the current step: completed updates, and during a step the update being computed.
    data_ended: True if the data has no batch for the next step.
    """

    def __init__(
        self,
        context: RunContext,
        callbacks: Callbacks,
        checkpoints: Checkpoints,
        evaluation: Evaluation,
        config_text: str,
        checks: IntegrityCheck,
        bad_steps: BadSteps,
        restart: RestartPoint,
        batches: Callable[[dict[str, Any] | None, int], Prefetch],
        local: LocalMemory | None,
    ) -> None:
        self.context = context
        self.callbacks = callbacks
        self.checkpoints = checkpoints
        self.evaluation = evaluation
        self.config_text = config_text
        self.checks = checks
        self.bad_steps = bad_steps
        self.restart = restart
        self.batches = batches
        self.local = local
        self.step = context.start_step
        self.data_ended = False
        self._unread: tuple[int, Any, Fed, Callable[[], dict[str, Any] | None]] | None = None
        self._data_before: Callable[[], dict[str, Any] | None] = lambda: None

    def run(self, state: TrainState, data_state: dict[str, Any] | None, stop: StopRequest) -> int:
        """Runs steps as `run_steps` does; where bad numbers ask for it, goes back and runs them again."""
        while True:
            self._data_before = functools.partial(lambda before: before, data_state)
            with self.batches(data_state, self.step) as batches:
                try:
                    return self.run_steps(self._decided(state), batches, stop)
                except WentBack:
                    pass
            del state  # the devices have no room for two states
            state, data_state = self._go_back()
            self.context.metrics.rewind(self.step)
            self.callbacks.on_rewind(self.step)

    def run_steps(self, state: TrainState, batches: Prefetch, stop: StopRequest) -> int:
        """Runs steps until the run is complete, the data ends or a stop is requested, then saves; returns the step.

        The loop takes each batch one step ahead, so it knows which one is the last. All processes plan the same batches
        and reach the end together.
        """
        run, start_step = self.context.run, self.step
        saved, due, since = start_step, False, self.bad_steps.since
        fed = self._next(batches)
        self.data_ended = fed is None and start_step < run.num_steps
        while self.step < run.num_steps and fed is not None:
            here = fed
            self.step += 1
            state, fed, stopping = self._one_step(state, here, batches, stop)
            last = self.step == run.num_steps or stopping or self.data_ended
            # A save that is due waits for a step with good numbers; a stop waits for it, too.
            due = due or last or self.checkpoints.due(self.step)
            evaluate = _due(self.step, run.eval.every_steps)
            keep = self.local is not None and not due and _due(self.step, run.checkpoint.local_every_steps)
            # Check the results before the state is saved or evaluated.
            if due or keep or evaluate:
                self._report()
            if since != self.bad_steps.since:
                state, since = self._decided(state), self.bad_steps.since
            if evaluate or (run.eval.every_steps is not None and (self.step == run.num_steps or self.data_ended)):
                self._evaluate(state)
            if keep and not self.checkpoints.hold and not self.bad_steps.in_doubt(self.step):
                self._keep(state, here)
            if due and not self.bad_steps.in_doubt(self.step):
                self._save(state, here, last=last)
                saved, due = self.step, False
            self.checkpoints.check(self.step)
            if stopping and saved == self.step:
                self.data_ended = False
                break
        assert saved == self.step, (saved, self.step)
        self._wait_for_saves()
        return self.step

    @_phase("step")
    def _one_step(
        self, state: TrainState, fed: Fed, batches: Prefetch, stop: StopRequest
    ) -> tuple[TrainState, Fed | None, bool]:
        """Dispatches a step; returns the new state, the next batch, and True if a stop was requested in any process."""
        batch = share_batch(fed.batch, self.context.mesh)
        train_step = self.context.train_step
        with self.callbacks.during("dispatch", self.step, state, batch):
            state, metrics = train_step(state, batch)
        # While the devices compute this step, the host prepares a save and reads the results of the previous step.
        self.checkpoints.prepare()
        self._report()
        for text in fed.said:
            self._note(self.step - 1, text)
        self._unread = (self.step, metrics, fed, self._data_before)
        self._data_before = fed.state
        following = self._next(batches) if self.step < self.context.run.num_steps else None
        arrived_s = time.perf_counter()
        wait_ms = 0.0 if following is None else following.wait_ms
        idle = wait_ms >= 1.0 and metrics["loss_nats"].is_ready()
        self.data_ended = following is None and self.step < self.context.run.num_steps
        stopping, requested = self._agree(stop.requested)
        self.callbacks.on_step(DispatchedStep(self.step, metrics, wait_ms, arrived_s, idle, requested))
        return state, following, stopping

    @_phase("data_wait")
    def _next(self, batches: Prefetch) -> Fed | None:
        """Returns the next batch, None after the last; before an error propagates, logs the data plane's messages."""
        try:
            with jax.profiler.TraceAnnotation("jtrain:data_wait"):
                return next(batches, None)
        except Exception:
            for text in batches.said:
                self._note(self.step, text)
            raise

    @_phase("device_wait")
    def _agree(self, stopping: bool) -> tuple[bool, ...]:
        """Returns two flags that are equal in all processes: a stop is requested; a callback has `requested` set.

        With several processes the call waits for the step. That costs milliseconds, but all processes then stop
        at once: schedulers kill a job soon after their warning.
        """
        return agree(stopping, self.callbacks.requested)

    def _report(self) -> None:
        """Reads the results of the last dispatched step, checks them and passes them to the callbacks."""
        if self._unread is None:
            return
        (step, metrics, fed, data_before), self._unread = self._unread, None
        values = self._read(metrics)
        hash_hex = "".join(f"{word:08x}" for word in np.asarray(values["batch_hash"]).tolist())
        self.checks.check(step, values)
        last = step == self.step and (step == self.context.run.num_steps or self.data_ended)
        self.bad_steps.check(
            Numbers.of(step, values, hash_hex),
            dispatched=self.step,
            last=last,
            documents=lambda: documents_of_batch(self.restart.dataset, data_before(), step=step - 1),
        )
        self.callbacks.on_results(StepResults(step, values, hash_hex, fed))

    def _decided(self, state: TrainState) -> TrainState:
        return self.restart.with_decisions(state, self.bad_steps.left_out, self.bad_steps.since)

    @_phase("checkpoint")
    def _go_back(self) -> tuple[TrainState, dict[str, Any] | None]:
        """Restores the state from which `bad_steps` has the steps run again."""
        self._unread, self.data_ended, self.step = None, False, self.bad_steps.origin
        if self.local is not None:
            self.local.forget_after(self.step)
        return self.restart.state_at(self.step)

    @_phase("device_wait")
    def _read(self, metrics: Any) -> Any:
        return jax.device_get(metrics)

    @_phase("evaluation")
    def _evaluate(self, state: TrainState) -> None:
        """Logs the losses on held-out text."""
        with jax.profiler.TraceAnnotation("jtrain:evaluate"):
            split, sets = self.evaluation(state.params)
        self.context.metrics.evaluation(self.step, split, sets)

    @_phase("checkpoint")
    def _save(self, state: TrainState, fed: Fed, *, last: bool) -> None:
        """Saves the state, with the data state that resumes at the next batch.

        Raises:
          UserError: the processes plan different batches: one skipped documents that others could read, or their files
            differ.
        """
        with jax.profiler.TraceAnnotation("jtrain:checkpoint"):
            self.checkpoints.save(self.step, state, self._data_state(fed), self.config_text, last=last)

    @_phase("checkpoint")
    def _keep(self, state: TrainState, fed: Fed) -> None:
        """Keeps the state in local memory; raises UserError as `_save` does."""
        assert self.local is not None
        with jax.profiler.TraceAnnotation("jtrain:checkpoint"):
            self.local.save(self.step, state, self._data_state(fed))

    def _data_state(self, fed: Fed) -> dict[str, Any]:
        data_state = fed.state()
        if not same_everywhere(json.dumps(data_state)):
            raise UserError(
                "the processes no longer plan the same batches: one of them skipped documents that others could read, "
                "or its files differ. data.log and the stderr of each process list the skipped documents. Nothing was "
                "saved. Fix the files, and run again from the last checkpoint."
            )
        return data_state

    @_phase("checkpoint")
    def _wait_for_saves(self) -> None:
        self.checkpoints.wait()

    def _note(self, step: int, text: str) -> None:
        """Prints a message of the data plane and appends it to data.log."""
        self.context.metrics.note(step, text)


def _due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0
