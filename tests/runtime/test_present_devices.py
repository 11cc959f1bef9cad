"""Devices of a run's processes: the first line of a run, and processes or hardware that do not fit."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jtrain.runtime.platform import devices_line, present_devices
from tests.ports import free_port

START = """
import os, sys
from jtrain.cli.run import run
from jtrain.runtime import multihost, platform
def main():
    if len(sys.argv) > 1:
        platform.start_jax(os.environ, emulate_devices=int(sys.argv[1]))
    multihost.join_processes(os.environ)
    platform.present_devices()
    return 0
sys.exit(run(main))
"""


@pytest.mark.parametrize(
    ("count", "hosts", "line"),
    [
        (1, ["a"], "cpu: 1 x cpu, 1 process on 1 host (a)"),
        (8, ["a", "a"], "cpu: 8 x cpu, 2 processes on 1 host (a)"),
        (8, ["a", "b"], "cpu: 8 x cpu, 2 processes on 2 hosts (a, b)"),
        (8, list("abcdef"), "cpu: 8 x cpu, 6 processes on 6 hosts (a, b, c, d, ...)"),
    ],
)
def test_the_first_line_says_what_is_here(count: int, hosts: list[str], line: str) -> None:
    assert devices_line(present_devices()[:count], hosts) == line
    assert present_devices() == jax.devices()


def start(folder: Path, *arguments: str, **environ: str) -> "subprocess.Popen[str]":
    (folder / "start.py").write_text(START)
    command = [sys.executable, str(folder / "start.py"), *arguments]
    return subprocess.Popen(command, env=os.environ | environ, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_hardware_that_jax_cannot_start_on_is_a_message(tmp_path: Path) -> None:
    """Where a variable asks for it; `--device` looks for device files first."""
    process = start(tmp_path, JAX_PLATFORMS="cuda")
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 2, error
    assert error.splitlines()[-1].startswith("error: jax cannot start on cuda: ")
    assert "choose another device (--device cpu|gpu|tpu)" in error


@pytest.mark.slow
def test_processes_with_other_numbers_of_devices_are_refused(tmp_path: Path) -> None:
    """All of them, with the numbers: the sum over all devices of a run would not even begin."""
    port = free_port()
    common = {"JTRAIN_COORDINATOR": f"localhost:{port}", "JTRAIN_NUM_PROCESSES": "2"}
    processes = [
        start(tmp_path, str(count), **common, JTRAIN_PROCESS_ID=str(number))
        for number, count in enumerate((2, 3))
    ]
    try:
        for process in processes:
            error = process.communicate(timeout=300)[1]
            assert process.returncode == 2, error
            assert "the same number of cpu devices, but process 0 has 2, process 1 has 3." in error
            assert "Traceback" not in error
    finally:
        for process in processes:
            process.kill()
            process.communicate()
