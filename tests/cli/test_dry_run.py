"""`--dry-run` refuses what the run would be refused for, by the same message, and touches nothing."""

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from jtrain.checkpoint.files import MANIFEST
from jtrain.cli import launch
from jtrain.config.load import load_config
from jtrain.config.tree import flat


def of_another_run(workdir: Path) -> None:
    workdir.mkdir()
    (workdir / "config.txt").write_text(flat(load_config("tiny", ["debug"], ["seed=1"])))


def without_its_checkpoints(workdir: Path) -> None:
    workdir.mkdir()
    (workdir / "last_checkpoint.json").write_text(json.dumps({"step": 5}))


def a_file(workdir: Path) -> None:
    workdir.write_text("")


def nothing(_: Path) -> None:
    pass


def of_this_run(workdir: Path) -> None:
    workdir.mkdir()
    (workdir / "config.txt").write_text(flat(load_config("tiny", ["debug"])))


REFUSED: dict[str, tuple[Callable[[Path], None], list[str], str]] = {
    "mesh": (nothing, ["--set", "mesh.data=4"], "8 devices are here (cpu), but mesh data=4 = 4 devices"),
    "memory": (
        nothing,
        ["--set", "model.d_model=65536", "--set", "model.num_layers=99"],
        "GiB are available",
    ),
    "data": (nothing, ["--set", "data.path=/nowhere/*.txt"], "/nowhere/*.txt"),
    "vocabulary": (nothing, ["--set", "model.vocab_size=128"], "Set model.vocab_size=256 or more"),
    "callback": (nothing, ["--set", "callbacks=('nowhere:Mine',)"], "callbacks='nowhere:Mine'"),
    "batch": (nothing, ["--set", "data.global_batch=7", "--set", "mesh.data=8"], "data.global_batch=7"),
    "another run": (of_another_run, [], "holds another run:\n  seed: 1 there, 0 here"),
    "a change": (of_this_run, ["--allow-change", "seed"], "--allow-change seed: It takes"),
    "lost": (without_its_checkpoints, [], "holds no checkpoint, although"),
    "a file": (a_file, [], "is a file. Give a folder"),
    "a processor": (nothing, ["--device", "tpu"], "--device tpu"),
}


def without_free_memory(text: str) -> str:
    """A message without the memory that was free at that moment, and what fits into it."""
    needed, there, _ = text.partition(" GiB are available")
    return re.sub(r"cpu, [\d.]+ GiB each", "cpu", needed.rpartition(",")[0] if there else text)


@pytest.mark.parametrize("case", REFUSED)
def test_a_dry_run_is_refused_as_the_run_is(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare, words, message = REFUSED[case]
    workdir = tmp_path / "run"
    prepare(workdir)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    command = ["--config=tiny", "--with", "debug", *words, "--workdir", str(workdir)]
    assert launch.main([*command, "--dry-run"]) == 2
    dry = capsys.readouterr()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert launch.main(command) == 2
    assert without_free_memory(dry.err) == without_free_memory(capsys.readouterr().err)
    assert message in dry.err
    # What the layout would need is said as well, where there is one.
    if case in ("mesh", "memory", "data", "vocabulary", "another run", "lost"):
        assert "bytes per device, at the peak" in dry.out


@pytest.mark.parametrize(
    ("saved", "words", "ending"),
    [
        (["num_steps=5"], ["--set", "num_steps=7"], ""),
        (["num_steps=5", "seed=1"], ["--set", "num_steps=5"], ""),
        (["num_steps=5"], ["--set", "num_steps=5", "--set", "profile.steps=(1,3)"], "-profile"),
    ],
    ids=["more steps", "another seed", "a profile"],
)
def test_a_run_that_is_done_offers_a_workdir_for_something_new(
    saved: list[str],
    words: list[str],
    ending: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last line is the whole command, in a folder that is not there; it starts."""
    workdir = tmp_path / "run"
    (workdir / "checkpoints" / "5").mkdir(parents=True)
    (workdir / "checkpoints" / "5" / MANIFEST).touch()
    (workdir / "config.txt").write_text(flat(load_config("tiny", ["debug"], saved)))
    if ending == "":
        (tmp_path / "run-2").mkdir()
    new = f"{workdir}-3" if ending == "" else f"{workdir}{ending}"
    command = ["--config=tiny", "--with", "debug", *words, "--workdir", str(workdir), "--dry-run"]
    assert launch.main(command) == 2
    advice = capsys.readouterr().err.rpartition("\n")[0].rpartition("\n")[2]
    assert shlex.split(advice) == ["next:", "jtrain", "launch", *command[:-3], "--workdir", new]
    assert launch.main([*shlex.split(advice)[3:], "--dry-run"]) == 0


def test_a_run_that_would_start_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--config=tiny", "--with", "debug", "--workdir", str(tmp_path / "run"), "--dry-run"]
    assert launch.main(command) == 0
    assert "bytes per device, at the peak" in capsys.readouterr().out
    assert os.listdir(tmp_path) == []
