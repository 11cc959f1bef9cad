"""Refuses a run that cannot fit before anything is allocated, and names settings that would fit."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jtrain.errors import UserError
from jtrain.layout import Layout, LayoutSpec
from jtrain.mesh import BATCH_AXES, MeshSpec
from jtrain.optim import Muon
from jtrain.plan.estimate.memory import MemoryPlan, memory
from jtrain.plan.job import Job
from jtrain.plan.search import SLACK
from jtrain_kernels.device import from_device

GIB = 2**30

MARGIN = {"gpu": 1.15, "tpu": 1.15, "cpu": 1.5}
"""Platform -> largest ratio of estimated to available bytes that is still let through, so that no run that fits is
refused. The estimate was at most 10 % above what compilers allocate for H200 and v5p (`python -m jtrain.bench
plan_accuracy`), and 12.5 % for small shapes, much of which a TPU keeps in vector memory. The margin is wider for
XLA:CPU: it widens some bfloat16 arrays, and the estimate was not fitted to it. Settings that the message offers fit
without a margin."""


def available_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Bytes that a step may use on one of `devices`; None if unknown.

    An accelerator reports its allocator's limit; of a compile-only device there is only the data sheet. CPU devices
    share the free memory of this machine, also with several processes, because they then emulate a cluster on it.
    """
    device = next((d for d in devices if d.process_index == jax.process_index()), devices[0])
    if device.platform == "cpu":
        free = free_host_bytes()
        return None if free is None else free // len(devices)
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
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def check_fits(job: Job, *, available: int, asked: Layout | None = None) -> MemoryPlan:
    """Returns the memory plan of a job that fits into `available` bytes per device.

    Args:
      asked: the layout of the user's config, if it is not the job's: the changes offered are relative to it.

    Raises:
      UserError: the job does not fit; the message has both sizes and settings that would fit.
    """
    plan = memory(job)
    if plan.total_bytes <= MARGIN[job.platform] * available:
        return plan
    ways = ways_out(job, limit=available, asked=asked)
    largest = sorted(plan.classes().items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    out = (
        "Any of these fits:\n" + "\n".join(ways)
        if ways
        else (
            f"No ZeRO stage, remat, accumulation, offload{', smaller state' if smaller_states(job) else ''} or "
            "mesh.data up to 4096 alone makes it fit: set a smaller model or data.seq_len, or raise mesh.tensor or "
            "mesh.context."
        )
    )
    raise UserError(
        f"this run needs {plan.total_bytes / GIB:.1f} GiB per device ({parts} GiB), but {available / GIB:.1f} GiB are "
        f"available. {out}"
    )


def check_fits_devices(job: Job, devices: Sequence[jax.Device], *, available: int) -> None:
    """Refuses a job that does not fit into the present devices, also if its mesh has another size.

    `make_mesh` refuses a mesh of another size later. This check comes first because a user with one device and a config
    for eight needs to know whether the model would fit on one at all.
    """
    asked = job.layout
    data = len(devices) // (asked.mesh.size // asked.mesh.shape["data"] // asked.mesh.replica)
    if asked.mesh.size != len(devices) and data and job.global_batch % data == 0:
        mesh = dataclasses.replace(asked.mesh, replica=1, data=data)
        job = job.relaid(dataclasses.replace(asked.spec, microbatches=job.global_batch // data), mesh)
    check_fits(job, available=available, asked=asked)


def ways_out(job: Job, *, limit: int, asked: Layout | None = None, host: bool = True) -> list[str]:
    """Up to four lines of layout settings that need at most `limit` bytes per device, the smallest change first.

    Args:
      asked: as in `check_fits`.
      host: True if offloading may be offered, that is, if the host's memory is known.
    """
    ways: list[str] = []
    offered: set[str] = set()
    offloads = host and job.platform != "cpu" and not isinstance(job.optimizer, Muon)
    offloads &= not job.layout.spec.offload.unified_memory
    for change in _changes(job, asked or job.layout, offloads=offloads):
        try:
            changed = with_state(job, change.state)
            needed = memory(changed.relaid(change.layout, change.mesh, global_batch=change.global_batch)).total_bytes
        except ValueError:
            continue  # does not split evenly
        on_host = "as_needed" in change.text  # as_needed keeps SLACK free, and moves no more than it must
        if needed <= limit * (1 - SLACK if on_host else 1) and change.text and change.text not in offered:
            offered.add(change.text)
            ways.append(f"  {change.text}  ({'down to ' if on_host else ''}{needed / GIB:.1f} GiB)")
        if len(ways) == 4:
            break
    return ways


type StateFormats = tuple[tuple[str, str], ...]
"""Config paths of the optimizer or of `precision`, with other values."""

_INT8: StateFormats = (("optimizer.moment_dtype", "int8"),)
_BF16: StateFormats = (("precision.param_dtype", "bfloat16"), ("optimizer.param_rounding", "stochastic"))


def smaller_states(job: Job) -> list[StateFormats]:
    """Formats of parameters and moments that take less memory, the smallest change first; they change the losses."""
    optimizer, param_dtype = job.optimizer, job.layout.precision.param_dtype
    if isinstance(optimizer, Muon):
        return []
    moments = _INT8 if optimizer.moment_dtype != "int8" else ()
    params = _BF16 if param_dtype != "bfloat16" and optimizer.master_dtype == "none" else ()
    return list(dict.fromkeys(state for state in (moments, params, params + moments) if state))


def with_state(job: Job, state: StateFormats) -> Job:
    """The same job with other formats of parameters and moments."""
    if not state:
        return job
    values: dict[str, dict[str, Any]] = {"optimizer": {}, "precision": {}}
    for path, value in state:
        component, _, field = path.partition(".")
        values[component][field] = value
    precision = dataclasses.replace(job.layout.precision, **values["precision"])
    optimizer = dataclasses.replace(job.optimizer, **values["optimizer"])
    return dataclasses.replace(job, optimizer=optimizer, layout=dataclasses.replace(job.layout, precision=precision))


def set_options(state: StateFormats) -> str:
    """The `--set` options that select formats."""
    return " ".join(f"--set {path}={value}" for path, value in state)


@dataclasses.dataclass(frozen=True)
class _Change:
    """Another layout, batch and formats of the state, with the `--set` options that select them."""

    text: str
    layout: LayoutSpec
    mesh: MeshSpec
    global_batch: int
    state: StateFormats = ()


def _changes(job: Job, asked: Layout, *, offloads: bool) -> Iterator[_Change]:
    """Yields other settings, the smallest change first: on the same number of devices, then on more.

    Args:
      offloads: True if the optimizer's state can be kept in host memory.
    """
    spec, global_batch = job.layout.spec, job.global_batch

    def change(
        new: LayoutSpec, mesh: MeshSpec, batch: int, *, on_host: tuple[str, ...] = (), state: StateFormats = ()
    ) -> _Change:
        changes = {
            "mesh.replica": (asked.mesh.replica, mesh.replica),
            "mesh.data": (asked.mesh.shape["data"], mesh.shape["data"]),
            "layout.zero_stage": (asked.spec.zero_stage, new.zero_stage),
            "layout.remat": (asked.spec.remat, new.remat),
            "layout.microbatches": (asked.spec.microbatches, new.microbatches),
            "data.global_batch": (global_batch, batch),
            **{f"layout.offload.{name}": (getattr(asked.spec.offload, name), "as_needed") for name in on_host},
            **{path: (None, value) for path, value in state},
        }
        return _Change(
            " ".join(f"--set {path}={to}" for path, (was, to) in changes.items() if was != to), new, mesh, batch, state
        )

    stages = [stage for stage in (0, 1, 2, 3) if stage >= spec.zero_stage]
    remats = ["none", "full"] if spec.remat == "none" else ["full"] if spec.remat == "full" else [spec.remat, "full"]
    now = job.layout.mesh
    for data in (now.data, *(now.data * 2**k for k in range(1, 13) if now.data * 2**k <= 4096)):
        mesh = dataclasses.replace(now, data=data)
        shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
        batch = max(global_batch, shards)
        parts = sorted({spec.microbatches, max(1, batch // shards)})
        on_host: list[tuple[str, ...]] = [()]
        if offloads and mesh == now:
            on_host += [("optimizer",), *([("optimizer", "params")] if job.model.scan_layers else [])]
        for names, stage, remat, microbatches in itertools.product(on_host, stages, remats, parts):
            save = spec.remat_save if remat == "named" else ()
            offload: Any = dataclasses.replace(spec.offload, **dict.fromkeys(names, 1.0))
            new = dataclasses.replace(
                spec, zero_stage=stage, remat=remat, remat_save=save, microbatches=microbatches, offload=offload
            )
            yield change(new, mesh, batch, on_host=names)
        if mesh != now:
            continue
        full = dataclasses.replace(
            spec, zero_stage=3 if mesh.zero_shards > 1 else spec.zero_stage, remat="full", remat_save=(), microbatches=1
        )
        if shards < global_batch:
            yield change(full, mesh, shards)
        for of_layers in (spec, dataclasses.replace(full, microbatches=parts[-1])):
            for state in smaller_states(job):
                yield change(of_layers, mesh, global_batch, state=state)
