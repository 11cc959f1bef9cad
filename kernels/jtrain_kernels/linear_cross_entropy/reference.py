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
    weight_BL: Float[Array, "B L"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sums over tokens whose target is not -1, each times its weight: objective, and cross entropy in nats.

    Logits are in at least float32.
    """
    dtype = jnp.promote_types(x_BLD.dtype, jnp.float32)
    logits_BLV = jnp.einsum("bld,dv->blv", x_BLD, unembed_DV, preferred_element_type=dtype)
    if soft_cap is not None:
        logits_BLV = soft_cap * jnp.tanh(logits_BLV / soft_cap)
    lse_BL = jax.nn.logsumexp(logits_BLV, axis=-1)
    picked_BL = jnp.take_along_axis(logits_BLV, jnp.maximum(target_BL, 0)[..., None], axis=-1)[..., 0]
    factor_BL = (target_BL != -1) * (1.0 if weight_BL is None else weight_BL)
    nats = jnp.sum((lse_BL - picked_BL) * factor_BL)
    return nats + z_loss * jnp.sum(lse_BL**2 * factor_BL), jax.lax.stop_gradient(nats)
