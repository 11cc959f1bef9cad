"""`model.loss_chunk_tokens=auto`, settled for the devices of a run."""

import math
from typing import Any

from jtrain import config
from jtrain.layout import itemsize
from jtrain.mesh import BATCH_AXES
from jtrain.model.ops import best_chunk
from jtrain_kernels.device import DeviceSpec


def settle_loss_chunk(run_config: Any, device: DeviceSpec) -> list[str]:
    """Sets the number in the config where it says `auto`; returns what to say about it.

    Args:
      run_config: of a `Run`; changed in place.
    """
    run = config.build(run_config)
    if run.model.loss_chunk_tokens != "auto":
        return []
    mesh = run.mesh.shape
    shards = math.prod(mesh[axis] for axis in (*BATCH_AXES, "context", "tensor"))
    tokens, because = best_chunk(
        device,
        tokens=max(1, run.data.global_batch * run.data.seq_len // shards // run.layout.microbatches),
        d_model=run.model.d_model,
        vocab=run.model.vocab_size,
        itemsize=itemsize(run.layout.compute_dtype),
        shards=mesh["tensor"],
    )
    config.set_values(run_config, {"model.loss_chunk_tokens": tokens})
    return [f"model.loss_chunk_tokens=auto: {tokens}, {because}"]
