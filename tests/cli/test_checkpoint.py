"""Tests of `python -m jtrain.checkpoint`."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jtrain.checkpoint import Checkpoints, CheckpointSpec
from jtrain.cli import checkpoint as verb
from jtrain.step.state import TrainState
from tests.cli.loaded import list_loaded

MakeLike = Callable[..., TrainState]
Fill = Callable[[Any, int], Any]


@pytest.fixture
def workdir(tmp_path: Path, make_like: MakeLike, fill: Fill) -> Path:
    """Directory with checkpoints of steps 1 and 2, and the remains of a third."""
    with Checkpoints(tmp_path, CheckpointSpec()) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, fill(make_like({}), step), {"next": step}, f"seed: int = {step}\n")
    (tmp_path / "checkpoints" / "3.orbax-checkpoint-tmp").mkdir()
    return tmp_path


def run(*argv: str) -> int:
    """Runs the verb; returns its exit code."""
    return verb.main(list(argv))


def spoil(workdir: Path, step: int) -> None:
    """Cuts one file short."""
    files = [file for file in (workdir / "checkpoints" / str(step)).rglob("*") if file.is_file()]
    file = max(files, key=lambda file: file.stat().st_size)
    os.truncate(file, 10)


def test_list_shows_steps_dates_sizes_and_what_is_no_checkpoint(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The JSON has the same rows as the table."""
    assert run("list", "--workdir", str(workdir), "--json", str(workdir / "list.json")) == 0
    rows = json.loads((workdir / "list.json").read_text())
    assert [(row["step"], row["complete"]) for row in rows] == [(1, True), (2, True), (None, False)]
    assert rows[0]["bytes"] > 100_000
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 4
    assert shown[1].endswith("yes")
    assert rows[1]["saved_at"][:19] in shown[2]
    assert shown[3].startswith("3.orbax-checkpoint-tmp")


def test_show_prints_leaves_data_state_and_config_of_the_newest(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --step it shows that step instead."""
    assert run("show", "--workdir", str(workdir)) == 0
    shown = capsys.readouterr().out
    (line,) = (line for line in shown.splitlines() if line.startswith("params.layers.attention.q_DNH "))
    assert line.split() == [
        "params.layers.attention.q_DNH",
        "[2,",
        "64,",
        "4,",
        "16]",
        "float32",
        "0.0",
        "MiB",
    ]
    assert '"next": 2' in shown
    assert "seed: int = 2" in shown
    assert run("show", "--workdir", str(workdir), "--step", "1", "--json", str(workdir / "show.json")) == 0
    found = json.loads((workdir / "show.json").read_text())
    assert found["data"] == {"next": 1}
    assert found["config"] == "seed: int = 1\n"
    assert found["leaves"]["params.embed_VD"] == {"shape": [256, 64], "dtype": "float32", "bytes": 65536}


def test_verify_finds_damage_and_exits_2(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Intact checkpoints exit with 0, so that a script can rely on the code."""
    assert run("verify", "--workdir", str(workdir)) == 0
    assert capsys.readouterr().out.count(": intact (") == 2
    spoil(workdir, 2)
    assert run("verify", "--workdir", str(workdir), "--json", str(workdir / "verify.json")) == 2
    shown = capsys.readouterr()
    assert "step 1: intact" in shown.out
    assert "step 2: DAMAGED" in shown.out
    assert "10 bytes" in shown.err
    assert "Intact steps: [1]" in shown.err
    rows = json.loads((workdir / "verify.json").read_text())
    assert rows[0]["damage"] == []
    assert len(rows[1]["damage"]) == 1
    assert run("verify", "--workdir", str(workdir), "--step", "1") == 0


def test_a_damaged_manifest_hides_no_other_checkpoint(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`list` shows the other checkpoints too."""
    (workdir / "checkpoints" / "1" / "manifest.json").write_text("{")
    assert run("list", "--workdir", str(workdir)) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "no: damaged: " in shown[1]
    assert shown[2].endswith("yes")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("show", "--step", "7"), "--step 7: no complete checkpoint in"),
        (("verify", "--step", "7"), "which has steps 1, 2."),
    ],
)
def test_a_step_that_is_not_there_exits_2(
    workdir: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    """The message lists the existing steps."""
    assert run(argv[0], "--workdir", str(workdir), *argv[1:]) == 2
    assert message in capsys.readouterr().err


def test_a_directory_without_checkpoints_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The workdir does not exist, or nothing was saved in it yet."""
    assert run("list", "--workdir", str(tmp_path)) == 2
    assert "Give the --workdir of a run" in capsys.readouterr().err
    (tmp_path / "checkpoints").mkdir()
    assert run("list", "--workdir", str(tmp_path)) == 2
    assert "No complete checkpoint in" in capsys.readouterr().err


def test_the_verb_needs_neither_jax_nor_orbax(workdir: Path) -> None:
    """The verb answers at once; it runs as a command, and its exit code is checked."""
    command = ["jtrain.checkpoint", "verify", "--workdir", str(workdir)]
    loaded = list_loaded(("jax", "orbax", "numpy"), command)
    assert (loaded.codes, loaded.packages) == ([0], [])
    command = [sys.executable, "-m", "jtrain.checkpoint", "show", "--workdir", str(workdir), "--step", "9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --step 9: no complete checkpoint")
