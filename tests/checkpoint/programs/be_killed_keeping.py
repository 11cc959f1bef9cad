"""Keeps five states in local memory; is killed in the save of step 3.

python be_killed_keeping.py INSTANT WORKDIR DIRECTORY
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jtrain.checkpoint import files, host_copy, slots
from jtrain.checkpoint.local_memory import LocalMemory

instant, workdir, directory = sys.argv[1:]
device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
like = {"w": jax.ShapeDtypeStruct((1000, 100), np.float32, sharding=device)}
memory = LocalMemory(Path(workdir), directory, like, "", newest_checkpoint=lambda: 0, say=print)
newest = memory.start(checkpoint=0)
step = 0 if newest is None else newest[0]
held_chunks = host_copy.held_chunks


def die() -> None:
    """Kills this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def dying(when: str, function: Callable[..., Any]) -> Any:
    """The function; this process dies before or after its call for step 3, if that is the instant."""

    def call(*args: Any, **named: Any) -> Any:
        called_for = step
        if instant == f"before-{when}" and called_for == 3:
            die()
        result = function(*args, **named)
        if instant == f"after-{when}" and called_for == 3:
            die()
        return result

    return call


def half_written(state: Any) -> Iterator[Any]:
    """The chunks of a state; at the instant mid-write a half of them is spoilt first."""
    yield from held_chunks(state)
    if instant == "mid-write" and step == 3:
        (slot,) = (
            memory.own_folder / name
            for name in slots.SLOTS
            if not (memory.own_folder / name / files.MANIFEST).exists()
        )
        for name in slots.chunk_sizes(like):
            slots.shared_map(slot / name)[:5000] = 7
        die()


host_copy.held_chunks, files.hashes_of = half_written, dying("hash", files.hashes_of)
files.seal = dying("commit", files.seal)
while step < 5:
    step += 1
    memory.save(step, {"w": jax.device_put(np.full((1000, 100), step, np.float32), device)}, {"next": step})
    while step not in memory.newest(checkpoint=0):
        time.sleep(0.01)  # so that the functions above see the step that they are called for
print("end", flush=True)
