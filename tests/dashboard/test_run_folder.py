"""A run is what its files say, at any moment: growing, cut off, rewritten, not begun, killed, finished."""

import json
from pathlib import Path

import numpy as np
import pytest

from jtrain.checkpoint.files import MANIFEST
from jtrain.dashboard import growing_file
from jtrain.dashboard.run_folder import RunFolder, open_runs
from jtrain.errors import UserError
from jtrain.runtime.lease import Lease
from jtrain.runtime.lease_stores import FolderStore
from jtrain.telemetry.metrics import drop_after
from tests.dashboard.made_up import CONFIG, loss_of, make_run, train_lines, wall_lines


def read_all(run: RunFolder) -> RunFolder:
    while run.refresh():
        pass
    return run


def steps_of(run: RunFolder) -> list[int]:
    return read_all(run).metrics.columns.steps.tolist()


def append(file: Path, text: str) -> None:
    with file.open("a") as opened:
        opened.write(text)


def test_a_growing_file_is_read_once_and_a_cut_line_waits(tmp_path: Path) -> None:
    workdir = make_run(tmp_path / "run", 20)
    run, file = RunFolder(workdir, "run"), workdir / "metrics.jsonl"
    assert steps_of(run) == list(range(1, 21))
    version = run.version
    assert not run.refresh()
    assert run.version == version, "nothing is new"
    next_line = train_lines([21])
    append(file, next_line[:40])
    assert steps_of(run)[-1] == 20
    append(file, next_line[40:] + "garbage\n" + train_lines([22]))
    assert steps_of(run) == list(range(1, 23))
    assert run.version > version
    np.testing.assert_array_equal(run.metrics.columns.values("loss_nats"), [loss_of(s) for s in range(1, 23)])


def test_a_resumed_run_rewrites_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than before at the next look, in pieces of a few lines: what was dropped is gone."""
    monkeypatch.setattr(growing_file, "CHUNK_BYTES", 3000)
    workdir = make_run(tmp_path / "run", 20)
    run = RunFolder(workdir, "run")
    assert steps_of(run)[-1] == 20
    assert drop_after(workdir / "metrics.jsonl", 12) == 0
    append(workdir / "metrics.jsonl", train_lines(range(13, 31), loss_nats=1.0))
    assert steps_of(run) == list(range(1, 31))
    assert run.metrics.columns.values("loss_nats")[12:].tolist() == [1.0] * 18
    # The same length, other numbers.
    text = (workdir / "metrics.jsonl").read_text()
    (workdir / "metrics.jsonl").write_text(text.replace('"loss_nats": 1.0', '"loss_nats": 2.0'))
    read_all(run)
    assert run.metrics.columns.values("loss_nats")[12:].tolist() == [2.0] * 18


def test_attempts_and_the_time_between_them(tmp_path: Path) -> None:
    """An attempt of 10 + 80 s, killed; the next one begins 30 s later, three steps back."""
    workdir = make_run(tmp_path / "run", 20)
    run = RunFolder(workdir, "run")
    append(workdir / "goodput.jsonl", wall_lines(range(18, 22), start_s=1.7e9 + 120.0))
    read_all(run)
    [restart] = run.wall.attempts[1:]
    assert (restart.step, restart.kind) == (17, "restart")
    assert restart.text == "attempt 2 goes on, 30 s after the one before"
    assert np.nansum(run.wall.columns.values("idle")) == 30.0
    assert run.wall.columns.steps.tolist() == sorted([0, *range(1, 21), 17, *range(18, 22)])


def test_the_state_of_a_run(tmp_path: Path) -> None:
    """By its files and its lock: each state in the order in which a run has them."""
    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / "config.txt").write_text(CONFIG.format(steps=30))
    run = RunFolder(workdir, "run")
    assert read_all(run).status == "not begun"
    lease = Lease(FolderStore(workdir / "lock"))
    lease.take(watching=lambda _: None, taken_over=lambda _: None)
    assert read_all(run).status == "running, before its first line"
    append(workdir / "metrics.jsonl", train_lines(range(1, 11)))
    append(workdir / "goodput.jsonl", wall_lines(range(1, 11)))
    assert read_all(run).status == "running"
    lease.release()
    assert read_all(run).status == "killed after step 10"
    append(workdir / "goodput.jsonl", '{"event": "end", "time_s": 1.8e9, "step": 10, "seconds": {}}\n')
    assert read_all(run).status == "stopped after step 10"
    append(workdir / "metrics.jsonl", train_lines(range(11, 31)))
    assert read_all(run).status == "finished"


def test_what_else_happened(tmp_path: Path) -> None:
    """Bad steps, alerts and the data's messages; a damaged checkpoint is no checkpoint."""
    workdir = make_run(tmp_path / "run", 20)
    append(workdir / "bad_steps.jsonl", '{"step": 7, "action": "went back", "to": 4}\n')
    append(
        workdir / "alerts.jsonl",
        '{"step": 9, "kind": "disk", "message": "full", "time": "2026-01-02T03:04:05Z"}\n',
    )
    append(workdir / "data.log", "step 3: one document is damaged\nno step\n")
    (workdir / "checkpoints" / "10" / "state").mkdir(parents=True)
    (workdir / "checkpoints" / "10" / MANIFEST).write_text("{")
    run = read_all(RunFolder(workdir, "run"))
    assert [(event.step, event.kind, event.text, event.time) for event in run.events] == [
        (7, "bad step", "action went back, to 4", ""),
        (9, "alert", "full", "2026-01-02T03:04:05"),
        (3, "data", "one document is damaged", ""),
    ]
    assert run.checkpoints == {}


def test_the_samples_are_those_of_the_newest_evaluation(tmp_path: Path) -> None:
    workdir = make_run(tmp_path / "run", 2)
    for step in (1, 2, 2):
        append(
            workdir / "generations.jsonl",
            json.dumps({"step": step, "of": "prompts", "prompt": "a", "answer": "b"}) + "\n",
        )
    assert [sample["step"] for sample in read_all(RunFolder(workdir, "run")).samples] == [2, 2]


def test_a_folder_without_a_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that begins one; two runs of one name are told apart by their paths."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"--workdir empty holds no run: it has no config\.txt") as refusal:
        open_runs(["empty"])
    assert "jtrain launch --config=tiny --workdir empty." in str(refusal.value)
    with pytest.raises(UserError, match=r"--workdir a/rnu: there is no such folder\. Train one"):
        open_runs(["a/rnu"])
    for name in ("a", "b"):
        make_run(tmp_path / name / "run", 1)
    assert [run.name for run in open_runs(["a/run", "b/run", "a/run"])] == ["a/run", "b/run"]
    assert [run.name for run in open_runs(["a/run"])] == ["run"]
    # The way out: what a run writes first makes the folder one.
    (tmp_path / "empty" / "lock").mkdir()
    assert read_all(open_runs(["empty"])[0]).status == "not begun"
