"""Sampler process: its records survive a kill, it dies with its parent, and nothing waits for it."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from jtrain.profile.clocks import sampler, samples
from jtrain.profile.clocks.sampler import Sampler, records_in
from jtrain.profile.clocks.scripted import Scripted
from tests.processes import program

ROOT = Path(__file__).parents[3]


def wait_for(what: Callable[[], object]) -> None:
    """Waits until the condition holds; the limit is long because the machine may be busy."""
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


@pytest.fixture
def script(tmp_path: Path) -> str:
    """Script of two devices with a point every 5 ms."""
    path = tmp_path / "clocks.json"
    points = [
        {"time_s": 0, "device": 0, "sm_mhz": 1000, "power_w": 100, "energy_j": 5.0, "reasons": 4},
        {"time_s": 0, "device": 1, "sm_mhz": 0},
    ]
    path.write_text(json.dumps({"ref_mhz": 1000, "max_mhz": 1200, "period_s": 0.005, "points": points}))
    return f"scripted:{path}"


@pytest.fixture
def running(tmp_path: Path, script: str) -> Iterator[Sampler]:
    with Sampler(tmp_path / "live", source=script, platform="cpu", devices=[0, 1]) as found:
        yield found


def file_of(folder: Path) -> Path:
    (path,) = (folder / "live").glob("*.bin")
    return path


def alive(pid: int | None) -> bool:
    """True if the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second one if it ends between opening and reading
        return False


def test_samples_of_a_window_end_in_its_folder(tmp_path: Path, running: Sampler) -> None:
    """Samples follow the script, with times on both clocks; a clock of zero is unknown, the other device goes
    on.
    """
    start = time.time_ns()
    wait_for(lambda: len(records_in(file_of(tmp_path))) >= 40)
    end = time.time_ns()
    means = running.means(start, end)
    assert means.sm_mhz == (1000.0, None)
    assert means.power_w == (100.0, None)
    assert means.energy_j[1] is None
    assert running.facts() == {"ref_mhz": 1000.0, "max_mhz": 1200.0}
    assert running.note == ""

    running.save(tmp_path, start, end)
    found = samples.load(tmp_path)
    assert set(found) == {0, 1}
    assert set(found[0].sm_mhz) == {1000.0}
    assert set(found[0].reasons) == {4}
    assert len(found[0].epoch_ns) >= 15
    assert (np.diff(found[0].monotonic_ns) > 0).all()
    # One machine, two clocks: their difference is the same in all samples, but for a moment between two
    # readings.
    apart = found[0].epoch_ns - found[0].monotonic_ns
    assert np.median(np.abs(apart - np.median(apart))) < 1_000_000
    assert "give 0 MHz" in found[1].notes[0]
    assert found[0].notes == ()


def test_nothing_waits_for_a_sampler_that_is_stuck(tmp_path: Path, running: Sampler) -> None:
    """With the child stopped (as in a stuck driver), means, fast and save use existing records; close kills
    it.
    """
    wait_for(lambda: len(records_in(file_of(tmp_path))) >= 4)
    pid = running.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    for _ in range(70_000):  # more than a pipe holds
        running.fast(True)
    assert running.means(0, time.time_ns()).sm_mhz[0] == 1000.0
    running.save(tmp_path, 0, time.time_ns())
    running.close()
    assert not alive(pid)


def test_a_killed_sampler_leaves_what_it_wrote(tmp_path: Path, running: Sampler) -> None:
    """Complete records, in order, and a note."""
    wait_for(lambda: len(records_in(file_of(tmp_path))) >= 10)
    pid = running.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not alive(pid))
    with open(file_of(tmp_path), "ab") as file:
        file.write(b"half a record")
    found = records_in(file_of(tmp_path))
    assert found["sequence"].tolist() == list(range(1, len(found) + 1))
    assert len(found) >= 10
    assert "the sampler ended (exit code -9)" in running.note
    assert running.means(0, time.time_ns()).sm_mhz[0] == 1000.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_for_the_run_leave_the_sampler_alone(tmp_path: Path, running: Sampler, number: int) -> None:
    """The whole process group gets them, but the run still needs samples while it saves or traces."""
    wait_for(lambda: len(records_in(file_of(tmp_path))) >= 4)
    pid, before = running.pid, len(records_in(file_of(tmp_path)))
    assert pid is not None
    os.kill(pid, number)
    wait_for(lambda: len(records_in(file_of(tmp_path))) >= before + 10)
    assert alive(pid)


def test_it_dies_with_a_parent_that_is_killed(tmp_path: Path, script: str) -> None:
    """It dies even while another child of the parent holds the pipe open; its file stays."""
    command = program(__file__, "sample_and_fork", tmp_path / "live", script)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child, forked = (int(pid) for pid in parent.stdout.readline().split())
        try:
            wait_for(lambda: len(records_in(file_of(tmp_path))) >= 4)
            parent.kill()
            wait_for(lambda: not alive(child))
            assert alive(forked), "it holds the pipe, or the test shows less"
        finally:
            os.kill(forked, signal.SIGKILL)
    assert len(records_in(file_of(tmp_path))) >= 4


def test_the_file_is_a_ring(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of a week leaves a file of bounded size with the newest records."""
    monkeypatch.setattr(sampler, "CAPACITY", 16)
    path = tmp_path / "ring.bin"
    path.touch()
    commands, theirs = os.pipe()
    source = Scripted(Path(script.removeprefix("scripted:")))
    thread = threading.Thread(target=sampler.sample, args=(source, path, commands))
    thread.start()
    wait_for(lambda: (found := records_in(path)).size and found["sequence"][-1] > 40)
    os.close(theirs)
    thread.join()
    os.close(commands)
    found = records_in(path)
    last = int(found["sequence"][-1])
    assert path.stat().st_size == 16 * samples.RECORD.itemsize
    assert found["sequence"].tolist() == list(range(last - 15, last + 1))


def test_what_cannot_be_sampled_is_refused_or_noted(tmp_path: Path) -> None:
    """A source given by name is refused in one line; "none", and "auto" without a source, give a note."""
    for source, match in (
        ("scripted:nowhere.json", r"nowhere\.json does not exist"),
        ("amd", "amdsmi is not installed"),
        ("tpu", "no TPU is attached|libtpu is not installed"),
    ):
        with pytest.raises(ValueError, match=match) as refusal:
            Sampler(tmp_path, source=source, platform="cpu", devices=[0])
        assert "\n" not in str(refusal.value)
    for source, platform, note in (
        ("none", "cpu", "profile.clocks=none"),
        ("auto", "rocm", "not sampled: amd:"),
    ):
        with Sampler(tmp_path, source=source, platform=platform, devices=[0]) as running:
            assert note in running.note
            assert running.means(0, 1).sm_mhz == (None,)
            running.fast(True)
            running.save(tmp_path, 0, 1)
            assert running.facts() == {}
    assert list(tmp_path.iterdir()) == [], "nothing was started"


def test_a_script_that_is_none_is_noted(tmp_path: Path) -> None:
    """The child refuses the file; the run goes on without samples."""
    (tmp_path / "bad.json").write_text('{"points": [{"time_s": 0, "speed": 3}]}')
    source = f"scripted:{tmp_path / 'bad.json'}"
    with Sampler(tmp_path / "live", source=source, platform="cpu", devices=[0]) as running:
        wait_for(lambda: running.note)
        assert "bad.json is not a script of clocks" in running.note
        assert "\n" not in running.note
