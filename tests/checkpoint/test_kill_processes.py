"""One or both of two processes are killed within a save: every durable checkpoint stays, and the next run
goes on.
"""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from jtrain.checkpoint import removal
from tests.checkpoint.test_kill import check
from tests.ports import free_port
from tests.processes import program


def run(workdir: Path, instant: str, victims: str, *, until: int) -> tuple[int, bool]:
    """Runs two processes; returns the last durable step, and True if both ended by themselves.

    As soon as a victim is dead, the other process is killed too, as a supervisor would do.
    """
    coordinator = f"localhost:{free_port()}"
    environ = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    outputs = [workdir.parent / f"{workdir.name}-{until}-{index}.txt" for index in range(2)]
    with contextlib.ExitStack() as opened:
        processes = [
            subprocess.Popen(
                program(__file__, "be_killed_saving", workdir, coordinator, index, instant, victims, until),
                stdout=opened.enter_context(open(output, "w")),
                stderr=subprocess.STDOUT,
                env=environ,
            )
            for index, output in enumerate(outputs)
        ]
    while all(process.poll() is None for process in processes):
        time.sleep(0.02)
    if any(process.poll() for process in processes):
        for process in processes:
            process.kill()
    codes = [process.wait(timeout=180) for process in processes]
    text = "\n".join(output.read_text() for output in outputs)
    assert set(codes) <= {0, -signal.SIGKILL}, text
    durable = [int(line.split()[1]) for line in text.splitlines() if line.startswith("durable")]
    return max(durable, default=0), codes == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("instant", "victims", "newest"),
    [
        ("mid-write", "0", 2),
        ("mid-write", "1", 2),
        ("mid-write", "01", 2),
        ("after-its-part", "1", 2),
        ("after-its-part", "01", 2),
        ("before-the-manifest", "0", 2),
        ("before-the-rename", "0", 2),
        ("after-the-rename", "0", 3),
        ("reading-back", "1", 3),
        ("reading-back", "01", 3),
        ("within-a-deletion", "0", 3),
    ],
)
def test_a_kill_within_a_save_of_two_processes_loses_nothing(
    tmp_path: Path, instant: str, victims: str, newest: int
) -> None:
    """Every checkpoint that is left is compared bit for bit; then two processes go on in the same workdir."""
    workdir = tmp_path / "run"
    durable, ended = run(workdir, instant, victims, until=5)
    assert not ended, "the kill must have happened, or this proves nothing"
    assert check(workdir, durable) == newest
    durable, ended = run(workdir, "never", "", until=6)
    assert ended
    assert check(workdir, durable) == 6
    assert removal.unread_names(workdir / "checkpoints") == ()
