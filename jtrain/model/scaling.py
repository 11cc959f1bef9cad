"""Which weights multiply in 8-bit floats, and the history by which delayed scaling knows the range of their tensors.

In 8 bits are the products of the layers' weights: of attention's projections and of the feed-forward layers. Attention
itself, the embedding, the unembedding with its loss, a router and routed experts compute as without. The model does not
know of it: an 8-bit weight is an `ops.Fp8Kernel` in the place of the array.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jtrain.dims import ParamInfo
from jtrain.layout import LayoutSpec
from jtrain.model import ops
from jtrain.model.param import Params, map_params
from jtrain_kernels.device import from_device

type Tree = dict[str, Any]
"""Something of every 8-bit weight, nested like the parameters, without what has none."""

_LARGEST_NORMAL = math.sqrt(24.0)
"""In standard deviations, the largest number that `param.py` draws: the sum of eight uniforms has no tails."""


def check_matmul_dtype(spec: LayoutSpec, mesh: Mesh) -> None:
    """Refuses 8-bit matmuls where the devices have none.

    Raises:
      ValueError: says why, and what to set.
    """
    device = from_device(mesh.devices.flat[0])
    if spec.matmul_dtype == "compute":
        return
    kind = mesh.devices.flat[0].device_kind
    reason = f"{kind} is not known" if device is None else ops.fp8_unsupported(device)
    if reason is not None:
        raise ValueError(f"layout.matmul_dtype={spec.matmul_dtype}: {reason}. Set layout.matmul_dtype=compute.")


def fp8_weights(infos: Sequence[ParamInfo]) -> tuple[ParamInfo, ...]:
    """The parameters whose products are in 8 bits: the layers' matrices, but for what belongs to routed experts."""
    return tuple(info for info in infos if info.is_matrix and info.dims.startswith("Y") and "X" not in info.dims)


def first_scaling(infos: Sequence[ParamInfo], params: Params | None = None) -> Tree:
    """Histories before the first step: [Y, 3, S] of every 8-bit weight, float32.

    Of the weight itself the history says how large it is, or for drawn ones can be; of its activations and gradients
    nothing, until a step has seen them.

    Args:
      params: weights that were not drawn, such as imported ones.
    """

    def first(info: ParamInfo, value: Any = None) -> Float[Array, "Y 3 S"]:
        num_layers = info.shape[0]
        if value is None:
            kernel_Y = jnp.full(num_layers, _LARGEST_NORMAL * info.std, jnp.float32)
        else:
            kernel_Y = jnp.max(jnp.abs(value).reshape(num_layers, -1), axis=1).astype(jnp.float32)
        none_Y = jnp.zeros_like(kernel_Y)
        return ops.amax_pushed(ops.no_amax(num_layers), jnp.stack([none_Y, kernel_Y, none_Y], axis=-1))

    return map_params(first, fp8_weights(infos), *([] if params is None else [params]))


def unseen(scaling: Tree) -> Tree:
    """What to differentiate in order to learn this step's largest numbers, [Y, 3] of every weight."""
    return jax.tree.map(lambda history_Y3S: jnp.zeros(history_Y3S.shape[:2], jnp.float32), scaling)


def advanced(scaling: Tree, seen: Tree) -> Tree:
    """The histories after a step that saw these numbers."""
    return jax.tree.map(ops.amax_pushed, scaling, seen)


def with_fp8(weights: Params, infos: Sequence[ParamInfo], scaling: Tree, seen: Tree, unit: Float[Array, ""]) -> Params:
    """The weights, those that multiply in 8 bits as `ops.Fp8Kernel`.

    Args:
      weights: stacked; a leaf need not be an array yet, since `fetch` keeps what is around it.
      scaling: histories; empty where every tensor is scaled by its own largest number.
      seen: as of `unseen`, by which the histories go on.
      unit: the order of magnitude of a first step's gradients: 1 / tokens of the batch.
    """
    if not scaling:
        wrapped = map_params(lambda info, weight: ops.Fp8Kernel(weight), fp8_weights(infos), weights)
        return _merged(weights, wrapped)

    def kernel(info: ParamInfo, weight: Any, history_Y3S: Array, seen_Y3: Array) -> ops.Fp8Kernel:
        return ops.Fp8Kernel(weight, jax.lax.stop_gradient(ops.amax_scales(history_Y3S, unit)), seen_Y3)

    return _merged(weights, map_params(kernel, fp8_weights(infos), weights, scaling, seen))


def _merged(weights: Params, wrapped: Params) -> Params:
    """`weights` with those of `wrapped` in their place."""
    out = dict(weights)
    for key, value in wrapped.items():
        out[key] = _merged(weights[key], value) if isinstance(value, dict) else value
    return out
