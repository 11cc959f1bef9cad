"""The loop: the only module that changes anything; `watch.py` times it.

Invariants:
- Step n is dispatched before the metrics of step n - 1 are read, so the device never waits for the host.
- The data state that is saved with a step leads to the batch that follows it.
- No state is saved whose loss or gradient was not finite.
- Every process takes every decision (save, stop, evaluate) at the same step.
"""

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jtrain.checkpoint import Checkpoints
from jtrain.config import Run, check_same_run, check_vocabulary
from jtrain.data import Fed, Prefetch, TextDataset, host_rows, open_dataset, prefetch, put_batch, share_batch
from jtrain.data.budget import budget
from jtrain.guard import StopRequest, agree, check_finite, same_everywhere
from jtrain.layout import Layout, make_layout
from jtrain.mesh import make_mesh
from jtrain.metrics import Metrics
from jtrain.model.param import map_params
from jtrain.optim import Optimizer, build
from jtrain.plan.exhausted import explained
from jtrain.plan.fit import available_bytes, check_fits
from jtrain.plan.flops import flops_per_token
from jtrain.plan.report import Parts, print_plan
from jtrain.step import TrainState, abstract_state, init_state, make_eval_step, make_train_step
from jtrain.watch import Watch
from jtrain.workdir import write_run_files

DONE = 0
STOPPED = 75
"""Exit codes: the run is complete; stopped when asked to, after a good save (EX_TEMPFAIL: run again)."""


def train(run: Run, *, workdir: Path, config_text: str, started_s: float | None = None) -> int:
    """Trains from the newest checkpoint of `workdir`, or from the start, to the end; returns the exit code.

    Args:
      run: a checked config, built.
      workdir: made if missing; gets config.txt, run.json, metrics.jsonl, goodput.json, tensorboard/, checkpoints/ and
        profile/.
      config_text: the flat config, kept in the workdir and in every checkpoint.
      started_s: when this attempt began, in seconds since the epoch; None for now.

    Raises:
      ValueError: the run cannot be: it does not fit, the workdir is another run's, there is no data ...
      NotFinite, MemoryExhausted: a loss or gradient stopped being a number; a device's memory was too small after all.
    """
    started_s = time.time() if started_s is None else started_s
    devices = jax.devices()
    check_same_run(workdir, config_text)
    parts = plan_parts(run)
    available = available_bytes(devices)
    if available is not None:
        _check_fits(run, parts.layout, devices, available=available)
    mesh = make_mesh(run.mesh, devices)
    layout = parts.layout
    optimizer = make_optimizer(run)
    dataset = open_dataset(run.data, seed=run.seed)
    check_vocabulary(run.model, dataset.vocab_size)
    if jax.process_index() == 0:
        print_plan(parts, available=available, platform=devices[0].platform)
        print(dataset.describe())
        print(budget(dataset, rows=len(host_rows(mesh, run.data.global_batch))).line(), flush=True)
        write_run_files(workdir, config_text, mesh, num_processes=jax.process_count())

    with (
        explained(parts, optimizer, mesh, available=available),
        Checkpoints(workdir, run.checkpoint) as checkpoints,
        StopRequest() as stop,
        Watch(run, layout, mesh, workdir, started_s=started_s, source_names=dataset.names) as watch,
    ):
        start_step = checkpoints.latest_step() or 0
        if checkpoints.latest_step() is None:
            state, data_state = init_state(layout, optimizer, mesh, seed=run.seed), None
        else:
            state, data_state = checkpoints.restore(start_step, abstract_state(layout, optimizer, mesh))
        rows = host_rows(mesh, run.data.global_batch)
        with (
            Metrics(workdir, run.metrics, num_steps=run.num_steps, start_step=start_step) as metrics,
            prefetch(
                dataset.train_batches(data_state, rows=rows, context=run.mesh.context, cost=_cost(run)),
                lambda batch: put_batch(batch, mesh, rows=rows, global_batch=run.data.global_batch),
            ) as fed,
        ):
            if start_step:
                metrics.say(f"resumed from step {start_step}")
            loop = Loop(run, layout, optimizer, mesh, dataset, checkpoints, metrics, watch, config_text, workdir)
            watch.begin(start_step, metrics, loop.train_step)
            step = loop.run_steps(state, start_step, fed, stop)
            with watch.outside("checkpoint"):
                checkpoints.wait()
            watch.end()
            seconds = time.time() - started_s
            if loop.data_ended:
                metrics.say(
                    f"done: the data ended after {step} of {run.num_steps} steps (data.epochs={run.data.epochs}), in "
                    f"{seconds:.0f} s; results in {workdir}"
                )
                return DONE
            if step < run.num_steps:
                metrics.say(f"stopped at step {step} after a good save; the same command goes on from there: {workdir}")
                return STOPPED
            metrics.say(f"done: {step} steps in {seconds:.0f} s; results in {workdir}")
    return DONE


def plan_parts(run: Run) -> Parts:
    """What a plan has to know of a run."""
    infos = run.model.param_infos()
    layout = make_layout(run.layout, run.mesh, infos, context_order=run.data.context_order)
    return Parts(run.model, layout, run.optimizer, run.data.global_batch, run.data.seq_len)


def dry_run(run: Run, *, topology: str | None) -> None:
    """Prints the plan; with a topology, what that machine's compiler says beside it. Allocates nothing.

    Raises:
      ValueError: no such topology, or the mesh is not of that many devices.
    """
    platform = jax.devices()[0].platform
    print_plan(plan_parts(run), optimizer=make_optimizer(run), topology=topology, platform=platform)


def make_optimizer(run: Run) -> Optimizer:
    """The optimizer of a run, bound to its length and parameters."""
    return build(run.optimizer, num_steps=run.num_steps, params=map_params(lambda i: i, run.model.param_infos()))


def _cost(run: Run) -> tuple[float, float]:
    """What a token of a document costs, and what each token before it adds, relative to the former."""
    flops = flops_per_token(run.model, seq_len=run.data.seq_len)
    return 1.0, flops.attention_flops / run.data.seq_len / flops.matmul_flops


def _check_fits(run: Run, layout: Layout, devices: list[jax.Device], *, available: int) -> None:
    """Refuses what does not fit into the devices that are here, also when the config's mesh wants others.

    A mesh of another size is refused by `make_mesh`; but whoever has one device and a config for eight first has to
    know whether one would do at all.
    """
    asked = layout
    data = len(devices) // (run.mesh.size // run.mesh.data // run.mesh.replica)
    if run.mesh.size != len(devices) and data and run.data.global_batch % data == 0:
        mesh = dataclasses.replace(run.mesh, replica=1, data=data)
        spec = dataclasses.replace(run.layout, microbatches=run.data.global_batch // data)
        layout = make_layout(spec, mesh, run.model.param_infos(), context_order=run.data.context_order)
    sizes: dict[str, Any] = dict(global_batch=run.data.global_batch, seq_len=run.data.seq_len, available=available)
    check_fits(run.model, layout, run.optimizer, **sizes, platform=devices[0].platform, asked=asked)


class Loop:
    """Runs the steps of one attempt."""

    def __init__(
        self,
        run: Run,
        layout: Layout,
        optimizer: Optimizer,
        mesh: Mesh,
        dataset: TextDataset,
        checkpoints: Checkpoints,
        metrics: Metrics,
        watch: Watch,
        config_text: str,
        workdir: Path,
    ) -> None:
        self.run = run
        self.workdir = workdir
        self.mesh = mesh
        self.dataset = dataset
        self.checkpoints = checkpoints
        self.metrics = metrics
        self.watch = watch
        self.config_text = config_text
        self.train_step = make_train_step(run.model, optimizer, layout, mesh)
        self.eval_step = make_eval_step(run.model, layout, mesh)
        self.data_ended = False

    def run_steps(self, state: TrainState, start_step: int, batches: Prefetch, stop: StopRequest) -> int:
        """Steps until the run is complete, the data has ended or somebody asks to stop; the state is saved then.

        Returns the step. A batch is taken one ahead, so that the last one is known to be it: every process plans the
        same steps, so all of them come to the end together.
        """
        num_steps = self.run.num_steps
        save_every, evaluate_every = self.run.checkpoint.every_steps, self.run.eval.every_steps
        step, saved = start_step, start_step
        unread: tuple[int, Any, Fed] | None = None
        fed = self._next(batches, step)
        self.data_ended = fed is None and step < num_steps
        while step < num_steps and fed is not None:
            here = fed
            with self.watch.step(step + 1):
                batch = share_batch(here.batch, self.mesh)
                state, results = self.watch.dispatch(state, batch)
                # The device works on this step from here on; meanwhile the host gets ready to save, and looks at the
                # one before.
                self.checkpoints.prepare()
                if unread is not None:
                    self._report(*unread)
                for text in here.said:
                    self._note(step, text)
                step += 1
                unread = (step, results, here)
                fed = self._next(batches, step) if step < num_steps else None
                if fed is not None:
                    self.watch.data_waited(fed.wait_ms, results)
                self.data_ended = fed is None and step < num_steps
                # Among several processes this waits for the step: milliseconds, but schedulers kill soon after they
                # warn.
                with self.watch.device_wait():
                    stopping, window_asked = agree(stop.requested, self.watch.window_requested)
                self.watch.wait_in_window(results)
            last = step == num_steps or stopping or self.data_ended
            # A state that is saved or evaluated is first known to be finite.
            if last or _due(step, save_every) or _due(step, evaluate_every):
                self._report(*unread)
                unread = None
            if _due(step, evaluate_every) or (evaluate_every is not None and (step == num_steps or self.data_ended)):
                with self.watch.outside("evaluation"):
                    self._evaluate(step, state)
            if last or _due(step, save_every):
                with self.watch.outside("checkpoint"):
                    self.checkpoints.save(step, state, self._agreed(here.state()), self.config_text)
                saved = step
            self.checkpoints.check()
            self.watch.after(step, results, asked=window_asked, last=last)
            if stopping:
                self.data_ended = False
                break
        assert saved == step, (saved, step)
        return step

    def _next(self, batches: Prefetch, step: int) -> Fed | None:
        """The next batch; None after the last. What the data plane said before an error is kept."""
        try:
            with jax.profiler.TraceAnnotation("jtrain:data_wait"):
                return next(batches, None)
        except Exception:
            for text in batches.said:
                self._note(step, text)
            raise

    def _agreed(self, data_state: dict[str, Any]) -> dict[str, Any]:
        """The state, if every process plans the same stream.

        Raises:
          ValueError: they do not; one has skipped what others could read, or their files differ.
        """
        if not same_everywhere(json.dumps(data_state)):
            raise ValueError(
                "the processes no longer plan the same batches: on one of them documents were left out that others "
                "could read, or its files are others. data.log and stderr of each say what was left out; nothing was "
                "saved. Mend that, and run again from the last checkpoint."
            )
        return data_state

    def _note(self, step: int, text: str) -> None:
        """Says what happened to the data, and keeps it: data.log is what the data plane decided and why."""
        self.metrics.say(text)
        if jax.process_index() == 0:
            with open(self.workdir / "data.log", "a") as file:
                print(f"step {step}: {text}", file=file)

    def _report(self, step: int, results: Any, fed: Fed) -> None:
        """Waits for a step's results, checks them, and logs them if it is their turn."""
        with self.watch.device_wait():
            values = jax.device_get(results)
        hash_hex = "".join(f"{word:08x}" for word in np.asarray(values["batch_hash"]).tolist())
        loss, norm = float(values["loss_nats"]), float(values["grad_norm"])
        last = self.checkpoints.latest_step() if not math.isfinite(loss + norm) else None
        check_finite(step, {"loss_nats": loss, "grad_norm": norm}, batch_hash=hash_hex, last_checkpoint_step=last)
        self.watch.step_done(step, values, fed, hash_hex=hash_hex)

    def _evaluate(self, step: int, state: TrainState) -> None:
        """The mean cross entropy over the held-out batches."""
        nats, tokens = 0.0, 0
        for batch in self.dataset.eval_batches(context=self.run.mesh.context):
            sums = jax.device_get(self.eval_step(state.params, put_batch(batch, self.mesh)))
            nats += float(sums["nats"])
            tokens += int(sums["tokens"])
        self.metrics.evaluation(step, nats / max(tokens, 1))


def _due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0
