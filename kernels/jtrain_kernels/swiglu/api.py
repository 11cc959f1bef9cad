"""SwiGLU, the gate of a feed-forward layer; keeps only its inputs for the backward pass."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels import cost, registry
from jtrain_kernels.swiglu import mosaic_gpu


def swiglu(gate: Float[Array, "*dims"], up: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """`silu(gate) * up`, computed in float32, returned in gate's dtype (arXiv:2002.05202)."""
    return registry.call(SWIGLU, gate=gate, up=up)


def grouped_swiglu(
    gate: Float[Array, "T F"], up: Float[Array, "T F"], group_size: Int[Array, " X"], *, expected_rows: int
) -> Float[Array, "T F"]:
    """`swiglu` of the rows of groups: the first `sum(group_size)` rows of a buffer.

    The other rows are undefined, in the result and in the gradients, and their contents have no effect on
    rows of groups.

    Args:
      expected_rows: rows that groups usually have, by which implementations are ranked.
    """
    return registry.call(GROUPED_SWIGLU, gate=gate, up=up, group_size=group_size, expected_rows=expected_rows)


def _all_rows(gate: Array, up: Array, group_size: Array, *, expected_rows: int) -> Array:
    del group_size, expected_rows
    return _xla(gate, up)


@jax.custom_vjp
def _xla(gate: Array, up: Array) -> Float[Array, "*dims"]:
    gate32 = gate.astype(jnp.float32)
    return (gate32 * jax.nn.sigmoid(gate32) * up.astype(jnp.float32)).astype(gate.dtype)


def _forward(gate: Array, up: Array) -> tuple[Array, tuple[Array, Array]]:
    # Inputs only: silu is cheap to compute again.
    return _xla(gate, up), (gate, up)


def _backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    # A pass of its own: as the end of the matmul that recomputes `up`, XLA:TPU makes that one 1.5 times as
    # long.
    gate, up, dy = jax.lax.optimization_barrier((*saved, dy))
    # Float32 within the pass, rounded once per gradient.
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
_BUFFER = jax.ShapeDtypeStruct((131072, 768), jnp.bfloat16)
GROUPED_SWIGLU = registry.Op(
    "grouped_swiglu",
    (
        registry.Implementation(
            "mosaic_gpu",
            mosaic_gpu.swiglu,
            supports=mosaic_gpu.supports,
            cost_s=functools.partial(cost.grouped_swiglu_s, skips=True),
            only_forced="no hardware has run the kernel yet",
        ),
        registry.Implementation(
            "xla", _all_rows, cost_s=functools.partial(cost.grouped_swiglu_s, skips=False)
        ),
    ),
    cases={
        "qwen3_30b_a3b": {  # a quarter of 16384 tokens, 8 experts each, and 32 of 128 experts per device
            "gate": _BUFFER,
            "up": _BUFFER,
            "group_size": jax.ShapeDtypeStruct((32,), jnp.dtype("int32")),
            "expected_rows": 32768,
        }
    },
)
OPS = (SWIGLU, GROUPED_SWIGLU)
