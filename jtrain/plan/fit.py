"""Refuses a run that cannot fit, before anything is allocated, and says what would."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jtrain.layout import Layout, LayoutSpec, make_layout
from jtrain.mesh import BATCH_AXES, MeshSpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Muon
from jtrain.plan.memory import MemoryPlan, memory
from jtrain.plan.search import SLACK
from jtrain_kernels.device import Platform, from_device

GIB = 2**30

MARGIN = {"gpu": 1.15, "tpu": 1.15, "cpu": 1.5}
"""Platform -> how far the estimate may be over what is there, for a run that fits must not be refused. It was at most
a tenth over what compilers allocate for H200 and v5p (`python -m jtrain.bench plan_accuracy`), an eighth for small
shapes, of which a TPU keeps much in its vector memory; XLA:CPU widens bfloat16 here and there, and nobody fitted the
estimate to it. Settings that are offered instead have to fit by the estimate as it stands."""


def available_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Bytes that a step may use on one of `devices`; None where nothing says.

    An accelerator says its allocator's limit, and one to compile for only its data sheet. CPU devices share the memory
    that is free on this machine: with several processes all of their devices are taken to be here, as in a run that
    emulates a cluster.
    """
    device = next((d for d in devices if d.process_index == jax.process_index()), devices[0])
    if device.platform == "cpu":
        meminfo = Path("/proc/meminfo")
        if not meminfo.exists():
            return None
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024 // len(devices)
    spec = from_device(device)
    try:
        stats = device.memory_stats() or {}
    except (jax.errors.JaxRuntimeError, NotImplementedError):  # compile-only
        stats = {}
    return stats.get("bytes_limit") or (spec.hbm_bytes if spec else None)


def check_fits(
    model: Transformer,
    layout: Layout,
    optimizer: AdamW | Muon,
    *,
    global_batch: int,
    seq_len: int,
    available: int,
    platform: Platform,
    asked: Layout | None = None,
) -> MemoryPlan:
    """The plan of a run that fits into `available` bytes per device.

    Args:
      platform: of the devices.
      asked: the layout that the user's config has, if it is not `layout`: what to change is said relative to it.

    Raises:
      ValueError: it does not fit; names both numbers and what would, as settings to change.
    """
    sizes: dict[str, Any] = dict(global_batch=global_batch, seq_len=seq_len, platform=platform)
    plan = memory(model, layout, optimizer, **sizes)
    if plan.total_bytes <= MARGIN[platform] * available:
        return plan
    ways = ways_out(model, layout, optimizer, **sizes, limit=available, asked=asked)
    largest = sorted(plan.classes().items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    out = (
        "Any of these fits:\n" + "\n".join(ways)
        if ways
        else (
            "No ZeRO stage, remat, accumulation, offload or mesh.data up to 4096 alone makes it fit: set a smaller "
            "model or data.seq_len, or use mesh.tensor."
        )
    )
    raise ValueError(
        f"this run needs {plan.total_bytes / GIB:.1f} GiB per device ({parts} GiB), but {available / GIB:.1f} GiB are "
        f"there. {out}"
    )


def ways_out(
    model: Transformer,
    layout: Layout,
    optimizer: AdamW | Muon,
    *,
    global_batch: int,
    seq_len: int,
    platform: Platform,
    limit: int,
    asked: Layout | None = None,
    host: bool = True,
) -> list[str]:
    """Up to four lines, each with settings of the layout that need at most `limit` bytes per device, the least first.

    Args:
      asked: as in `check_fits`.
      host: the host's memory is known, so that some of it can be used.
    """
    ways: list[str] = []
    infos = tuple(p.info for p in layout.params)
    offloads = host and platform != "cpu" and not isinstance(optimizer, Muon)
    offloads &= not layout.spec.offload.unified_memory
    can = {"offloads": offloads, "scanned": model.scan_layers}
    for change in _changes(layout, asked or layout, global_batch=global_batch, **can):
        try:
            other = make_layout(change.layout, change.mesh, infos)
            sizes: dict[str, Any] = dict(global_batch=change.global_batch, seq_len=seq_len, platform=platform)
            needed = memory(model, other, optimizer, **sizes).total_bytes
        except ValueError:
            continue  # does not split evenly
        on_host = "as_needed" in change.text  # which leaves some room, and takes no more than it needs
        if needed <= limit * (1 - SLACK if on_host else 1):
            ways.append(f"  {change.text}  ({'down to ' if on_host else ''}{needed / GIB:.1f} GiB)")
        if len(ways) == 4:
            break
    return ways


@dataclasses.dataclass(frozen=True)
class _Change:
    text: str
    layout: LayoutSpec
    mesh: MeshSpec
    global_batch: int


def _changes(layout: Layout, asked: Layout, *, global_batch: int, offloads: bool, scanned: bool) -> Iterator[_Change]:
    """Other settings in the order of how little they change: on these devices first, then on more of them.

    Args:
      offloads: host memory is another memory, and what the optimizer keeps can go there.
      scanned: layers are looped over, so that their parameters can be fetched one by one.
    """
    spec, mesh = layout.spec, layout.mesh
    stages = [stage for stage in (0, 1, 2, 3) if stage >= spec.zero_stage]
    remats = ["none", "full"] if spec.remat == "none" else ["full"] if spec.remat == "full" else [spec.remat, "full"]
    for data in (mesh.data, *(mesh.data * 2**k for k in range(1, 13) if mesh.data * 2**k <= 4096)):
        shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES) // mesh.data * data
        batch = max(global_batch, shards)
        parts = sorted({spec.microbatches, max(1, batch // shards)})
        on_host: list[tuple[str, ...]] = [()]
        if offloads and data == mesh.data:
            on_host += [("optimizer",), *([("optimizer", "params")] if scanned else [])]
        for names, stage, remat, microbatches in itertools.product(on_host, stages, remats, parts):
            save = spec.remat_save if remat == "named" else ()
            offload: Any = dataclasses.replace(spec.offload, **dict.fromkeys(names, 1.0))
            new = dataclasses.replace(
                spec, zero_stage=stage, remat=remat, remat_save=save, microbatches=microbatches, offload=offload
            )
            changes = {
                "mesh.replica": (asked.mesh.replica, mesh.replica),
                "mesh.data": (asked.mesh.data, data),
                "layout.zero_stage": (asked.spec.zero_stage, stage),
                "layout.remat": (asked.spec.remat, remat),
                "layout.microbatches": (asked.spec.microbatches, microbatches),
                "data.global_batch": (global_batch, batch),
                **{f"layout.offload.{name}": (getattr(asked.spec.offload, name), "as_needed") for name in names},
            }
            text = " ".join(f"--set {path}={to}" for path, (was, to) in changes.items() if was != to)
            if text:
                yield _Change(text, new, dataclasses.replace(mesh, data=data), batch)
        if shards < global_batch and data == mesh.data:
            strongest = dataclasses.replace(spec, zero_stage=3, remat="full", remat_save=(), microbatches=1)
            text = f"--set data.global_batch={shards} --set layout.zero_stage=3 --set layout.remat=full"
            yield _Change(text + " --set layout.microbatches=1", strongest, mesh, shards)
