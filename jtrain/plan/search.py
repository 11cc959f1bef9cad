"""Which layout trains a model fastest on a machine, among those that fit: enumerated, by the closed forms.

Every mesh of (replica, data, tensor), ZeRO stage, remat and number of microbatches is looked at; what does not fit is
looked at again with some of it on the host, the smallest share of it that fits. A point is ranked by its predicted
step time. More microbatches are never faster, so of a series only the first that fits is kept.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jtrain.dims import ParamInfo
from jtrain.layout import LayoutSpec, OffloadSpec, check_batch, make_layout
from jtrain.mesh import MeshSpec
from jtrain.model.stream import check_scanned
from jtrain.model.transformer import SAVEABLE, Transformer
from jtrain.optim import AdamW, Muon, check_layout
from jtrain.plan.cost import Assumptions, StepTime, step_time
from jtrain.plan.memory import MemoryPlan, memory
from jtrain.plan.network import Machine

SLACK = 0.15
"""How far the closed form may be off: what it says takes more than this much less than the memory is not relied on."""

REMATS: tuple[tuple[str, ...] | None, ...] = (
    None,  # keeps everything
    SAVEABLE,
    tuple(name for name in SAVEABLE if not name.startswith("mlp")),
    ("attention_q", "attention_k", "attention_v", "attention"),
    ("attention",),
    (),  # keeps the layer's input only
)
"""What a layer keeps for its backward pass, from most memory and least work to the opposite."""

SHARES = tuple(k / 20 for k in range(1, 21))
"""Shares of offload that are tried; whole arrays are moved, so finer ones would reach the same bytes."""

_FIELDS: tuple[str, ...] = ("optimizer", "activations", "params")
"""What can be on the host, in the order of how seldom it is copied."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be trained, on what: everything that a search does not change.

    infos: the model's parameters; a search asks for them thousands of times.
    """

    model: Transformer
    infos: tuple[ParamInfo, ...]
    optimizer: AdamW | Muon
    spec: LayoutSpec
    machine: Machine
    global_batch: int
    seq_len: int
    assume: Assumptions = dataclasses.field(default_factory=Assumptions)
    memory_share: float = 1 - SLACK

    @property
    def offloadable(self) -> tuple[str, ...]:
        """What can be on the host, in the order of how seldom it is copied.

        Muon's state cannot: it takes matrices. Nor can what only a loop over layers fetches, if that is unrolled.
        """
        can = _FIELDS if self.model.scan_layers else _FIELDS[:1]
        return tuple(name for name in can if name != "optimizer" or not isinstance(self.optimizer, Muon))

    @property
    def budget_bytes(self) -> int:
        """Bytes that a step may take on one device by the closed form."""
        return int(self.machine.hbm_bytes * self.memory_share)


@dataclasses.dataclass(frozen=True)
class Point:
    """One layout with what it takes."""

    spec: LayoutSpec
    mesh: MeshSpec
    plan: MemoryPlan
    timed: StepTime | None

    @property
    def step_s(self) -> float:
        return math.inf if self.timed is None else self.timed.step_s

    @property
    def settings(self) -> dict[str, object]:
        """Config path -> value of everything that the search decided."""
        found: dict[str, object] = {
            f"mesh.{axis}": getattr(self.mesh, axis) for axis in ("replica", "data", "expert", "tensor")
        }
        return found | layout_settings(self.spec)


def layout_settings(spec: LayoutSpec) -> dict[str, object]:
    """Config path -> value of what `layout.auto` picks."""
    names = ("zero_stage", "remat", "remat_save", "microbatches")
    found: dict[str, object] = {f"layout.{name}": getattr(spec, name) for name in names}
    return found | {f"layout.offload.{name}": getattr(spec.offload, name) for name in (*_FIELDS, "update")}


def evaluate(job: Job, spec: LayoutSpec, mesh: MeshSpec, *, timed: bool = True) -> Point:
    """One point, whether it fits or not.

    Raises:
      ValueError: a dimension or the batch does not split evenly.
    """
    layout = make_layout(spec, mesh, job.infos)
    check_layout(job.optimizer, layout)
    sizes = {"global_batch": job.global_batch, "seq_len": job.seq_len}
    plan = memory(job.model, layout, job.optimizer, **sizes, platform=job.machine.device.platform)
    took = step_time(job.model, layout, job.optimizer, plan, job.machine, **sizes, assume=job.assume) if timed else None
    return Point(spec, mesh, plan, took)


def fits(job: Job, plan: MemoryPlan, *, host_known: bool = True) -> bool:
    """Whether a plan fits into the device and its share of the host.

    Args:
      host_known: where nobody said how much memory the host has, nothing is put there; else as much as is needed.
    """
    if plan.total_bytes > job.budget_bytes:
        return False
    there = job.machine.host_bytes_per_device
    if there is None:
        return not (plan.host_bytes and host_known)
    return plan.host_bytes <= there


def meshes(job: Job) -> Iterator[MeshSpec]:
    """Every (replica, data, expert, tensor) of the machine's devices that splits the model and the batch evenly."""
    model, count = job.model, job.machine.count
    for tensor in _divisors(count):
        if any(size % tensor for size in (model.num_kv_heads, model.d_ff, model.vocab_size, job.seq_len)):
            continue
        if job.global_batch % (count // tensor):
            continue
        for data, expert in itertools.product(_divisors(count // tensor), _divisors(count // tensor)):
            if model.d_model % data or count // tensor % (data * expert):
                continue
            if expert == 1 or (model.moe is not None and model.moe.num_experts % expert == 0):
                yield MeshSpec(replica=count // tensor // data // expert, data=data, expert=expert, tensor=tensor)


def search(job: Job, over: Iterable[MeshSpec]) -> list[Point]:
    """The points of these meshes that fit, fastest first; empty where none does."""
    found: list[Point] = []
    misses: list[Point] = []
    for series in _series(job, over):
        for point in series:
            if fits(job, point.plan):
                found.append(point)
                break
            misses.append(point)
    # A host only costs time, so only what would be faster than anything that does without is looked at again.
    best_s = min((point.step_s for point in found), default=math.inf)
    if job.machine.host_bytes_per_device is not None:
        for point in sorted(misses, key=lambda point: point.step_s):
            if point.step_s >= best_s:
                break
            for helped in _with_host(job, point):
                found.append(helped)
                best_s = min(best_s, helped.step_s)
    return sorted(found, key=lambda point: (point.step_s, point.plan.total_bytes))


def fastest_miss(job: Job, over: Iterable[MeshSpec]) -> Point | None:
    """What would be fastest if memory did not matter, if it does not fit as it is."""
    point = min((point for series in _series(job, over) for point in series), key=lambda p: p.step_s, default=None)
    return None if point is None or fits(job, point.plan) else point


def nearest_miss(job: Job, over: Iterable[MeshSpec]) -> Point:
    """Of everything that does not fit, what comes closest, with all on the host that the host can hold.

    Raises:
      ValueError: no mesh of the machine splits the model and the batch evenly.
    """
    there = job.machine.host_bytes_per_device or 0
    candidates = [point for point in _frugal(job, over) if point.plan.host_bytes <= there]
    if not candidates:
        raise ValueError(
            f"no mesh of {job.machine.count} devices splits data.global_batch={job.global_batch}, "
            f"model.d_model={job.model.d_model} and data.seq_len={job.seq_len} evenly. "
            f"Set data.global_batch to a multiple of {job.machine.count}, or change --count."
        )
    return min(candidates, key=lambda point: point.plan.total_bytes)


def _frugal(job: Job, over: Iterable[MeshSpec]) -> Iterator[Point]:
    """What takes the least memory on each mesh: alone, and with the optimizer's state or everything on the host."""
    for mesh in over:
        stage = 3 if mesh.data > 1 else 0
        base = dataclasses.replace(job.spec, zero_stage=stage, remat="full", remat_save=(), auto=False)
        most = job.global_batch // (mesh.replica * mesh.data)
        # One microbatch needs no accumulator, most of them the smallest activations.
        for parts, fields in itertools.product({1, most}, ((), job.offloadable[:1], job.offloadable)):
            shares = dict.fromkeys(_FIELDS, 0.0) | dict.fromkeys(fields, 1.0)
            spec = dataclasses.replace(base, microbatches=parts, offload=_offload(job, base, shares))
            try:
                yield evaluate(job, spec, mesh, timed=False)
            except ValueError:
                break  # does not split evenly


def what_would_fit(job: Job, over: Callable[[Job], Iterable[MeshSpec]]) -> list[str]:
    """Changes of the machine or the sequence that make something fit, each as an option to give."""
    ways: list[str] = []
    if job.machine.device.host.link_bytes_per_s is not None:
        enough = [point.plan for point in _frugal(job, over(job)) if point.plan.total_bytes <= job.budget_bytes]
        if enough:
            needed = min(plan.host_bytes for plan in enough) * job.machine.devices_per_host
            ways.append(f"--host-memory {math.ceil(needed / 2**30)}GiB or more, of each host")
    for factor in (2, 4, 8, 16, 32, 64):
        count = job.machine.count * factor
        if count > job.machine.device.host.devices and count % job.machine.device.host.devices:
            continue
        batch = -(-job.global_batch // count) * count
        larger = dataclasses.replace(job, machine=dataclasses.replace(job.machine, count=count), global_batch=batch)
        if any(fits(larger, point.plan) for point in _frugal(larger, meshes(larger))):
            also = f" --set data.global_batch={batch}" if batch != job.global_batch else ""
            ways.append(f"--count {count}{also}")
            break
    for part in (2, 4, 8):
        length = job.seq_len // part
        shorter = dataclasses.replace(job, seq_len=length)
        if length and any(fits(shorter, point.plan) for point in _frugal(shorter, over(shorter))):
            ways.append(f"--set data.seq_len={length}")
            break
    return ways


def no_point(job: Job, over: Callable[[Job], Iterable[MeshSpec]], *, fixed: bool = False) -> ValueError:
    """What to say where nothing fits: the nearest miss, and what would make it fit.

    Args:
      fixed: the machine is the one that is here.
    """
    miss = nearest_miss(job, over(job))
    settings = " ".join(f"{path}={value}" for path, value in miss.settings.items())
    largest = sorted(miss.plan.classes().items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in largest)
    ways = [way for way in what_would_fit(job, over) if way.startswith("--set") or not fixed]
    otherwise = "Set a smaller model, or use more devices" if fixed else "Set a smaller model, or another --device"
    out = "It would fit with any of: " + "; ".join(ways) if ways else otherwise
    return ValueError(
        f"nothing fits into {job.machine}: the nearest miss takes {miss.plan.total_bytes / 2**30:.1f} GiB per device "
        f"({parts}), but {job.budget_bytes / 2**30:.1f} of {job.machine.hbm_bytes / 2**30:.1f} GiB may be used "
        f"({settings}). {out}."
    )


def resolve_as_needed(job: Job, mesh: MeshSpec) -> LayoutSpec:
    """The job's layout with every `as_needed` share a number: the smallest that fits, or `none` if all fits without.

    Shares are raised in the order of how seldom they are copied: optimizer, activations, params.

    Raises:
      ValueError: it does not fit with all of them on the host.
    """
    open_fields = [name for name in _FIELDS if getattr(job.spec.offload, name) == "as_needed"]
    spec = dataclasses.replace(job.spec, offload=_offload(job, job.spec, dict.fromkeys(open_fields, 0.0)))
    if "activations" in open_fields or "params" in open_fields:
        check_scanned(job.model.scan_layers)
    if not open_fields or fits(job, evaluate(job, spec, mesh, timed=False).plan):
        return spec
    for name in open_fields:
        if (shared := _smallest_share(job, spec, mesh, name)) is not None:
            return shared
        spec = dataclasses.replace(spec, offload=_offload(job, spec, {name: 1.0}))
    plan = evaluate(job, spec, mesh, timed=False).plan
    there = job.machine.host_bytes_per_device
    held = "an unknown number (--host-memory says it)" if there is None else f"{there / 2**30:.1f}"
    raise ValueError(
        f"layout.offload.{', .'.join(open_fields)}=as_needed: with all of it on the host a device needs "
        f"{plan.total_bytes / 2**30:.1f} GiB of {job.budget_bytes / 2**30:.1f} that may be used, and its share of the "
        f"host {plan.host_bytes / 2**30:.1f} GiB of {held}. "
        "Set layout.auto=True, or more of layout.zero_stage, layout.remat, layout.microbatches or mesh.data."
    )


def _series(job: Job, over: Iterable[MeshSpec]) -> Iterator[list[Point]]:
    """Points that differ in microbatches only, fewest first."""
    for mesh in over:
        stages = (0, 1, 2, 3) if mesh.data > 1 else (0,)
        for stage, kept in itertools.product(stages, REMATS):
            if kept == SAVEABLE and stage == 3 and mesh.data > 1:
                continue  # what remat=none keeps there anyway
            remat = "none" if kept is None else "named" if kept else "full"
            base = dataclasses.replace(
                job.spec,
                zero_stage=stage,
                remat=remat,
                remat_save=kept or (),
                microbatches=1,
                offload=_offload(job, job.spec, dict.fromkeys(_FIELDS, 0.0)),
                auto=False,
            )
            try:
                rows = check_batch(base, mesh, global_batch=job.global_batch, seq_len=job.seq_len)
                check_layout(job.optimizer, make_layout(base, mesh, job.infos))
            except ValueError:
                continue  # does not split evenly
            # What is not known of the machine is not a layout that does not fit: it is raised.
            specs = [dataclasses.replace(base, microbatches=parts) for parts in _divisors(rows)]
            yield [evaluate(job, spec, mesh) for spec in specs]


def _with_host(job: Job, miss: Point) -> Iterator[Point]:
    """Ways to make a miss fit by the host: of each combination the smallest share of what is copied most often."""
    everything = _offload(job, miss.spec, dict.fromkeys(job.offloadable, 1.0))
    most = evaluate(job, dataclasses.replace(miss.spec, offload=everything), miss.mesh, timed=False).plan
    if most.total_bytes > job.budget_bytes:
        return
    each = (most.host_optimizer, most.host_activations, most.host_parameters)
    saves: dict[str, int] = dict(zip(_FIELDS, each, strict=True))
    for size in range(1, len(job.offloadable) + 1):
        for fields in itertools.combinations(job.offloadable, size):
            if miss.plan.total_bytes - sum(saves[name] for name in fields) > job.budget_bytes:
                continue  # not even all of them
            *whole, last = fields
            spec = dataclasses.replace(miss.spec, offload=_offload(job, miss.spec, dict.fromkeys(whole, 1.0)))
            if (shared := _smallest_share(job, spec, miss.mesh, last)) is not None:
                yield evaluate(job, shared, miss.mesh)


def _smallest_share(job: Job, spec: LayoutSpec, mesh: MeshSpec, field: str) -> LayoutSpec | None:
    """`spec` with the smallest share of `field` on the host that fits; None if even all of it does not help."""

    def with_share(share: float) -> LayoutSpec:
        return dataclasses.replace(spec, offload=_offload(job, spec, {field: share}))

    def fits_device(share: float) -> bool:
        try:
            return evaluate(job, with_share(share), mesh, timed=False).plan.total_bytes <= job.budget_bytes
        except ValueError:
            return False  # the share is smaller than anything that could be moved

    if not fits_device(1.0):
        return None
    low, high = 0, len(SHARES) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits_device(SHARES[middle]) else (middle + 1, high)
    found = with_share(SHARES[high])
    return found if fits(job, evaluate(job, found, mesh, timed=False).plan) else None


def _offload(job: Job, spec: LayoutSpec, shares: dict[str, float]) -> OffloadSpec:
    """The spec's offload with these shares instead; 0 is `none`. What is not named keeps its share.

    Where state is updated is the job's, wherever there is any on the host; so is unified memory, where nothing is.
    """
    asked = job.spec.offload
    named: dict[str, Any] = {name: shares.get(name, getattr(spec.offload, name)) or "none" for name in _FIELDS}
    return OffloadSpec(
        **named,
        update="device" if named["optimizer"] == "none" else asked.update,
        unified_memory=asked.unified_memory and set(named.values()) == {"none"},
    )


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
