"""Faults in real supervised trainings of `tiny`: what is named, what goes on, and that no number differs."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jtrain.checkpoint import files
from tests.ports import free_port

ROOT = Path(__file__).parents[2]

SMALL = (
    *("--set", "model.num_layers=1", "--set", "data.seq_len=64", "--set", "num_steps=40"),
    *(
        "--set",
        "metrics.log_every_steps=1",
        "--set",
        "checkpoint.every_steps=5",
        "--set",
        "eval.every_steps=None",
    ),
)


class Supervised:
    """A supervised run; the lines of both of its streams arrive in `lines`."""

    def __init__(
        self, workdir: Path, *arguments: str, processes: int = 1, environ: dict[str, str] | None = None
    ) -> None:
        clean = {
            name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")
        }
        clean["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
        )
        command = [sys.executable, "-m", "jtrain.launch", "--supervise", "--processes", str(processes)]
        if processes > 1:
            command += ["--emulate-devices", "1", "--set", f"mesh.data={processes}"]
        self.workdir = workdir
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [*command, "--config=tiny", "--workdir", str(workdir), *SMALL, *arguments],
            cwd=ROOT,
            env=clean | (environ or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip("\n") for line in self.process.stdout)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Waits for an event; fails if the run ends before it."""
        while not what():
            assert self.process.poll() is None, self.output
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: max(train_lines(self.workdir), default=0) >= step)

    def trainers(self) -> list[int]:
        """Process ids of the trainers, process 0 first."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return sorted(int(pid) for task in tasks for pid in task.read_text().split())

    def end(self) -> int:
        """Waits for the end; returns the exit code."""
        code = self.process.wait()
        self._reader.join()
        return code

    def close(self) -> None:
        """Closes the pipe, once all who write to it have ended."""
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def supervised(
    workdir: Path, *arguments: str, processes: int = 1, environ: dict[str, str] | None = None
) -> Iterator[Supervised]:
    """Context of a supervised run, which leaves no process behind."""
    run = Supervised(workdir, *arguments, processes=processes, environ=environ)
    try:
        yield run
    finally:
        trainers: list[int] = []
        with contextlib.suppress(OSError):
            trainers = run.trainers()
        run.process.kill()
        run.process.wait()
        for pid in trainers:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        run.close()


def train_lines(workdir: Path) -> dict[int, tuple[float, str]]:
    """Loss and batch hash of each logged step."""
    path = workdir / "metrics.jsonl"
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_bytes().rpartition(b"\n")[0].splitlines()]
    return {line["step"]: (line["loss_nats"], line["batch_hash"]) for line in lines if "loss_nats" in line}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[int, tuple[float, str]]]:
    """Lines of the same run without a fault, by number of processes."""
    found = {}
    for processes in (1, 2):
        workdir = tmp_path_factory.mktemp(f"unbroken{processes}") / "run"
        with supervised(workdir, processes=processes) as run:
            assert run.end() == 0, run.output
        found[processes] = train_lines(workdir)
        losses = [loss for loss, _ in found[processes].values()]
        assert len(losses) == 40
        assert losses[-1] < losses[0] - 0.1, "the loss must move, or equality proves nothing"
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "victim"), [(1, 0), (2, 0), (2, 1)])
def test_a_killed_process_is_named_and_no_number_differs(
    processes: int, victim: int, unbroken: dict[int, dict[int, tuple[float, str]]], tmp_path: Path
) -> None:
    """As by the kernel where memory is exhausted: restarted, and the losses are bitwise those of the unbroken
    run.
    """
    with supervised(tmp_path / "run", processes=processes) as run:
        run.wait_for((tmp_path / "run" / "checkpoints" / "10" / files.MANIFEST).exists)
        os.kill(run.trainers()[victim], signal.SIGKILL)
        assert run.end() == 0, run.output
    assert re.search(rf"supervise .*: process {victim} on \S+ \(pid \d+\) was killed by SIGKILL", run.output)
    assert "restart 1 of 5 at once" in run.output
    resumed = re.search(r"resumed from step (\d+)", run.output)
    assert resumed is not None
    assert int(resumed[1]) >= 10
    assert train_lines(tmp_path / "run") == unbroken[processes]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_process_is_named_with_its_collectives(
    victim: int, unbroken: dict[int, dict[int, tuple[float, str]]], tmp_path: Path
) -> None:
    with supervised(tmp_path / "run", "--set", "supervise.save_s=120", processes=2) as run:
        run.wait_for_step(12)
        os.kill(run.trainers()[victim], signal.SIGSTOP)
        assert run.end() == 0, run.output
    assert re.search(
        rf"process {victim} on \S+ \(pid \d+\) causes it: stopped by a signal \(state T\)", run.output
    )
    assert re.search(
        rf"process {1 - victim} on \S+ \(pid \d+\) waits: alive, in phase \w+ of step \d+", run.output
    )
    assert re.search(
        r"collectives: jit_train_step has .*\d+ x all-reduce over data \(2 devices, f32\)", run.output
    )
    assert "in run_steps" in run.output, "the stacks of the one that waits"
    assert "all processes saved and ended" in run.output
    assert train_lines(tmp_path / "run") == unbroken[2]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_and_both_save(number: signal.Signals, tmp_path: Path) -> None:
    with supervised(tmp_path / "run", processes=2) as run:
        run.wait_for_step(7)
        run.process.send_signal(number)
        assert run.end() == 75, run.output
    assert (tmp_path / "run" / "checkpoints" / str(max(train_lines(tmp_path / "run")))).is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_supervisors_of_two_hosts_restart_together(
    number: signal.Signals, unbroken: dict[int, dict[int, tuple[float, str]]], tmp_path: Path
) -> None:
    """Two supervisors with a process each, over one workdir: one names the fault, the other one tells it."""
    port = free_port()
    environ = {"JTRAIN_COORDINATOR": f"localhost:{port}", "JTRAIN_NUM_PROCESSES": "2"}
    arguments = ("--emulate-devices", "1", "--set", "mesh.data=2", "--set", "supervise.save_s=120")
    with (
        supervised(tmp_path / "run", *arguments, environ=environ | {"JTRAIN_PROCESS_ID": "0"}) as first,
        supervised(tmp_path / "run", *arguments, environ=environ | {"JTRAIN_PROCESS_ID": "1"}) as second,
    ):
        first.wait_for_step(12)
        os.kill(second.trainers()[0], number)
        assert (first.end(), second.end()) == (0, 0), first.output + second.output
    what = "was killed by SIGKILL" if number == signal.SIGKILL else "causes it: stopped by a signal"
    assert re.search(rf"another host says: .*process 1 on \S+ \(pid \d+\) {what}", first.output)
    assert re.search(rf"process 1 on \S+ \(pid \d+\) {what}", second.output)
    assert re.search(r"^\[\S+:1\] ", second.output, re.MULTILINE), "lines carry host and process"
    assert train_lines(tmp_path / "run") == unbroken[2]


@pytest.mark.slow
def test_a_hang_in_python_is_named_with_its_stack(
    unbroken: dict[int, dict[int, tuple[float, str]]], tmp_path: Path
) -> None:
    """The process beats, but makes no step: the stack says where, and the run goes on from its checkpoint."""
    callbacks = f"callbacks=('{ROOT}/tests/supervise/programs/blocking_callback.py:Blocks',)"
    limits = ("--set", "supervise.step_s=5", "--set", "supervise.save_s=1", "--set", callbacks)
    with supervised(tmp_path / "run", *limits, environ={"MARK": str(tmp_path / "mark")}) as run:
        assert run.end() == 0, run.output
    assert re.search(r"hang: no step for .* limit", run.output)
    assert "in waits_for_ever" in run.output
    assert train_lines(tmp_path / "run") == unbroken[1]


@pytest.mark.slow
def test_a_data_plane_that_delivers_nothing_is_named(
    unbroken: dict[int, dict[int, tuple[float, str]]], tmp_path: Path
) -> None:
    """All its processes are stopped: the wait for a batch is over its limit, and they end with the
    trainer.
    """
    limits = ("--set", "supervise.data_s=5", "--set", "supervise.save_s=1")
    with supervised(tmp_path / "run", *limits) as run:
        run.wait_for_step(7)
        (trainer,) = run.trainers()
        plane = [pid for pid in group(trainer) if pid != trainer]
        assert len(plane) >= 3, "forkserver, constructor and loader"
        for pid in plane:
            os.kill(pid, signal.SIGSTOP)
        assert run.end() == 0, run.output
    assert re.search(
        r"process 0 on \S+ \(pid \d+\) causes it: alive, in phase data_wait of step \d+", run.output
    )
    assert not group(trainer), "the stopped ones are ended, too"
    assert train_lines(tmp_path / "run") == unbroken[1]


def group(leader: int) -> list[int]:
    """Process ids of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, _, rest = stat.read_text().partition(" ")
            if int(rest.rpartition(")")[2].split()[2]) == leader:
                found.append(int(pid))
    return found
