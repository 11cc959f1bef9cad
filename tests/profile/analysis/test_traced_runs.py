"""Breakdowns of traces of real runs: steps, layers and phases of ops, collectives and FLOPs."""

import collections
import functools
import re
import shutil
from pathlib import Path

import pytest

from jtrain.hlo.parser import visits
from jtrain.hlo.scopes import scope_mark
from jtrain.profile.analysis.breakdown import Traced, analyse, load
from jtrain.profile.analysis.hlo_ops import is_recomputed
from jtrain.profile.analysis.records import Breakdown
from tests.profile.traced import COLS, MODULE, ROWS, SIZES, STEPS, WAIT_S, traced


@functools.cache
def loaded() -> Traced:
    return load(traced(data=8))


@functools.cache
def analysed(**run: int) -> Breakdown:
    return analyse(traced(**run))


RUNS = (
    dict(data=8),  # other quick tests read this trace as well
    pytest.param(dict(data=2, tensor=2, zero_stage=2, microbatches=2), marks=pytest.mark.slow),
)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_traced_step_sums_to_its_duration_and_every_op_finds_its_layer_and_phase(
    run: dict[str, int],
) -> None:
    """On eight emulated devices, with a loop over layers and remat: sums within 1e-6, 99 % of time
    covered.
    """
    found = analysed(**run)
    assert [step.step for step in found.steps] == list(STEPS)
    for step in found.steps:
        assert sum(part or 0.0 for part in step.parts.values()) == pytest.approx(step.duration_s, rel=1e-6)
        assert step.chain["instruction"] is not None
        assert 1.2 < step.chain["instruction"] < 2.0, (
            "a third of the matrices' forward again, and whole scores"
        )
        assert {device["device"] for device in step.devices} == set(range(found.num_devices))
    assert (found.steps[0].parts["data_wait"] or 0.0) == 0.0
    assert all((step.parts["data_wait"] or 0.0) >= WAIT_S for step in found.steps[1:])
    assert found.coverage >= 0.99
    assert {row.phase for row in found.ops} >= {"forward", "backward", "optimizer", "data"}
    assert {row.layer for row in found.ops} >= {
        "embed",
        "layers/attention",
        "layers/mlp",
        "final_norm",
        "loss",
    }
    exposed_s = sum(row.exposed_s for row in found.communication)
    mean_s = sum(step.parts["exposed_communication"] or 0.0 for step in found.steps) / len(found.steps)
    assert exposed_s == pytest.approx(mean_s, rel=1e-6)


def test_every_op_has_a_shape_its_work_and_a_line_of_ours() -> None:
    """Of 99 % of the devices' time a report says the shape, the FLOPs or bytes, and the line of source code."""
    found = analysed(data=8)
    total_s = sum(op.total_s for op in found.ops)
    for name, has in {
        "shape": lambda op: bool(op.shape),
        "work": lambda op: op.kind == "communication" or op.flops + op.bytes > 0,
        "source": lambda op: re.match(r"(jtrain|jtrain_kernels|.*/tests)/.*\.py:\d+$", op.source) is not None,
    }.items():
        assert sum(op.total_s for op in found.ops if has(op)) >= 0.99 * total_s, name
    assert {op.kernel for op in found.ops} >= {"attention, xla", "linear_cross_entropy, xla", "rms_norm, xla"}
    layers = {op.source.partition(":")[0] for op in found.ops if op.layer == "layers/mlp" and op.flops}
    assert any(file.startswith(("jtrain/model/", "jtrain_kernels/")) for file in layers)


def test_a_real_step_replays_as_it_ran() -> None:
    """The critical path of a traced step on eight devices is as long as the step, and no cause makes it longer."""
    path = analysed(data=8).path
    assert path is not None
    assert sum(row.seconds for row in path.rows) == pytest.approx(path.duration_s, rel=1e-9)
    assert {row.kind for row in path.rows} == {"computing", "communication", "wait"}
    assert all(0 < cause.without_s < path.duration_s for cause in path.causes)
    without = {cause.cause: cause.without_s for cause in path.causes}
    single_s = [value for name, value in without.items() if name.startswith("transfers of ")]
    assert single_s
    assert without["all communication"] <= min(single_s)


def test_hardly_any_op_s_layer_is_guessed() -> None:
    """Ops of 97 % of the time have a layer in their own path; the rule for compiler-made ops covers the
    rest.
    """
    trace, ops, _ = loaded()
    ran = [
        (event.duration_ns, ops[event.name]) for event in trace.events if ops[event.name].kind != "control"
    ]
    own = sum(duration for duration, op in ran if any(scope_mark(part)[1] for part in op.scope.split(":")))
    assert own / sum(duration for duration, _ in ran) > 0.97


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_executed_collectives_are_the_planned_ones_byte_by_byte(run: dict[str, int]) -> None:
    """Bytes counted in the trace, including loops, equal the layout's formula; the compiler's scalars are
    left out.
    """
    rows = analysed(**run).communication
    assert max(row.wire_bytes for row in rows) > 10_000
    for row in rows:
        assert row.planned_bytes is not None
        assert row.wire_bytes == pytest.approx(row.planned_bytes, abs=200), row


def test_flops_of_a_traced_step_are_those_of_the_model() -> None:
    """By hand, per device: 2 FLOPs per MLP parameter and token forward, 4 backward, up to 2 recomputed."""
    trace, ops, _ = loaded()
    counted: collections.Counter[str] = collections.Counter()
    for event in trace.events:
        op = ops[event.name]
        if op.layer == "layers/mlp":
            counted["again" if is_recomputed(op) else op.phase] += op.flops
    params = SIZES["num_layers"] * 3 * SIZES["d_model"] * SIZES["d_ff"]
    tokens = len(STEPS) * ROWS * COLS  # on all devices
    assert counted["forward"] == 2 * params * tokens
    transposed = 2 * (
        2 * tokens * SIZES["d_model"] ** 2 + 8 * len(STEPS) * SIZES["d_model"] * SIZES["d_ff"] ** 2
    )
    assert counted["backward"] == 4 * params * tokens + SIZES["num_layers"] * transposed, (
        "a CPU's, by the identity"
    )
    assert 2 / 3 * 2 * params * tokens <= counted["again"] <= 2 * params * tokens, (
        "the last product may be left out"
    )


def test_a_loop_s_flops_are_counted_as_often_as_the_compiler_says_that_it_runs() -> None:
    """Executions in the trace and trip counts in the program give the same sum."""
    trace, ops, _ = loaded()
    executed = sum(ops[event.name].flops for event in trace.events) / len(STEPS) / trace.num_devices
    text = (traced(data=8) / f"{MODULE}.hlo.txt").read_text()
    outside = [
        v for v in visits(text) if v.instruction.name in ops and ops[v.instruction.name].kind == "compute"
    ]
    assert executed == sum((v.num_runs or 0) * ops[v.instruction.name].flops for v in outside)
    assert executed > 1e6


def test_a_window_without_its_program_is_refused(tmp_path: Path) -> None:
    """Without the program, the ops would have no layers."""
    shutil.copytree(traced(data=8), tmp_path / "copy")
    (tmp_path / "copy" / f"{MODULE}.hlo.txt").unlink()
    with pytest.raises(ValueError, match=f"lacks {MODULE}.hlo.txt"):
        analyse(tmp_path / "copy")
