"""One of two processes that save together; a victim is killed within the save of step 3.

    python be_killed_saving.py WORKDIR COORDINATOR INDEX INSTANT VICTIMS UNTIL

VICTIMS: indices in one word, such as 01. UNTIL: the last step that is saved.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jtrain.checkpoint import Checkpoints, CheckpointSpec, array_writer, files, folders, hashed_io
from jtrain.runtime import atomic_io

workdir, coordinator, index, instant, victims, until = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, 2, int(index))
checkpoints = Checkpoints(Path(workdir), CheckpointSpec(keep_last=2))
writes_of_3 = 0


def die(now: bool) -> None:
    """Kills this process if it is now."""
    if now:
        os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str, when: Callable[..., bool]) -> None:
    """Has a call of a function kill this process first, if its arguments say so."""
    wrapped = getattr(owner, name)

    def wrapper(*args: Any, **named: Any) -> Any:
        die(when(*args, **named))
        return wrapped(*args, **named)

    setattr(owner, name, wrapper)


def after(owner: Any, name: str, when: Callable[..., bool]) -> None:
    """Has a call of a function kill this process at its end, if its arguments say so."""
    wrapped = getattr(owner, name)

    def wrapper(*args: Any, **named: Any) -> Any:
        result = wrapped(*args, **named)
        die(when(*args, **named))
        return result

    setattr(owner, name, wrapper)


def is_third_write(disk: object, path: object, data: object) -> bool:
    """True at the third write into the checkpoint of step 3."""
    global writes_of_3
    writes_of_3 += "/3." in str(path)
    return writes_of_3 == 3


if index in victims:
    if instant == "mid-write":
        before(hashed_io.HashedIO, "write", is_third_write)
    elif instant == "after-its-part":
        after(array_writer, "write_arrays", lambda path, *args, **named: "/3." in str(path))
    elif instant == "before-the-manifest":
        before(files, "seal", lambda path, **named: named["step"] == 3)
    elif instant == "before-the-rename":
        after(files, "seal", lambda path, **named: named["step"] == 3)
    elif instant == "after-the-rename":
        before(atomic_io, "sync_directory", lambda path: 3 in checkpoints.steps())
    elif instant == "reading-back":
        before(array_writer, "find_differences", lambda path, *args: path.name == "3")
    elif instant == "within-a-deletion":
        before(folders.shutil, "rmtree", lambda path, **named: 3 in checkpoints.steps())

mesh = jax.make_mesh((4,), ("data",))
split, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())


def put(array: Any, sharding: NamedSharding) -> jax.Array:
    """Array on the devices of all processes."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


step = checkpoints.latest_step() or 0
while step < int(until):
    step += 1
    rng = np.random.default_rng(step)
    state = {
        "step": put(np.int32(step), replicated),
        "params": {f"w{i}": put(rng.standard_normal((256, 256), np.float32), split) for i in range(8)},
    }
    checkpoints.save(step, state, {"next": step}, f"config {step}")
    if step % 2:
        checkpoints.wait()
        print("durable", step, flush=True)
checkpoints.close()
print("closed", flush=True)
