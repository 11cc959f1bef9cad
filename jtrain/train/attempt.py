"""One attempt of a run: checks the workdir, restores the state, opens the data, then runs the loop."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jtrain.checkpoint import Checkpoints, files
from jtrain.checkpoint.local_memory import local_memory
from jtrain.checkpoint.lost_history import check_history
from jtrain.config.resume import check_same_run, with_history
from jtrain.config.run import Run, check_vocabulary
from jtrain.data import Prefetch, open_dataset, place_tree, put_batch
from jtrain.data.inspect.resource_estimate import budget
from jtrain.data.plane.prefetch import prefetch  # not of jtrain.data, where that name is the module
from jtrain.errors import UserError
from jtrain.layout.mesh import make_mesh
from jtrain.plan.estimate.flops import flops_per_token
from jtrain.plan.estimate.machine import machine_of
from jtrain.plan.fit_check import available_bytes, check_fits_devices, with_host_memory
from jtrain.plan.from_run import make_optimizer, plan_job
from jtrain.plan.oom_report import explained
from jtrain.plan.report.summary import brief_lines, plan_text
from jtrain.runtime.exit_codes import DONE, STOPPED
from jtrain.runtime.multihost import same_everywhere
from jtrain.runtime.run_files import full_disk_named, write_run_files
from jtrain.runtime.secrets import without_secrets
from jtrain.runtime.shared_folder import check_shared
from jtrain.runtime.signals import StopRequest
from jtrain.runtime.workdir_lock import WorkdirLock
from jtrain.step.state import abstract_state
from jtrain.step.train_step import make_train_step
from jtrain.telemetry.metrics_writer import Metrics
from jtrain.train.bad_steps import BadSteps
from jtrain.train.built_in_callbacks import built_in_callbacks
from jtrain.train.callbacks import (
    Callback,
    Callbacks,
    RunContext,
    load_callbacks,
)
from jtrain.train.evaluation import Evaluation
from jtrain.train.integrity import IntegrityCheck
from jtrain.train.loop import Loop
from jtrain.train.restart_point import RestartPoint


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
) -> int:
    """Trains from the newest checkpoint of `workdir`, or from the start; returns the exit code.

    Args:
      run: the run, built and validated.
      workdir: created if missing; gets config.txt, run.json, plan.txt, metrics.jsonl, goodput.json, tensorboard/,
        checkpoints/ and profile/.
      config_text: the flat config, kept in the workdir and in every checkpoint.
      started_s: start of this attempt, in seconds since the epoch; None for now.
      allow_change: names in `resume.CHANGEABLE` of fields that may differ from the run in `workdir`.
      from_scratch: begin at step 0 if the run in `workdir` has a history, but no whole checkpoint.
      home: folder in an object store that holds the checkpoints; None if `workdir` holds them.
      watchers: callbacks besides the built-in ones and those of the config; they come first.
      devices: those of `run.mesh`, of each process equally many; None for all that are here.

    Raises:
      UserError: the run cannot start: it does not fit, the workdir belongs to another run, there is no data ...
      BadNumbers: bad losses or gradient norms end the run, as `guard` says.
      HardwareFault: a step gave other bits when it was run again.
      MemoryExhausted: a device ran out of memory although the plan fitted.
    """
    started_s = time.time() if started_s is None else started_s
    devices = jax.devices() if devices is None else devices
    home = workdir if home is None else home
    check_shared(home)
    with WorkdirLock(workdir, say=_print) if from_scratch else contextlib.nullcontext():  # it moves files
        moved = check_history(workdir, home / "checkpoints", from_scratch=from_scratch)
    changes = check_same_run(workdir, config_text, allow=allow_change)
    step_there = max(files.steps(home / "checkpoints"), default=0)
    config_text = with_history(workdir, config_text, step=step_there, changes=changes)
    job = with_host_memory(plan_job(run, machine_of(devices)))
    available = available_bytes(devices)
    if available is not None:
        check_fits_devices(job, devices, available=available)
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
        print("\n".join([*brief_lines(job, available=available), f"the whole plan: {home / 'plan.txt'}"]))
        print(without_secrets("\n".join([dataset.describe(), *evaluation.describe()])))
        print(budget(dataset, rows=len(rows)).line(), flush=True)

    checks = IntegrityCheck(run.integrity, home / "checkpoints")
    own = load_callbacks(run.callbacks)
    with (
        WorkdirLock(workdir, say=_print) as lock,  # before anything in the workdir is written or removed
        full_disk_named(workdir),
        explained(job, optimizer, mesh, available=available),
        Checkpoints(home, run.checkpoint, layer_order=job.layout.layer_order) as checkpoints,
        StopRequest() as stop,
        Callbacks([*watchers, checks, *built_in_callbacks(run, workdir, lock), *own]) as callbacks,
        local_memory(
            run.checkpoint, workdir, lambda: abstract_state(job.layout, optimizer, mesh), config_text
        ) as local,
    ):
        check_same_run(workdir, config_text, allow=allow_change)  # again: the folder may have been empty before
        if jax.process_index() == 0:
            plan = plan_text(job, available=available)
            write_run_files(workdir, config_text, mesh, num_processes=jax.process_count(), plan=plan)
        may_change = "data" in allow_change
        restart = RestartPoint(job.layout, optimizer, mesh, run.seed, checkpoints, dataset, may_change)
        with callbacks.during("restore", 0):
            newest = restart.newest(local, workdir=workdir, from_scratch=from_scratch)
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
                *(run.model, optimizer, job.layout, mesh),
                sigmas=run.guard.sigmas,
                traced=run.profile.steps is not None,
                checksums=run.integrity.checksums,
            )
            context = RunContext(
                run, job, mesh, workdir, start_step, started_s, dataset.names, train_step, metrics, callbacks.during
            )
            bad_steps = BadSteps(run.guard, workdir, mesh, checkpoints, metrics.say, metrics.alert)
            loop = Loop(
                *(context, callbacks, checkpoints, evaluation, config_text, checks, bad_steps, restart, batches, local)
            )
            with contextlib.closing(bad_steps), callbacks.running(context):
                step = loop.run(state, data_state, stop)
            seconds = time.time() - started_s
            if local is not None and (loop.data_ended or step == run.num_steps):
                local.remove()
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


def _cost(run: Run) -> tuple[float, float]:
    """Relative FLOPs of a token: 1.0 for itself, and those that each earlier token of its document adds."""
    flops = flops_per_token(run.model, seq_len=run.data.seq_len)
    return 1.0, flops.attention_flops / run.data.seq_len / flops.matmul_flops


def _print(line: str) -> None:
    print(line, flush=True)
