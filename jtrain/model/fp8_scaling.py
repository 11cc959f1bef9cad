"""Selection of the weights that multiply in 8-bit floats, and the amax histories of delayed scaling.

The projections of attention and the dense feed-forward layers multiply in 8 bits. Attention itself, the
embedding, the unembedding with its loss, the router and routed experts keep the compute dtype. The model's
code is the same in both cases: an `ops.Fp8Kernel` takes the place of the weight's array.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jtrain.errors import UserError
from jtrain.layout.dims import ParamInfo
from jtrain.layout.precision import PrecisionSpec
from jtrain.model import ops
from jtrain.model.param import Params, map_params
from jtrain_kernels.device import from_device

type Tree = dict[str, Any]
"""One value per 8-bit weight, nested like the parameters; other parameters are left out."""

_LARGEST_NORMAL = math.sqrt(24.0)
"""Largest number that `param.py` draws, in standard deviations: a sum of eight uniforms is bounded."""


def check_matmul_dtype(precision: PrecisionSpec, mesh: Mesh) -> None:
    """Refuses 8-bit matmuls on devices without them.

    Raises:
      UserError: names the device and the setting to change.
    """
    device = from_device(mesh.devices.flat[0])
    if precision.matmul_dtype == "compute":
        return
    kind = mesh.devices.flat[0].device_kind
    reason = f"{kind} is not known" if device is None else ops.fp8_unsupported(device)
    if reason is not None:
        raise UserError(
            f"precision.matmul_dtype={precision.matmul_dtype}: {reason}. Set precision.matmul_dtype=compute."
        )


def fp8_weights(infos: Sequence[ParamInfo]) -> tuple[ParamInfo, ...]:
    """The parameters that multiply in 8 bits: the layers' matrices, except routers and routed experts."""
    return tuple(
        info for info in infos if info.is_matrix and info.dims.startswith("Y") and "X" not in info.dims
    )


@functools.cache
def history_shape(num_layers: int) -> tuple[int, ...]:
    """Shape of the amax histories of one 8-bit weight, [Y, 3, S]."""
    return jax.eval_shape(functools.partial(ops.no_amax, num_layers)).shape


def first_scaling(infos: Sequence[ParamInfo], params: Params | None = None) -> Tree:
    """Amax histories before the first step: [Y, 3, S] per 8-bit weight, float32.

    The weight's own entry is its largest absolute value, or an upper bound for weights drawn at random.
    Activations and gradients have no entry until the first step has seen them.

    Args:
      params: the weights, if they were not drawn at random (imported weights).
    """

    def first_history(info: ParamInfo, value: Any = None) -> Float[Array, "Y 3 S"]:
        num_layers = info.shape[0]
        if value is None:
            # An upper bound for drawn weights: they are 4.9 deviations at most, whatever the seed.
            kernel_Y = jnp.full(num_layers, _LARGEST_NORMAL * info.std, jnp.float32)
        else:
            kernel_Y = jnp.max(jnp.abs(value).reshape(num_layers, -1), axis=1).astype(jnp.float32)
        # Entries are (activation, weight, gradient); 0 means none yet.
        zero_Y = jnp.zeros_like(kernel_Y)
        return ops.amax_pushed(ops.no_amax(num_layers), jnp.stack([zero_Y, kernel_Y, zero_Y], axis=-1))

    return map_params(first_history, fp8_weights(infos), *([] if params is None else [params]))


def amax_probes(scaling: Tree) -> Tree:
    """Zeros, [Y, 3] per weight, whose gradients are the largest absolute values that this step sees."""
    return jax.tree.map(lambda history_Y3S: jnp.zeros(history_Y3S.shape[:2], jnp.float32), scaling)


def advance_scaling(scaling: Tree, amax: Tree) -> Tree:
    """The histories after a step that saw these largest values."""
    return jax.tree.map(ops.amax_pushed, scaling, amax)


def with_fp8(
    weights: Params, infos: Sequence[ParamInfo], scaling: Tree, probes: Tree, unit: Float[Array, ""]
) -> Params:
    """The weights, with an `ops.Fp8Kernel` in place of each one that multiplies in 8 bits.

    Args:
      weights: stacked. A leaf may be a wrapper around an array: `fetch` later replaces the array and keeps
        the wrapper.
      scaling: amax histories; empty if every tensor is scaled by its own current largest value.
      probes: from `amax_probes`; its gradients extend the histories.
      unit: order of magnitude of the first step's gradients: 1 / tokens of the batch.
    """
    # Current scaling has no history and no probes: each matmul finds its own maxima.
    if not scaling:
        wrapped = map_params(lambda info, weight: ops.Fp8Kernel(weight), fp8_weights(infos), weights)
        return _merge(weights, wrapped)

    def kernel(info: ParamInfo, weight: Any, history_Y3S: Array, probe_Y3: Array) -> ops.Fp8Kernel:
        # Scales are constants of a step, from the histories before it.
        return ops.Fp8Kernel(weight, jax.lax.stop_gradient(ops.amax_scales(history_Y3S, unit)), probe_Y3)

    return _merge(weights, map_params(kernel, fp8_weights(infos), weights, scaling, probes))


def _merge(weights: Params, wrapped: Params) -> Params:
    """`weights` with the leaves of `wrapped` replacing their own."""
    merged = dict(weights)
    for key, value in wrapped.items():
        merged[key] = _merge(weights[key], value) if isinstance(value, dict) else value
    return merged
