"""Unembedding and cross entropy in one, without ever holding all the logits."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels import registry
from jtrain_kernels.linear.cpu import transposed
from jtrain_kernels.linear.reference import contract

IGNORE = -1
"""Target id of a token that is not predicted."""


def linear_cross_entropy(
    x_BLD: Float[Array, "B L D"],
    unembed_DV: Float[Array, "D V"],
    target_BL: Int[Array, "B L"],
    *,
    chunk_tokens: int,
    z_loss: float = 0.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Cross entropy of `x @ unembed` and its gradient, holding the logits of `chunk_tokens` tokens at a time.

    That is chunk_tokens * V * 4 bytes of logits instead of B * L * V * 4. When differentiated, the gradient is
    computed in the same pass as the loss: three matmuls, where recomputing the logits in the backward pass takes
    four; `d unembed`, D * V * 4 bytes, is then alive from here until the backward pass. Not differentiated, only
    the loss is computed. All shapes are one device's block, with `unembed` whole.

    Args:
      x_BLD: last hidden states; the matmuls run in their dtype, the softmax and all sums in float32.
      target_BL: next-token ids in [0, V), or -1 where there is nothing to predict.
      chunk_tokens: tokens whose logits exist at a time.
      z_loss: coefficient of the squared log-partition (arXiv:2204.02311, section 5).

    Returns:
      Two float32 sums over tokens with a target, not means: divide by the global number of such tokens, so that
      accumulation over microbatches is exact. First the objective, nats + z_loss * sum(logsumexp^2), differentiable;
      then the cross entropy in nats, for reporting: its gradient is zero.

    Raises:
      ValueError: chunk_tokens is not positive.

    Source: the gradient in the forward pass is Liger Kernel's, arXiv:2410.10989, section 3.2.
    """
    return registry.call(
        LINEAR_CROSS_ENTROPY,
        x_BLD=x_BLD,
        unembed_DV=unembed_DV,
        target_BL=target_BL,
        chunk_tokens=chunk_tokens,
        z_loss=z_loss,
    )


def _xla(
    x_BLD: Array, unembed_DV: Array, target_BL: Array, chunk_tokens: int, z_loss: float
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    x_ZCD, target_ZC = in_chunks(x_BLD, target_BL, chunk_tokens)
    return _loss(x_ZCD, unembed_DV, target_ZC, z_loss)


def in_chunks(
    x_BLD: Float[Array, "B L D"], target_BL: Int[Array, "B L"], chunk_tokens: int
) -> tuple[Float[Array, "Z C D"], Int[Array, "Z C"]]:
    """The tokens in chunks; the last is filled up with tokens that have no target.

    Raises:
      ValueError: chunk_tokens is not positive.
    """
    if chunk_tokens < 1:
        raise ValueError(f"linear_cross_entropy: chunk_tokens={chunk_tokens} must be at least 1.")
    D, tokens = x_BLD.shape[-1], target_BL.size
    chunk = min(chunk_tokens, tokens)
    x_TD, target_T = x_BLD.reshape(-1, D), target_BL.reshape(-1)
    if missing := -tokens % chunk:
        x_TD = jnp.pad(x_TD, ((0, missing), (0, 0)))
        target_T = jnp.pad(target_T, (0, missing), constant_values=IGNORE)
    return x_TD.reshape(-1, chunk, D), target_T.reshape(-1, chunk)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _loss(x_ZCD: Array, unembed_DV: Array, target_ZC: Array, z_loss: float) -> tuple[Array, Array]:
    """Z chunks of C tokens."""
    kernel_DV = unembed_DV.astype(x_ZCD.dtype)

    def chunk(sums: Array, x_and_target: tuple[Array, Array]) -> tuple[Array, None]:
        x_CD, target_C = x_and_target
        logits_CV = contract(x_CD, kernel_DV, 1, 0, jnp.float32)
        return sums + _sums(logits_CV, jax.nn.logsumexp(logits_CV, axis=-1), target_C, z_loss), None

    (total, nats), _ = jax.lax.scan(chunk, jnp.zeros(2, jnp.float32), (x_ZCD, target_ZC))
    return total, nats


def _sums(logits_CV: Array, lse_C: Array, target_C: Array, z_loss: float) -> Float[Array, "2"]:
    """[objective, nats] of one chunk."""
    valid_C = target_C != IGNORE
    picked_C = jnp.take_along_axis(logits_CV, jnp.maximum(target_C, 0)[:, None], axis=1)[:, 0]
    nats = jnp.sum(jnp.where(valid_C, lse_C - picked_C, 0.0))
    return jnp.stack([nats + z_loss * jnp.sum(jnp.where(valid_C, lse_C * lse_C, 0.0)), nats])


def _forward(
    x_ZCD: Array, unembed_DV: Array, target_ZC: Array, z_loss: float
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    kernel_DV = unembed_DV.astype(x_ZCD.dtype)

    def chunk(carry: tuple[Array, Array], x_and_target: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        sums, dkernel_DV = carry
        x_CD, target_C = x_and_target
        logits_CV = contract(x_CD, kernel_DV, 1, 0, jnp.float32)
        lse_C = jax.nn.logsumexp(logits_CV, axis=-1)
        sums = sums + _sums(logits_CV, lse_C, target_C, z_loss)
        # d(nats)/d(logits) = softmax - onehot; d(lse^2)/d(logits) = 2 lse softmax.
        weight_C = jnp.where(target_C != IGNORE, 1.0, 0.0)
        softmax_CV = jnp.exp(logits_CV - lse_C[:, None]) * ((1.0 + 2.0 * z_loss * lse_C) * weight_C)[:, None]
        is_target_CV = jax.lax.broadcasted_iota(jnp.int32, logits_CV.shape, 1) == target_C[:, None]
        dlogits_CV = (softmax_CV - is_target_CV).astype(x_CD.dtype)
        dx_CD = contract(dlogits_CV, kernel_DV, 1, 1, x_CD.dtype)
        dkernel_DV += jax.lax.platform_dependent(
            x_CD,
            dlogits_CV,
            cpu=lambda x, dlogits: contract(transposed(x), dlogits, 1, 0, jnp.float32),
            default=lambda x, dlogits: contract(x, dlogits, 0, 0, jnp.float32),
        )
        return (sums, dkernel_DV), dx_CD

    start = (jnp.zeros(2, jnp.float32), jnp.zeros(unembed_DV.shape, jnp.float32))
    ((total, nats), dkernel_DV), dx_ZCD = jax.lax.scan(chunk, start, (x_ZCD, target_ZC))
    return (total, nats), (dx_ZCD, dkernel_DV.astype(unembed_DV.dtype))


def _backward(z_loss: float, saved: tuple[Array, Array], cotangents: tuple[Array, Array]) -> tuple[Array, Array, None]:
    del z_loss  # is in the saved gradients
    dx_ZCD, dkernel_DV = saved
    scale = cotangents[0]

    def scaled(gradient: Array) -> Array:
        return (gradient.astype(jnp.float32) * scale).astype(gradient.dtype)

    return scaled(dx_ZCD), scaled(dkernel_DV), None


_loss.defvjp(_forward, _backward)

LINEAR_CROSS_ENTROPY = registry.Op(
    "linear_cross_entropy",
    (registry.Implementation("xla", _xla),),
    cases={
        "llama8b": {
            "x_BLD": jax.ShapeDtypeStruct((2, 8192, 4096), jnp.bfloat16),
            "unembed_DV": jax.ShapeDtypeStruct((4096, 128256), jnp.bfloat16),
            "target_BL": jax.ShapeDtypeStruct((2, 8192), jnp.int32),
            "chunk_tokens": 2048,
            "z_loss": 0.0,
        }
    },
)
OPS = (LINEAR_CROSS_ENTROPY,)
