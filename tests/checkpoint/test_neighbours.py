"""Two real processes keep copies of each other's state; a host whose memory is lost fetches its part."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jtrain.checkpoint.neighbours import neighbours_of
from tests.ports import free_port
from tests.processes import program, run_together


def run(workdir: Path, directories: list[Path], *, caller: str = "nobody") -> list[dict[str, Any]]:
    """Starts two processes, each with memory of its own, which resume and keep three more states."""
    coordinator = f"localhost:{free_port()}"
    environ = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    name = "keep_beside_a_neighbour"
    commands = [
        program(__file__, name, workdir, coordinator, index, caller, *directories) for index in range(2)
    ]
    processes = run_together(commands, [environ] * 2)
    for process in processes:
        assert process.code == 0, process.errors
    return [json.loads(process.output.splitlines()[-1]) for process in processes]


def test_each_process_sends_to_another_host() -> None:
    assert neighbours_of(["a", "a", "b", "b"]) == [2, 3, 0, 1]
    assert neighbours_of(["a", "b", "c"]) == [1, 2, 0]
    assert neighbours_of(["a", "a", "a", "b"]) == [3, 3, 3, 0]
    assert neighbours_of(["a", "a", "a"]) == [1, 2, 0]
    assert neighbours_of(["a"]) == [0]


@pytest.mark.slow
def test_lost_memory_is_fetched_from_the_neighbour(tmp_path: Path) -> None:
    """The memory of either process is lost, then its last generation, then both memories; only the latter
    loses steps.

    The folders are two, as on two hosts: each process finds the copy of the other's only over the network.
    """
    workdir = tmp_path / "run"
    memories = [tmp_path / "memory-0", tmp_path / "memory-1"]
    assert [one["step"] for one in run(workdir, memories)] == [None, None]
    for lost in (1, 0):
        before = 30 if lost else 60
        shutil.rmtree(memories[lost])
        for one in run(workdir, memories):
            assert one == {"said": [], "step": before, "equal": True, "data": {"next": before}}
    # The newest generation of process 1 is gone on both hosts: the older one is whole.
    for file in tmp_path.glob("memory-*/*/*-1/*/manifest.json"):
        if json.loads(file.read_text())["step"] == 90:
            file.unlink()
    for one in run(workdir, memories):
        assert (one["step"], one["equal"]) == (80, True)
    for file in tmp_path.glob("memory-*/*/*-1/*/manifest.json"):
        file.unlink()
    for one in run(workdir, memories):
        assert one["step"] is None
        assert one["said"] == ["The state in local memory is not used: of process 1 nothing is there."]


@pytest.mark.slow
def test_a_stranger_is_not_answered(tmp_path: Path) -> None:
    """A connection that does not know the token gets 32 random bytes and then the end, and the process goes
    on.
    """
    memories = [tmp_path / "memory-0", tmp_path / "memory-1"]
    for one in run(tmp_path / "run", memories, caller="stranger"):
        assert one["said"] == [[32, 0]] * 3
