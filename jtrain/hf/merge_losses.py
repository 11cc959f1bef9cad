"""Losses of an adapter, and of the models that it becomes when it is merged onto either base."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jtrain.checkpoint import Checkpoints
from jtrain.config.run import Run
from jtrain.config.trained_params import MergeOnto, read_params
from jtrain.data import open_dataset
from jtrain.layout.constants import IGNORE
from jtrain.layout.dims import Batch
from jtrain.model.forward_placement import single_device
from jtrain.model.param import Params

UNMERGED = "adapter"
"""Name of the loss without a merge that rounds: beside the frozen weights of the run, all in float32."""


def merge_losses(checkpoints: Checkpoints, step: int, run: Run, dtype: str) -> dict[str, float]:
    """Nats per target of one batch, by name: `UNMERGED`, then each `MergeOnto` with its weights rounded to
    `dtype`.

    The batch is the first one held out, or of training if none is. Products are in float32, so that losses
    differ by the weights alone. The model is read once for each, onto one device.
    """
    batch = _batch(run)

    def nats(params: Params, row: Batch) -> Float[Array, ""]:
        return jnp.sum(run.model.token_nats(params, row, single_device("float32")))

    row_nats = jax.jit(nats)
    cases: dict[str, tuple[MergeOnto, str]] = {
        UNMERGED: ("trained", "float32"),
        "trained": ("trained", dtype),
        "base": ("base", dtype),
    }
    losses: dict[str, float] = {}
    for name, (onto, weight_dtype) in cases.items():
        params = read_params(checkpoints, step, run, lambda _, dtype=weight_dtype: dtype, onto=onto)
        # A row at a time: memory of one sequence beside the model.
        rows = [
            jax.tree.map(lambda x, row=row: x[row : row + 1], batch) for row in range(len(batch.token_BL))
        ]
        total = sum(float(row_nats(params, row)) for row in rows)
        losses[name] = total / max(1, int(np.sum(batch.target_BL != IGNORE)))
    return losses


def _batch(run: Run) -> Batch:
    """The first batch held out, or of training."""
    dataset = open_dataset(run.data, seed=run.seed)
    if run.data.eval_fraction:
        return next(iter(dataset.held_out().batches(context=1))).batch
    with dataset.train_batches(inline=True) as batches:
        return next(batches)
