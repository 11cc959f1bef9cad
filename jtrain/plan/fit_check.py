"""Refuses a run that cannot fit before anything is allocated, and names settings that would fit."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from jtrain.errors import UserError
from jtrain.layout.layout import Layout
from jtrain.plan.estimate.machine import Machine
from jtrain.plan.estimate.memory import MemoryPlan, memory
from jtrain.plan.job import Job
from jtrain.plan.nothing_fits import MAX_DEVICES, describe_devices, first_fit, largest_parts
from jtrain.plan.search_task import SearchTask
from jtrain.plan.smaller_settings import (
    GIB,
    FittingSettings,
    as_text,
    fitting_settings,
    option_lines,
    settings_of,
)
from jtrain_kernels.device import DEVICES, from_device

MARGIN = {"gpu": 1.15, "tpu": 1.15, "cpu": 1.5}
"""Platform -> largest ratio of estimated to available bytes that is still let through, so that no run that
fits is refused. The estimate was at most 10 % above what compilers allocate for H200 and v5p
(`bench/NOTES.md`), and 12.5 % for small shapes, much of which a TPU keeps in vector memory. The margin is
wider for XLA:CPU: it widens some bfloat16 arrays, and the estimate was not fitted to it. Settings that the
message offers fit without a margin."""


def available_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Bytes that a step may use on one of `devices`; None if unknown.

    An accelerator reports its allocator's limit; of a compile-only device there is only the data sheet. CPU
    devices share the free memory of this machine, also with several processes, because they then emulate a
    cluster on it.
    """
    # Only devices of this process report their memory.
    device = next((d for d in devices if d.process_index == jax.process_index()), devices[0])
    # XLA:CPU reports no limit of its own.
    if device.platform == "cpu":
        free = free_host_bytes()
        return None if free is None else free // len(devices)
    # The data sheet is the fallback for devices that report nothing.
    spec = from_device(device)
    try:
        stats = device.memory_stats() or {}
    except (jax.errors.JaxRuntimeError, NotImplementedError):  # compile-only
        stats = {}
    return stats.get("bytes_limit") or (spec.hbm_bytes if spec else None)


def free_host_bytes() -> int | None:
    """Memory of this host that is free, as Linux reports it in /proc/meminfo; None on other systems."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    # Lines such as `MemAvailable:   16303248 kB`.
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def check_fits(
    job: Job, *, available: int, config_layout: Layout | None = None, devices_text: str = ""
) -> MemoryPlan:
    """Returns the memory plan of a job that fits into `available` bytes per device.

    Args:
      config_layout: the layout of the user's config, if it is not the job's: the changes offered are relative
        to it.
      devices_text: the devices that are here, as the message begins.

    Raises:
      UserError: the job does not fit; the message has both sizes and settings that would fit.
    """
    plan = memory(job)
    if plan.total_bytes <= MARGIN[job.platform] * available:
        return plan
    raise UserError(
        f"{devices_text}{'This' if devices_text else 'this'} run needs {plan.total_bytes / GIB:.1f} GiB per "
        f"device ({largest_parts(plan)}), but {available / GIB:.1f} GiB are available. "
        f"{_fitting_advice(job, available, as_text(settings_of(config_layout or job.layout, job.global_batch)))}"
    )


def _fitting_advice(job: Job, available: int, config_values: Mapping[str, str]) -> str:
    """Settings of these devices that fit, or the number of devices that does, with its settings."""
    if lines := option_lines(fitting_settings(job, limit=available), config_values):
        return "Any of these fits:\n" + "\n".join(lines)
    # A job without a machine has bytes only; an h100 stands in for the search.
    mesh = job.layout.mesh
    machine = job.machine or Machine(DEVICES["h100"], mesh.size)
    device = dataclasses.replace(machine.device, hbm_bytes=available)
    machine = dataclasses.replace(machine, device=device, count=mesh.size)
    # memory_share=1: `available` is what is free, with no margin kept.
    task = SearchTask(dataclasses.replace(job, machine=machine), job.layout.spec, memory_share=1.0)
    if (fit := first_fit(task, mesh)) is None:
        return f"Nothing fits, nor on up to {MAX_DEVICES} such devices: set a smaller model or data.seq_len."
    # The fit may have another batch than the job.
    settings = fit.settings | settings_of(fit.job.layout, fit.job.global_batch)
    fitting = FittingSettings(settings, fit.plan.total_bytes)
    count = fit.mesh.size
    lead = "This fits" if count == mesh.size else f"Nothing fits on {mesh.size} of them; on {count} this does"
    return f"{lead}:\n{'\n'.join(option_lines([fitting], config_values))}"


def check_fits_devices(job: Job, devices: Sequence[jax.Device], *, available: int) -> None:
    """Refuses a job that does not fit into the present devices, also if its mesh has another size.

    `make_mesh` refuses a mesh of another size later. This check comes first because a user with one device
    and a config for eight needs to know whether the model would fit on one at all.
    """
    config_layout = job.layout
    # The `data` axis that takes all present devices, with the other axes as they are.
    data = len(devices) // (
        config_layout.mesh.size // config_layout.mesh.shape["data"] // config_layout.mesh.replica
    )
    if (
        config_layout.mesh.size != len(devices)
        and data
        and job.global_batch % (data * config_layout.mesh.expert) == 0
    ):
        mesh = dataclasses.replace(config_layout.mesh, replica=1, data=data)
        # One sequence per device at a time: the smallest activations on this mesh.
        parts = job.global_batch // (data * config_layout.mesh.expert)
        job = job.relaid(dataclasses.replace(config_layout.spec, microbatches=parts), mesh)
    devices_text = describe_devices(len(devices), devices[0].device_kind, available)
    check_fits(job, available=available, config_layout=config_layout, devices_text=f"{devices_text}. ")


def with_host_memory(job: Job) -> Job:
    """The job on a machine whose host has the memory that is free on this one."""
    if job.machine is None or job.platform == "cpu":
        return job
    return dataclasses.replace(
        job, machine=dataclasses.replace(job.machine, host_memory_bytes=free_host_bytes())
    )
