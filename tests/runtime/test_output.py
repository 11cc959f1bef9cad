"""Output that nobody reads, or that its disk has no room for, ends nothing."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from tests.processes import program
from tests.small_disk import fill, small_disk


def shell(script: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PY": sys.executable,
        "PRINT": shlex.join(program(__file__, "print_lines", 5000, tmp_path / "done")),
    }
    return subprocess.run(
        ["bash", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )


def test_a_reader_that_goes_away_costs_only_the_output(tmp_path: Path) -> None:
    """`| head` keeps the exit code 7, and every line of work is done; without it Python gives 120 or a
    traceback.
    """
    done = shell("$PRINT | head -2; exit ${PIPESTATUS[0]}", tmp_path)
    assert done.returncode == 7, done.stderr
    assert len(done.stdout.splitlines()) == 2
    assert "warning: stdout cannot be written (Broken pipe): going on without it" in done.stderr
    assert "an error" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "done").read_text() == "all lines"


def test_every_command_outlives_its_reader(tmp_path: Path) -> None:
    """A pipe whose reader is gone before the first line: exit code 0, no traceback."""
    command = '"$PY" -m jtrain.plan pipeline --schedule 1f1b --stages 8 --microbatches 64'
    done = shell(
        f"{{ {command}; echo $? >rc; }} | :; while [ ! -s rc ]; do sleep 0.1; done; cat rc", tmp_path
    )
    assert done.stdout == "0\n"
    assert "Traceback" not in done.stderr


def test_both_streams_may_go_away(tmp_path: Path) -> None:
    done = shell("$PRINT 2>&1 | head -2; exit ${PIPESTATUS[0]}", tmp_path)
    assert (done.returncode, (tmp_path / "done").read_text()) == (7, "all lines")


def test_a_full_disk_under_the_log_costs_lines_that_are_counted(tmp_path: Path) -> None:
    """Once there is room the log goes on, with a line that says what is missing."""
    with small_disk(tmp_path / "disk", 64) as disk:
        fill(disk, leave_bytes=4096)
        with open(disk / "log", "wb") as log:
            process = subprocess.Popen(
                program(__file__, "print_lines", 200, tmp_path / "done", 99),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert process.stderr is not None
            assert "stdout cannot be written (No space left on device)" in process.stderr.readline()
            while (disk / "log").stat().st_size < 4096:
                assert process.poll() is None
            (disk / "filler").unlink()
            process.communicate("\n", timeout=300)
        assert process.returncode == 7
        text = (disk / "log").read_text()
        assert "bytes of output were lost here: No space left on device]" in text
        assert text.splitlines()[0].startswith("line 0 ")
        assert text.splitlines()[-1].startswith("line 199 ")
