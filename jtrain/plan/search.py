"""Search for the layout that trains a model fastest on a machine, among the layouts that fit.

The search enumerates every mesh of (replica, data, expert, tensor), ZeRO stage, remat and number of microbatches, and
estimates each in closed form. A layout that does not fit is tried again with the smallest share on the host that makes
it fit. Layouts are ranked by predicted step time. More microbatches are never faster, so of layouts that differ only in
microbatches the first that fits is kept.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jtrain.dims import splits_heads
from jtrain.errors import UserError
from jtrain.layout import LayoutSpec, OffloadSpec
from jtrain.mesh import MeshSpec
from jtrain.model.forward_placement import SAVEABLE
from jtrain.model.layer_scan import check_scanned
from jtrain.optim import Muon, check_layout
from jtrain.plan.estimate.machine import Machine
from jtrain.plan.estimate.memory import MemoryPlan, memory
from jtrain.plan.estimate.step_time import Assumptions, StepTime, step_time
from jtrain.plan.job import Job

SLACK = 0.15
"""Error margin of the closed form: the fraction of the memory that an estimate has to leave free."""

REMATS: tuple[tuple[str, ...] | None, ...] = (
    None,  # keep everything
    SAVEABLE,
    tuple(name for name in SAVEABLE if not name.startswith("mlp")),
    ("attention_q", "attention_k", "attention_v", "attention"),
    ("attention",),
    (),  # keep the layer's input only
)
"""Activations that a layer keeps for its backward pass, from the most memory and least work to the opposite."""

SHARES = tuple(k / 20 for k in range(1, 21))
"""Shares of offload to try; whole arrays are moved, so finer steps would give the same bytes."""

_FIELDS: tuple[str, ...] = ("optimizer", "activations", "params")
"""Fields of layout.offload, from the least to the most often copied."""


@dataclasses.dataclass(frozen=True)
class SearchTask:
    """A job whose layout is searched for, with the limits of the search.

    job: model, optimizer, batch and machine; the search replaces its layout.
    asked: layout settings of the config; a search decides `layout_settings` and keeps the others.
    memory_share: fraction of a device's memory that the estimate may fill.
    """

    job: Job
    asked: LayoutSpec
    assume: Assumptions = dataclasses.field(default_factory=Assumptions)
    memory_share: float = 1 - SLACK

    @property
    def machine(self) -> Machine:
        """The machine that layouts are compared on."""
        assert self.job.machine is not None, "a search compares times, which take a machine"
        return self.job.machine

    @property
    def offloadable(self) -> tuple[str, ...]:
        """Fields of layout.offload that may be used, from the least to the most often copied.

        Muon's state stays on the device, because its update takes whole matrices. Activations and parameters need
        model.scan_layers: only a loop over layers fetches them one by one.
        """
        can = _FIELDS if self.job.model.scan_layers else _FIELDS[:1]
        return tuple(name for name in can if name != "optimizer" or not isinstance(self.job.optimizer, Muon))

    @property
    def budget_bytes(self) -> int:
        """Bytes that a step may take on one device by the closed form."""
        return int(self.machine.hbm_bytes * self.memory_share)

    def changed(self, **changes: Any) -> "SearchTask":
        """The same search of a job with other fields."""
        return dataclasses.replace(self, job=dataclasses.replace(self.job, **changes))


@dataclasses.dataclass(frozen=True)
class Point:
    """One layout of a job, with the memory that it takes and the predicted step time.

    timed: None if only memory was asked for.
    """

    job: Job
    plan: MemoryPlan
    timed: StepTime | None

    @property
    def spec(self) -> LayoutSpec:
        return self.job.layout.spec

    @property
    def mesh(self) -> MeshSpec:
        return self.job.layout.mesh

    @property
    def step_s(self) -> float:
        """Predicted step time in seconds; infinite if it was not asked for."""
        return math.inf if self.timed is None else self.timed.step_s

    @property
    def settings(self) -> dict[str, object]:
        """Config path -> value of every setting that the search decided."""
        axes = ("replica", "data", "expert", "tensor", *(["stage"] if self.mesh.stage > 1 else []))
        found: dict[str, object] = {f"mesh.{axis}": getattr(self.mesh, axis) for axis in axes}
        if (pipeline := self.job.layout.pipeline) is not None:
            found |= {f"pipeline.{name}": getattr(pipeline.spec, name) for name in ("schedule", "chunks")}
        return found | layout_settings(self.spec)


def layout_settings(spec: LayoutSpec) -> dict[str, object]:
    """Config path -> value of every setting that `layout.auto` decides."""
    names = ("zero_stage", "remat", "remat_save", "microbatches")
    found: dict[str, object] = {f"layout.{name}": getattr(spec, name) for name in names}
    return found | {f"layout.offload.{name}": getattr(spec.offload, name) for name in (*_FIELDS, "update")}


def evaluate(task: SearchTask, spec: LayoutSpec, mesh: MeshSpec, *, timed: bool = True) -> Point:
    """Estimates one layout, also one that does not fit.

    Args:
      timed: True if the step time is wanted as well.

    Raises:
      UserError: a dimension or the batch does not split evenly.
    """
    job = task.job.relaid(spec, mesh)
    check_layout(job.optimizer, job.layout)
    plan = memory(job)
    return Point(job, plan, step_time(job, plan, assume=task.assume) if timed else None)


def fits(task: SearchTask, plan: MemoryPlan, *, host_known: bool = True) -> bool:
    """True if a plan fits into the device and its share of the host.

    Args:
      host_known: True if a host of unknown memory counts as having none; False if it counts as having enough.
    """
    if plan.total_bytes > task.budget_bytes:
        return False
    there = task.machine.host_bytes_per_device
    if there is None:
        return not (plan.host_bytes and host_known)
    return plan.host_bytes <= there


def meshes(task: SearchTask) -> Iterator[MeshSpec]:
    """Yields every (replica, data, expert, tensor) mesh of the machine that splits the model and the batch evenly."""
    model, count = task.job.model, task.machine.count
    for tensor in divisors(count):
        if any(size % tensor for size in (model.d_ff, model.vocab_size, task.job.seq_len)):
            continue
        if not splits_heads(model.num_heads, model.num_kv_heads, tensor):
            continue
        if task.job.global_batch % (count // tensor):
            continue
        for data, expert in itertools.product(divisors(count // tensor), divisors(count // tensor)):
            width = data * tensor if tensor > model.num_kv_heads else data  # D of shared key heads is split over both
            if model.d_model % width or count // tensor % (data * expert):
                continue
            if expert == 1 or (model.moe is not None and model.moe.num_experts % expert == 0):
                yield MeshSpec(replica=count // tensor // data // expert, data=data, expert=expert, tensor=tensor)


def search(task: SearchTask, over: Iterable[MeshSpec]) -> list[Point]:
    """Returns the layouts on these meshes that fit, the fastest first."""
    found: list[Point] = []
    misses: list[Point] = []
    for series in _series(task, over):
        for point in series:
            if fits(task, point.plan):
                found.append(point)
                if point.mesh.stage == 1:  # with stages, more microbatches shorten the bubble
                    break
                continue
            misses.append(point)
    # Offloading only costs time, so only layouts that would be faster than the best without it are tried again.
    best_s = min((point.step_s for point in found), default=math.inf)
    if task.machine.host_bytes_per_device is not None:
        for point in sorted(misses, key=lambda point: point.step_s):
            if point.step_s >= best_s:
                break
            for helped in _with_host(task, point):
                found.append(helped)
                best_s = min(best_s, helped.step_s)
    return sorted(found, key=lambda point: (point.step_s, point.plan.total_bytes))


def fastest_miss(task: SearchTask, over: Iterable[MeshSpec]) -> Point | None:
    """The layout that would be fastest if memory did not matter; None if it fits."""
    point = min((point for series in _series(task, over) for point in series), key=lambda p: p.step_s, default=None)
    return None if point is None or fits(task, point.plan) else point


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
        most = task.job.global_batch // (mesh.replica * mesh.data)
        # One microbatch needs no accumulator; the largest number has the smallest activations.
        for parts, fields in itertools.product({1, most}, ((), task.offloadable[:1], task.offloadable)):
            shares = dict.fromkeys(_FIELDS, 0.0) | dict.fromkeys(fields, 1.0)
            spec = dataclasses.replace(base, microbatches=parts, offload=_offload(task, base, shares))
            try:
                yield evaluate(task, spec, mesh, timed=False)
            except ValueError:
                break  # does not split evenly


def what_would_fit(task: SearchTask, over: Callable[[SearchTask], Iterable[MeshSpec]]) -> list[str]:
    """Changes of the machine or the sequence length that make some layout fit, as command-line options."""
    ways: list[str] = []
    if task.machine.device.host.link_bytes_per_s is not None:
        enough = [point.plan for point in _frugal(task, over(task)) if point.plan.total_bytes <= task.budget_bytes]
        if enough:
            needed = min(plan.host_bytes for plan in enough) * task.machine.devices_per_host
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


def resolve_as_needed(task: SearchTask, mesh: MeshSpec) -> LayoutSpec:
    """The asked layout with every `as_needed` share resolved: the smallest that fits, `none` if all fits without.

    Shares are raised from the least to the most often copied: optimizer, activations, params.

    Raises:
      UserError: the run does not fit even with all of them on the host.
    """
    open_fields = [name for name in _FIELDS if getattr(task.asked.offload, name) == "as_needed"]
    spec = dataclasses.replace(task.asked, offload=_offload(task, task.asked, dict.fromkeys(open_fields, 0.0)))
    if "activations" in open_fields or "params" in open_fields:
        check_scanned(task.job.model.scan_layers)
    if not open_fields or fits(task, evaluate(task, spec, mesh, timed=False).plan):
        return spec
    for name in open_fields:
        if (shared := _smallest_share(task, spec, mesh, name)) is not None:
            return shared
        spec = dataclasses.replace(spec, offload=_offload(task, spec, {name: 1.0}))
    plan = evaluate(task, spec, mesh, timed=False).plan
    there = task.machine.host_bytes_per_device
    held = "an unknown size (give it with --host-memory)" if there is None else f"{there / 2**30:.1f}"
    raise UserError(
        f"layout.offload.{', .'.join(open_fields)}=as_needed: with all of it on the host a device needs "
        f"{plan.total_bytes / 2**30:.1f} GiB of {task.budget_bytes / 2**30:.1f} that may be used, and its share of the "
        f"host {plan.host_bytes / 2**30:.1f} GiB of {held}. "
        "Set layout.auto=True, or more of layout.zero_stage, layout.remat, layout.microbatches or mesh.data."
    )


def _series(task: SearchTask, over: Iterable[MeshSpec]) -> Iterator[list[Point]]:
    """Yields lists of layouts that differ only in microbatches, the fewest first."""
    for mesh in over:
        stages = (0, 1, 2, 3) if mesh.zero_shards > 1 else (0,)
        for stage, kept in itertools.product(stages, REMATS):
            if kept == SAVEABLE and stage == 3 and mesh.zero_shards > 1:
                continue  # remat=none keeps the same under stage 3
            remat = "none" if kept is None else "named" if kept else "full"
            base = dataclasses.replace(
                task.asked,
                zero_stage=stage,
                remat=remat,
                remat_save=kept or (),
                microbatches=1,
                offload=_offload(task, task.asked, dict.fromkeys(_FIELDS, 0.0)),
                auto=False,
            )
            try:
                job = task.job.relaid(base, mesh)
                rows = job.rows()
                check_layout(job.optimizer, job.layout)
            except ValueError:
                continue  # does not split evenly
            # Outside of the try: an unknown figure of the machine is an error, not a layout that does not fit.
            specs = [dataclasses.replace(base, microbatches=parts) for parts in divisors(rows) if parts >= mesh.stage]
            yield [evaluate(task, spec, mesh) for spec in specs]


def _with_host(task: SearchTask, miss: Point) -> Iterator[Point]:
    """Yields layouts that make a miss fit with host memory: per combination, the smallest share of its last field."""
    if miss.mesh.stage > 1:
        return
    everything = _offload(task, miss.spec, dict.fromkeys(task.offloadable, 1.0))
    most = evaluate(task, dataclasses.replace(miss.spec, offload=everything), miss.mesh, timed=False).plan
    if most.total_bytes > task.budget_bytes:
        return
    each = (most.host_optimizer, most.host_activations, most.host_parameters)
    saves: dict[str, int] = dict(zip(_FIELDS, each, strict=True))
    for size in range(1, len(task.offloadable) + 1):
        for fields in itertools.combinations(task.offloadable, size):
            if miss.plan.total_bytes - sum(saves[name] for name in fields) > task.budget_bytes:
                continue  # not enough, even with all of these on the host
            *whole, last = fields
            spec = dataclasses.replace(miss.spec, offload=_offload(task, miss.spec, dict.fromkeys(whole, 1.0)))
            if (shared := _smallest_share(task, spec, miss.mesh, last)) is not None:
                yield evaluate(task, shared, miss.mesh)


def _smallest_share(task: SearchTask, spec: LayoutSpec, mesh: MeshSpec, field: str) -> LayoutSpec | None:
    """`spec` with the smallest share of `field` on the host that fits; None if even all of it is not enough."""

    def with_share(share: float) -> LayoutSpec:
        return dataclasses.replace(spec, offload=_offload(task, spec, {field: share}))

    def fits_device(share: float) -> bool:
        try:
            return evaluate(task, with_share(share), mesh, timed=False).plan.total_bytes <= task.budget_bytes
        except ValueError:
            return False  # the share is smaller than the smallest array

    if not fits_device(1.0):
        return None
    low, high = 0, len(SHARES) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits_device(SHARES[middle]) else (middle + 1, high)
    found = with_share(SHARES[high])
    return found if fits(task, evaluate(task, found, mesh, timed=False).plan) else None


def _offload(task: SearchTask, spec: LayoutSpec, shares: dict[str, float]) -> OffloadSpec:
    """The offload of `spec` with these shares replaced; 0 means `none`.

    `update` is the asked one if any optimizer state is on the host; `unified_memory` if nothing is.
    """
    asked = task.asked.offload
    named: dict[str, Any] = {name: shares.get(name, getattr(spec.offload, name)) or "none" for name in _FIELDS}
    return OffloadSpec(
        **named,
        update="device" if named["optimizer"] == "none" else asked.update,
        unified_memory=asked.unified_memory and set(named.values()) == {"none"},
    )


def divisors(n: int) -> list[int]:
    """Divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]
