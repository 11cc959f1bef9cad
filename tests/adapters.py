"""Training of adapters beside a small frozen model, in any layout."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jtrain.data.constructor.context_order import context_order
from jtrain.layout.dims import Batch, ParamInfo
from jtrain.layout.layout import Layout
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.adapters.base_hash import hash_base, hex_of
from jtrain.model.adapters.lora import LoRA
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Cosine, Optimizer, build
from jtrain.step.state import abstract_state, init_state, shardings_of
from jtrain.step.train_step import BATCH_SPEC, make_train_step
from tests.batches import adversarial_batch
from tests.layouts import layout_from
from tests.losses import SIZES

ADAMW = AdamW(peak_lr=1e-2, warmup_steps=0, schedule=Cosine(final_fraction=1.0))
LORA = LoRA(rank=4, alpha=8.0, train=("embed", "*norm*"))


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A model with an adapter, in a layout."""

    model: Transformer
    infos: tuple[ParamInfo, ...]
    layout: Layout
    optimizer: Optimizer
    mesh: Mesh
    batch: Batch


def adapted(
    axes: dict[str, int], *, lora: LoRA = LORA, sizes: dict[str, Any] = SIZES, **layout: Any
) -> Adapted:
    """The model on the first devices, and the batch in the order of its columns.

    Args:
      layout: fields of LayoutSpec and PrecisionSpec.
    """
    spec, model = MeshSpec(**axes), Transformer(**sizes)
    mesh, infos = make_mesh(spec, jax.devices()[: spec.size]), lora.infos(model.param_infos())
    fields = dict(compute_dtype="float32", **layout)
    laid_out = layout_from(fields, spec, infos, adapter_scale=lora.scale)
    optimizer = build(ADAMW, num_steps=100, params=map_params(lambda info: info, infos))
    columns = context_order(adversarial_batch().token_BL.shape[1], spec.context, laid_out.context_order)
    batch = jax.tree.map(
        lambda x: jax.device_put(x[:, columns], NamedSharding(mesh, BATCH_SPEC)), adversarial_batch()
    )
    return Adapted(model, infos, laid_out, optimizer, mesh, batch)


def trained(
    run: Adapted, num_steps: int, base: dict[str, Any] | None = None
) -> tuple[np.ndarray, Any, Any, str]:
    """Loss of each step on one batch, the parameters before and after, and the hash of the base before.

    Args:
      base: parameters on the host to begin with; None draws them.
    """
    if base is not None:
        shardings = shardings_of(abstract_state(run.layout, run.optimizer, run.mesh)).params
        base = jax.device_put(base, shardings)
    state = init_state(run.layout, run.optimizer, run.mesh, seed=0, base=base)
    base_hash = hex_of(hash_base(tuple(p.info for p in run.layout.params), state.params))
    step = make_train_step(run.model, run.optimizer, run.layout, run.mesh)
    before, values = jax.device_get(state.params), []
    for _ in range(num_steps):
        state, metrics = step(state, run.batch)
        values.append(float(metrics["loss_nats"]))
    assert values[-1] < values[0] - 0.1, "the loss must move, or equality of two runs proves nothing"
    return np.array(values), before, jax.device_get(state.params), base_hash
