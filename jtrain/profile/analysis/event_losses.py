"""Losses of the events of a trace to low clocks and to overlap, and their sums per op and per collective."""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jtrain.profile.analysis import clock_loss
from jtrain.profile.analysis.hlo_ops import is_recomputed
from jtrain.profile.analysis.records import CommRow, OpRow, Peaks
from jtrain.profile.analysis.timeline import Events, overlap_factors
from jtrain.profile.clocks.samples import Samples


@dataclasses.dataclass(frozen=True)
class EventLosses:
    """Clock figures per event.

    num_samples, mhz: clock samples taken during the event, and their mean (nan if unknown).
    multiplier: time that the event would have taken at the reference clock, as a share of its time.
    clocks_s, overlap_s: seconds lost to low clocks and to concurrent communication.
    """

    num_samples: np.ndarray
    mhz: np.ndarray
    multiplier: np.ndarray
    clocks_s: np.ndarray
    overlap_s: np.ndarray


def event_losses(events: Events, peaks: Peaks, sampled: Mapping[int, Samples]) -> EventLosses:
    """Clock and overlap losses of each event."""
    mhz, num_samples = np.full(len(events.op), np.nan), np.zeros(len(events.op), np.int64)
    for device, of_device in sampled.items():
        here = np.flatnonzero(events.device == device)
        mhz[here] = of_device.mean_mhz(events.start_ns[here], events.end_ns[here])
        num_samples[here] = of_device.num_in(events.start_ns[here], events.end_ns[here])
    flops, size = (
        np.array([getattr(op, name) for op in events.ops], float)[events.op] for name in ("flops", "bytes")
    )
    reference = clock_loss.reference_mhz(peaks, sampled)
    sensitivity = clock_loss.sensitivity(flops, size, peaks, mhz)
    multiplier = clock_loss.multipliers(mhz, sensitivity, reference)
    factors = overlap_factors(events, multiplier)
    clocks_s = np.where(events.computes, events.own_s * (1.0 - multiplier), 0.0)
    overlap_s = np.where(events.computes, events.own_s * multiplier * (1.0 - 1.0 / factors), 0.0)
    return EventLosses(num_samples, mhz, multiplier, clocks_s, overlap_s)


def op_rows(events: Events, losses: EventLosses, peaks: Peaks) -> list[OpRow]:
    """One row per op that ran, sorted by lost seconds, largest first."""
    num = len(events.ops)

    def per_op(values: np.ndarray) -> np.ndarray:
        return np.bincount(events.op, values, minlength=num)

    count = np.bincount(events.op, minlength=num)
    total = per_op(events.own_s)
    exposed = per_op(events.exposed_s)
    clocks, overlap = per_op(losses.clocks_s), per_op(losses.overlap_s)
    sampled_enough = clock_loss.enough(per_op(losses.num_samples).astype(np.int64))
    known = np.isfinite(losses.mhz)
    clocked_s = per_op(np.where(known, events.own_s, 0.0))
    mhz = per_op(np.where(known, events.own_s * losses.mhz, 0.0))
    at_reference = per_op(np.where(known, events.own_s * losses.multiplier, 0.0))
    rows = []
    for index, op in enumerate(events.ops):
        if not count[index]:
            continue
        theoretical_s: float | None = None
        lost: dict[str, float] = dict.fromkeys(
            ("instruction", "utilisation", "overlap", "clocks", "exposed"), 0.0
        )
        if op.kind == "communication":
            lost["exposed"] = float(exposed[index])
        else:
            lost |= {"overlap": float(overlap[index]), "clocks": float(clocks[index])}
            needed_s = 0.0
            if peaks.flops is not None:
                needed_s = int(count[index]) * op.flops / peaks.flops
                theoretical_s = 0.0 if is_recomputed(op) else needed_s
                lost["instruction"] = needed_s - theoretical_s
            lost["utilisation"] = float(total[index]) - needed_s - lost["overlap"] - lost["clocks"]
        has_clock = op.kind != "communication" and clocked_s[index] > 0 and bool(sampled_enough[index])
        rows.append(
            OpRow(
                name=op.name,
                opcode=op.opcode,
                kind=op.kind,
                phase=op.phase,
                layer=op.layer,
                count=int(count[index]),
                total_s=float(total[index]),
                theoretical_s=theoretical_s,
                lost_s=math.fsum(lost.values()),
                lost=lost,
                mean_mhz=float(mhz[index] / clocked_s[index]) if has_clock else None,
                multiplier=float(at_reference[index] / clocked_s[index]) if has_clock else None,
            )
        )
    return sorted(rows, key=lambda row: -row.lost_s)


def comm_rows(events: Events, facts: dict[str, Any], device_steps: int) -> list[CommRow]:
    """One row per collective kind and axes, per device and step; includes planned collectives that did not
    run.
    """
    order = list(facts["mesh"])
    planned: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
    for row in facts["planned"]:
        planned[row["kind"], tuple(sorted(row["axes"], key=order.index))] += row["wire_bytes"]
    kinds = np.array([op.kind for op in events.ops])
    of_op = [
        (op.collective.kind, op.collective.axes) if op.collective is not None else (op.opcode or op.name, ())
        for op in events.ops
    ]
    found = {of_op[index] for index in np.flatnonzero(kinds == "communication")}
    rows = []
    for kind, axes in sorted(found | set(planned)):
        these = np.flatnonzero(
            np.array([of == (kind, axes) for of in of_op], bool)[events.op] & ~events.computes
        )
        ran = collections.Counter(events.op[these].tolist())
        sent = sum(ran[i] * c.wire_bytes for i in ran if (c := events.ops[i].collective) is not None)
        starts = sum(ran[i] for i in ran if not events.ops[i].opcode.endswith(("-done", "-update")))
        total_s = float(events.own_s[these].sum()) / device_steps
        wire_bytes = round(sent / device_steps)
        rows.append(
            CommRow(
                kind=kind,
                axes=axes,
                count=starts / device_steps,
                wire_bytes=wire_bytes,
                planned_bytes=planned[kind, axes] if facts["planned"] else None,
                total_s=total_s,
                exposed_s=float(events.exposed_s[these].sum()) / device_steps,
                bytes_per_s=wire_bytes / total_s if total_s and wire_bytes else None,
            )
        )
    return sorted(rows, key=lambda row: -row.exposed_s)
