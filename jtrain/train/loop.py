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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jtrain.checkpoint import Checkpoints, files
from jtrain.checkpoint.lost_history import check_history
from jtrain.config.resume import check_same_run, with_history
from jtrain.config.run import Run, check_vocabulary
from jtrain.data import Fed, Prefetch, open_dataset, place_tree, put_batch, share_batch
from jtrain.data.prefetch import prefetch  # not of jtrain.data, where that name is the module
from jtrain.data.resource_estimate import budget
from jtrain.data.step_contents import documents_of_batch
from jtrain.errors import UserError
from jtrain.mesh import make_mesh
from jtrain.plan.estimate.flops import flops_per_token
from jtrain.plan.estimate.machine import machine_of
from jtrain.plan.fit_check import available_bytes, check_fits
from jtrain.plan.from_run import make_optimizer, plan_job
from jtrain.plan.job import Job
from jtrain.plan.oom_report import explained
from jtrain.plan.report.summary import print_plan
from jtrain.runtime.exit_codes import DONE, STOPPED
from jtrain.runtime.multihost import agree, same_everywhere
from jtrain.runtime.run_files import full_disk_named, write_run_files
from jtrain.runtime.shared_folder import check_shared
from jtrain.runtime.signals import StopRequest
from jtrain.runtime.workdir_lock import WorkdirLock
from jtrain.step.state import TrainState
from jtrain.step.train_step import make_train_step
from jtrain.telemetry.metrics_writer import Metrics
from jtrain.telemetry.step_timer import StepTimes
from jtrain.train.alert_watch import AlertWatch
from jtrain.train.bad_steps import BadSteps, Numbers, WentBack
from jtrain.train.callbacks import (
    Callback,
    Callbacks,
    DispatchedStep,
    LoopPhase,
    RunContext,
    StepResults,
    load_callbacks,
)
from jtrain.train.evaluation import Evaluation
from jtrain.train.goodput_ledger import GoodputLedger
from jtrain.train.lock_watch import LockWatch
from jtrain.train.restart_point import RestartPoint
from jtrain.train.step_metrics import RecompileWatch, StepLog
from jtrain.train.trace_windows import TraceWindows


def train(
    run: Run,
    *,
    workdir: Path,
    config_text: str,
    started_s: float | None = None,
    allow_change: Sequence[str] = (),
    from_scratch: bool = False,
    home: Path | None = None,
    watchers: Sequence[Callback] = (),
) -> int:
    """Trains from the newest checkpoint of `workdir`, or from the start; returns the exit code.

    Args:
      run: the run, built and validated.
      workdir: created if missing; gets config.txt, run.json, metrics.jsonl, goodput.json, tensorboard/, checkpoints/
        and profile/.
      config_text: the flat config, kept in the workdir and in every checkpoint.
      started_s: start of this attempt, in seconds since the epoch; None for now.
      allow_change: names in `resume.CHANGEABLE` of fields that may differ from the run in `workdir`.
      from_scratch: begin at step 0 if the run in `workdir` has a history, but no whole checkpoint.
      home: folder in an object store that holds the checkpoints; None if `workdir` holds them.
      watchers: callbacks besides the built-in ones and those of the config; they come first.

    Raises:
      UserError: the run cannot start: it does not fit, the workdir belongs to another run, there is no data ...
      BadNumbers: bad losses or gradient norms end the run, as `guard` says.
      HardwareFault: a step gave other bits when it was run again.
      MemoryExhausted: a device ran out of memory although the plan fitted.
    """
    started_s = time.time() if started_s is None else started_s
    devices = jax.devices()
    home = workdir if home is None else home
    check_shared(home)
    moved = check_history(workdir, home / "checkpoints", from_scratch=from_scratch)
    changes = check_same_run(workdir, config_text, allow=allow_change)
    step_there = max(files.steps(home / "checkpoints"), default=0)
    config_text = with_history(workdir, config_text, step=step_there, changes=changes)
    job = plan_job(run, machine_of(devices))
    available = available_bytes(devices)
    if available is not None:
        _check_fits(job, devices, available=available)
    mesh = make_mesh(run.mesh, devices)
    optimizer = make_optimizer(run)
    dataset = open_dataset(run.data, seed=run.seed, say=_print if jax.process_index() == 0 else None)
    if not same_everywhere(dataset.fingerprint()):
        raise UserError(
            f"the processes of this run find different files at {run.data.path_fields}. Give every host the same "
            "files; where files are still being added, start again when all hosts have them."
        )
    check_vocabulary(run.model, dataset.vocab_size)
    evaluation = Evaluation(run, job.layout, mesh, dataset)
    place = place_tree(mesh, run.data.global_batch)
    rows = place.rows(jax.process_index())
    if jax.process_index() == 0:
        print_plan(job, available=available)
        print(dataset.describe(), *evaluation.describe(), sep="\n")
        print(budget(dataset, rows=len(rows)).line(), flush=True)

    with (
        WorkdirLock(workdir, say=_print) as lock,  # before anything in the workdir is written or removed
        full_disk_named(workdir),
        explained(job, optimizer, mesh, available=available),
        Checkpoints(home, run.checkpoint) as checkpoints,
        StopRequest() as stop,
        Callbacks([*watchers, *built_in_callbacks(run, workdir, lock), *load_callbacks(run.callbacks)]) as callbacks,
    ):
        check_same_run(workdir, config_text, allow=allow_change)  # again: the folder may have been empty before
        if jax.process_index() == 0:
            write_run_files(workdir, config_text, mesh, num_processes=jax.process_count())
        may_change = "data" in allow_change
        restart = RestartPoint(job.layout, optimizer, mesh, run.seed, checkpoints, dataset, may_change)
        with callbacks.during("restore", 0):
            newest = restart.newest(workdir=workdir, from_scratch=from_scratch)
            start_step, state, data_state, said = newest

        def batches(data_state: dict[str, Any] | None, first_step: int) -> Prefetch:
            fields: dict[str, Any] = dict(rows=rows, context=run.mesh.context, cost=_cost(run))
            source = dataset.train_batches(data_state, first_step=first_step, **fields)
            return prefetch(source, lambda batch: put_batch(batch, mesh, place))

        with Metrics(
            workdir, run.metrics, num_steps=run.num_steps, start_step=start_step, alerts=run.alerts
        ) as metrics:
            checkpoints.say_with(metrics.say)
            for line in (*moved, *said):
                metrics.say(line)
            if start_step:
                metrics.say(f"resumed from step {start_step}")
            if start_step and data_state is None:
                metrics.say(f"the data begins anew at step {start_step}, as --allow-change data permits")
            for change in changes:
                metrics.say(f"changed from step {start_step} on, as --allow-change permits: {change}")
            train_step = make_train_step(
                run.model, optimizer, job.layout, mesh, sigmas=run.guard.sigmas, traced=run.profile.steps is not None
            )
            context = RunContext(
                run, job, mesh, workdir, start_step, started_s, dataset.names, train_step, metrics, callbacks.during
            )
            bad_steps = BadSteps(run.guard, workdir, mesh, checkpoints, metrics.say)
            loop = Loop(context, callbacks, checkpoints, evaluation, config_text, bad_steps, restart, batches)
            with callbacks.running(context):
                step = loop.run(state, data_state, stop)
            seconds = time.time() - started_s
            if loop.data_ended:
                metrics.say(
                    f"done: the data ended after {step} of {run.num_steps} steps (data.epochs={run.data.epochs}), in "
                    f"{seconds:.0f} s; results in {home}"
                )
                return DONE
            if step < run.num_steps:
                metrics.say(f"stopped at step {step} after a good save; the same command goes on from there: {home}")
                return STOPPED
            metrics.say(f"done: {step} steps in {seconds:.0f} s; results in {home}")
    return DONE


def built_in_callbacks(run: Run, workdir: Path, lock: WorkdirLock) -> list[Callback]:
    """Creates the callbacks of every run; a step's metrics line comes before its line of the ledger."""
    times = StepTimes()
    goodput = GoodputLedger(run, times)
    recompiles = RecompileWatch()
    windows = TraceWindows(run, workdir, goodput)
    log = StepLog(run, times, windows.sampler, recompiles)
    return [LockWatch(lock), recompiles, windows, log, goodput, AlertWatch(run, goodput)]


def _cost(run: Run) -> tuple[float, float]:
    """Relative FLOPs of a token: 1.0 for itself, and those that each earlier token of its document adds."""
    flops = flops_per_token(run.model, seq_len=run.data.seq_len)
    return 1.0, flops.attention_flops / run.data.seq_len / flops.matmul_flops


def _print(line: str) -> None:
    print(line, flush=True)


def _check_fits(job: Job, devices: list[jax.Device], *, available: int) -> None:
    """Refuses a job that does not fit into the present devices, also if its mesh has another size.

    `make_mesh` refuses a mesh of another size later. This check comes first because a user with one device and a config
    for eight needs to know whether the model would fit on one at all.
    """
    asked = job.layout
    data = len(devices) // (asked.mesh.size // asked.mesh.data // asked.mesh.replica)
    if asked.mesh.size != len(devices) and data and job.global_batch % data == 0:
        mesh = dataclasses.replace(asked.mesh, replica=1, data=data)
        job = job.relaid(dataclasses.replace(asked.spec, microbatches=job.global_batch // data), mesh)
    check_fits(job, available=available, asked=asked)


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
        bad_steps: BadSteps,
        restart: RestartPoint,
        batches: Callable[[dict[str, Any] | None, int], Prefetch],
    ) -> None:
        self.context = context
        self.callbacks = callbacks
        self.checkpoints = checkpoints
        self.evaluation = evaluation
        self.config_text = config_text
        self.bad_steps = bad_steps
        self.restart = restart
        self.batches = batches
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
            # Check the results before the state is saved or evaluated.
            if due or evaluate:
                self._report()
            if since != self.bad_steps.since:
                state, since = self._decided(state), self.bad_steps.since
            if evaluate or (run.eval.every_steps is not None and (self.step == run.num_steps or self.data_ended)):
                self._evaluate(state)
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
        restored = self.restart.state_at(self.step)
        self.context.metrics.rewind(self.step)
        self.callbacks.on_rewind(self.step)
        return restored

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
        data_state = fed.state()
        if not same_everywhere(json.dumps(data_state)):
            raise UserError(
                "the processes no longer plan the same batches: one of them skipped documents that others could read, "
                "or its files differ. data.log and the stderr of each process list the skipped documents. Nothing was "
                "saved. Fix the files, and run again from the last checkpoint."
            )
        with jax.profiler.TraceAnnotation("jtrain:checkpoint"):
            self.checkpoints.save(self.step, state, data_state, self.config_text, last=last)

    @_phase("checkpoint")
    def _wait_for_saves(self) -> None:
        self.checkpoints.wait()

    def _note(self, step: int, text: str) -> None:
        """Prints a message of the data plane and appends it to data.log."""
        self.context.metrics.note(step, text)


def _due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0
