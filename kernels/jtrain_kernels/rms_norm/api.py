"""Root-mean-square normalisation, alone or as the branch of a residual stream."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels import cost, registry, triton_call
from jtrain_kernels.device import DeviceSpec
from jtrain_kernels.platforms import by_platform
from jtrain_kernels.rms_norm import pallas_tpu, triton

type Backward = Callable[[Array, Array, Array, Array, float, Array | None], tuple[Array, Array]]
"""(dy, x, inverse_rms, scale, eps, residual's gradient or None) -> (dx, dscale)."""


def rms_norm(x: Float[Array, "*rest C"], scale_C: Float[Array, " C"], eps: float) -> Float[Array, "*rest C"]:
    """`x / sqrt(mean(x^2) + eps) * scale`, computed in float32, returned in x's dtype (arXiv:1910.07467).

    Keeps its input and one float32 per row for the backward pass.
    """
    return registry.call(RMS_NORM, x=x, scale_C=scale_C, eps=eps)


def rms_norm_branch(
    x: Float[Array, "*rest C"], scale_C: Float[Array, " C"], eps: float
) -> tuple[Float[Array, "*rest C"], Float[Array, "*rest C"]]:
    """Residual stream x and `rms_norm(x)`, the input of the branch that is later added to x.

    The gradient of x is the sum over both uses, added in float32 and rounded once. Combining them lets one
    pass over memory compute it.
    """
    return registry.call(RMS_NORM_BRANCH, x=x, scale_C=scale_C, eps=eps)


def _normalised(
    x: Array, scale_C: Array, eps: float
) -> tuple[Float[Array, "*rest C"], Float[Array, "*rest 1"]]:
    """Result, and the inverse root mean square of every row."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    # Rounded once, after the scale.
    return (x32 * inverse * _broadcast(scale_C, x.ndim)).astype(x.dtype), inverse


def _broadcast(scale_C: Float[Array, " C"], ndim: int) -> Float[Array, "..."]:
    return scale_C.astype(jnp.float32).reshape((1,) * (ndim - 1) + scale_C.shape)


# Arguments 2 and 3 are no arrays: eps, and the function that is the backward pass.
@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def norm_by(x: Array, scale_C: Array, eps: float, backward: Backward) -> Array:
    """`rms_norm` with the given backward pass."""
    del backward
    return _normalised(x, scale_C, eps)[0]


def _forward(
    x: Array, scale_C: Array, eps: float, backward: Backward
) -> tuple[Array, tuple[Array, Array, Array]]:
    del backward
    y, inverse = _normalised(x, scale_C, eps)
    return y, (x, inverse, scale_C)


def _backward(
    eps: float, backward: Backward, saved: tuple[Array, Array, Array], dy: Array
) -> tuple[Array, Array]:
    return backward(dy, *saved, eps, None)


norm_by.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def branch_by(x: Array, scale_C: Array, eps: float, backward: Backward) -> tuple[Array, Array]:
    """`rms_norm_branch` with the given backward pass."""
    del backward
    # x itself is a result, so that the sum of both gradients happens in this op's backward pass.
    return x, _normalised(x, scale_C, eps)[0]


def _branch_forward(
    x: Array, scale_C: Array, eps: float, backward: Backward
) -> tuple[tuple[Array, Array], tuple[Array, Array, Array]]:
    y, saved = _forward(x, scale_C, eps, backward)
    return (x, y), saved


def _branch_backward(
    eps: float, backward: Backward, saved: tuple[Array, Array, Array], cotangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    dx, dy = cotangents
    return backward(dy, *saved, eps, dx)


branch_by.defvjp(_branch_forward, _branch_backward)


def _gradients(
    dy: Array, x: Array, inverse: Array, scale_C: Array, eps: float, residual: Array | None
) -> tuple[Array, Array]:
    """Backward pass in plain JAX."""
    # eps is an argument because kernels recompute `inverse` from x.
    del eps  # part of `inverse`
    # A pass of its own: as the end of the matmul that gives dy, it makes XLA:TPU's matmul a fifth longer. On
    # a GPU it would only be one more reading of dy.
    dy = by_platform(dy, tpu=jax.lax.optimization_barrier, default=lambda dy: dy)
    x32, dy32 = x.astype(jnp.float32), dy.astype(jnp.float32)
    unit = x32 * inverse
    dscale_C = jnp.sum(dy32 * unit, axis=tuple(range(x.ndim - 1)))
    dunit = dy32 * _broadcast(scale_C, x.ndim)
    # Derivative of x / rms(x): the part of dunit along x is removed.
    dx = inverse * (dunit - unit * jnp.mean(dunit * unit, axis=-1, keepdims=True))
    if residual is not None:
        dx += residual.astype(jnp.float32)
    return dx.astype(x.dtype), dscale_C.astype(scale_C.dtype)


def _implementations(*, residual: bool) -> tuple[registry.Implementation, ...]:
    """Implementations of the op with or without a residual stream; all use XLA's forward pass.

    The kernels move fewer bytes, but XLA cannot fuse across a kernel, and the cost model does not see what it
    fuses.
    """
    call = branch_by if residual else norm_by
    unfused = "XLA cannot fuse across it, and no train step was measured with it"
    unproven = "no hardware has run the kernel yet, and XLA cannot fuse across it"
    one_pass = partial(cost.rms_norm_s, residual=residual, one_pass=True)

    def supports(refusal: Callable[..., str | None]) -> Callable[[DeviceSpec, registry.Avals], str | None]:
        return lambda device, avals: refusal(device, avals["x"], residual=residual)

    return (
        registry.Implementation(
            "pallas_tpu",
            # The backward pass is a static argument: equal frozen dataclasses share one trace.
            lambda x, scale_C, eps: call(x, scale_C, eps, pallas_tpu.OnePassTPU()),
            supports=supports(pallas_tpu.refusal),
            cost_s=one_pass,
            only_forced=unproven,
        ),
        registry.Implementation(
            "triton",
            lambda x, scale_C, eps, **config: call(x, scale_C, eps, triton.OnePassTriton(**config)),
            supports=supports(triton.refusal),
            cost_s=one_pass,
            configs=triton.configs,
            only_forced=unfused,
            modules=triton_call.MODULES,
        ),
        registry.Implementation(
            "xla",
            lambda x, scale_C, eps: call(x, scale_C, eps, _gradients),
            cost_s=partial(cost.rms_norm_s, residual=residual, one_pass=False),
        ),
    )


_CASES: dict[str, registry.Avals] = {
    "llama8b": {
        "x": jax.ShapeDtypeStruct((1, 8192, 4096), jnp.bfloat16),
        "scale_C": jax.ShapeDtypeStruct((4096,), jnp.float32),
        "eps": 1e-5,
    },
    "tiny": {
        "x": jax.ShapeDtypeStruct((2, 128, 64), jnp.float32),
        "scale_C": jax.ShapeDtypeStruct((64,), jnp.float32),
        "eps": 1e-5,
    },
}

RMS_NORM = registry.Op("rms_norm", _implementations(residual=False), cases=_CASES)
RMS_NORM_BRANCH = registry.Op("rms_norm_branch", _implementations(residual=True), cases=_CASES)
OPS = (RMS_NORM, RMS_NORM_BRANCH)
