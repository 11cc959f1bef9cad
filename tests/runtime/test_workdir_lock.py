"""One run per workdir: real processes that start at once, are killed, stand still, or are on another host."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jtrain.errors import FileError, UserError
from jtrain.runtime import lease
from jtrain.runtime.lease import LeaseLost
from jtrain.runtime.workdir_lock import FOLDER, WorkdirLock
from tests.processes import program
from tests.small_disk import fill, remount, small_disk


def start(name: str, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        program(__file__, name, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def told(process: "subprocess.Popen[str]") -> str:
    """What the process prints after another line on its stdin."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return line(process)


@pytest.fixture
def holding() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts processes that hold a workdir until they are killed."""
    processes: list[subprocess.Popen[str]] = []

    def hold(workdir: Path, *machine: str) -> "subprocess.Popen[str]":
        processes.append(start("hold_workdir", workdir, *machine))
        assert line(processes[-1]) == "held"
        return processes[-1]

    yield hold
    for process in processes:
        process.kill()
        process.communicate()


def test_a_second_run_is_refused_with_who_holds_it_and_a_killed_one_is_replaced_at_once(
    tmp_path: Path, holding: Callable[..., "subprocess.Popen[str]"]
) -> None:
    """SIGSTOP keeps the lock on the same host, SIGKILL does not, and the takeover is said."""
    said: list[str] = []
    holder = holding(tmp_path / "run")
    holder.send_signal(signal.SIGSTOP)
    way = (
        rf"--workdir .*run is in use by another run: process {holder.pid} on host \S+, since 20\S+\. Wait "
        r"for it, stop"
    )
    with pytest.raises(
        UserError, match=rf"{way} it \(`kill {holder.pid}` on .*or set --workdir to another folder"
    ):
        WorkdirLock(tmp_path / "run", say=said.append).__enter__()
    assert said == []
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # not reaped: a zombie holds nothing
    with WorkdirLock(tmp_path / "run", say=said.append) as lock:
        lock.check()
        assert len(said) == 1
        assert f"from process {holder.pid} on host" in said[0]
        assert said[0].endswith("which is gone")
        with pytest.raises(UserError, match=f"process {os.getpid()} on host"):
            WorkdirLock(tmp_path / "run", say=said.append).__enter__()
    with WorkdirLock(tmp_path / "run", say=said.append):
        assert len(said) == 1, "a released lock is taken without a word"
    assert len(list((tmp_path / "run" / FOLDER).iterdir())) == 1, "old locks are removed"


def test_of_processes_that_start_at_once_one_gets_the_workdir(tmp_path: Path) -> None:
    """Three processes take and release it at full speed; two are never inside at once."""
    rivals = [start("take_workdir", tmp_path, 25) for _ in range(3)]
    assert {line(rival) for rival in rivals} == {"ready"}
    outputs = [rival.communicate("\n", timeout=120)[0] for rival in rivals]
    assert [rival.returncode for rival in rivals] == [0, 0, 0], outputs
    assert sum(int(text.split()[-1]) for text in outputs) >= 25


def test_a_living_run_on_another_host_is_seen_by_its_touches(
    tmp_path: Path, holding: Callable[..., "subprocess.Popen[str]"]
) -> None:
    """Process ids of another host say nothing here."""
    said: list[str] = []
    holder = holding(tmp_path, "another host")
    with pytest.raises(UserError, match=rf"in use by another run: process {holder.pid} on host"):
        WorkdirLock(tmp_path, say=said.append).__enter__()
    assert len(said) == 1
    assert "watching for at most 60 s whether it lives" in said[0]


def test_a_run_that_stood_still_notices_that_it_lost_its_workdir(
    tmp_path: Path, holding: Callable[..., "subprocess.Popen[str]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host takes over after the bound; the first one, going on, ends before it writes."""
    said: list[str] = []
    monkeypatch.setattr(lease, "STALE_S", 0.3)
    monkeypatch.setattr(lease, "WATCH_S", 0.1)
    holder = holding(tmp_path, "another host")
    assert told(holder) == "still held"
    holder.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)  # all of its threads
    with WorkdirLock(tmp_path, say=said.append):
        assert "which has not touched it for" in said[-1]
        holder.send_signal(signal.SIGCONT)
        lost = told(holder)
        assert lost.startswith(
            f"LeaseLost the lock of --workdir {tmp_path} was taken over by process {os.getpid()} on"
        )
        assert "Nothing more is written here" in lost
        assert holder.wait(timeout=300) == 0
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["2.released"], (
        "the loser left the lock alone"
    )


def test_a_lock_whose_process_was_killed_while_it_took_it_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty or damaged file names nobody; it is stale once it was not touched for long."""
    monkeypatch.setattr(lease, "POLL_S", 0.01)
    monkeypatch.setattr(lease, "STALE_S", 0.3)
    monkeypatch.setattr(lease, "WATCH_S", 0.1)
    for number, content in enumerate((b"", b"\xff{", b"[]", b'{"pid": 1}')):
        workdir = tmp_path / str(number)
        (workdir / FOLDER).mkdir(parents=True)
        (workdir / FOLDER / "7").write_bytes(content)
        (workdir / FOLDER / "notes.txt").write_text("not a lock")
        said: list[str] = []
        with WorkdirLock(workdir, say=said.append):
            assert sorted(path.name for path in (workdir / FOLDER).iterdir()) == ["8", "notes.txt"]
        assert "from a process that has not written its name" in said[-1]


def test_a_lock_that_somebody_deleted_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "STALE_S", 0.0)
    monkeypatch.setattr(lease, "BEAT_S", 3600.0)
    with WorkdirLock(tmp_path, say=print) as lock:
        (tmp_path / FOLDER / "1").unlink()
        lock.check()
        with pytest.raises(UserError, match="in use by another run"):
            WorkdirLock(tmp_path, say=print).__enter__()
        (tmp_path / FOLDER / "2").write_text("")
        with pytest.raises(LeaseLost, match="taken over by a process that has not written its name"):
            lock.check()


def test_a_full_or_read_only_disk_names_the_workdir(tmp_path: Path) -> None:
    """No half lock stays; with room the same workdir works."""
    with small_disk(tmp_path / "disk", 64) as disk:
        (disk / "run" / FOLDER).mkdir(parents=True)
        filler = fill(disk)
        with pytest.raises(
            FileError, match=rf"--workdir {disk / 'run'} cannot be written to \(No space left on dev"
        ):
            WorkdirLock(disk / "run", say=print).__enter__()
        assert list((disk / "run" / FOLDER).iterdir()) == []
        filler.unlink()
        with WorkdirLock(disk / "run", say=print):
            fill(disk)
        remount(disk, "ro")
        with pytest.raises(
            FileError, match=r"cannot be written to \(Read-only file system\)\. Make room there, or"
        ):
            WorkdirLock(disk / "run", say=print).__enter__()
