"""One attempt of a run: checks the workdir, restores the state, opens the data, then runs the loop.

set_up -> lock of the workdir -> restored state -> Attempt -> Loop.run
"""

import contextlib
import dataclasses
import functools
import shlex
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from jtrain.checkpoint import Checkpoints, files
from jtrain.checkpoint.local_memory import LocalMemory
from jtrain.checkpoint.lost_history import check_history
from jtrain.checkpoint.restoring import Restored
from jtrain.config.resume import check_same_run, with_history
from jtrain.config.run import Run
from jtrain.errors import UserError
from jtrain.plan.estimate.machine import machine_of
from jtrain.plan.fit_check import available_bytes
from jtrain.plan.from_run import plan_job
from jtrain.plan.oom_report import explain_exhaustion
from jtrain.plan.report.summary import plan_text, print_plan
from jtrain.profile.trace_dir import FOLDER
from jtrain.runtime.exit_codes import DONE, STOPPED
from jtrain.runtime.run_files import full_disk_named, write_run_files
from jtrain.runtime.signals import StopRequest
from jtrain.runtime.workdir_lock import WorkdirLock, check_shared
from jtrain.step.state import abstract_state, without_base
from jtrain.step.train_step import make_train_step
from jtrain.telemetry.metrics_writer import Metrics
from jtrain.train.bad_steps.bad_steps import BadSteps
from jtrain.train.built_in_callbacks import built_in_callbacks
from jtrain.train.callbacks import Callback, Callbacks, RunContext, load_callbacks
from jtrain.train.integrity import IntegrityCheck
from jtrain.train.loop import Attempt, Loop
from jtrain.train.restart_point import RestartPoint
from jtrain.train.sampling import sample_at_end
from jtrain.train.setup import Setup, print_line, set_up
from jtrain.train.store_mirror import StoreMirror
from jtrain.train.weight_stream import WeightStream


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
    devices: Sequence[jax.Device] | None = None,
    train_step: Any = None,
    cache: Path | None = None,
) -> int:
    """Trains from the newest checkpoint of `workdir`, or from the start; returns the exit code.

    Args:
      run: the run, built and validated.
      workdir: created if missing; gets config.txt, run.json, plan.txt, metrics.jsonl, goodput.json,
        tensorboard/, checkpoints/ and profile/.
      config_text: the flat config, kept in the workdir and in every checkpoint.
      started_s: start of this attempt, in seconds since the epoch; None for now.
      allow_change: names in `resume.CHANGEABLE` of fields that may differ from the run in `workdir`.
      from_scratch: begin at step 0 if the run in `workdir` has a history, but no whole checkpoint.
      home: folder in an object store that holds the checkpoints; None if `workdir` holds them.
      watchers: callbacks besides the built-in ones and those of the config; they come first.
      devices: those of `run.mesh`, of each process equally many; None for all that are here.
      train_step: compiled step of another attempt of this process that began as this one does; None makes one.
      cache: the user's cache, which keeps the peaks of a machine whose maker publishes none; None measures
        none.

    Raises:
      UserError: the run cannot start: it does not fit, the workdir belongs to another run, there is no data
        ...
      BadNumbers: bad losses or gradient norms end the run, as `guard` says.
      HardwareFault: a step gave other bits when it was run again.
      MemoryExhausted: a device ran out of memory although the plan fitted.
    """
    started_s = time.time() if started_s is None else started_s
    home = workdir if home is None else home
    # First: nothing may be written to a folder that the processes do not share.
    check_shared(home)
    # Held only for the move: the run takes the lock again below, after the setup.
    with WorkdirLock(home, say=print_line) if from_scratch else contextlib.nullcontext():  # it moves files
        history_lines = check_history(workdir, home / "checkpoints", from_scratch=from_scratch)
    prepared = prepare(
        run,
        workdir=workdir,
        home=home,
        config_text=config_text,
        allow_change=allow_change,
        devices=devices,
    )
    setup, changes = prepared.setup, prepared.changes
    saved_step = max(files.steps(home / "checkpoints"), default=0)
    config_text = with_history(workdir, config_text, step=saved_step, changes=changes)
    if jax.process_index() == 0:
        stream_lines = [] if prepared.weights is None else [prepared.weights.line()]
        print_line("\n".join([*setup.lines(home), *stream_lines]))
    job, mesh = setup.job, setup.mesh

    checkpoints = Checkpoints(home, run.checkpoint, layer_order=job.layout.layer_order)
    integrity = IntegrityCheck(run.integrity, checkpoints)
    with (
        WorkdirLock(home, say=print_line) as lock,  # before anything in the workdir is written or removed
        # Errors of a full disk become one message, wherever they happen inside.
        full_disk_named(workdir),
        explain_exhaustion(job, setup.optimizer, mesh, available=setup.memory_bytes),
        # Inside the lock: a save in flight ends before another run can have the workdir.
        checkpoints,
        # Signals ask for a stop from here on: before, Ctrl-C ends the process at once.
        StopRequest() as stop,
        Callbacks(
            [*watchers, integrity, *built_in_callbacks(run, workdir, lock, cache), *prepared.user_callbacks]
        ) as callbacks,
        open_local_memory(setup, home, checkpoints, config_text) as local,
    ):
        # From here on commits and deletions ask the lock, in the threads of saves too.
        checkpoints.lock = lock
        for watcher in watchers:
            if isinstance(watcher, StoreMirror):
                # Before anything of the workdir is read: another run may have gone on since it was fetched.
                watcher.hold(lock, takes=1 + from_scratch, moved=bool(history_lines))
        # Again, under the lock: the folder may have been empty before, and another run may have begun in it.
        check_same_run(workdir, config_text, allow=allow_change)
        if jax.process_index() == 0:
            plan = plan_text(job, available=setup.memory_bytes)
            write_run_files(workdir, config_text, mesh, num_processes=jax.process_count(), plan=plan)
        restart = RestartPoint(setup, checkpoints, data_may_change="data" in allow_change)
        # Announced as a phase: a hang of the restore is then named as one.
        with callbacks.during("restore", 0):
            restored = restart.newest(local, workdir=workdir, from_scratch=from_scratch)
        with (
            Metrics(
                workdir, run.metrics, num_steps=run.num_steps, start_step=restored.step, alerts=run.alerts
            ) as metrics,
            prepared.weights or contextlib.nullcontext(),
        ):
            if prepared.weights is not None:
                prepared.weights.say = metrics.say
            # Warnings about saves go through the metrics' writer from here on.
            checkpoints.say = metrics.say
            for line in (*history_lines, *restored.messages, *_resume_lines(restored, changes)):
                metrics.say(line)
            train_step = train_step or make_train_step(
                *(run.model, setup.optimizer, job.layout, mesh),
                sigmas=run.guard.sigmas,
                jumps=run.data.mixture.jumps,
                traced=run.profile.steps is not None,
                checksums=run.integrity.checksums,
                deterministic=run.deterministic,
                objective=run.objective,
            )
            attempt = Attempt(
                context=RunContext(
                    run=run,
                    job=job,
                    mesh=mesh,
                    workdir=workdir,
                    start_step=restored.step,
                    started_s=started_s,
                    source_names=setup.dataset.names,
                    train_step=train_step,
                    metrics=metrics,
                    during=callbacks.during,
                ),
                config_text=config_text,
                open_batches=setup.open_batches,
                evaluation=setup.evaluation,
                callbacks=callbacks,
                integrity=integrity,
                bad_steps=BadSteps(run.guard, workdir, mesh, checkpoints, metrics.say, metrics.alert),
                restart=restart,
                checkpoints=checkpoints,
                local=local,
                weights=prepared.weights,
            )
            loop = Loop(attempt)
            # Closed even if the loop raises: entries that waited
            # for room on the disk are written or reported.
            with contextlib.closing(attempt.bad_steps), callbacks.running(attempt.context):
                loop.run(restored.state, restored.data_state, stop)
            # A stopped run keeps its copies: it may go on on the same hosts.
            is_complete = loop.data_ended or loop.step == run.num_steps
            if local is not None and is_complete:
                local.remove()
            metrics.say(_end_line(loop, seconds=time.time() - started_s, home=home))
            if is_complete:
                sample = functools.partial(sample_at_end, checkpoints, run, loop.step)
                metrics.end(home, _next_commands(run, workdir, home), sample)
    return DONE if is_complete else STOPPED


@dataclasses.dataclass(frozen=True)
class Preparation:
    """Parts of an attempt that are made, and refused, before the workdir is locked.

    changes: differences to the run in the workdir that `--allow-change` permits.
    """

    setup: Setup
    changes: list[str]
    user_callbacks: list[Callback]
    weights: WeightStream | None


def prepare(
    run: Run,
    *,
    workdir: Path,
    home: Path,
    config_text: str,
    allow_change: Sequence[str],
    devices: Sequence[jax.Device] | None,
) -> Preparation:
    """Checks the workdir, the devices, the data and the user's code; writes nothing to the workdir.

    Raises:
      UserError: as `train`.
    """
    # Before the setup: a change that is not allowed, and a trace of a run that is done, are refused at once.
    changes = check_same_run(workdir, config_text, allow=allow_change)
    saved_step = max(files.steps(home / "checkpoints"), default=0)
    run.profile.check_steps_to_come(home, saved_step=saved_step, num_steps=run.num_steps)
    setup = set_up(run, jax.devices() if devices is None else devices)
    weights = None
    if run.weight_stream is not None:
        weights = WeightStream(run, setup.job.layout, setup.mesh, home, say=print_line)
    return Preparation(setup, changes, load_callbacks(run.callbacks), weights)


def dry_run(
    run: Run,
    *,
    workdir: Path,
    config_text: str,
    allow_change: Sequence[str] = (),
    from_scratch: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> int:
    """Prints the plan of a run, and refuses what `train` refuses before it locks the workdir; returns 0.

    Allocates nothing on a device. What a checkpoint holds is not looked at.

    Raises:
      UserError: as `train`.
    """
    devices = jax.devices() if devices is None else devices
    try:
        check_shared(workdir)
        # With `from_scratch` the history would be moved away, and nothing be refused.
        if not from_scratch:
            check_history(workdir, workdir / "checkpoints", from_scratch=False)
        weights = prepare(
            run,
            workdir=workdir,
            home=workdir,
            config_text=config_text,
            allow_change=allow_change,
            devices=devices,
        ).weights
        if weights is not None and jax.process_index() == 0:
            print_line(weights.line())
    finally:
        # Printed for a run that is refused too: what it would need is part of the answer. Where the layout is
        # the mistake there is no plan, and the refusal says so.
        with contextlib.suppress(UserError):
            if jax.process_index() == 0:
                print_plan(plan_job(run, machine_of(devices)), available=available_bytes(devices))
    return DONE


def open_local_memory(
    setup: Setup, home: Path, checkpoints: Checkpoints, config_text: str
) -> AbstractContextManager[LocalMemory | None]:
    """Opens the local memory of a run; none if its config keeps no state there."""
    if setup.run.checkpoint.local_every_steps is None:
        return contextlib.nullcontext()
    return LocalMemory(
        home,
        setup.run.checkpoint.local_dir,
        without_base(setup.job.layout, abstract_state(setup.job.layout, setup.optimizer, setup.mesh)),
        config_text,
        newest_checkpoint=lambda: max(checkpoints.steps(), default=0),
        say=print_line,
    )


def _resume_lines(restored: Restored, changes: Sequence[str]) -> list[str]:
    """Lines on the step that the run goes on from, and on what differs from then on."""
    step, lines = restored.step, []
    if step:
        lines.append(f"resumed from step {step}")
    # `--allow-change data` lets the data begin anew, which the reader of the loss curve must see.
    if step and restored.data_state is None:
        lines.append(f"the data begins anew at step {step}, as --allow-change data permits")
    return lines + [f"changed from step {step} on, as --allow-change permits: {change}" for change in changes]


def _end_line(loop: Loop, *, seconds: float, home: Path) -> str:
    """Last line of an attempt: how far the run came, and where its results are."""
    run, step = loop.attempt.context.run, loop.step
    if loop.data_ended:
        return (
            f"done: the data ended after {step} of {run.num_steps} steps (data.epochs={run.data.epochs}), in "
            f"{seconds:.0f} s; results in {home}"
        )
    if step < run.num_steps:
        return f"stopped at step {step} after a good save; the same command goes on from there: {home}"
    return f"done: {step} steps in {seconds:.0f} s; results in {home}"


def _next_commands(run: Run, workdir: Path, home: Path) -> list[str]:
    """Commands that show what a finished run made: its profile first if it traced a window, else text."""
    name = shlex.quote(str(home))
    commands = [f"jtrain generate --workdir {name}", f"jtrain checkpoint list --workdir {name}"]
    # Not in `home`: the client of a store may raise errors of its own, and the run is complete.
    if run.profile.steps is not None and (workdir / FOLDER).is_dir():
        commands.insert(0, f"jtrain profile --workdir {name}")
    return [*commands[:2], f"jtrain hf export --workdir {name} --out {name}-export"]
