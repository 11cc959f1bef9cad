"""Planning values of a whole `Run`: its job, its search, its dry run."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jtrain.config.run import Run, build_run_optimizer, run_layout
from jtrain.layout.layout import Layout, LayoutSpec, make_layout
from jtrain.layout.mesh import MeshSpec
from jtrain.plan.estimate.machine import Machine, machine_of
from jtrain.plan.fit_check import available_bytes, check_fits_devices
from jtrain.plan.job import Job
from jtrain.plan.report.summary import print_plan
from jtrain.plan.search_task import SearchTask


def plan_job(run: Run, machine: Machine | None = None) -> Job:
    """The job of a run, laid out as its config says.

    Raises:
      UserError: the model does not split evenly over the mesh, as in `make_layout`.
    """
    return _job(run, run_layout(run), machine)


def _job(run: Run, layout: Layout, machine: Machine | None) -> Job:
    data = run.data
    return Job(run.model, layout, run.optimizer, data.global_batch, data.seq_len, machine, run.objective)


def search_task(run: Run, machine: Machine, **settings: Any) -> SearchTask:
    """The search for a run's layout on a machine.

    The config's layout may hold `as_needed` or not fit the mesh yet, so the job starts from the plain layout
    of one device, which every model has.

    Args:
      settings: `assume` and `memory_share` of `SearchTask`.
    """
    # The search lays the job out anew for every candidate, and chooses the microbatches itself.
    limits = dataclasses.replace(run.layout, microbatch_tokens=None)
    plain = make_layout(LayoutSpec(), MeshSpec(), run.param_infos(), **run.components_of_layout)
    job = _job(run, plain, machine)
    return SearchTask(job, limits, **settings)


def compile_plan(run: Run, *, topology: str, devices: Sequence[jax.Device]) -> None:
    """Prints the plan for a machine that need not be here, with its compiler's report.

    Args:
      devices: those of the topology that the run takes.

    Raises:
      UserError: the mesh is not of that many devices, or the run does not fit them.
    """
    # The machine tells the platform, whose compiler decides what a step keeps in memory.
    job = plan_job(run, machine_of(devices))
    print_plan(job, optimizer=build_run_optimizer(run), topology=topology, devices=devices)
    available = available_bytes(devices)
    if available is not None:
        check_fits_devices(job, devices, available=available)
