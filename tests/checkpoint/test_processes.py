"""Two real processes share one checkpoint directory."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.checkpoint import Checkpoints, CheckpointSpec, files
from tests.ports import free_port
from tests.processes import program, run_together


def test_two_processes_write_and_read_one_checkpoint(tmp_path: Path) -> None:
    """Each writes its part, process 0 the rest; damage that one finds stops both; one process can read
    everything.
    """
    coordinator = f"localhost:{free_port()}"
    environ = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    commands = [program(__file__, "share_one_checkpoint", tmp_path, coordinator, index) for index in range(2)]
    processes = run_together(commands, [environ] * 2)
    for process in processes:
        assert process.code == 0, process.errors
    found = [json.loads(process.output.splitlines()[-1]) for process in processes]
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
