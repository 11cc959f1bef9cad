"""Layers of which the float64 reference has no formula: one device stands for them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import unflatten_dict

from jtrain.model.block import Block, BlockSpec
from jtrain.model.mixer import MixerSpec
from jtrain.model.norm import NormSpec
from jtrain.model.sizes import ModelSizes


@functools.cache
def on_one_device(sizes: ModelSizes, norm: NormSpec) -> Any:
    """Function of (spec, weights by path, x, position, segment) that computes a mixer or a dense layer in
    float32.
    """

    def compute(spec: Any, w: dict[str, Any], x_BLD: Any, position_BL: Any, segment_BL: Any) -> Any:
        # The reference around it runs with 64 bits; layers of jtrain see 32, as in a step.
        with jax.enable_x64(False):
            weights = {path: value.astype(jnp.float32) for path, value in w.items()}
            x32_BLD, segment_BL = x_BLD.astype(jnp.float32), segment_BL.astype(jnp.int32)
            if isinstance(spec, MixerSpec):
                rotation = spec.rotation(sizes)
                tables = rotation and rotation[0].tables(position_BL.astype(jnp.int32), rotation[1])
                y_BLD = _with(spec.module(sizes, norm, layers=0), weights)(x32_BLD, tables, segment_BL)
            else:
                y_BLD = _with(Block(BlockSpec(None, spec), sizes, norm, layers=0).mlp, weights)(x32_BLD)
        return y_BLD.astype(x_BLD.dtype)

    return compute


def _with(module: Any, weights: dict[str, Any]) -> Any:
    return nnx.merge(nnx.split(module)[0], unflatten_dict(weights, sep="."))
