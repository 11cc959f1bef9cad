"""Two real processes keep copies of each other's state; a host whose memory is lost fetches its part."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jtrain.checkpoint.neighbours import neighbours_of
from tests.ports import free_port

PROCESS = """
import json, sys, threading
from pathlib import Path
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
workdir, coordinator, index, *directories = sys.argv[1:]
jax.distributed.initialize(coordinator, 2, int(index))
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jtrain.checkpoint.local_memory import LocalMemory

mesh = jax.make_mesh((4,), ("data",))
rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
like = {"split": jax.ShapeDtypeStruct((64, 256), np.float32, sharding=rows),
        "whole": jax.ShapeDtypeStruct((8,), np.int32, sharding=whole)}

def state(step):
    def filled(leaf):
        value = np.random.default_rng(step).standard_normal(leaf.shape).astype(leaf.dtype)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: value[index])

    return {name: filled(leaf) for name, leaf in like.items()}

said = []
memory = LocalMemory(Path(workdir), directories[int(index)], like, "", newest_checkpoint=lambda: 0, say=said.append)
found = memory.start(checkpoint=0)
result = {"said": said, "step": None}
first = 0
if found is not None:
    first, got, data_state = found
    want = state(first)
    equal = all(
        np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
        for name in like for a, b in zip(got[name].addressable_shards, want[name].addressable_shards)
    )
    result |= {"step": first, "equal": equal, "data": data_state}
with memory:
    for step in (first + 10, first + 20, first + 30):
        memory.save(step, state(step), {"next": step})
print(json.dumps(result), flush=True)
"""


def run(workdir: Path, directories: list[Path], *, script: str = PROCESS) -> list[dict[str, Any]]:
    """Starts two processes, each with memory of its own, which resume and keep three more states."""
    coordinator = f"localhost:{free_port()}"
    environ = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(workdir), coordinator, str(index), *map(str, directories)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        for index in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


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
    script = PROCESS.replace(
        "said = []",
        """said = []
import socket
from jtrain.checkpoint import neighbours
called = neighbours.Neighbours.send
def send(self, *args):
    with socket.create_connection(self._peers.addresses[self._receiver], timeout=60) as link:
        nonce = link.recv(32, socket.MSG_WAITALL)
        link.sendall(bytes(68))
        said.append([len(nonce), len(link.recv(100))])
    return called(self, *args)
neighbours.Neighbours.send = send""",
    )
    memories = [tmp_path / "memory-0", tmp_path / "memory-1"]
    for one in run(tmp_path / "run", memories, script=script):
        assert one["said"] == [[32, 0]] * 3
