"""Weights of a model with an adapter as those of the plain model."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain.layout.dims import ADAPTER, ParamInfo
from jtrain.model.adapters.block_quantization import dequantize, is_quantized
from jtrain.model.adapters.lora import model_infos
from jtrain.model.param import Params, at_path, map_params


def merge(
    infos: Sequence[ParamInfo], params: Params, scale: float, dtype_of: Callable[[ParamInfo], str]
) -> Params:
    """The parameters of the plain model, `W + scale A B` for each target, summed in float32 and rounded once.

    Args:
      infos: of the model with its adapter.
      params: whole arrays, the layers in the model's order.
      dtype_of: number format of each parameter of the result.
    """
    parts = {info.path: info for info in infos if info.is_adapter}

    def merged(info: ParamInfo, value: Any) -> Array:
        # A base in blocks: its numbers as the steps computed with them.
        value = dequantize(value, "float32") if is_quantized(value) else value
        adapter_paths = sorted(path for path in parts if path.rpartition(".")[0] == f"{info.path}{ADAPTER}")
        if not adapter_paths:
            return value.astype(dtype_of(info))
        # Sorted above: A comes before B.
        down, up = (at_path(params, path) for path in adapter_paths)
        # Stacked layers and experts lead the dimensions of a matrix, and so those of its A and B.
        lead = len(info.dims) - len(info.dims.removeprefix("Y").removeprefix("X"))
        product = _product(down, up, lead)
        # One addition to the base, as it is stored, and one rounding.
        return (value.astype(jnp.float32) + scale * product).astype(dtype_of(info))

    return map_params(merged, model_infos(infos), params)


def _product(down: Float[Array, "..."], up: Float[Array, "..."], lead: int) -> Float[Array, "..."]:
    """A B of every layer and expert, float32."""
    shape = (*down.shape[:-1], *up.shape[lead + 1 :])
    stack = down.shape[:lead]
    down_SIR = down.astype(jnp.float32).reshape(*stack, -1, down.shape[-1])
    up_SRO = up.astype(jnp.float32).reshape(*stack, up.shape[lead], -1)
    # Float32 on every platform: the default of a TPU multiplies in bfloat16.
    return jnp.matmul(down_SIR, up_SRO, precision="highest").reshape(shape)
