"""The command with a workdir in an object store: killed in the middle of a save, and resumed on another
machine.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jtrain.checkpoint import files, folders
from jtrain.errors import UserError
from jtrain.runtime.stores import workdir_path
from jtrain.runtime.workdir_lock import WorkdirLock
from jtrain.telemetry import metrics
from jtrain.train.store_mirror import StoreMirror, open_workdir
from tests.data.sources.object_store import gs_store, s3_store

SETS = ("num_steps=12", "metrics.log_every_steps=1", "metrics.tensorboard=False", "checkpoint.every_steps=4")
SETS += ("optimizer.warmup_steps=2",)


def start(workdir: object, cache: Path) -> subprocess.Popen[str]:
    flags = [flag for text in SETS for flag in ("--set", text)]
    command = [sys.executable, "-m", "jtrain.launch", "--config=tiny", "--with", "debug", *flags]
    environ = os.environ | {"XLA_FLAGS": "", "XDG_CACHE_HOME": str(cache)}
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen([*command, "--workdir", str(workdir)], env=environ, **pipes)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def steps(file: Path) -> dict[int, Any]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {line["step"]: (line["loss_nats"], line["batch_hash"]) for line in lines if "loss_nats" in line}


def test_files_of_a_run_in_between_are_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the first fetch and the run's own lock another run went on: its metrics are there. A history that
    was moved aside is not fetched back.
    """
    with gs_store(monkeypatch) as store:
        workdir = workdir_path(f"{store.url}/runs/tiny")
        (workdir / "metrics.jsonl").write_bytes(b"1\n")
        local, (mirror,) = open_workdir(workdir, {"XDG_CACHE_HOME": str(tmp_path)})
        assert isinstance(mirror, StoreMirror)
        (local / "mark").touch()
        with WorkdirLock(workdir, say=print) as lock:
            mirror.hold(lock, takes=1, moved=False)
        assert (local / "mark").exists(), "nobody was there in between: nothing is fetched"
        local, (mirror,) = open_workdir(workdir, {"XDG_CACHE_HOME": str(tmp_path)})
        assert isinstance(mirror, StoreMirror)
        with WorkdirLock(workdir, say=print):
            (workdir / "metrics.jsonl").write_bytes(b"1\n2\n")
        with WorkdirLock(workdir, say=print) as lock:
            with pytest.raises(UserError, match=r"another run has had --workdir .* --from-scratch"):
                mirror.hold(lock, takes=1, moved=True)
            assert (local / "metrics.jsonl").read_bytes() == b"1\n"
            mirror.hold(lock, takes=1, moved=False)
        assert (local / "metrics.jsonl").read_bytes() == b"1\n2\n"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_run_in_a_store_is_killed_within_a_save_and_goes_on_elsewhere(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its losses and batches are those of an unbroken run on a disk."""
    finish(start(tmp_path / "disk", tmp_path / "first"))
    want = steps(tmp_path / "disk" / metrics.FILE)
    assert sorted(want) == list(range(1, 13))
    with {"gs": gs_store, "s3": s3_store}[scheme](monkeypatch) as store:
        workdir = workdir_path(f"{store.url}/runs/tiny")
        folder = workdir / "checkpoints"
        process = start(workdir, tmp_path / "first")
        while not folders.names(folder / "8"):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert files.steps(folder) in ((4,), (4, 8))
        output = finish(start(workdir, tmp_path / "second"))
        assert "resumed from step " in output
        assert f"results in {workdir}" in output
        assert steps(workdir / metrics.FILE) == want
        assert files.steps(folder) == (8, 12)
        assert (workdir / "run.json").is_file()
        again = finish(start(workdir, tmp_path / "third"))
        assert "resumed from step 12" in again
        assert not Path("gs:").exists()
        verify = [sys.executable, "-m", "jtrain.checkpoint", "verify", "--workdir", str(workdir)]
        done = subprocess.run(verify, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        sample = [sys.executable, "-m", "jtrain.generate", "--workdir", str(workdir), "--max-tokens", "4"]
        done = subprocess.run(sample, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_second_run_on_another_host_is_refused_and_harms_nothing(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preempted job beside its replacement: the second one, whose local folder is another, ends with 2."""
    with {"gs": gs_store, "s3": s3_store}[scheme](monkeypatch) as store:
        workdir = workdir_path(f"{store.url}/runs/tiny")
        first = start(workdir, tmp_path / "first")
        while not folders.names(workdir / "checkpoints"):
            assert first.poll() is None, first.communicate()[0]
            time.sleep(0.02)
        second = start(workdir, tmp_path / "second")
        output, _ = second.communicate(timeout=300)
        assert second.returncode == 2, output
        assert f"--workdir {workdir} is in use by another run: process {first.pid} on host" in output
        finish(first)
        assert files.steps(workdir / "checkpoints") == (8, 12)
        assert sorted(steps(workdir / metrics.FILE)) == list(range(1, 13))
        leases = [files.read_manifest(workdir / "checkpoints" / str(step)).lease for step in (8, 12)]
        assert leases[0] == leases[1] is not None
