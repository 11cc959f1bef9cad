"""SwiGLU, the gate of a feed-forward layer; keeps only its inputs for the backward pass."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels import cost, registry


def swiglu(gate: Float[Array, "*dims"], up: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """`silu(gate) * up`, computed in float32, returned in gate's dtype (arXiv:2002.05202)."""
    return registry.call(SWIGLU, gate=gate, up=up)


@jax.custom_vjp
def _xla(gate: Array, up: Array) -> Float[Array, "*dims"]:
    gate32 = gate.astype(jnp.float32)
    return (gate32 * jax.nn.sigmoid(gate32) * up.astype(jnp.float32)).astype(gate.dtype)


def _forward(gate: Array, up: Array) -> tuple[Array, tuple[Array, Array]]:
    return _xla(gate, up), (gate, up)


def _backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    gate, up = saved
    gate32, dy32 = gate.astype(jnp.float32), dy.astype(jnp.float32)
    sigmoid = jax.nn.sigmoid(gate32)
    silu = gate32 * sigmoid
    dgate = dy32 * up.astype(jnp.float32) * (sigmoid + silu * (1.0 - sigmoid))
    return dgate.astype(gate.dtype), (dy32 * silu).astype(up.dtype)


_xla.defvjp(_forward, _backward)

_LLAMA8B = jax.ShapeDtypeStruct((1, 8192, 14336), jnp.bfloat16)
SWIGLU = registry.Op(
    "swiglu",
    (registry.Implementation("xla", _xla, cost_s=cost.swiglu_s),),
    cases={"llama8b": {"gate": _LLAMA8B, "up": _LLAMA8B}},
)
OPS = (SWIGLU,)
