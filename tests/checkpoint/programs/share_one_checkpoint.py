"""One of two processes that write and read one checkpoint folder, damage it, and run out of memory.

python share_one_checkpoint.py WORKDIR COORDINATOR INDEX
"""

import json
import resource
import sys
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jtrain.checkpoint import CheckpointError, Checkpoints, CheckpointSpec, orbax_io
from jtrain.runtime.multihost import agree

workdir, coordinator, index = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, 2, int(index))
assert (jax.process_count(), len(jax.local_devices()), len(jax.devices())) == (2, 4, 8)
mesh = jax.make_mesh((8,), ("data",))
split, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())


def put(array: Any, sharding: NamedSharding) -> jax.Array:
    """Array on the devices of both processes."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def state(step: int) -> dict[str, Any]:
    """State that a step must hold."""
    rng = np.random.default_rng(step)
    return {
        "step": put(np.int32(step), replicated),
        "params": {
            "split": put(rng.standard_normal((64, 256), np.float32), split),
            "whole": put(rng.standard_normal((8, 256), np.float32), replicated),
        },
    }


answers: dict[str, Any] = {"agree": [*agree(False), *agree(jax.process_index() == 1), *agree(True)]}
checkpoints = Checkpoints(Path(workdir), CheckpointSpec(keep_last=2, every_steps=1 << 20))
answers["first"] = checkpoints.latest_step()
for step in (1, 2, 3):
    checkpoints.save(step, state(step), {"next": step}, "config")
checkpoints.wait()
answers["again"] = checkpoints.save(3, state(3), {}, "")

# The disk of process 1 is full, as a limit on the size of its files.
# All learn it, and all save again together.
lines: list[str] = []
checkpoints.say = lines.append
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
if jax.process_index() == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, most))
checkpoints.save(4, state(4), {"next": 4}, "config")
step = 4
while not checkpoints.should_save(step):
    checkpoints.check(step)
    step += 1
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
answers["again_at"] = step
answers["kept"] = checkpoints.steps()
answers["warned"] = lines
answers["latest"] = checkpoints.latest_step()
like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), state(3))
got, data_state = checkpoints.restore(3, like)
answers["equal"] = all(
    np.asarray(a).tobytes() == np.asarray(b.addressable_data(0)).tobytes() if b.is_fully_replicated else True
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(state(3)), strict=True)
)
answers["data"] = data_state
checkpoints.close()
if jax.process_index() == 0:
    paths = [path for path in (checkpoints.folder / "3").rglob("*") if path.is_file()]
    largest = max(paths, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
multihost_utils.sync_global_devices("spoiled")
try:
    checkpoints.restore(3, like)
except CheckpointError as error:
    answers["error"] = str(error)


def exhausted(*_: object, **__: object) -> NoReturn:
    """Fails as a process that has no memory left."""
    raise MemoryError("cannot allocate")


# Process 1 has no memory left: the other one does not wait for it, and the checkpoint keeps its name.
if jax.process_index() == 1:
    orbax_io.restore = exhausted
try:
    checkpoints.restore(2, like)
except (CheckpointError, MemoryError) as error:
    answers["exhausted"] = f"{type(error).__name__}: {error}"
print(json.dumps(answers), flush=True)
