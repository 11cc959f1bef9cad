"""One of two processes that keep copies of each other's state: it resumes, and keeps three more states.

    python keep_beside_a_neighbour.py WORKDIR COORDINATOR INDEX STRANGER DIRECTORY DIRECTORY

STRANGER: `stranger` has a connection without the token call before each state that is sent.
"""

import json
import socket
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jtrain.checkpoint.local_memory import LocalMemory

workdir, coordinator, index, stranger, *directories = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, 2, int(index))
mesh = jax.make_mesh((4,), ("data",))
split, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
like = {
    "split": jax.ShapeDtypeStruct((64, 256), np.float32, sharding=split),
    "whole": jax.ShapeDtypeStruct((8,), np.int32, sharding=replicated),
}
messages: list[Any] = []
connect = socket.create_connection


def state(step: int) -> dict[str, jax.Array]:
    """State that a step must hold."""

    def filled(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        value = np.random.default_rng(step).standard_normal(leaf.shape).astype(leaf.dtype)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: value[index])

    return {name: filled(leaf) for name, leaf in like.items()}


def connect_after_a_stranger(address: tuple[str, int], timeout: float) -> socket.socket:
    """Connects to the process that takes a state, after a stranger has called it."""
    with connect(address, timeout=60) as link:
        nonce = link.recv(32, socket.MSG_WAITALL)
        link.sendall(bytes(68))
        messages.append([len(nonce), len(link.recv(100))])
    return connect(address, timeout=timeout)


memory = LocalMemory(
    Path(workdir), directories[int(index)], like, "", newest_checkpoint=lambda: 0, say=messages.append
)
newest = memory.start(checkpoint=0)
result: dict[str, Any] = {"said": messages, "step": None}
first = 0
if newest is not None:
    first, got, data_state = newest
    want = state(first)
    equal = all(
        np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
        for name in like
        for a, b in zip(got[name].addressable_shards, want[name].addressable_shards, strict=True)
    )
    result |= {"step": first, "equal": equal, "data": data_state}
if stranger == "stranger":
    socket.create_connection = connect_after_a_stranger
with memory:
    for step in (first + 10, first + 20, first + 30):
        memory.save(step, state(step), {"next": step})
print(json.dumps(result), flush=True)
