"""`python -m jtrain.plan`: what it prints and writes, the command that it offers, and every refusal."""

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jtrain.cli import options
from jtrain.cli.plan import main
from jtrain.config import tree
from jtrain.config.load import for_devices, load_config
from jtrain.config.run import build_run
from jtrain.plan.compile.compiled_step import CompiledStep
from jtrain.plan.compile.topology import topology_of
from jtrain.plan.estimate.machine import make_machine
from jtrain.plan.estimate.memory import MemoryPlan, memory
from jtrain.plan.estimate.step_time import cost, step_time
from jtrain.plan.from_run import plan_job
from jtrain.plan.plan_check import check_plan
from jtrain.plan.report.plan_sheet import Sheet, classes, print_sheet, to_json
from jtrain_kernels.device import from_name
from tests.processes import program, run_together

TINY = ("--config=tiny", "--device", "h200", "--count", "8")
LLAMA8B = ("--config=llama8b", "--device", "h200", "--count", "1", "--set", "data.global_batch=8")


@pytest.mark.parametrize("tensor", [1, 2])
def test_dense_layers_before_experts_are_planned(tensor: int) -> None:
    """They share the mesh of the mixture, whose `expert` axis they have no experts for; experts have a width of
    their own, which `tensor` splits.
    """
    run_config = load_config("glm45_air", [], [f"mesh.tensor={tensor}"])
    for_devices(run_config, 128)
    run = build_run(run_config)
    assert run.mesh.expert > 1
    job = plan_job(run, make_machine("h200", 128))
    # 107 billion parameters in bfloat16 or float32, and two moments.
    plan = memory(job)
    assert 106e9 * 6 / 128 < plan.argument_bytes < 107e9 * 16 / 16
    assert 1 < step_time(job, plan).step_s < 1000


def test_a_plan_has_every_part(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The sheet says what is asked of it, and the JSON has the form that scripts rely on, bytes as the
    formula has.
    """
    file = tmp_path / "plan.json"
    argv = [*TINY, "--host-memory", "128GiB", "--price", "2", "--tokens", "1e9", "--json", str(file)]
    assert main(argv) == 0
    text = capsys.readouterr().out
    for part in (
        "params",
        "grads",
        "optimizer",
        "activations",
        "loss",
        "temporaries",
        "host memory",
        "all-reduce",
    ):
        assert part in text, part
    for part in (
        "tokens/s",
        "MFU",
        "assumed: up to 71% of peak",
        "attention by tokamax: the cost",
        "largest batch that fits",
        "1,000,000,000 tokens at a",
    ):
        assert part in text, part
    for part in (
        "goodput of 100.0%",
        "checkpoint.every_steps=",
        "$",
        "J per token",
        "40 bytes a parameter",
        "mesh.data=8 (the config: auto)",
    ):
        assert part in text, part

    found = json.loads(file.read_text())
    assert list(found) == ["config", "device", "count", "formula", "compiler", "step", "cost", "faster"]
    assert (found["config"], found["device"], found["count"], found["compiler"]) == ("tiny", "h200", 8, None)
    run_config = load_config("tiny")
    for_devices(run_config, 8)
    run = build_run(run_config)
    plan = memory(plan_job(run, make_machine("h200", 8)))
    assert found["formula"]["peak_bytes"] == plan.total_bytes > 10**7
    assert found["formula"]["argument_bytes"] == plan.argument_bytes
    assert found["step"]["step_s"] == pytest.approx(sum(found["step"]["parts_s"].values()))
    assert found["cost"]["usd"] == pytest.approx(2 * found["cost"]["device_hours"])
    uptime = found["cost"]["uptime"]
    assert uptime["mtbf_s"] == pytest.approx(50_700 * 3600 / 8)
    assert 0.99 < found["cost"]["goodput"] == uptime["goodput"] < 1
    assert main([*argv, "--goodput", "0.5"]) == 0
    given = json.loads(file.read_text())["cost"]
    assert (given["goodput"], given["uptime"]) == (0.5, None)
    assert given["device_hours"] == pytest.approx(found["cost"]["device_hours"] * uptime["goodput"] / 0.5)


def test_a_plan_of_an_absent_machine_does_not_depend_on_what_is_installed_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A process without the optional packages prints the same plans: Hopper by tokamax, Ampere by cuDNN."""
    devices = {"h200": "tokamax", "a100": "cudnn"}
    for device in devices:
        assert main(["--config=tiny", "--device", device, "--count", "8"]) == 0
    printed = capsys.readouterr().out
    for name in devices.values():
        assert f"attention by {name}: the cost" in printed
    command = program(__file__, "plan_without_extras", "tiny", *devices)
    [ended] = run_together([command], [{}])
    assert (ended.code, ended.output) == (0, printed), ended.errors


def test_classes_hold_every_byte_once() -> None:
    """The classes add up to the peak; the host's are beside it."""
    names = [field.name for field in dataclasses.fields(MemoryPlan) if field.name != "moment"]
    plan = MemoryPlan(**{name: 10**index for index, name in enumerate(names)}, moment="layer")
    found = classes(plan)
    assert list(found) == [
        "params",
        "grads",
        "optimizer",
        "activations",
        "loss",
        "batch",
        "temporaries",
        "host",
    ]
    assert sum(size for name, size in found.items() if name != "host") == plan.total_bytes
    assert found["host"] == plan.host_bytes > 0
    assert found["loss"] == plan.loss > 0


def test_a_config_that_does_not_fit_is_shown_and_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The sheet is there, the exit code is 2, and what is offered fits."""
    assert main(["--config=llama8b", "--device", "h100", "--count", "1"]) == 2
    out, error = capsys.readouterr()
    assert "DOES NOT FIT: 174%" in out
    assert "no batch fits" in out
    assert "llama8b does not fit 1 x h100" in error
    assert "--count 4" in error


def test_what_a_run_measured_is_beside_the_plan_and_in_later_plans(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The highest memory of any step, and the median step, which the same plan then predicts."""
    file = tmp_path / "plan.json"
    assert main([*TINY, "--json", str(file)]) == 0
    planned_ms = 1e3 * json.loads(file.read_text())["step"]["step_s"]
    lines = [
        {"step": step, "step_time_ms": ms, "tokens_per_s": 4096e3 / ms, "device_memory_peak_gib": gib}
        for step, ms, gib in ((1, 9 * planned_ms, 1.5), (2, 2 * planned_ms, 2.5), (3, 3 * planned_ms, 2.5))
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [{"eval": 1}, *lines])
    )
    capsys.readouterr()
    assert main([*TINY, "--calibrate", str(tmp_path), "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "measured GiB" in out
    assert "2.50" in out
    assert "predicted/measured" in out
    measured = json.loads(file.read_text())["measured"]
    assert measured["peak_bytes"] == 2.5 * 2**30
    assert measured["step_s"] == pytest.approx(3e-3 * planned_ms)
    assert main([*TINY, "--measured", str(tmp_path), "--json", str(file)]) == 0
    assert "as measured in" in capsys.readouterr().out
    assert json.loads(file.read_text())["step"]["step_s"] == pytest.approx(3e-3 * planned_ms, rel=1e-6)
    for option in (["--calibrate", str(tmp_path)], ["--measured", str(tmp_path)]):
        assert main([*TINY, "--efficiency", "0.5", *option]) == 2
        assert "Leave --efficiency out" in capsys.readouterr().err
    assert main(["--config=tiny", "--device", "v5p", "--count", "8", "--measured", str(tmp_path)]) == 2
    assert "is of h200 with precision.matmul_dtype=compute, not of v5p" in capsys.readouterr().err


def test_a_run_of_another_layout_or_machine_calibrates_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its seconds would be taken for another machine's: nothing is written; the run's own layout and machine
    do.
    """
    line = {"step": 1, "step_time_ms": 20.0, "tokens_per_s": 1.0, "device_memory_peak_gib": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    config = load_config("tiny", sets=("layout.zero_stage=3", "mesh.data=8"))
    (tmp_path / "config.txt").write_text(tree.flat(config))
    for kind, count, words, said in (
        ("cpu", 8, ["--set", "layout.zero_stage=3"], "that run was on 8 x cpu, and 8 x h200 are planned"),
        ("NVIDIA H200", 1, ["--set", "layout.zero_stage=3"], "that run was on 1 x NVIDIA H200, and 8 x h200"),
        ("NVIDIA H200", 8, [], "layout.zero_stage=3 there, 0 here. Plan that run's config"),
        ("NVIDIA H200", 8, ["--search"], "--search finds another. Leave one out"),
    ):
        (tmp_path / "run.json").write_text(json.dumps({"devices": {"kind": kind, "count": count}}))
        assert main([*TINY, "--calibrate", str(tmp_path), *words]) == 2
        assert said in capsys.readouterr().err
        assert not (tmp_path / "calibration.json").exists()
    (tmp_path / "run.json").write_text(json.dumps({"devices": {"kind": "NVIDIA H200", "count": 8}}))
    assert main([*TINY, "--calibrate", str(tmp_path), "--set", "layout.zero_stage=3"]) == 0
    assert (tmp_path / "calibration.json").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config=tiny"], r"no machine is named\. Give --device, one of a100, h100"),
        (["--config=tiny", "--device", "cpu"], r"--device cpu: its peaks are not published"),
        (["--config=tiny", "--device", "h2"], r"No device is called 'h2'\. Did you mean"),
        ([*TINY, "--host-memory", "12qb"], r"--host-memory 12qb: expected a size such as 128GiB"),
        ([*TINY, "--host-memory", "0GiB"], r"--host-memory 0GiB: expected a size"),
        ([*TINY, "--goodput", "1.5"], r"--goodput 1\.5 must be a share above 0 and at most 1"),
        ([*TINY, "--efficiency", "0"], r"--efficiency 0 must be a share"),
        ([*TINY, "--network", "-1"], r"--network -1 must be a number above 0"),
        (["--config=tiny", "--device", "h200", "--count", "0"], r"--count 0 must be at least 1"),
        (
            [*TINY, "--top", "2"],
            r"--top 2 is the number of layouts of a search to compile\. Add --search --compile",
        ),
        ([*TINY, "--search", "--compile", "--top", "0"], r"--top 0 must be at least 1"),
        (
            ["table", "--device", "h200"],
            r"no option --device\. `python -m jtrain\.plan table --help` lists the options",
        ),
        ([*TINY, "--tokens", "nan"], r"--tokens nan must be a number above 0"),
        ([*TINY, "--price", "-3"], r"--price -3 must be a number above 0"),
        ([*TINY, "--json", "/nowhere/plan.json"], r"--json /nowhere/plan\.json: there is no folder /nowhere"),
        ([*TINY, "--html", "/nowhere/plan.html"], r"--html /nowhere/plan\.html: there is no folder /nowhere"),
        (
            [*TINY, "--set", "optimizer.master_dtype=float32"],
            r"master_dtype=float32 with precision\.param_dtype=float32",
        ),
        ([*TINY, "--set", "layout.offload.unified_memory=True"], r"unified_memory=True, but this is H200"),
        (
            [*TINY, "--search", "--set", "precision.compute_dtype=float32"],
            r"its peak on h200 is not published",
        ),
        (
            [*LLAMA8B, "--host-memory", "16GiB", "--set", "layout.offload.optimizer=1.0"],
            r"59\.8 GiB of host memory per device, but its share of the host is 12\.8, with "
            r"20%.*--host-memory 75GiB",
        ),
        ([*TINY, "--tokens", "0"], r"--tokens 0 must be a number above 0"),
        ([*TINY, "--calibrate", "/nowhere"], r"--calibrate /nowhere: there is no /nowhere/metrics\.jsonl"),
        (
            [*TINY, "--measured", "/nowhere"],
            r"--measured /nowhere: No such file.*Write it with --calibrate WORKDIR",
        ),
        (
            [*TINY, "--measured", "README.md"],
            r"--measured README\.md: README\.md is not what --calibrate writes",
        ),
        (["--config=tiny", "--device", "h200", "--count", "12"], r"--count 12: a host has 8 x h200"),
        (
            ["--config=tiny", "--device", "h200", "--count", "32"],
            r"data\.global_batch=16 does not split evenly.*32 shards",
        ),
        (
            ["--config=tiny", "--with", "tensor", "--device", "h200", "--count", "2"],
            r"2 devices are not a multiple of mesh\.tensor=4 = 4",
        ),
        (
            [*TINY, "--set", "layout.offload.optimizer=1.5"],
            r"layout\.offload\.optimizer=1\.5 must be a share from 0",
        ),
        ([*TINY, "--set", "layout.offload.params=maybe"], r"layout\.offload\.params"),
        (
            ["--config=tiny", "--device", "tpu7x", "--count", "8", "--set", "layout.offload.optimizer=1.0"],
            r"speed of that link is not published for tpu7x",
        ),
        (
            ["--config=tiny", "--device", "tpu7x", "--count", "1", "--compile"],
            r"--count 1: a tpu7x chip has 2 devices\. Use 2",
        ),
        (
            ["--config=tiny", "--device", "a100", "--count", "8", "--compile"],
            r"no compiler for a100 is known, only for h100, ",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[1:]),
)
def test_bad_input_is_one_message_and_exit_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr, with the way out."""
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert re.search(message, error), error


@pytest.mark.aot
def test_a_slice_that_does_not_exist_lists_those_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    """Sixty chips of a v5p are a whole number of hosts, but no slice."""
    argv = ["--config=tiny", "--device", "v5p", "--count", "60", "--set", "data.global_batch=60", "--compile"]
    assert main(argv) == 2
    assert re.search(r"--topology v5p:3x4x5: there is no such machine .*v5p:4x4x8", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("128GiB", 128 * 2**30),
        ("2TB", 2 * 10**12),
        ("1.5 GiB", 3 * 2**29),
        ("1000", 1000),
        ("64MB", 64 * 10**6),
    ],
)
def test_sizes_have_units(text: str, size: int) -> None:
    """GB and GiB are two things."""
    assert options.size(text) == size


@pytest.mark.parametrize(
    ("device", "count", "name"),
    [
        ("h200", 16, "h200:16"),
        ("v5p", 4, "v5p:2x2x1"),
        ("v5p", 8, "v5p:2x2x2"),
        ("v5p", 128, "v5p:4x4x8"),
        ("v5p", 512, "v5p:8x8x8"),
        ("v5e", 8, "v5e:2x4"),
        ("v6e", 256, "v6e:16x16"),
        ("tpu7x", 8, "tpu7x:2x2x1"),
    ],
)
def test_a_machine_has_the_name_that_its_compiler_knows(device: str, count: int, name: str) -> None:
    """The most cubic slice."""
    assert topology_of(from_name(device), count) == name


PROGRAM = "ENTRY %main () -> s32[] {\n  ROOT %z = s32[] constant(0)\n}\n"
"""A compiled program that computes nothing."""


def compiled_sheet(**said: Any) -> Sheet:
    """The tiny config on one H200, with a compiler that says these bytes."""
    run = build_run(load_config("tiny", sets=("mesh.data=1",)))
    machine = make_machine("h200", 1)
    job = plan_job(run, machine)
    plan = memory(job)
    timed = step_time(job, plan)
    nothing: dict[str, Any] = {"int": 0, "float": 0.0}
    said["peak_bytes"] = int(plan.total_bytes * said.pop("peak_over_formula"))
    for field in dataclasses.fields(CompiledStep):
        said.setdefault(field.name, nothing.get(getattr(field.type, "__name__", ""), ()))
    said["hlo"] = said["hlo"] or PROGRAM
    compiled = CompiledStep(**said)
    spent = cost(timed, machine, tokens=10**6, goodput=0.9)
    return Sheet("tiny", job, plan, timed, spent, 0.9, largest_rows=1, compiled=compiled)


@pytest.mark.parametrize(("turns", "waits_s"), [(3, 0.0), (None, None)])
def test_a_plan_says_what_the_compiled_schedule_waits_for(turns: int | None, waits_s: float | None) -> None:
    """Nothing, on one device; of a loop whose length is not in the program it is not known."""
    loop = "%w = (s32[]) while(%z), condition=%turn, body=%body"
    known = f', backend_config={{"known_trip_count":{{"n":"{turns}"}}}}' if turns else ""
    body = "%body (p: (s32[])) -> (s32[]) {\n  ROOT %p = (s32[]) parameter(0)\n}\n"
    condition = "%turn (q: (s32[])) -> pred[] {\n  ROOT %q = (s32[]) parameter(0)\n}\n"
    hlo = f"{body}\n{condition}\n{PROGRAM.replace('ROOT', f'{loop}{known}{chr(10)}  ROOT')}"
    sheet = compiled_sheet(peak_over_formula=1.0, hlo=hlo)
    assert to_json(sheet)["step"]["compiled_waits_s"] == waits_s
    out = io.StringIO()
    print_sheet(sheet, Console(file=out, width=110), [])
    said = "unknown" if waits_s is None else "0 s"
    assert f"waits for the network: 0 s by the formula, {said} in the compiled schedule" in out.getvalue()


@pytest.mark.parametrize(
    ("peak_over_formula", "good"), [(0.92, True), (1.08, True), (0.88, False), (1.2, False)]
)
def test_a_plan_that_the_compiler_contradicts_is_not_called_good(
    peak_over_formula: float, good: bool
) -> None:
    """Ten percent apart, either way."""
    sheet = compiled_sheet(peak_over_formula=peak_over_formula, temp_bytes=5, argument_bytes=7, compile_s=2.0)
    assert to_json(sheet)["compiler"]["peak_bytes"] == int(sheet.plan.total_bytes * peak_over_formula)
    assert list(to_json(sheet)["compiler"]) == [
        "argument_bytes", "temp_bytes", "host_argument_bytes", "peak_bytes", "compile_s",
    ]  # fmt: skip
    if good:
        check_plan(sheet, {})
    else:
        with pytest.raises(
            ValueError, match=r"not a good plan: the formula says [\d.]+ GiB .* more than 10% apart"
        ):
            check_plan(sheet, {})
