"""Example breakdown of a run on four H200s: five steps, 24 ops, power-capped half way through."""

import dataclasses
import itertools
import math
import random

from jtrain.profile.analysis.records import (
    Breakdown,
    ClockTrack,
    CommRow,
    LiveBuffer,
    LiveTrack,
    MemoryRow,
    OpKind,
    OpRow,
    Peaks,
    Phase,
    StepBreakdown,
)
from jtrain.profile.analysis.step_tracks import CriticalPath, Lane, LaneTrack, PathRow, WhatIf

STEPS, DEVICES, TOKENS = 5, 4, 131_072
STEP_S = 1.2
COUNT, PEAK_FLOPS = 32 * STEPS * DEVICES, 989.4e12

SHARES = {
    "theoretical": 0.46,
    "instruction": 0.12,
    "utilisation": 0.12,
    "overlap": 0.02,
    "clocks": 0.08,
    "exposed_communication": 0.13,
    "data_wait": 0.02,
    "host": 0.02,
    "idle": 0.03,
}

OPS: tuple[tuple[str, str, OpKind, Phase, str, float], ...] = (
    ("fusion.12", "fusion", "compute", "forward", "layers/attention", 0.06),
    ("gemm_fusion_dot.3", "custom-call", "compute", "forward", "layers/mlp", 0.13),
    ("gemm_fusion_dot.9", "custom-call", "compute", "backward", "layers/mlp", 0.27),
    ("flash_attention.2", "custom-call", "compute", "forward", "layers/attention", 0.05),
    ("flash_attention_bwd.2", "custom-call", "compute", "backward", "layers/attention", 0.11),
    ("gemm_fusion_dot.21", "custom-call", "compute", "backward", "loss", 0.06),
    ("loop_add_fusion.4", "fusion", "compute", "optimizer", "optimizer", 0.02),
    ("all-gather.7", "all-gather", "communication", "forward", "layers/mlp", 0.09),
    ("all-gather.8", "all-gather", "communication", "backward", "layers/mlp", 0.09),
    ("reduce-scatter.2", "reduce-scatter", "communication", "backward", "layers/mlp", 0.12),
)


def step(number: int, *, duration_s: float = STEP_S, shares: dict[str, float] = SHARES) -> StepBreakdown:
    """One step whose parts sum to its duration and whose factors multiply to its computing seconds."""
    parts: dict[str, float | None] = {name: duration_s * part for name, part in shares.items()}
    reached = list(itertools.accumulate(duration_s * part for part in list(shares.values())[:5]))
    chain: dict[str, float | None] = {"theoretical_s": reached[0]}
    names = ("instruction", "utilisation", "overlap", "frequency")
    chain |= {name: after / before for name, before, after in zip(names, reached, reached[1:], strict=False)}
    chain["compute_s"] = reached[-1]
    clocks = duration_s * shares["clocks"]
    return StepBreakdown(
        step=number,
        duration_s=duration_s,
        parts=parts,
        chain=chain,
        clocks_lost_s={"power": clocks * 0.75, "thermal": clocks * 0.2, "other": clocks * 0.05},
        energy_j=2500.0 * duration_s,
        mfu={"spec": 0.46, "clock": 0.5, "reference": 0.48},
        devices=[
            {
                "device": d,
                "busy_s": duration_s * 0.8,
                "communication_s": 0.3,
                "exposed_communication_s": 0.156,
            }
            for d in range(DEVICES)
        ],
    )


def op(name: str, opcode: str, kind: OpKind, phase: Phase, layer: str, seconds: float) -> OpRow:
    """Row of an op that takes `seconds` per step and device."""
    total = seconds * STEPS * DEVICES
    theoretical = None if kind == "communication" else total * 0.6
    lost = total - (theoretical or 0.0)
    causes = {"instruction": 0.2, "utilisation": 0.5, "overlap": 0.1, "clocks": 0.2, "exposed": 0.0}
    if kind == "communication":
        lost, causes = lost * 0.6, dict.fromkeys(causes, 0.0) | {"exposed": 1.0}
    return OpRow(
        name=name,
        opcode=opcode,
        kind=kind,
        phase=phase,
        layer=layer,
        flops=round((theoretical or 0.0) / COUNT * PEAK_FLOPS),
        bytes=round((theoretical or 0.0) / COUNT * PEAK_FLOPS / 250),
        shape="bf16[8192,4096]",
        source="" if kind == "communication" else f"jtrain/model/{layer.rpartition('/')[2]}.py:88",
        kernel="attention, cudnn" if layer == "layers/attention" else "",
        count=COUNT,
        total_s=total,
        theoretical_s=theoretical,
        lost_s=lost,
        lost={cause: lost * part for cause, part in causes.items()},
        mean_mhz=None if kind == "communication" else 1680.0,
        multiplier=None if kind == "communication" else 0.93,
    )


def track(device: int, *, points: int = 300) -> ClockTrack:
    """Track of a clock that falls from 1,980 to about 1,600 MHz under the power cap."""
    draw = random.Random(device)
    time_s = [round(STEPS * STEP_S * i / (points - 1), 6) for i in range(points)]
    capped = [t > 0.4 * STEPS * STEP_S + 0.1 * device for t in time_s]
    mhz: list[float | None] = [1600.0 + draw.choice((-15, 0, 15)) if cap else 1980.0 for cap in capped]
    mhz[7] = None  # a query that the driver refused
    return ClockTrack(
        device=device,
        source="nvml",
        time_s=time_s,
        sm_mhz=mhz,
        mem_mhz=[2619.0] * points,
        power_w=[round(640.0 + 60 * math.sin(9 * t), 2) for t in time_s],
        temperature_c=[round(48.0 + 14 * (1 - math.exp(-t / 2)), 2) for t in time_s],
        reasons=[
            "power_cap" + (",sw_thermal" if t > 5 else "") if cap else ""
            for t, cap in zip(time_s, capped, strict=True)
        ],
    )


def lanes(*, executions: int = 60) -> LaneTrack:
    """A lane of computing and one of collectives for each device, the collectives beside every second op."""
    length_us = (STEP_S + 0.02) * 1e6 / executions
    return LaneTrack(
        step=22,
        duration_s=STEP_S + 0.02,
        names=[row[0] for row in OPS],
        groups=["communication" if row[2] == "communication" else row[3] for row in OPS],
        lanes=[
            Lane(
                device,
                kind,
                [i % 7 if kind == "computing" else 7 + i % 3 for i in range(executions)],
                [i * length_us for i in range(executions)],
                [length_us * (0.9 if kind == "computing" else 0.5)] * executions,
            )
            for device in range(DEVICES)
            for kind in ("computing", "communication")
        ],
        num_left_out=0,
    )


def breakdown() -> Breakdown:
    """Returns the example breakdown."""
    ops = sorted((op(*row) for row in OPS), key=lambda row: -row.lost_s)
    small = [op(f"fusion.{i}", "fusion", "compute", "forward", "layers/norm", 0.001) for i in range(100, 114)]
    return Breakdown(
        platform="cuda",
        device_kind="NVIDIA H200",
        num_devices=DEVICES,
        all_devices=DEVICES,
        process=0,
        num_processes=1,
        tokens_per_step=TOKENS,
        steps=[step(20 + i, duration_s=STEP_S + 0.01 * i) for i in range(STEPS)],
        ops=[*ops, *small],
        communication=[
            CommRow("all-gather", ("data",), 128.0, 14 * 2**30, 14 * 2**30, 0.18, 0.05, 14 * 2**30 / 0.18),
            CommRow("reduce-scatter", ("data",), 64.0, 9 * 2**30, 7 * 2**30, 0.12, 0.1, 9 * 2**30 / 0.12),
            CommRow("all-reduce", ("data", "tensor"), 2.0, 4096, None, 0.002, 0.0, None),
        ],
        clocks=[track(d) for d in range(DEVICES)],
        memory=[
            MemoryRow("params", 16 * 2**30, "plan"),
            MemoryRow("optimizer", 48 * 2**30, "plan"),
            MemoryRow("activations", 21 * 2**30, "plan"),
            MemoryRow("in use", 91 * 2**30, "allocator"),
        ],
        live=LiveTrack(
            22,
            [0.0, 0.3, 0.6, 0.9, 1.2],
            {
                "made by the forward pass": [2**30, 14 * 2**30, 21 * 2**30, 9 * 2**30, 0],
                "made by the backward pass": [0, 0, 3 * 2**30, 12 * 2**30, 6 * 2**30],
                "made by the update": [0, 0, 0, 0, 2 * 2**30],
                "other": [0, 0, 0, 0, 0],
            },
            [
                LiveBuffer(
                    "fusion.12",
                    "layers/mlp",
                    "forward",
                    "bf16[32,8192,14336]",
                    "jtrain/model/mlp.py:88",
                    7 * 2**30,
                ),
                LiveBuffer("flash_attention.2", "layers/attention", "forward", "", "", 2**30),
            ],
        ),
        pipeline=None,
        host={"data_wait": 0.02, "callback Goodput": 0.001},
        lanes=lanes(),
        path=CriticalPath(
            num_steps=STEPS,
            duration_s=STEP_S + 0.02,
            rows=[
                PathRow("layers/mlp, backward", "computing", 0.5),
                PathRow("layers/mlp, forward", "computing", 0.3),
                PathRow("reduce-scatter over data", "communication", 0.3),
                PathRow("host", "wait", 0.12),
            ],
            causes=[WhatIf("all communication", 0.92), WhatIf("low clocks", 1.12)],
        ),
        coverage=0.9931,
        peaks=Peaks(flops=PEAK_FLOPS, hbm_bytes_per_s=4.8e12, ref_mhz=1830.0, max_mhz=1980.0),
        settings={"layout.zero_stage": 3, "layout.microbatches": 4, "layout.remat": "full"},
        goodput={
            "startup": 9.0,
            "compile": 31.0,
            "compute": 150.0,
            "exposed_communication": 20.0,
            "idle": 0.0,
        },
        advice=["Exposed communication is 13.0 % of the step: set layout.microbatches."],
        notes=["device 0: no temperature of the memory: this driver refuses it (Not Supported)."],
    )


def on_cpu() -> Breakdown:
    """Returns a breakdown of two emulated devices on a CPU: a measured peak, a relative clock, no energy."""
    measured = Peaks(6e10, 1e10, ref_mhz=2600.0, max_mhz=None, measured="2026-11-28 14:36 UTC")
    steps = [
        dataclasses.replace(one, energy_j=None, mfu=one.mfu | {"reference": None}, devices=one.devices[:2])
        for one in breakdown().steps
    ]
    clocks = [
        dataclasses.replace(
            track(0), source="cpu", **dict.fromkeys(("mem_mhz", "power_w", "temperature_c"), [None] * 300)
        )
    ]
    return dataclasses.replace(
        breakdown(),
        platform="cpu",
        device_kind="cpu",
        num_devices=2,
        all_devices=2,
        steps=steps,
        ops=[dataclasses.replace(row, mean_mhz=None) for row in breakdown().ops],
        communication=breakdown().communication[:2],
        clocks=[dataclasses.replace(clocks[0], device=device) for device in range(2)],
        memory=breakdown().memory[:3],
        peaks=measured,
        lanes=dataclasses.replace(track_of_lanes := lanes(), lanes=track_of_lanes.lanes[:4]),
        advice=[],
        notes=["Power and energy are unknown: the source of the clocks (cpu) reads none on this machine."],
    )


def unknown() -> Breakdown:
    """Returns a breakdown of an emulated run on CPUs, without peak, clocks and energy."""
    parts: dict[str, float | None] = dict.fromkeys(SHARES, 0.0)
    parts |= {"theoretical": None, "instruction": None, "clocks": None, "utilisation": 0.9, "idle": 0.3}
    bare = StepBreakdown(
        step=3,
        duration_s=1.2,
        parts=parts,
        chain=dict.fromkeys(("theoretical_s", "instruction", "utilisation", "overlap", "frequency"))
        | {"compute_s": 0.9},
        clocks_lost_s={"power": 0.0, "thermal": 0.0, "other": 0.0},
        energy_j=None,
        mfu=dict.fromkeys(("spec", "clock", "reference")),
        devices=[],
    )
    row = dataclasses.replace(op(*OPS[0]), theoretical_s=None, mean_mhz=None, multiplier=None)
    return dataclasses.replace(
        breakdown(),
        platform="cpu",
        device_kind="cpu",
        steps=[bare],
        ops=[row],
        communication=[],
        clocks=[],
        memory=[],
        peaks=Peaks(None, None, None, None),
        live=None,
        lanes=None,
        path=None,
        advice=[],
        notes=["no peak of this device is known: the theoretical time, the chain and MFU are unknown."],
    )
