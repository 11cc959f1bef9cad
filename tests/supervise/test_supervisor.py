"""The supervisor over real processes that beat as a training process does, but need no jax."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from jtrain.errors import UserError
from jtrain.supervise.supervisor import Supervisor
from tests.processes import program
from tests.webhook_server import webhook_server


@contextlib.contextmanager
def started(
    tmp_path: Path, *behaviour: object, processes: int = 1, ignored: tuple[signal.Signals, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Context of a supervisor that is started with signals `ignored`; leaves none of its processes behind.

    behaviour: that of each process, by its name in programs/beat.py, and its arguments.
    """
    own = {"ATTEMPTS": str(tmp_path / "attempts")}
    numbers = ",".join(str(int(number)) for number in ignored)
    process = subprocess.Popen(
        program(__file__, "supervise", processes, numbers, *behaviour),
        env=os.environ | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()  # before its processes, or it would start them again
        for one in psutil.process_iter(["environ"]):  # also those whose parents have ended
            if (one.info["environ"] or {}).get("ATTEMPTS") == own["ATTEMPTS"]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def run(tmp_path: Path, *behaviour: object, processes: int = 1) -> tuple[int, str]:
    """Exit code of the supervisor, and everything that was printed."""
    with started(tmp_path, *behaviour, processes=processes) as process:
        output, _ = process.communicate(timeout=120)
        return process.returncode, output


def wait_for_attempts(process: subprocess.Popen[str], tmp_path: Path, count: int) -> None:
    attempts = tmp_path / "attempts"
    while not attempts.exists() or attempts.stat().st_size < count:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


@pytest.mark.parametrize("code", [0, 2, 75, 76])
def test_codes_that_are_final_pass_and_are_never_restarted(code: int, tmp_path: Path) -> None:
    """76 names the host that is to be replaced."""
    ended, output = run(tmp_path, "end", code)
    assert ended == code, output
    assert (tmp_path / "attempts").stat().st_size == 1
    assert ("is to be replaced" in output) == (code == 76)


def test_a_crash_loop_ends_with_the_code_of_its_cause(tmp_path: Path) -> None:
    """SIGSEGV each time: named, restarted twice, then given up with 128 + 11."""
    ended, output = run(tmp_path, "crash")
    assert ended == 128 + signal.SIGSEGV, output
    assert (tmp_path / "attempts").stat().st_size == 3
    assert output.count("was killed by SIGSEGV") == 3
    assert "given up after 2 restarts without a new checkpoint (supervise.max_restarts=2)" in output


@pytest.mark.slow
def test_a_later_checkpoint_resets_the_count(tmp_path: Path) -> None:
    """Killed four times with a limit of two, but each attempt resumes further on: the run ends well."""
    ended, output = run(tmp_path, "be_killed_later_each_time")
    assert ended == 0, output
    assert output.count("was killed by SIGKILL (by the kernel where the host's memory is exhausted") == 4


def test_what_is_away_is_tried_again_until_it_is_back(tmp_path: Path) -> None:
    """Killed once, then 77 three times where two restarts are allowed: it goes on once the world is back."""
    ended, output = run(tmp_path, "wait_for_the_world")
    assert ended == 0, output
    assert (tmp_path / "attempts").stat().st_size == 5
    assert output.count("restart 1 of 2 at once") == 1
    assert output.count("what the run needs is away (exit code 77): trying again in ") == 3


@pytest.mark.slow
def test_one_of_three_fails_the_others_end_and_it_is_named(tmp_path: Path) -> None:
    """Though they ignore SIGTERM; what they started ends too; its code is that of the run; lines carry the
    process.
    """
    ended, output = run(tmp_path, "fail_beside_stubborn_processes", processes=3)
    assert ended == 2, output
    assert "[1] process 1 gives up" in output
    helpers = re.findall(r"^\[[02]\] helper (\d+)$", output, re.MULTILINE)
    assert len(helpers) == 2
    for pid in helpers:
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize(
    ("number", "ignored"),
    [
        (signal.SIGTERM, ()),
        (signal.SIGINT, ()),
        (signal.SIGHUP, ()),
        (signal.SIGINT, (signal.SIGINT, signal.SIGHUP)),
    ],
)
def test_a_signal_is_passed_on_and_the_save_waited_for(
    number: signal.Signals, ignored: tuple[signal.Signals, ...], tmp_path: Path
) -> None:
    """SIGINT also where a script started the command in the background, which ignores it at first."""
    with started(tmp_path, "save_when_asked", processes=2, ignored=ignored) as process:
        wait_for_attempts(process, tmp_path, 2)
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 75, output
    assert output.count(f"{number.name}: stopping after this step") == 2
    assert sorted(line for line in output.splitlines() if line.endswith("saved")) == [
        "[0] saved",
        "[1] saved",
    ]


def test_under_nohup_a_closed_terminal_stops_nothing(tmp_path: Path) -> None:
    """SIGHUP reaches supervisor and process, both ignore it, and SIGTERM then stops them."""
    with started(tmp_path, "save_when_asked", ignored=(signal.SIGHUP,)) as process:
        wait_for_attempts(process, tmp_path, 1)
        for child in psutil.Process(process.pid).children():
            child.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 75, output
    assert "SIGHUP" not in output
    assert "SIGTERM: stopping after this step" in output


def test_a_stopped_process_is_named_and_all_save(tmp_path: Path) -> None:
    """SIGSTOP of one of two: it is continued together with the request to save, so nothing is lost."""
    ended, output = run(tmp_path, "stop_process_1", processes=2)
    assert ended == 0, output
    assert re.search(r"process 1 on \S+ \(pid \d+\) causes it: stopped by a signal \(state T\)", output)
    assert re.search(r"process 0 on \S+ \(pid \d+\) waits: alive, in phase step", output)
    assert "all processes saved and ended" in output
    assert "restart 1 of 2" in output


def test_a_hang_is_named_with_its_stack_and_ended(tmp_path: Path) -> None:
    """A main thread that waits for ever: it beats, but makes no step. File and webhook of `alerts` get the
    verdict.
    """
    file = tmp_path / "alerts.jsonl"
    with webhook_server() as server:
        ended, output = run(tmp_path, "hang", server.url, file)
        posted = server.next()
    assert ended == 0, output
    assert "hang: no step for" in output
    verdict = r"process 0 on \S+ \(pid \d+\) causes it: alive, in phase step of step 5"
    assert re.search(verdict, output)
    assert "in waits_for_a_batch" in output
    assert "all processes are ended; the last checkpoint stands" in output
    alert = json.loads(file.read_text())
    assert (alert["kind"], alert["step"]) == ("hang", 5)
    assert re.search(f"^hang: no step for .*; {verdict}", alert["message"])
    assert posted["message"] == alert["message"]


def test_a_process_whose_supervisor_is_killed_saves_and_ends(tmp_path: Path) -> None:
    """It would hold the devices with nobody to watch it."""
    with started(tmp_path, "count_twice") as process:
        wait_for_attempts(process, tmp_path, 1)
        process.kill()
        output, _ = process.communicate(timeout=120)  # until the orphan has closed it, too
    assert "The supervisor is gone: stopping, with a checkpoint." in output
    assert (tmp_path / "attempts").stat().st_size == 2


def test_a_stopped_process_whose_supervisor_is_killed_saves_and_ends(tmp_path: Path) -> None:
    """The kernel continues it when its parent dies: stopped, it would hold the devices for ever."""
    with started(tmp_path, "count_twice") as process:
        wait_for_attempts(process, tmp_path, 1)
        (child,) = psutil.Process(process.pid).children()
        child.suspend()
        while child.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        process.kill()
        output, _ = process.communicate(timeout=120)
    assert "The supervisor is gone: stopping, with a checkpoint." in output
    assert (tmp_path / "attempts").stat().st_size == 2


@pytest.mark.parametrize(
    ("processes", "environ", "message"),
    [
        (0, {}, r"--processes 0 must be at least 1"),
        (
            2,
            {"JTRAIN_COORDINATOR": "a:1"},
            r"--processes 2 starts all .* JTRAIN_COORDINATOR=a:1 names others\. Unset",
        ),
    ],
)
def test_contradictions_are_refused(processes: int, environ: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Supervisor(["true"], environ, processes=processes, workdir=None)
