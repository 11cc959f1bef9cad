"""Runs of the command whose checkpoints are damaged, lost, or on disks that are not shared."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jtrain.telemetry import metrics
from tests.ports import free_port

SETS = ("num_steps=12", "metrics.log_every_steps=1", "metrics.tensorboard=False", "checkpoint.every_steps=4")
SETS += ("optimizer.warmup_steps=2", "checkpoint.keep_last=3")


def command(workdir: Path, *more: str) -> list[str]:
    flags = [flag for text in SETS for flag in ("--set", text)]
    base = [sys.executable, "-m", "jtrain.launch", "--config=tiny", "--with", "debug", *flags]
    return [*base, "--workdir", str(workdir), *more]


def run(workdir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"XLA_FLAGS": ""}
    return subprocess.run(command(workdir, *more), env=environ, capture_output=True, text=True, check=False)


def steps(workdir: Path) -> dict[int, Any]:
    lines = metrics.read(workdir / metrics.FILE)
    return {line["step"]: (line["loss_nats"], line["batch_hash"]) for line in lines if "loss_nats" in line}


@pytest.mark.slow
def test_a_run_goes_on_after_damage_and_never_begins_anew_in_silence(tmp_path: Path) -> None:
    """The two newest are damaged: the losses are those of the unbroken run. All gone: exit 2, or from
    scratch.
    """
    workdir = tmp_path / "run"
    done = run(workdir)
    assert done.returncode == 0, done.stderr
    want = steps(workdir)
    assert sorted(want) == list(range(1, 13))
    folder = workdir / "checkpoints"
    (folder / "12" / "manifest.json").unlink()
    big = max(
        (file for file in (folder / "8").rglob("*") if file.is_file()), key=lambda file: file.stat().st_size
    )
    os.truncate(big, big.stat().st_size - 1)
    again = run(workdir)
    assert again.returncode == 0, again.stderr
    assert "WARNING: the checkpoint of step 12 is damaged (manifest.json is missing)" in again.stdout
    assert "WARNING: the checkpoint of step 8 is damaged" in again.stdout
    assert "resumed from step 4" in again.stdout
    assert steps(workdir) == want
    assert {"8.damaged", "12.damaged", "8", "12"} < set(os.listdir(folder))

    shutil.move(folder, tmp_path / "away")
    lost = run(workdir)
    assert lost.returncode == 2
    assert "A disk may not be mounted" in lost.stderr
    assert "Traceback" not in lost.stderr
    assert steps(workdir) == want, "the history is untouched"
    anew = run(workdir, "--from-scratch")
    assert anew.returncode == 0, anew.stderr
    assert f"the earlier history is in {workdir / 'history-1'}" in anew.stdout
    assert steps(workdir) == want
    assert steps(workdir / "history-1") == want


@pytest.mark.slow
def test_processes_with_different_folders_are_refused_before_the_first_step(tmp_path: Path) -> None:
    """Each would write half of every checkpoint."""
    coordinator = f"localhost:{free_port()}"
    environ = os.environ | {"XLA_FLAGS": "", "JTRAIN_COORDINATOR": coordinator, "JTRAIN_NUM_PROCESSES": "2"}
    processes = [
        subprocess.Popen(
            command(tmp_path / str(index), "--set", "mesh.data=2", "--set", "layout.zero_stage=3"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ | {"JTRAIN_PROCESS_ID": str(index)},
        )
        for index in range(2)
    ]
    for process in processes:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 2, errors
        assert "is not one shared folder" in errors
        assert "Set --workdir to a folder that all hosts share" in errors
        assert "Traceback" not in errors
        assert "step 1/" not in output
