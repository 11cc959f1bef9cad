"""The answer where no layout fits: the one that comes closest, and changes that would make one fit."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

from jtrain.errors import UserError
from jtrain.mesh import MeshSpec
from jtrain.plan.estimate.machine import HOST_RESERVE
from jtrain.plan.fit_check import set_options, smaller_states, with_state
from jtrain.plan.search import OFFLOADS, Point, SearchTask, evaluate, fits, meshes, offload_of


def nearest_miss(task: SearchTask, over: Iterable[MeshSpec]) -> Point:
    """The layout that comes closest to fitting, with as much on the host as the host can hold.

    Raises:
      UserError: no mesh of the machine splits the model and the batch evenly.
    """
    there = task.machine.host_bytes_per_device or 0
    candidates = [point for point in _frugal(task, over) if point.plan.host_bytes <= there]
    if not candidates:
        raise UserError(
            f"no mesh of {task.machine.count} devices splits data.global_batch={task.job.global_batch}, "
            f"model.d_model={task.job.model.d_model} and data.seq_len={task.job.seq_len} evenly. "
            f"Set data.global_batch to a multiple of {task.machine.count}, or change --count."
        )
    return min(candidates, key=lambda point: point.plan.total_bytes)


def _frugal(task: SearchTask, over: Iterable[MeshSpec]) -> Iterator[Point]:
    """Yields the layouts of least memory on each mesh: without offload, with the optimizer's state, with everything."""
    for mesh in over:
        stage = 3 if mesh.zero_shards > 1 else 0
        base = dataclasses.replace(task.asked, zero_stage=stage, remat="full", remat_save=(), auto=False)
        most = task.job.global_batch // mesh.batch_shards
        # One microbatch needs no accumulator; the largest number has the smallest activations.
        for parts, fields in itertools.product({1, most}, ((), task.offloadable[:1], task.offloadable)):
            shares = dict.fromkeys(OFFLOADS, 0.0) | dict.fromkeys(fields, 1.0)
            spec = dataclasses.replace(base, microbatches=parts, offload=offload_of(task, base, shares))
            try:
                yield evaluate(task, spec, mesh, timed=False)
            except ValueError:
                break  # does not split evenly


def what_would_fit(task: SearchTask, over: Callable[[SearchTask], Iterable[MeshSpec]]) -> list[str]:
    """Changes of the machine, the state, the batch or the length that make some layout fit, as command-line options."""
    ways: list[str] = []
    for state in smaller_states(task.job):
        smaller = dataclasses.replace(task, job=with_state(task.job, state))
        if any(fits(smaller, point.plan) for point in _frugal(smaller, over(smaller))):
            ways.append(set_options(state))
            break
    if (batch := task.machine.count) < task.job.global_batch:  # one microbatch has no accumulator
        fewer = task.changed(global_batch=batch)
        if any(fits(fewer, point.plan) for point in _frugal(fewer, over(fewer))):
            ways.append(f"--set data.global_batch={batch}")
    if task.machine.device.host.link_bytes_per_s is not None:
        enough = [point.plan for point in _frugal(task, over(task)) if point.plan.total_bytes <= task.budget_bytes]
        if enough:
            needed = min(plan.host_bytes for plan in enough) * task.machine.devices_per_host / (1 - HOST_RESERVE)
            ways.append(f"--host-memory {math.ceil(needed / 2**30)}GiB or more per host")
    for factor in (2, 4, 8, 16, 32, 64):
        count = task.machine.count * factor
        if count > task.machine.device.host.devices and count % task.machine.device.host.devices:
            continue
        batch = -(-task.job.global_batch // count) * count
        larger = task.changed(machine=dataclasses.replace(task.machine, count=count), global_batch=batch)
        if any(fits(larger, point.plan) for point in _frugal(larger, meshes(larger))):
            also = f" --set data.global_batch={batch}" if batch != task.job.global_batch else ""
            ways.append(f"--count {count}{also}")
            break
    for part in (2, 4, 8):
        length = task.job.seq_len // part
        shorter = task.changed(seq_len=length)
        if length and any(fits(shorter, point.plan) for point in _frugal(shorter, over(shorter))):
            ways.append(f"--set data.seq_len={length}")
            break
    return ways


def no_point(task: SearchTask, over: Callable[[SearchTask], Iterable[MeshSpec]], *, fixed: bool = False) -> UserError:
    """The error for a search that finds nothing: the layout that comes closest, and changes that would make one fit.

    Args:
      fixed: True if the machine cannot be changed, because the run is on it.
    """
    miss = nearest_miss(task, over(task))
    settings = " ".join(f"{path}={value}" for path, value in miss.settings.items())
    largest = sorted(miss.plan.classes().items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in largest)
    ways = [way for way in what_would_fit(task, over) if way.startswith("--set") or not fixed]
    otherwise = "Set a smaller model, or use more devices" if fixed else "Set a smaller model, or another --device"
    out = "It would fit with any of: " + "; ".join(ways) if ways else otherwise
    return UserError(
        f"nothing fits into {task.machine}: the nearest miss takes {miss.plan.total_bytes / 2**30:.1f} GiB per device "
        f"({parts}), but {task.budget_bytes / 2**30:.1f} of {task.machine.hbm_bytes / 2**30:.1f} GiB may be used "
        f"({settings}). {out}."
    )
