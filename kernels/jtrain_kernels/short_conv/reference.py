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
    (L, W), y_BLC = (x_BLC.shape[1], len(kernel_WC)), jnp.zeros_like(x_BLC)
    for token in range(L):
        for w in range(W):
            tap = token - (W - 1) + w
            if tap >= 0:
                same_B = segment_BL[:, tap] == segment_BL[:, token]
                y_BLC = y_BLC.at[:, token].add(
                    jnp.where(same_B[:, None], kernel_WC[w][None] * x_BLC[:, tap], 0.0)
                )
    y_BLC = y_BLC if bias_C is None else y_BLC + bias_C[None, None]
    return jax.nn.silu(y_BLC) if silu else y_BLC
