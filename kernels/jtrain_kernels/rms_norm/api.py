"""Root-mean-square normalisation that keeps only its input for the backward pass."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels import registry


def rms_norm(x: Float[Array, "*rest C"], scale_C: Float[Array, " C"], eps: float) -> Float[Array, "*rest C"]:
    """`x / sqrt(mean(x^2) + eps) * scale`, computed in float32, back in x's dtype (arXiv:1910.07467)."""
    return registry.call(RMS_NORM, x=x, scale_C=scale_C, eps=eps)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _xla(x: Array, scale_C: Array, eps: float) -> Float[Array, "*rest C"]:
    x32 = x.astype(jnp.float32)
    return (x32 * _inverse_rms(x32, eps) * _broadcast(scale_C, x.ndim)).astype(x.dtype)


def _inverse_rms(x32: Float[Array, "*rest C"], eps: float) -> Float[Array, "*rest 1"]:
    return jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)


def _broadcast(scale_C: Float[Array, " C"], ndim: int) -> Float[Array, "..."]:
    return scale_C.astype(jnp.float32).reshape((1,) * (ndim - 1) + scale_C.shape)


def _forward(x: Array, scale_C: Array, eps: float) -> tuple[Array, tuple[Array, Array]]:
    return _xla(x, scale_C, eps), (x, scale_C)


def _backward(eps: float, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, scale_C = saved
    x32, dy32 = x.astype(jnp.float32), dy.astype(jnp.float32)
    inverse = _inverse_rms(x32, eps)
    unit = x32 * inverse
    dscale_C = jnp.sum(dy32 * unit, axis=tuple(range(x.ndim - 1)))
    dunit = dy32 * _broadcast(scale_C, x.ndim)
    dx = inverse * (dunit - unit * jnp.mean(dunit * unit, axis=-1, keepdims=True))
    return dx.astype(x.dtype), dscale_C.astype(scale_C.dtype)


_xla.defvjp(_forward, _backward)

RMS_NORM = registry.Op(
    "rms_norm",
    (registry.Implementation("xla", _xla),),
    cases={
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
    },
)
OPS = (RMS_NORM,)
