"""Losses of a few steps of a small model in any layout: a layout is not a model."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jtrain.data.constructor.context_order import context_order
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, build
from jtrain.step.state import init_state
from jtrain.step.train_step import BATCH_SPEC, make_train_step
from tests.batches import adversarial_batch
from tests.layouts import layout_from

SIZES: dict[str, Any] = dict(
    num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=64, vocab_size=64
)


def losses(
    axes: dict[str, int], *, num_steps: int = 6, sizes: dict[str, Any] = SIZES, **layout: Any
) -> np.ndarray:
    """Trains on one repeated batch in float32; returns the loss of each step.

    Args:
      axes: devices along the axes of the mesh, 1 where an axis is left out.
      layout: fields of LayoutSpec and PrecisionSpec.
    """
    spec = MeshSpec(**axes)
    mesh, model = make_mesh(spec, jax.devices()[: spec.size]), Transformer(**sizes)
    infos = model.param_infos()
    laid_out = layout_from(dict(compute_dtype="float32", **layout), spec, infos)
    optimizer = build(
        AdamW(peak_lr=1e-2, warmup_steps=0), num_steps=num_steps, params=map_params(lambda info: info, infos)
    )
    state, step = (
        init_state(laid_out, optimizer, mesh, seed=0),
        make_train_step(model, optimizer, laid_out, mesh),
    )
    columns = context_order(adversarial_batch().token_BL.shape[1], spec.context, laid_out.context_order)
    batch = jax.tree.map(
        lambda x: jax.device_put(x[:, columns], NamedSharding(mesh, BATCH_SPEC)), adversarial_batch()
    )
    values = []
    for _ in range(num_steps):
        state, metrics = step(state, batch)
        values.append(float(metrics["loss_nats"]))
    assert values[-1] < values[0] - 0.1, "the loss must move, or equality of two runs proves nothing"
    return np.array(values)
