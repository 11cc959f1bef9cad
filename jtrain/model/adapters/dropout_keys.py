"""Keys of an adapter's dropout in the weights that layers read, on any layout."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jtrain.layout.layout import Layout
from jtrain.model.adapters.dropout import KEY, matrix_key
from jtrain.model.layer_scan import Detached
from jtrain.model.param import Params


def with_dropout_keys(layout: Layout, weights: Params) -> Params:
    """Adds what tells the dropout of one matrix and layer from that of another, if the adapter has dropout.

    Beside A and B of each target: the key of `adapters.dropout.matrix_key`, and the number of the first input
    that this device has, uint32 [2] for each of its layers.

    Args:
      weights: as layers read them, from `attach_values`.
    """
    if layout.adapter_dropout is None:
        return weights
    leaves: dict[str, Any] = {}
    for p in layout.trained:
        target, _, matrix = p.info.path.rpartition(".")
        if not (p.info.is_adapter and matrix.startswith("A_")):
            continue
        stacked, size = p.info.is_stacked, p.info.shape
        order = (p.info.layer_order or range(size[0])) if stacked else 0
        # An identity layer of a pipeline is layer -1: its weights are 0, so its mask means nothing.
        key = matrix_key(target, jnp.asarray(np.asarray(order, np.int64).astype(np.uint32)))
        if p.staged and stacked:
            stages = key.reshape(layout.mesh.stage, -1)
            key = jax.lax.dynamic_index_in_dim(stages, jax.lax.axis_index("stage"), keepdims=False)
        first = jnp.uint32(0)
        if p.tensor_dim is not None and layout.mesh.tensor > 1:
            # Heads, or F, come first among the inputs, so a device has neighbouring ones.
            assert p.tensor_dim == stacked, p.info.path
            local_inputs = math.prod(size[stacked:-1]) // layout.mesh.tensor
            first = (jax.lax.axis_index("tensor") * local_inputs).astype(jnp.uint32)
        key_2 = jnp.stack([key, jnp.broadcast_to(first, key.shape)], axis=-1)
        leaves[f"{target}.{KEY}"] = Detached(None, key_2) if stacked else key_2
    return unflatten_dict({**flatten_dict(weights, sep="."), **leaves}, sep=".")
