"""What the loop refuses, and what it leaves behind."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jtrain.config import tree
from jtrain.config.devices import resolve_mesh
from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain.dashboard import prometheus
from jtrain.dashboard.run_folder import open_runs
from jtrain.runtime.user_code import load_python_file
from jtrain.telemetry import metrics
from jtrain.telemetry.metric_fields import MESSAGE_FIELD, eval_fields, result_fields, train_fields
from jtrain.train import attempt
from jtrain.train.bad_steps.bad_steps import BadNumbers

ROOT = Path(__file__).parents[2]


def train(workdir: Path, *sets: str) -> int:
    sets = (
        "mesh.data=8",
        "layout.zero_stage=1",
        "metrics.log_every_steps=1",
        "optimizer.warmup_steps=0",
        *sets,
    )
    run_config = load_config("tiny", ["debug"], sets)
    return attempt.train(build_run(run_config), workdir=workdir, config_text=tree.flat(run_config))


def launched(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jtrain.launch", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | {"XLA_FLAGS": ""},
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that trained all of its steps."""
    workdir = tmp_path_factory.mktemp("finished")
    assert train(workdir) == 0
    return workdir


@pytest.mark.smoke
def test_a_run_leaves_what_the_design_lists(finished: Path) -> None:
    """config.txt, run.json, one line per step with every key, event files and a checkpoint."""
    assert (finished / "config.txt").read_text().startswith("seed: int = 0\n")
    facts = json.loads((finished / "run.json").read_text())
    assert facts["mesh"]["data"] == 8
    assert set(facts["versions"]) > {"jtrain", "jax", "python"}
    lines = metrics.read(finished / metrics.FILE)
    steps = [line for line in lines if "loss_nats" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    for line in steps:
        assert list(line) == [field.name for field in dataclasses.fields(metrics.TrainLine)]
        assert line["mfu"] is None, "nobody publishes the peak of a CPU"
        assert line["tokens_per_s"] > 0
        assert len(line["batch_hash"]) == 16
    assert [line["step"] for line in lines if "eval_loss_nats" in line] == [5]
    assert list((finished / metrics.EVENTS).iterdir())
    assert (finished / "checkpoints" / "5").is_dir()


def test_the_page_of_the_fields_has_every_field_of_a_run_and_no_other(finished: Path) -> None:
    """docs/metrics.md: each field once for its kind of line, as `metric_fields` has it from the docstrings."""
    page = load_python_file(ROOT / "docs" / "make_metrics_page.py").page()
    assert (ROOT / "docs" / "metrics.md").read_text() == page, "run python docs/make_metrics_page.py"
    train_part, _, eval_part = page.partition("## A line of an evaluation")
    on_page = [re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE) for part in (train_part, eval_part)]
    lines = metrics.read(finished / metrics.FILE)
    [evaluated] = [line for line in lines if "eval_sets" in line]
    assert sorted(on_page[0]) == sorted(lines[0]) == sorted(train_fields())
    assert on_page[1] == [*evaluated, *result_fields(), MESSAGE_FIELD.name]
    assert MESSAGE_FIELD.name in json.loads(metrics.encode({"step": 1, "loss_nats": float("nan")}))
    assert lines[0]["data_planned"] == {"data": 1.0}
    described = [*train_fields().values(), *eval_fields().values()]
    assert all(field.meaning and field.title for field in described)
    units = {field.name: field.unit for field in described}
    assert (units["step_time_ms"], units["tokens_per_s"], units["step"]) == (
        "milliseconds",
        "tokens per second",
        "",
    )


def test_every_metric_of_the_board_is_at_the_endpoint_of_a_run(finished: Path) -> None:
    """launch/grafana/jtrain.json; what a CPU does not tell is declared without a sample."""
    [run] = open_runs([str(finished)])
    while run.refresh():
        pass
    families = {
        family.name: family
        for family in text_string_to_metric_families(prometheus.exposition([run]).decode())
    }
    board = json.loads((ROOT / "launch" / "grafana" / "jtrain.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in board["templating"]["list"]]
    queried = {name for query in queries for name in re.findall(r"jtrain_\w+", query)}
    assert len(queried) > 20
    assert queried - families.keys() == set()
    unknown = {name for name in queried if not families[name].samples}
    told_by_drivers = {"mfu", "measured_peak_share", "device_memory_peak_gib", "clock_mhz", "power_w"}
    assert unknown <= {f"jtrain_{name}" for name in told_by_drivers}
    [step], [saved] = families["jtrain_step"].samples, families["jtrain_checkpoint_step"].samples
    assert (step.labels, step.value, saved.value) == ({"run": finished.name}, 5, 5)
    for query in queries:
        for selector in re.findall(r"jtrain_\w+(\{.*?\})?", query):
            assert selector in ("", '{run=~"$run"}'), query
    labels = set(re.findall(r"\{\{(\w+)\}\}", json.dumps(board)))
    assert labels == {"run", "set", "category"}


def test_a_finished_run_is_left_alone(finished: Path) -> None:
    """The same config after the end trains nothing and changes no line."""
    before = (finished / metrics.FILE).read_bytes()
    assert train(finished) == 0
    assert (finished / metrics.FILE).read_bytes() == before


@pytest.mark.slow
def test_a_learning_rate_that_explodes_stops_the_run_and_nothing_is_saved(tmp_path: Path) -> None:
    """The message has the step, the batch and what to try; no checkpoint of it exists."""
    sets = ("num_steps=8", "checkpoint.every_steps=1", "model.tie_embeddings=False", "guard.on_bad=stop")
    with pytest.raises(
        BadNumbers, match=r"bad at step \d+: .*batch_hash=[0-9a-f]{16}.*optimizer.peak_lr"
    ) as ended:
        train(tmp_path, "optimizer.peak_lr=1e30", *sets)
    saved = [int(path.name) for path in (tmp_path / "checkpoints").iterdir()]
    assert saved
    assert all(step < ended.value.step for step in saved)
    with pytest.raises(ValueError, match=r"or add --allow-change optimizer.peak_lr to go on"):
        train(tmp_path, "optimizer.peak_lr=1e-3", *sets)


def test_a_workdir_of_another_run_is_refused_before_anything_changes(finished: Path) -> None:
    """The difference is shown, and the run that is there stays as it is."""
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"holds another run:\n  num_steps: 5 there, 7 here"):
        train(finished, "num_steps=7")
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


def test_a_model_that_cannot_fit_is_refused_with_what_would(tmp_path: Path) -> None:
    """Llama 3.1 8B on this machine: bytes needed, bytes there, settings that fit; nothing is written."""
    done = launched("--config=llama8b", "--workdir", str(tmp_path / "run"))
    assert done.returncode == 2, done.stderr
    assert "This run needs" in done.stderr
    assert "GiB per device" in done.stderr
    assert re.search(r"Nothing fits on 1 of them; on \d+ this does:\n  --set (mesh|layout)\.", done.stderr)
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_too_few_devices_are_counted(tmp_path: Path) -> None:
    """The mesh and what is here, with both ways out."""
    with pytest.raises(
        ValueError, match=r"^8 devices are here \(cpu\), but mesh data=2 \* tensor=2 = 4 devices\. "
    ):
        train(tmp_path, "mesh.data=2", "mesh.tensor=2")


@pytest.mark.slow
def test_idle_devices_change_no_batch_and_no_loss(finished: Path, tmp_path: Path) -> None:
    """`mesh.data=auto` on three of the eight devices takes two: the batches and losses of all eight."""
    config = load_config("tiny", ["debug"], ("metrics.log_every_steps=1", "optimizer.warmup_steps=0"))
    devices, lines = resolve_mesh(config, jax.devices()[:3])
    assert "on 2 of the 3 devices that are here; cpu:2 stays idle" in lines[0]
    assert (
        attempt.train(build_run(config), workdir=tmp_path, config_text=tree.flat(config), devices=devices)
        == 0
    )
    got, want = (
        [line for line in metrics.read(folder / metrics.FILE) if "loss_nats" in line]
        for folder in (tmp_path, finished)
    )
    assert [line["batch_hash"] for line in got] == [line["batch_hash"] for line in want]
    losses = [line["loss_nats"] for line in want]
    assert losses[-1] < losses[0] - 0.1
    assert [line["loss_nats"] for line in got] == pytest.approx(losses, rel=2e-2)  # bfloat16
    assert json.loads((tmp_path / "run.json").read_text())["devices"]["count"] == 2


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The losses of the README's first command on one device."""
    return first_command(tmp_path_factory.mktemp("alone"), devices=1)


def first_command(workdir: Path, *, devices: int, processes: int = 1) -> list[dict[str, Any]]:
    """Lines of the train steps of `--config=tiny`, six steps long and in float32."""
    sets = (
        "num_steps=6",
        "metrics.log_every_steps=1",
        "precision.compute_dtype=float32",
        "eval.every_steps=None",
    )
    flags = [flag for text in sets for flag in ("--set", text)]
    flags += ["--workdir", str(workdir), "--emulate-devices", str(devices)]
    supervised = [] if processes == 1 else ["--supervise", "-n", str(processes)]
    done = launched("--config=tiny", *flags, *supervised)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in metrics.read(workdir / metrics.FILE) if "loss_nats" in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "processes", "taken"), [(2, 1, 2), (3, 1, 2), (8, 1, 8), (4, 2, 8), (3, 2, 4)]
)
def test_the_first_command_trains_on_any_devices(
    devices: int, processes: int, taken: int, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The same command, without a word about the mesh: the same batches, the same losses, and an exit code of
    0.
    """
    got = first_command(tmp_path, devices=devices, processes=processes)
    assert len(got) == 6
    assert alone[-1]["loss_nats"] < alone[0]["loss_nats"] - 0.5
    assert [line["batch_hash"] for line in got] == [line["batch_hash"] for line in alone]
    assert [line["loss_nats"] for line in got] == pytest.approx(
        [line["loss_nats"] for line in alone], rel=1e-5
    )
    facts = json.loads((tmp_path / "run.json").read_text())
    assert (facts["devices"]["count"], facts["processes"]) == (taken, processes)


def test_a_workdir_that_cannot_be_written_is_a_message(tmp_path: Path) -> None:
    """Here a file is in the way."""
    (tmp_path / "run").write_text("not a folder")
    done = launched("--config=tiny", "--with", "debug", "--workdir", str(tmp_path / "run"))
    assert done.returncode == 2, done.stderr
    assert str(tmp_path / "run") in done.stderr
    assert "Traceback" not in done.stderr
