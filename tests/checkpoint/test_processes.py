"""Two real processes share one checkpoint directory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.checkpoint import Checkpoints, CheckpointSpec, files
from tests.ports import free_port

PROCESS = """
import json, os, sys
from pathlib import Path
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jtrain.checkpoint import CheckpointError, Checkpoints, CheckpointSpec
from jtrain.runtime.multihost import agree

assert (jax.process_count(), len(jax.local_devices()), len(jax.devices())) == (2, 4, 8)
mesh = jax.make_mesh((8,), ("data",))
rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

def put(array, sharding):
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

def state(step):
    rng = np.random.default_rng(step)
    return {
        "step": put(np.int32(step), whole),
        "params": {"split": put(rng.standard_normal((64, 256), np.float32), rows),
                   "whole": put(rng.standard_normal((8, 256), np.float32), whole)},
    }

said = {"agree": [*agree(False), *agree(jax.process_index() == 1), *agree(True)]}
checkpoints = Checkpoints(Path(sys.argv[1]), CheckpointSpec(keep_last=2, every_steps=1 << 20))
said["first"] = checkpoints.latest_step()
for step in (1, 2, 3):
    checkpoints.save(step, state(step), {"next": step}, "config")
checkpoints.wait()
said["again"] = checkpoints.save(3, state(3), {}, "")

# The disk of process 1 is full, as a limit on the size of its files. All learn it, and all save again together.
import resource
lines = []
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
said["again_at"] = step
said["kept"] = checkpoints.steps()
said["warned"] = lines
said["latest"] = checkpoints.latest_step()
like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), state(3))
got, data_state = checkpoints.restore(3, like)
said["equal"] = all(
    np.asarray(a).tobytes() == np.asarray(b.addressable_data(0)).tobytes() if b.is_fully_replicated else True
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(state(3)))
)
said["data"] = data_state
checkpoints.close()
if jax.process_index() == 0:
    big = max((f for f in (checkpoints.folder / "3").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    data = bytearray(big.read_bytes())
    data[len(data) // 2] ^= 1
    big.write_bytes(data)
from jax.experimental import multihost_utils
multihost_utils.sync_global_devices("spoiled")
try:
    checkpoints.restore(3, like)
except CheckpointError as error:
    said["error"] = str(error)

# Process 1 has no memory left: the other one does not wait for it, and the checkpoint keeps its name.
from jtrain.checkpoint import orbax_io
if jax.process_index() == 1:
    def exhausted(*_, **__):
        raise MemoryError("cannot allocate")
    orbax_io.restore = exhausted
try:
    checkpoints.restore(2, like)
except (CheckpointError, MemoryError) as error:
    said["exhausted"] = f"{type(error).__name__}: {error}"
print(json.dumps(said), flush=True)
"""


def test_two_processes_write_and_read_one_checkpoint(tmp_path: Path) -> None:
    """Each writes its part, process 0 the rest; damage that one finds stops both; one process can read
    everything.
    """
    coordinator = f"localhost:{free_port()}"
    environ = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path), coordinator, str(index)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        for index in range(2)
    ]
    outputs = [process.communicate(timeout=180) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    found = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    assert found[0].pop("again_at") == found[1].pop("again_at") > 4 + (1 << 16), "the same step in both"
    exhausted: list[str] = []
    for said in found:
        error = said.pop("error")
        (warning,) = said.pop("warned")
        exhausted.append(said.pop("exhausted"))
        assert "step 4 (process 1 of 2: OSError: [Errno 27] File too large" in warning
        assert "checkpoints/3 is damaged" in error
        assert "step 2 is intact" in error
        assert said == {
            "agree": [False, True, True],
            "first": None,
            "again": False,
            "latest": 3,
            "equal": True,
            "data": {"next": 3},
            "kept": [2, 3],
        }

    assert exhausted[0].startswith("CheckpointError: process 1 had no memory left when it read ")
    assert exhausted[1] == "MemoryError: cannot allocate"
    checkpoints = Checkpoints(tmp_path, CheckpointSpec())
    assert checkpoints.steps() == (2, 3)
    manifest = files.read_manifest(checkpoints.folder / "2")
    split = [name for name in manifest.files if name.startswith("state/params.split/c.")]
    assert len(split) == 8, "both processes must have written their shards"
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = {"split": (64, 256), "whole": (8, 256)}
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=device) for name, shape in shapes.items()
    }
    got, _ = checkpoints.restore(
        2, {"step": jax.ShapeDtypeStruct((), jnp.int32, sharding=device), "params": params}
    )
    rng = np.random.default_rng(2)
    for name, shape in shapes.items():
        assert np.asarray(got["params"][name]).tobytes() == rng.standard_normal(shape, np.float32).tobytes()
