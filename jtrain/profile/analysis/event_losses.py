"""Losses of the events of a trace to low clocks and to overlap, and their sums per op and per collective."""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jtrain.hlo.scopes import kernel_of
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
    for device, device_samples in sampled.items():
        device_events = np.flatnonzero(events.device == device)
        mhz[device_events] = device_samples.mean_mhz(
            events.start_ns[device_events], events.end_ns[device_events]
        )
        num_samples[device_events] = device_samples.num_in(
            events.start_ns[device_events], events.end_ns[device_events]
        )
    # Per event: the work of its op, taken from the table of ops.
    flops, size = (
        np.array([getattr(op, name) for op in events.ops], float)[events.op] for name in ("flops", "bytes")
    )
    reference = clock_loss.reference_mhz(peaks, sampled)
    # At the measured clock, since a slower clock makes an op more compute-bound.
    sensitivity = clock_loss.sensitivity(flops, size, peaks, mhz)
    multiplier = clock_loss.multipliers(mhz, sensitivity, reference)
    # Overlap is measured at the reference clock, so that a low clock is not counted twice.
    factors = overlap_factors(events, multiplier)
    # Communication loses nothing here: its loss is the part that no compute hides.
    clocks_s = np.where(events.computes, events.own_s * (1.0 - multiplier), 0.0)
    overlap_s = np.where(events.computes, events.own_s * multiplier * (1.0 - 1.0 / factors), 0.0)
    return EventLosses(num_samples, mhz, multiplier, clocks_s, overlap_s)


def op_rows(events: Events, losses: EventLosses, peaks: Peaks) -> list[OpRow]:
    """One row per op that ran, sorted by lost seconds, largest first."""
    num_ops = len(events.ops)

    def per_op(values: np.ndarray) -> np.ndarray:
        return np.bincount(events.op, values, minlength=num_ops)

    count = np.bincount(events.op, minlength=num_ops)
    total_s = per_op(events.own_s)
    exposed_s = per_op(events.exposed_s)
    clocks, overlap = per_op(losses.clocks_s), per_op(losses.overlap_s)
    # Short ops get no clock of their own: a sample every 20 ms falls into them by chance.
    sampled_enough = clock_loss.has_enough_samples(per_op(losses.num_samples).astype(np.int64))
    is_clocked = np.isfinite(losses.mhz)
    # Sums weighted by time; events without a clock are left out of weight and sum alike.
    clocked_s = per_op(np.where(is_clocked, events.own_s, 0.0))
    mhz = per_op(np.where(is_clocked, events.own_s * losses.mhz, 0.0))
    reference_s = per_op(np.where(is_clocked, events.own_s * losses.multiplier, 0.0))
    rows = []
    for index, op in enumerate(events.ops):
        if not count[index]:
            continue
        theoretical_s: float | None = None
        lost: dict[str, float] = dict.fromkeys(
            ("instruction", "utilisation", "overlap", "clocks", "exposed"), 0.0
        )
        if op.kind == "communication":
            lost["exposed"] = float(exposed_s[index])
        else:
            # Utilisation is the remainder, so that the losses and theoretical_s sum to the op's time.
            lost |= {"overlap": float(overlap[index]), "clocks": float(clocks[index])}
            needed_s = 0.0
            if peaks.flops is not None:
                needed_s = int(count[index]) * op.flops / peaks.flops
                # A recomputed op has no place in the model's own FLOPs: all of its work is a loss.
                theoretical_s = 0.0 if is_recomputed(op) else needed_s
                lost["instruction"] = needed_s - theoretical_s
            lost["utilisation"] = float(total_s[index]) - needed_s - lost["overlap"] - lost["clocks"]
        has_clock = op.kind != "communication" and clocked_s[index] > 0 and bool(sampled_enough[index])
        rows.append(
            OpRow(
                name=op.name,
                opcode=op.opcode,
                kind=op.kind,
                phase=op.phase,
                layer=op.layer,
                flops=op.flops,
                bytes=op.bytes,
                shape=op.shape,
                source=op.source,
                kernel=kernel_of(op.scope),
                count=int(count[index]),
                total_s=float(total_s[index]),
                theoretical_s=theoretical_s,
                lost_s=math.fsum(lost.values()),
                lost=lost,
                mean_mhz=float(mhz[index] / clocked_s[index]) if has_clock else None,
                multiplier=float(reference_s[index] / clocked_s[index]) if has_clock else None,
            )
        )
    return sorted(rows, key=lambda row: -row.lost_s)


def comm_rows(events: Events, facts: dict[str, Any], device_steps: int) -> list[CommRow]:
    """One row per collective kind and axes, per device and step, with planned ones that did not run."""
    axis_order = list(facts["mesh"])
    # Several rows of the plan may be one kind over the same axes: gradients and activations.
    planned: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
    for row in facts["planned"]:
        planned[row["kind"], tuple(sorted(row["axes"], key=axis_order.index))] += row["wire_bytes"]
    kinds = np.array([op.kind for op in events.ops])
    keys_by_op = [
        (op.collective.kind, op.collective.axes) if op.collective is not None else (op.opcode or op.name, ())
        for op in events.ops
    ]
    traced_keys = {keys_by_op[index] for index in np.flatnonzero(kinds == "communication")}
    rows = []
    # Planned collectives that never ran get a row too, so that the table shows what is missing.
    for kind, axes in sorted(traced_keys | set(planned)):
        key_events = np.flatnonzero(
            np.array([key == (kind, axes) for key in keys_by_op], bool)[events.op] & ~events.computes
        )
        runs_by_op = collections.Counter(events.op[key_events].tolist())
        # Bytes and calls count at the starts; the time is that of starts and dones together.
        sent_bytes = sum(
            runs_by_op[i] * traffic.wire_bytes
            for i in runs_by_op
            if (traffic := events.ops[i].collective) is not None
        )
        num_starts = sum(
            runs_by_op[i] for i in runs_by_op if not events.ops[i].opcode.endswith(("-done", "-update"))
        )
        total_s = float(events.own_s[key_events].sum()) / device_steps
        wire_bytes = round(sent_bytes / device_steps)
        rows.append(
            CommRow(
                kind=kind,
                axes=axes,
                count=num_starts / device_steps,
                wire_bytes=wire_bytes,
                planned_bytes=planned[kind, axes] if facts["planned"] else None,
                total_s=total_s,
                exposed_s=float(events.exposed_s[key_events].sum()) / device_steps,
                bytes_per_s=wire_bytes / total_s if total_s and wire_bytes else None,
            )
        )
    return sorted(rows, key=lambda row: -row.exposed_s)
