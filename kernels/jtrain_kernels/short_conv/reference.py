"""Reference short convolution: a sum over taps, differentiated by JAX."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def short_conv_reference(
    x_BLC: Float[Array, "B L C"],
    kernel_WC: Float[Array, "W C"],
    bias_C: Float[Array, " C"] | None,
    segment_BL: Int[Array, "B L"],
    *,
    silu: bool,
) -> Float[Array, "B L C"]:
    """`y[l] = silu(bias + sum over w of kernel[w] x[l - (W - 1) + w])` over taps of the token's segment."""
    L, W = x_BLC.shape[1], len(kernel_WC)
    # Position that each tap reads; below 0 before the row, where it counts as 0.
    tap_LW = jnp.arange(L)[:, None] - (W - 1) + jnp.arange(W)[None]
    index_LW = jnp.maximum(tap_LW, 0)
    sees_BLW = (tap_LW >= 0)[None] & (segment_BL[:, index_LW] == segment_BL[:, :, None])
    y_BLC = jnp.einsum("blwc,wc->blc", jnp.where(sees_BLW[..., None], x_BLC[:, index_LW], 0.0), kernel_WC)
    y_BLC = y_BLC if bias_C is None else y_BLC + bias_C[None, None]
    return jax.nn.silu(y_BLC) if silu else y_BLC
