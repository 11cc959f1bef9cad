"""Reference loss: the formula on all the logits, differentiated by JAX."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def linear_cross_entropy_reference(
    x_BLD: Float[Array, "B L D"],
    unembed_DV: Float[Array, "D V"],
    target_BL: Int[Array, "B L"],
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sums over tokens whose target is not -1: objective, and cross entropy in nats; logits in at least
    float32.
    """
    dtype = jnp.promote_types(x_BLD.dtype, jnp.float32)
    logits_BLV = jnp.einsum("bld,dv->blv", x_BLD, unembed_DV, preferred_element_type=dtype)
    if soft_cap is not None:
        logits_BLV = soft_cap * jnp.tanh(logits_BLV / soft_cap)
    lse_BL = jax.nn.logsumexp(logits_BLV, axis=-1)
    picked_BL = jnp.take_along_axis(logits_BLV, jnp.maximum(target_BL, 0)[..., None], axis=-1)[..., 0]
    valid_BL = target_BL != -1
    nats = jnp.sum(jnp.where(valid_BL, lse_BL - picked_BL, 0.0))
    return nats + z_loss * jnp.sum(jnp.where(valid_BL, lse_BL**2, 0.0)), jax.lax.stop_gradient(nats)
