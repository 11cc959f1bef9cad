"""Weights of one pipeline worker, as its chunks compute with them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain.layout.layout import Layout
from jtrain.model.adapters.dropout_keys import with_dropout_keys
from jtrain.model.forward_placement import Placement
from jtrain.model.fp8_scaling import amax_probes, fp8_weights, with_fp8
from jtrain.model.param import Params
from jtrain.model.router import RouterLosses
from jtrain.model.transformer import Transformer
from jtrain.step.pipeline_chunks import StageChunks
from jtrain.step.pipeline_ticks import ticks_of
from jtrain.step.zero import attach_values, placement_of


def pipeline_placement(layout: Layout) -> Placement:
    """Placement of a pipelined model: layers keep named values, and stages share the vocabulary."""
    return dataclasses.replace(placement_of(layout), stage=layout.mesh.stage, regather=True)


def chunks_of(
    model: Transformer,
    layout: Layout,
    placement: Placement,
    params: Params,
    trained: Params,
    scaling: dict[str, Any] | None,
    unit: Float[Array, ""],
    targets_per_token: Float[Array, ""] | None = None,
) -> StageChunks:
    """The worker's layers, ready to compute; without 8-bit matmuls if `scaling` is None.

    Args:
      unit, targets_per_token: as in `LossScale`.
    """
    assert layout.pipeline is not None
    pipeline, infos = layout.pipeline, tuple(p.info for p in layout.params)
    # 8-bit kernels wrap what `fetch` reads, so values are attached first.
    weights = with_dropout_keys(layout, attach_values(layout, trained, params))
    if scaling is not None and layout.precision.matmul_dtype != "compute":
        weights = with_fp8(weights, infos, scaling, amax_probes(scaling), unit)
    # -1 in the order is an identity layer; row p has the places of worker p.
    real_PY = (jnp.asarray(pipeline.order) >= 0).reshape(pipeline.stages, -1)
    router = None
    if (spec := model.router) is not None:
        loss_weights_2 = jnp.stack([spec.balance_loss * unit, spec.router_z_loss * unit]) / model.num_routers
        if targets_per_token is not None:
            loss_weights_2 *= targets_per_token
        # Cotangents of each layer's losses: the coefficients, divided as `Transformer.loss` divides them.
        router = RouterLosses(*loss_weights_2, load=unit if spec.bias_update_rate else None)
    split_paths = frozenset[str]()
    # The matrices that could multiply in 8 bits: norm scales, routers and routed experts are not split.
    # Beside frozen matrices there is next to nothing to compute later.
    if ticks_of(layout).schedule.splits_backward and layout.adapter_scale is None:
        split_paths = frozenset(info.path.removeprefix("layers.") for info in fp8_weights(infos))
    return StageChunks(
        model.layer(placement),
        placement.fetch,
        weights["layers"],
        split_paths,
        pipeline.layers_per_chunk,
        real_PY[jax.lax.axis_index("stage")],
        pipeline.num_identity > 0,
        router,
        1 if model.scan_layers else pipeline.layers_per_chunk,
    )
