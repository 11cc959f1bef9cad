"""Breakdown of a step into parts that sum to it: exact on a synthetic GPU trace, and on a real traced run."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jtrain.layout.mesh import AXES
from jtrain.profile.analysis import figures, replay
from jtrain.profile.analysis.breakdown import break_down
from jtrain.profile.analysis.breakdown_json import read_breakdown, write_breakdown
from jtrain.profile.analysis.chopper import chopper_chain
from jtrain.profile.analysis.figures import PARTS
from jtrain.profile.analysis.records import Breakdown, HloOp, HostSpan, OpEvent, OpTraffic, StepSpan, Trace
from jtrain.profile.clocks import samples
from tests.profile.traced import MODULE

NOW = 1_795_284_144_288_810_791
MS = 1_000_000

seconds = st.floats(1e-6, 1e3)


@given(
    seconds,
    st.floats(0, 0.4),
    st.floats(-0.3, 0.4),
    st.floats(1e6, 1e18),
    st.floats(1e-3, 2),
    st.floats(1, 5),
)
def test_the_links_multiply_to_the_measured_time_and_the_parts_add_up_to_it(
    compute_s: float, overlap: float, clocks: float, peak: float, busy: float, extra: float
) -> None:
    """For any measurement: no time is counted twice or lost."""
    lost = dict(overlap_s=overlap * compute_s, clocks_s=clocks * compute_s)
    program = busy * compute_s * peak
    model = program / extra
    links, parts = chopper_chain(compute_s, model_flops=model, program_flops=program, peak_flops=peak, **lost)
    factors = [
        links[name] for name in ("theoretical_s", "instruction", "utilisation", "overlap", "frequency")
    ]
    assert math.prod(factor for factor in factors if factor is not None) == pytest.approx(compute_s, rel=1e-9)
    assert None not in factors
    assert sum(part or 0.0 for part in parts.values()) == pytest.approx(compute_s, rel=1e-9)
    assert links["theoretical_s"] == model / peak
    _, unknown = chopper_chain(compute_s, model_flops=model, program_flops=program, peak_flops=None, **lost)
    assert unknown["theoretical"] is unknown["instruction"] is None
    assert sum(part or 0.0 for part in unknown.values()) == pytest.approx(compute_s, rel=1e-9)


def test_chopper_s_peak_is_the_one_of_its_paper() -> None:
    """On an MI300X at 2100 MHz, a matrix product at half that clock has the factors of Chopper's formulas."""
    peak = 2 * 16 * 16 * 16 * 4 * 304 / 16 * 2100e6
    assert peak == pytest.approx(1307.4432e12)
    links, _ = chopper_chain(
        1.0, overlap_s=0.0, clocks_s=0.25, model_flops=0.3 * peak, program_flops=0.45 * peak, peak_flops=peak
    )
    assert links["theoretical_s"] == pytest.approx(0.3)
    assert links["instruction"] == pytest.approx(1.5)
    assert links["utilisation"] == pytest.approx(0.75 / 0.45)
    assert links["frequency"] == pytest.approx(1 / 0.75)


PEAK = 1e15
OPS = {
    "dot.1": HloOp("dot.1", "fusion", "compute", "forward", "layers/mlp", "a", 10**12, 0, None),
    "again.1": HloOp(
        "again.1", "fusion", "compute", "backward", "layers/mlp", "a/rematted_computation/b", 10**12, 0, None
    ),
    "dot.2": HloOp("dot.2", "fusion", "compute", "backward", "layers/mlp", "b", 10**12, 0, None),
    "ag": HloOp(
        "ag",
        "all-gather-start",
        "communication",
        "forward",
        "layers/mlp",
        "c",
        0,
        0,
        OpTraffic("all-gather", ("data",), 5 * 10**8),
    ),
    "while.1": HloOp("while.1", "while", "control", "forward", "layers", "d", 0, 0, None),
}
FACTS: dict[str, Any] = {
    "platform": "gpu",
    "device_kind": "NVIDIA H200",
    "num_devices": 2,
    "process": 0,
    "num_processes": 1,
    "tokens_per_step": 1000,
    "mesh": dict.fromkeys(AXES, 1) | {"data": 2},
    "peaks": dict(flops=PEAK, hbm_bytes_per_s=4e12, ref_mhz=1000.0, max_mhz=1200.0),
    "partitions": [0, 1],
    "planned": [
        dict(kind="all-gather", axes=["data"], wire_bytes=4 * 10**8),
        dict(kind="all-gather", axes=["data"], wire_bytes=10**8),
        dict(kind="all-reduce", axes=["data"], wire_bytes=7),
    ],
    "memory": [dict(name="params", bytes=3, source="plan")],
    "step_flops": 4 * 10**12,
    "settings": {},
    "goodput": {"compute": 2.0},
    "module": MODULE,
}


def event(device: int, name: str, start_ms: float, end_ms: float) -> OpEvent:
    return OpEvent(device, 1, name, NOW + int(start_ms * MS), int((end_ms - start_ms) * MS))


TRACE = Trace(
    platform="gpu",
    device_kind="NVIDIA H200",
    num_devices=2,
    steps=(StepSpan(1, NOW, NOW + 20 * MS),),
    events=(
        # Device 0: 1 host, 9 compute, 2 exposed, 1 idle, 3 compute, 1 host, 3 data.
        event(0, "while.1", 1, 16),
        event(0, "dot.1", 1, 4),
        event(0, "again.1", 4, 6),
        event(0, "ag", 6, 12),
        event(0, "dot.1", 6, 10),
        event(0, "dot.2", 13, 16),
        # Device 1 does all of it at once and waits.
        event(1, "dot.1", 0, 3),
        event(1, "ag", 1, 2),
    ),
    host=(
        HostSpan("data_wait", NOW + 17 * MS, NOW + 20 * MS),
        HostSpan("evaluate", NOW + 12 * MS, NOW + 12 * MS),
    ),
)


def clocks(*mhz: float) -> dict[int, samples.Samples]:
    """Samples of device 0, one per ms, with the given clocks; device 1 stays at the reference clock."""
    epoch_ns = NOW + np.arange(len(mhz)) * MS
    rows = (np.array(mhz), np.full(len(mhz), 1000.0))
    return {
        device: samples.make(
            device, "scripted", epoch_ns=epoch_ns, monotonic_ns=epoch_ns, sm_mhz=row, power_w=row
        )
        for device, row in enumerate(rows)
    }


def made(sampled: dict[int, samples.Samples] | None = None, **facts: Any) -> Breakdown:
    return break_down(TRACE, OPS, FACTS | facts, sampled or {}, {})


@pytest.mark.smoke
def test_every_millisecond_of_a_step_is_in_one_part() -> None:
    """Parts are means over two devices; communication counts only where nothing computes at the same time."""
    step = made().steps[0]
    assert step.duration_s == pytest.approx(0.020)
    assert list(step.parts) == [part.key for part in PARTS]
    parts = {name: round((part or 0.0) * 1e3, 9) for name, part in step.parts.items()}
    assert parts["theoretical"] == 2.0, "4e12 FLOPs of the model on two devices of 1e15"
    assert parts["instruction"] == 0.5, (
        "device 0 does four times 1e12 and device 1 one: 2.5 on the mean, not 2"
    )
    assert parts["exposed_communication"] == 2.0 / 2
    assert parts["data_wait"] == 3.0, "both wait for the same data"
    assert parts["host"] == (1 + 1 + 14) / 2
    assert parts["idle"] == 1.0 / 2
    assert parts["utilisation"] + parts["overlap"] == (12 + 3) / 2 - 2.5
    assert sum(parts.values()) == pytest.approx(20.0)
    assert step.devices[0] == {
        "device": 0,
        "busy_s": pytest.approx(0.014),
        "communication_s": pytest.approx(0.006),
        "exposed_communication_s": pytest.approx(0.002),
    }


def test_an_op_that_is_slower_beside_communication_loses_the_difference_to_it() -> None:
    """dot.1 took 3 ms twice alone, and 4 and 3 ms beside the all-gather: a sixth more, of 7 ms."""
    trace = dataclasses.replace(TRACE, events=(*TRACE.events, event(1, "dot.1", 4, 7)))
    found = break_down(trace, OPS, FACTS, {}, {})
    row = next(row for row in found.ops if row.name == "dot.1")
    assert row.lost["overlap"] == pytest.approx(0.007 * (1 - 1 / (3.5 / 3)))
    assert found.steps[0].parts["overlap"] == pytest.approx(row.lost["overlap"] / 2)
    assert found.steps[0].chain["overlap"] == pytest.approx(9.0 / (9.0 - 0.5))


def test_a_clock_that_falls_to_half_loses_exactly_half_of_the_ops_after_it() -> None:
    """Scripted clock and no overlap: 1000 MHz until 13 ms, then 500 MHz while dot.2 runs for 3 ms."""
    found = made(clocks(*[1000.0] * 13, *[500.0] * 8), peaks=dict(FACTS["peaks"], hbm_bytes_per_s=None))
    step = found.steps[0]
    assert step.parts["clocks"] == pytest.approx(0.0015 / 2, abs=1e-12)
    assert step.clocks_lost_s == pytest.approx({"power": 0.0, "thermal": 0.0, "other": 0.0015 / 2})
    assert step.chain["frequency"] == pytest.approx(7.5 / (7.5 - 0.75))
    row = next(row for row in found.ops if row.name == "dot.2")
    assert row.lost["clocks"] == pytest.approx(0.0015)
    assert (row.mean_mhz, row.multiplier) == (pytest.approx(500.0), pytest.approx(0.5))
    assert [track.device for track in found.clocks] == [0, 1]
    assert step.energy_j == pytest.approx((13 * 1000 + 7 * 500 + 20 * 1000) * 1e-3)
    assert step.mfu["spec"] == pytest.approx(4e12 / (0.020 * 2 * PEAK))


def test_rows_of_ops_add_up_to_the_parts_of_the_steps() -> None:
    """Each op loses its time beyond the peak; recomputed ops count as extra instructions."""
    found = made()
    rows = {row.name: row for row in found.ops}
    assert set(rows) == {"dot.1", "again.1", "dot.2", "ag"}, "what holds others has no time of its own"
    assert [row.lost_s for row in found.ops] == sorted((row.lost_s for row in found.ops), reverse=True)
    assert sum(row.total_s for row in rows.values() if row.kind == "compute") == pytest.approx(2 * 0.0075)
    assert rows["ag"].lost == pytest.approx(
        dict(instruction=0, utilisation=0, overlap=0, clocks=0, exposed=0.002)
    )
    assert (rows["again.1"].theoretical_s, rows["again.1"].lost["instruction"]) == (0.0, pytest.approx(0.001))
    assert (rows["dot.2"].theoretical_s, rows["dot.2"].lost["utilisation"]) == (0.001, pytest.approx(0.002))
    for row in found.ops:
        assert sum(row.lost.values()) == pytest.approx(row.lost_s)
        assert (row.theoretical_s or 0.0) + row.lost_s == pytest.approx(
            row.total_s if row.kind == "compute" else 0.002
        )
    assert found.coverage == 1.0


def test_communication_is_held_against_the_plan_per_kind_and_axes() -> None:
    """Two planned rows of one kind are merged; a planned collective that did not run has a row too."""
    gather, reduce = made().communication
    assert (gather.kind, gather.axes, gather.count) == ("all-gather", ("data",), 1.0)
    assert (gather.wire_bytes, gather.planned_bytes) == (5 * 10**8, 5 * 10**8)
    assert (gather.total_s, gather.exposed_s) == (pytest.approx(0.0035), pytest.approx(0.001))
    assert gather.bytes_per_s == pytest.approx(5e8 / 0.0035)
    assert (reduce.kind, reduce.count, reduce.planned_bytes, reduce.bytes_per_s) == (
        "all-reduce",
        0.0,
        7,
        None,
    )


def test_what_is_unknown_is_null_and_said() -> None:
    """Without peak and clocks, with a kernel of no program and an untraced device, the parts still sum."""
    unknown = dataclasses.replace(TRACE, events=(*TRACE.events, event(1, "Memset", 5, 9)))
    facts = FACTS | {"peaks": dict.fromkeys(FACTS["peaks"]), "num_devices": 4}
    found = break_down(unknown, OPS, facts, {}, {})
    step = found.steps[0]
    assert step.parts["theoretical"] is step.parts["instruction"] is None
    assert sum(part or 0.0 for part in step.parts.values()) == pytest.approx(step.duration_s, rel=1e-9)
    assert step.mfu == {"spec": None, "clock": None, "reference": None}
    assert found.coverage == pytest.approx(1 - 4 / 26), (
        "15 ms of compute, 7 of communication, and 4 of nobody"
    )
    for words in (
        "peak of NVIDIA H200 is unknown",
        "No clocks",
        "2 of 4 devices",
        "in no program: Memset",
        "15.4%",
    ):
        assert any(words in note for note in found.notes), (words, found.notes)


def test_a_measured_peak_is_one_and_says_when() -> None:
    """Times are compared with it as with a published one; no number that it gives is unknown."""
    facts = {"peaks": FACTS["peaks"] | {"measured": "2026-11-28 14:36 UTC", "max_mhz": None}}
    found = made(clocks(*[1000.0] * 21), **facts)
    assert found.steps[0].parts == made(clocks(*[1000.0] * 21)).steps[0].parts
    assert figures.mfu_shares(found) == {
        "MFU, of the measured peak": pytest.approx(0.1),
        "MFU, of the measured peak at the clock while it computed": pytest.approx(0.1),
    }
    line = figures.peaks_line(found)
    assert line is not None
    assert (
        "1,000,000.0 GFLOP/s and 4,000.0 GB/s of memory, measured on this machine on 2026-11-28 14:36" in line
    )
    assert figures.peaks_line(made()) is None
    assert "MFU, of the specified peak" in figures.mfu_shares(made())


def test_a_step_that_is_faster_than_the_measured_peak_raises_it() -> None:
    """Both devices execute 5e12 FLOPs in 15 ms, 1 ms of it lost to overlap: no part is below 0."""
    slow = FACTS["peaks"] | {"flops": 1e14, "measured": "2026-11-28 14:36 UTC"}
    found = made(peaks=slow)
    assert found.peaks.flops == pytest.approx(5e12 / 0.014)
    assert found.steps[0].parts["utilisation"] == pytest.approx(0.0, abs=1e-12)
    assert min(part for part in found.steps[0].parts.values() if part is not None) >= -1e-12
    assert any(
        "measured on 2026-11-28 14:36 UTC, so the machine was busy then" in note for note in found.notes
    )
    published = made(peaks=FACTS["peaks"] | {"flops": 1e14})
    assert published.peaks.flops == 1e14, "a maker's figure stands"
    assert not any("was busy" in note for note in published.notes)


def test_an_evaluation_in_the_window_is_said_to_be_one() -> None:
    """Its ops have no layer because they are of another program; the note names that program."""
    other = dataclasses.replace(TRACE, events=(*TRACE.events, event(1, "jit_eval_step/fusion.1", 5, 9)))
    notes = break_down(other, OPS, FACTS, {}, {}).notes
    assert (
        "15.4% of the ops' time has no layer or phase: other programs ran between the steps (jit_eval_step)."
        in notes
    )
    assert not any("in no program" in note for note in notes)


def test_a_gpu_s_kernel_without_an_op_is_found_by_the_name_of_its_fusion() -> None:
    """Kernels inside CUDA graphs may lack hlo_op; they are named after the fusion, with underscores."""
    trace = dataclasses.replace(TRACE, events=(event(0, "dot_1", 1, 4), event(1, "dot.1", 1, 4)))
    found = break_down(trace, OPS, FACTS, {}, {})
    assert [(row.name, row.count) for row in found.ops] == [("dot.1", 2)]


def test_a_window_of_too_many_ops_has_no_path_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven executions are fewer than are replayed, and more than five."""
    assert made().path is not None
    monkeypatch.setattr(replay, "MAX_EXECUTIONS", 5)
    assert made().path is None
    assert any(note.startswith("The critical path is unknown: 7 executions") for note in made().notes)


def test_a_breakdown_is_the_same_after_json(tmp_path: Path) -> None:
    """The file holds no NaN, which JSON does not have."""
    found = made(clocks(*[900.0] * 21))
    write_breakdown(found, tmp_path / "breakdown.json")
    assert read_breakdown(tmp_path / "breakdown.json") == found
    text = (tmp_path / "breakdown.json").read_text()
    assert "NaN" not in text
    assert json.loads(text)["version"] == 2


def test_a_breakdown_that_is_cut_off_or_another_version_s_is_refused_in_one_line(tmp_path: Path) -> None:
    """Each message says how to write it again."""
    file = tmp_path / "breakdown.json"
    write_breakdown(made(), file)
    whole = json.loads(file.read_text())
    for text, match in (
        (file.read_text()[:500], "is truncated or not JSON"),
        (json.dumps(whole | {"version": 3}), "version=3"),
        (
            json.dumps({name: value for name, value in whole.items() if name != "ops"}),
            "has a missing or an unknown field",
        ),
        (json.dumps(whole | {"steps": [{}]}), "has a missing or an unknown field"),
        ("[]", "version=None"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=match) as refused:
            read_breakdown(file)
        assert "python -m jtrain.profile.postprocess" in str(refused.value)
        assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="cannot be read"):
        read_breakdown(tmp_path / "none.json")
