"""Saves two steps that do not fit, then a smaller one that does.

    python save_on_a_full_disk.py WORKDIR LIMIT

LIMIT: bytes that a file may have, or -1.
"""

import resource
import sys
from pathlib import Path

import jax
import numpy as np

from jtrain.checkpoint import CheckpointError, Checkpoints, CheckpointSpec

workdir, limit = Path(sys.argv[1]), int(sys.argv[2])


def state(rows: int) -> dict[str, dict[str, jax.Array]]:
    """State of 8 KiB per row."""
    return {"params": {"w": jax.numpy.asarray(np.random.default_rng(rows).standard_normal((rows, 1024)))}}


checkpoints = Checkpoints(workdir, CheckpointSpec(keep_last=1))
checkpoints.save(1, state(64), {"next": 1}, "")
checkpoints.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
for step in (2, 3):
    try:
        checkpoints.save(step, state(4096), {"next": step}, "")
        checkpoints.wait()
    except CheckpointError as error:
        print(error)
like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(64))
got, data_state = checkpoints.restore(1, like)
assert np.array_equal(got["params"]["w"], state(64)["params"]["w"])
assert data_state == {"next": 1}
checkpoints.save(4, state(64), {"next": 4}, "")
checkpoints.close()
print(sorted(path.name for path in checkpoints.folder.iterdir()))
