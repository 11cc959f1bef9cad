"""A pipelined run is the same run: it goes on from any checkpoint, and any run goes on from its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain.telemetry import metrics
from jtrain.train import attempt
from tests.ports import free_port

SMALL = (
    "num_steps=5",
    "model.num_layers=5",
    "model.d_model=64",
    "model.d_ff=128",
    "model.head_dim=16",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "data.seq_len=64",
    "data.global_batch=16",
    "data.eval_batches=1",
    "eval.every_steps=5",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=5",
    "metrics.log_every_steps=1",
    "precision.compute_dtype=float32",
    "integrity.recompute_every_steps=2",
)
PLAIN = ("mesh.data=8", "layout.zero_stage=1")
ZBV = ("mesh.stage=2", "mesh.data=4", "layout.microbatches=4", "pipeline.schedule=zbv", "layout.zero_stage=2")
UNEVEN = ("mesh.stage=4", "mesh.data=2", "layout.microbatches=8", "layout.zero_stage=3")


def train(workdir: Path, *sets: str) -> int:
    run_config = load_config("tiny", (), (*SMALL, *sets))
    return attempt.train(build_run(run_config), workdir=workdir, config_text=tree.flat(run_config))


def lines(workdir: Path) -> dict[int, dict[str, Any]]:
    """The lines of the steps, by step."""
    return {line["step"]: line for line in metrics.read(workdir / metrics.FILE) if "loss_nats" in line}


def begun(source: Path, workdir: Path, step: int) -> Path:
    """A copy of a run as it was after a step."""
    shutil.copytree(source, workdir)
    for folder in (workdir / "checkpoints").iterdir():
        if folder.name.isdigit() and int(folder.name) > step:
            shutil.rmtree(folder)
    (workdir / "last_checkpoint.json").unlink(missing_ok=True)
    return workdir


def assert_same(found: dict[int, dict[str, Any]], want: dict[int, dict[str, Any]]) -> None:
    assert found, "no step was compared"
    for step, line in found.items():
        assert line["batch_hash"] == want[step]["batch_hash"]
        assert line["tokens"] == want[step]["tokens"]
        assert line["loss_nats"] == pytest.approx(want[step]["loss_nats"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(want[step]["grad_norm"], rel=1e-4)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run without stages."""
    workdir = tmp_path_factory.mktemp("plain")
    assert train(workdir, *PLAIN) == 0
    return workdir


@pytest.mark.slow
def test_a_run_changes_its_stages_and_goes_on(plain: Path, tmp_path: Path) -> None:
    """No stages to step 2, 4 uneven stages to step 4, 2 stages under another schedule to 5; or none again.

    Four stages again, under a schedule that adds in the same order, repeat step 5 bit for bit.
    """
    want = lines(plain)
    assert want[5]["loss_nats"] < want[1]["loss_nats"] - 0.1, "the loss must move, or equality proves nothing"
    four = begun(plain, tmp_path / "four", 2)
    assert train(four, *UNEVEN) == 0
    assert_same({step: lines(four)[step] for step in (3, 4, 5)}, want)
    evaluated = [
        [line["eval_loss_nats"] for line in metrics.read(workdir / metrics.FILE) if "eval_loss_nats" in line]
        for workdir in (plain, four)
    ]
    assert evaluated[1][-1] == pytest.approx(evaluated[0][-1], rel=1e-5)
    leaves = [
        json.loads((workdir / "checkpoints" / "4" / "manifest.json").read_text())["leaves"]
        for workdir in (plain, four)
    ]
    assert leaves[0] == leaves[1]
    for name, sets in (("two", ZBV), ("none", PLAIN), ("gpipe", (*UNEVEN, "pipeline.schedule=gpipe"))):
        again = begun(four, tmp_path / name, 4)
        assert train(again, *sets) == 0
        assert_same({5: lines(again)[5]}, want)
    bits = [[lines(run)[5][key] for key in ("loss_nats", "grad_norm")] for run in (four, again)]
    assert bits[0] == bits[1]


@pytest.mark.slow
def test_two_processes_share_a_pipeline_and_resume_after_a_kill(plain: Path, tmp_path: Path) -> None:
    """Stages span the processes, which read the same rows. Steps taken again after SIGKILL have the same
    bits.
    """
    workdir = tmp_path / "run"
    coordinator = f"localhost:{free_port()}"
    environ = os.environ | {"XLA_FLAGS": "", "JTRAIN_COORDINATOR": coordinator, "JTRAIN_NUM_PROCESSES": "2"}
    sets = (*SMALL, *UNEVEN, "mesh.data=1", "layout.zero_stage=0")
    options = [part for text in sets for part in ("--set", text)]
    command = [sys.executable, "-m", "jtrain.launch", "--config=tiny", "--emulate-devices", "2", *options]

    def start() -> list[subprocess.Popen[str]]:
        return [
            subprocess.Popen(
                [*command, "--workdir", str(workdir)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environ | {"JTRAIN_PROCESS_ID": str(index)},
            )
            for index in range(2)
        ]

    processes = start()
    while not (workdir / "checkpoints" / "2").exists() or max(_steps(workdir), default=0) < 3:
        assert processes[0].poll() is None, processes[0].communicate()[0]
        time.sleep(0.05)
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    before = lines(workdir)
    processes = start()
    for process in processes:
        output, _ = process.communicate(timeout=1200)
        assert process.returncode == 0, output
    after = lines(workdir)
    assert_same(after, lines(plain))
    assert sorted(after) == [1, 2, 3, 4, 5]
    assert before[3]["loss_nats"] == after[3]["loss_nats"]


def _steps(workdir: Path) -> list[int]:
    return list(lines(workdir)) if (workdir / metrics.FILE).exists() else []
