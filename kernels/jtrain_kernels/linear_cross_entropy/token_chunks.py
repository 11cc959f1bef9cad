"""Tokens of a loss: the chunks in which they are computed, and what each adds to its sums."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jtrain_kernels.errors import UserError
from jtrain_kernels.linear_cross_entropy.vocab import IGNORE


def in_chunks(x: Shaped[Array, "..."], chunk_tokens: int, *, fill: int = 0) -> Shaped[Array, "..."]:
    """Reshapes [tokens, ...] to [chunks, at most `chunk_tokens` tokens, ...]; pads with `fill`.

    Raises:
      UserError: chunk_tokens is not positive.
    """
    if chunk_tokens < 1:
        raise UserError(f"linear_cross_entropy: chunk_tokens={chunk_tokens} must be at least 1.")
    chunk = min(chunk_tokens, x.shape[0])
    # -n % chunk is the number of tokens that the last chunk lacks.
    if missing := -x.shape[0] % chunk:
        x = jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1)), constant_values=fill)
    return x.reshape(-1, chunk, *x.shape[1:])


def by_device(
    value_BL: Shaped[Array, "B L *J"], x_BLD: Float[Array, "B _ D"], size: int, *, fill: int
) -> Shaped[Array, "Z C *J"]:
    """Splits values of all devices' positions into Z chunks, in the order of the all-gather: device by
    device.
    """
    # The order within a chunk is that of the all-gather: device by device.
    # [B, n, positions of a device] -> [B, positions, n]: row t has the values of the n devices' t-th tokens.
    rows, length, rest = *x_BLD.shape[:2], value_BL.shape[2:]
    value_Tn = value_BL.reshape(rows, -1, length, *rest).swapaxes(1, 2)
    value_Zcn = in_chunks(value_Tn.reshape(rows * length, -1, *rest), size, fill=fill)
    # [Z, c, n] -> [Z, n, c] -> [Z, C]: the chunk's tokens of device 0 first, as gathered.
    return value_Zcn.swapaxes(1, 2).reshape(value_Zcn.shape[0], -1, *rest)


def nats_of(
    lse: Float[Array, "*C"], picked: Float[Array, "*C"], target: Int[Array, "*C"]
) -> Float[Array, "*C"]:
    """Cross entropy of each token, from its log-partition and the logit of its target; 0 without a target."""
    return jnp.where(target != IGNORE, lse - picked, 0.0)


def weighted_sums(
    lse: Float[Array, "*C"],
    nats: Float[Array, "*C"],
    target: Int[Array, "*C"],
    weight: Float[Array, "*C"] | None,
    z_loss: float,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Objective and nats, summed over tokens with a target, each times its weight."""
    valid = target != IGNORE

    def total(value: Array) -> Array:
        value = jnp.where(valid, value, 0.0)
        return jnp.sum(value if weight is None else value * weight)

    sum_of_nats = total(nats)
    return sum_of_nats + z_loss * total(lse * lse), sum_of_nats


def slope_weights(target_C: Int[Array, " C"], weight_C: Float[Array, " C"] | None) -> Float[Array, " C"]:
    """Factor of each token's gradient: its weight, 0 without a target."""
    return jnp.where(target_C != IGNORE, 1.0 if weight_C is None else weight_C, 0.0)
