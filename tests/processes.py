"""Programs beside tests, `programs/NAME.py`, in processes of their own.

Such a process imports the tree of its test, by the PYTHONPATH that conftest.py sets.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.ports import free_port


class Ended(NamedTuple):
    """Exit code of a process and all that it printed."""

    code: int
    output: str
    errors: str


def program(test: str, name: str, *arguments: object) -> list[str]:
    """Command of the program `name` beside a test, whose `__file__` is `test`."""
    return [sys.executable, str(Path(test).parent / "programs" / f"{name}.py"), *map(str, arguments)]


def joined(count: int) -> list[dict[str, str]]:
    """Variables by which each of `count` processes on this host finds the others."""
    common = {"JTRAIN_COORDINATOR": f"localhost:{free_port()}", "JTRAIN_NUM_PROCESSES": str(count)}
    return [common | {"JTRAIN_PROCESS_ID": str(number)} for number in range(count)]


def run_together(
    commands: Sequence[Sequence[str]], environs: Sequence[Mapping[str, str]], *, timeout_s: float = 300
) -> list[Ended]:
    """Runs one process per command side by side until all have ended.

    Args:
      environs: variables that each process has beside those of this one.

    Raises:
      subprocess.TimeoutExpired: one has not ended after `timeout_s`; none is left.
    """
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, environ in zip(commands, environs, strict=True)
    ]
    try:
        printed = [process.communicate(timeout=timeout_s) for process in processes]
        return [Ended(process.returncode, *texts) for process, texts in zip(processes, printed, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
