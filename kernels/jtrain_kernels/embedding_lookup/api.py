"""Embedding lookup with a gradient that is summed in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels import cost, registry


def embedding_lookup(table_VD: Float[Array, "V D"], token_BL: Int[Array, "B L"]) -> Float[Array, "B L D"]:
    """`table[token]`. Ids must be in [0, V); others are clipped, because a gather under jit cannot raise.

    The gradient has the table's dtype; gradients of equal tokens are added in float32.
    """
    return registry.call(EMBEDDING_LOOKUP, table_VD=table_VD, token_BL=token_BL)


@jax.custom_vjp
def _lookup(table_VD: Array, token_BL: Array) -> Array:
    return table_VD.at[token_BL].get(mode="clip")


def _forward(table_VD: Array, token_BL: Array) -> tuple[Array, tuple[Array, Array]]:
    # An empty array carries the table's shape and dtype to the backward pass.
    return _lookup(table_VD, token_BL), (token_BL, jnp.zeros((table_VD.shape[0], 0), table_VD.dtype))


def _backward(saved: tuple[Array, Array], dx_BLD: Array) -> tuple[Array, None]:
    token_BL, like_V0 = saved
    zeros_VD = jnp.zeros((like_V0.shape[0], dx_BLD.shape[-1]), jnp.float32)
    # Float32 sums: frequent tokens add thousands of rows, which bfloat16 would swallow.
    dtable_VD = zeros_VD.at[token_BL].add(dx_BLD.astype(jnp.float32), mode="drop")
    return dtable_VD.astype(like_V0.dtype), None


_lookup.defvjp(_forward, _backward)

EMBEDDING_LOOKUP = registry.Op(
    "embedding_lookup",
    (registry.Implementation("xla", _lookup, cost_s=cost.embedding_lookup_s),),
    cases={
        "llama8b": {
            "table_VD": jax.ShapeDtypeStruct((128256, 4096), jnp.bfloat16),
            "token_BL": jax.ShapeDtypeStruct((1, 8192), jnp.int32),
        }
    },
)
OPS = (EMBEDDING_LOOKUP,)
