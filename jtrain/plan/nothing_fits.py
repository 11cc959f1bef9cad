"""The answer where no layout fits: the one that comes closest, and changes that would make one fit."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator

from jtrain.errors import UserError
from jtrain.layout.mesh import MeshSpec
from jtrain.layout.offload_spec import OFFLOADABLE
from jtrain.plan.estimate.memory import MemoryPlan
from jtrain.plan.search import meshes
from jtrain.plan.search_task import Point, SearchTask, evaluate, fits
from jtrain.plan.smaller_settings import GIB, set_options, smaller_states, with_state
from jtrain.runtime.platform import HOST_SHARE
from jtrain.step.layout_choices import frugal, with_shares

MAX_DEVICES = 4096
"""Devices up to which a layout is looked for."""


def nearest_miss(task: SearchTask, candidate_meshes: Iterable[MeshSpec]) -> Point:
    """The layout that comes closest to fitting, with as much on the host as the host can hold.

    Raises:
      UserError: no mesh of the machine splits the model and the batch evenly.
    """
    # An unknown host counts as holding nothing: the miss must be one that could run.
    host_capacity = task.machine.host_bytes_per_device or 0
    candidates = [
        point for point in _frugal_points(task, candidate_meshes) if point.plan.host_bytes <= host_capacity
    ]
    if not candidates:
        raise UserError(
            f"no mesh of {task.machine.count} devices splits data.global_batch={task.job.global_batch}, "
            f"model.d_model={task.job.model.d_model} and data.seq_len={task.job.seq_len} evenly. "
            f"Set data.global_batch to a multiple of {task.machine.count}, or change --count."
        )
    return min(candidates, key=lambda point: point.plan.total_bytes)


def _candidate_meshes(task: SearchTask, mesh: MeshSpec | None) -> Iterable[MeshSpec]:
    return meshes(task) if mesh is None else [mesh]


def _frugal_points(task: SearchTask, candidate_meshes: Iterable[MeshSpec]) -> Iterator[Point]:
    """Yields the layouts of least memory on each mesh: without offload, with the optimizer's, with all."""
    for mesh in candidate_meshes:
        base = frugal(task.config_spec, mesh)
        offloadable = task.offloadable(base, mesh) if task.machine.host_bytes_per_device is not None else ()
        # A dict keeps the order and drops equal choices.
        fields = dict.fromkeys(((), offloadable[:1], offloadable))
        max_microbatches = task.job.global_batch // mesh.batch_shards
        # One microbatch needs no accumulator; the largest number has the smallest activations.
        for microbatches, on_host in itertools.product(sorted({1, max_microbatches}), fields):
            shares = dict.fromkeys(OFFLOADABLE, 0.0) | dict.fromkeys(on_host, 1.0)
            spec = with_shares(dataclasses.replace(base, microbatches=microbatches), task.config_spec, shares)
            try:
                yield evaluate(task, spec, mesh, timed=False)
            except ValueError:
                break  # does not split evenly


def first_fit(task: SearchTask, mesh: MeshSpec | None = None) -> Point | None:
    """A layout that fits on the machine's devices, or else on the fewest times 2, 4, 8 ... as many.

    With more devices than sequences the batch grows to one sequence per device.

    Args:
      mesh: tried first, on more devices with a longer `data` axis; None for any mesh of the machine.
    """
    machine_count, devices_per_host = task.machine.count, task.machine.device.host.devices
    # Powers of two times the machine, in whole hosts.
    for count in (machine_count * 2**k for k in range(MAX_DEVICES.bit_length())):
        if count > max(machine_count, MAX_DEVICES) or (count > devices_per_host and count % devices_per_host):
            continue
        # Rounded up to a multiple of the devices: one sequence for each at least.
        batch = (
            task.job.global_batch if count == machine_count else -(-task.job.global_batch // count) * count
        )
        larger = task.changed(machine=dataclasses.replace(task.machine, count=count), global_batch=batch)
        # A replica holds all that the mesh without it splits.
        candidates = itertools.chain(
            _scaled(mesh, count), (candidate for candidate in meshes(larger) if candidate.replica == 1)
        )
        if point := next(
            (point for point in _frugal_points(larger, candidates) if fits(larger, point.plan)), None
        ):
            return point
    return None


def _scaled(mesh: MeshSpec | None, count: int) -> list[MeshSpec]:
    """The mesh on `count` devices, with all axes but `replica` and `data` as they are."""
    fixed_devices = 0 if mesh is None else mesh.size // mesh.replica // mesh.shape["data"]
    return (
        [dataclasses.replace(mesh, replica=1, data=count // fixed_devices)]
        if mesh and count % fixed_devices == 0
        else []
    )


def suggest_changes(task: SearchTask, mesh: MeshSpec | None, *, fixed: bool) -> list[str]:
    """Changes of state, batch, machine or length that make some layout fit, as command-line options.

    Args:
      mesh, fixed: as in `no_point`.
    """

    def any_fits(changed: SearchTask) -> bool:
        return any(
            fits(changed, point.plan) for point in _frugal_points(changed, _candidate_meshes(changed, mesh))
        )

    suggestions: list[str] = []
    for state in smaller_states(task.job):
        with contextlib.suppress(ValueError):  # a layout that cannot have these formats
            if any_fits(dataclasses.replace(task, job=with_state(task.job, state))):
                suggestions.append(set_options(state))
                break
    # One sequence per device: over `data` alone that is one microbatch, which has no accumulator.
    batch = task.machine.count
    if batch < task.job.global_batch and any_fits(task.changed(global_batch=batch)):
        suggestions.append(set_options([("data.global_batch", batch)]))
    if not fixed and task.machine.device.host.link_bytes_per_s is not None:
        # A host that holds anything shows how much would be enough.
        ample = task.changed(machine=dataclasses.replace(task.machine, host_memory_bytes=2**60))
        fitting_host_bytes = [
            point.plan.host_bytes
            for point in _frugal_points(ample, _candidate_meshes(ample, mesh))
            if fits(ample, point.plan)
        ]
        if fitting_host_bytes:
            # Of a whole host, of which a run may fill HOST_SHARE.
            required_bytes = min(fitting_host_bytes) * task.machine.devices_per_host / HOST_SHARE
            suggestions.append(f"--host-memory {math.ceil(required_bytes / GIB)}GiB (or more, per host)")
    if (fit := first_fit(task, mesh)) is not None:
        suggestions.append(_larger_machine_options(task, fit, mesh, fixed=fixed))
    # The length comes last, because it changes what the model learns from.
    for divisor in (2, 4, 8):
        length = task.job.seq_len // divisor
        if length and any_fits(task.changed(seq_len=length)):
            suggestions.append(set_options([("data.seq_len", length)]))
            break
    return [suggestion for suggestion in suggestions if suggestion]


def _larger_machine_options(task: SearchTask, fit: Point, mesh: MeshSpec | None, *, fixed: bool) -> str:
    """Options for the mesh and the devices of a layout that fits."""
    count, batch_setting = fit.mesh.size, []
    if fit.job.global_batch != task.job.global_batch:
        batch_setting = [("data.global_batch", fit.job.global_batch)]
    if fixed:
        # Only axes that differ from the config's mesh are printed.
        config_mesh = MeshSpec() if mesh is None else mesh
        axes = [
            (f"mesh.{axis}", size) for axis, size in fit.mesh.shape.items() if size != config_mesh.shape[axis]
        ]
        return set_options([*axes, *batch_setting]) + (
            f" on {count} devices" if count > task.machine.count else ""
        )
    options = ["--search"] if mesh is not None else []
    options += [f"--count {count}"] if count > task.machine.count else []
    options += [set_options(batch_setting)] if batch_setting else []
    device = task.machine.device
    if count > device.linked and device.host.network_bytes_per_s is None:
        options += ["--network 25 (Gbit/s of your network, per device)"]
    return " ".join(options)


def no_point(
    task: SearchTask, mesh: MeshSpec | None = None, *, fixed: bool = False, is_local: bool = False
) -> UserError:
    """The error for a search that finds nothing: the closest layout, and changes that would make one fit.

    Args:
      mesh: the mesh that the search keeps; None if it tries all.
      fixed: True if the machine cannot be changed, because the run is on it.
      is_local: True if its devices are here; the message then begins with them.
    """
    # Raises an error of its own where not even a mesh splits evenly.
    miss = nearest_miss(task, _candidate_meshes(task, mesh))
    settings = " ".join(f"{path}={value}" for path, value in miss.settings.items())
    suggestions = suggest_changes(task, mesh, fixed=fixed)
    fallback = "Set a smaller model or data.seq_len" + ("" if fixed else ", or another --device")
    advice = "It would fit with any of: " + "; ".join(suggestions) if suggestions else fallback
    machine, budget = task.machine, task.budget_bytes
    prefix = (
        f"{describe_devices(machine.count, machine.device.name, machine.hbm_bytes)}; " if is_local else ""
    )
    return UserError(
        f"{prefix}nothing fits into {machine}: the nearest miss takes {miss.plan.total_bytes / GIB:.1f} GiB "
        f"per device ({largest_parts(miss.plan)}), but {budget / GIB:.1f} of {machine.hbm_bytes / GIB:.1f} "
        f"GiB may be used ({settings}). {advice}."
    )


def describe_devices(count: int, kind: str, available: int) -> str:
    """Says what a run is on, such as `1 device is here: cpu, 23.0 GiB`."""
    device_text = f"{kind}, {available / GIB:.1f} GiB"
    return (
        f"1 device is here: {device_text}" if count == 1 else f"{count} devices are here: {device_text} each"
    )


def largest_parts(plan: MemoryPlan) -> str:
    """The three largest classes of a plan."""
    largest = sorted(plan.classes().items(), key=lambda item: -item[1])[:3]
    return f"{', '.join(f'{name} {size / GIB:.1f}' for name, size in largest)} GiB"
