"""Devices of a run's processes: the first line of a run, and processes or hardware that do not fit."""

import jax
import pytest

from jtrain.runtime.platform import devices_line, present_devices
from tests.processes import joined, program, run_together


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


@pytest.mark.slow
def test_hardware_that_jax_cannot_start_on_is_a_message() -> None:
    """Where a variable asks for it; `--device` looks for device files first."""
    [ended] = run_together([program(__file__, "present_devices")], [{"JAX_PLATFORMS": "cuda"}])
    error = ended.errors
    assert ended.code == 2, error
    assert error.splitlines()[-1].startswith("error: jax cannot start on cuda: ")
    assert "choose another device (--device cpu|gpu|tpu)" in error


@pytest.mark.slow
def test_processes_with_other_numbers_of_devices_are_refused() -> None:
    """All of them, with the numbers: the sum over all devices of a run would not even begin."""
    commands = [program(__file__, "present_devices", count) for count in (2, 3)]
    for ended in run_together(commands, joined(2)):
        assert ended.code == 2, ended.errors
        assert "the same number of cpu devices, but process 0 has 2, process 1 has 3." in ended.errors
        assert "Traceback" not in ended.errors
