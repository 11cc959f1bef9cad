"""Reference loss: the formula on all the logits, differentiated by JAX."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels.linear_cross_entropy.soft_targets import SoftTargets


def linear_cross_entropy_reference(
    x_BLD: Float[Array, "B L D"],
    unembed_DV: Float[Array, "D V"],
    target_BL: Int[Array, "B L"],
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    weight_BL: Float[Array, "B L"] | None = None,
    soft: SoftTargets | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sums over tokens whose target is not -1, each times its weight: objective, and nats.

    Logits are in at least float32.
    """
    dtype = jnp.promote_types(x_BLD.dtype, jnp.float32)
    logits_BLV = jnp.einsum("bld,dv->blv", x_BLD, unembed_DV, preferred_element_type=dtype)
    if soft_cap is not None:
        logits_BLV = soft_cap * jnp.tanh(logits_BLV / soft_cap)
    lse_BL = jax.nn.logsumexp(logits_BLV, axis=-1)
    picked_BL = jnp.take_along_axis(logits_BLV, jnp.maximum(target_BL, 0)[..., None], axis=-1)[..., 0]
    factor_BL = (target_BL != -1) * (1.0 if weight_BL is None else weight_BL)
    nats_BL = lse_BL - picked_BL
    if soft is not None:
        q_BLV = jax.nn.softmax(logits_BLV, axis=-1)
        is_kept_BLV = jnp.any(jax.nn.one_hot(soft.id, logits_BLV.shape[-1], dtype=bool), axis=-2)
        rest_BL1 = jnp.sum(jnp.where(is_kept_BLV, 0.0, q_BLV), axis=-1, keepdims=True)
        q_BLI = jnp.concatenate([jnp.take_along_axis(q_BLV, soft.id, axis=-1), rest_BL1], axis=-1)
        p_BLI = jnp.exp(soft.logprob)
        # log 0 of an outcome that both give no probability.
        has_p_BLI = p_BLI > 0
        log_ratio_BLI = jnp.log(jnp.where(has_p_BLI, p_BLI, 1.0)) - jnp.log(jnp.where(has_p_BLI, q_BLI, 1.0))
        nats_BL = soft.share * jnp.sum(p_BLI * log_ratio_BLI, axis=-1) + (1 - soft.share) * nats_BL
    nats = jnp.sum(nats_BL * factor_BL)
    return nats + z_loss * jnp.sum(lse_BL**2 * factor_BL), jax.lax.stop_gradient(nats)
