"""Router of a mixture of experts: each token's experts, their weights, and the load-balancing losses.

Each device routes only its own positions, also where a sequence is split over devices. Each token's logits
and loss terms therefore exist once, and the router's gradient is the sum over all devices.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jtrain.errors import UserError


@dataclasses.dataclass(frozen=True)
class MoESpec:
    """Mixture of experts of hidden width `model.d_ff` that replaces every feed-forward layer.

    No token is ever dropped. Padding goes to no expert.

    num_experts: experts per layer, X.
    top_k: experts per token: those with the highest logits.
    normalize_top_k: True if the weights of a token's experts are scaled to add up to one (Qwen3); False keeps
      the softmax over all experts.
    shared_experts: additional experts that every token uses (arXiv:2401.06066, section 3.2).
    balance_loss: coefficient of the load-balancing loss (arXiv:2101.03961, section 2.2), computed per
      sequence (arXiv:2412.19437, section 2.1.2) so that it is the same on any mesh and with any number of
      microbatches. Per token and layer: num_experts / top_k * the sum over experts of (fraction of slots sent
      to the expert) * (mean probability of the expert); 1 when all experts are used equally.
    router_z_loss: coefficient of the squared log-partition of the router's logits (arXiv:2202.08906, section
      2.2).
    """

    num_experts: int
    top_k: int
    normalize_top_k: bool = True
    shared_experts: int = 0
    balance_loss: float = 1e-3
    router_z_loss: float = 0.0

    def __post_init__(self) -> None:
        if self.num_experts < 2:
            raise UserError(
                f"model.moe.num_experts={self.num_experts} must be at least 2. Set model.moe=None for a "
                "dense model."
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise UserError(
                f"model.moe.top_k={self.top_k} must be from 1 to model.moe.num_experts={self.num_experts}. "
                f"Set model.moe.top_k={self.num_experts} or less, or more model.moe.num_experts."
            )
        for name in ("shared_experts", "balance_loss", "router_z_loss"):
            if (value := getattr(self, name)) < 0:
                raise UserError(f"model.moe.{name}={value} must be at least 0.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """The S = top_k experts of each token.

    Fields are arrays: expert_BLS int32, equal to `num_experts` for padding, which goes to no expert;
    weight_BLS float32.
    """

    expert_BLS: Any
    weight_BLS: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterLosses:
    """Sums over this device's tokens, without their coefficients; fields are float32 scalars.

    balance: the loss of `MoESpec.balance_loss`; z: the squared log-partition.
    """

    balance: Any
    z: Any


def route(
    logits_BLX: Float[Array, "B L X"],
    valid_BL: Bool[Array, "B L"],
    spec: MoESpec,
    *,
    axes: tuple[str, ...] = (),
) -> tuple[Routing, RouterLosses]:
    """Experts, weights and losses from the router's logits.

    Args:
      logits_BLX: float32, at this device's positions.
      valid_BL: False for padding, which goes to no expert and counts in no loss.
      axes: mesh axes over which sequences are split.
    """
    p_BLX = jax.nn.softmax(logits_BLX, axis=-1)
    # The k largest logits, not probabilities: distinct logits may round to equal probabilities.
    _, expert_BLS = jax.lax.top_k(jax.lax.stop_gradient(logits_BLX), spec.top_k)
    weight_BLS = jnp.take_along_axis(p_BLX, expert_BLS, axis=-1)
    if spec.normalize_top_k:
        weight_BLS /= jnp.sum(weight_BLS, axis=-1, keepdims=True)
    # int32, so that counts of long sequences are exact; they carry no gradient.
    chosen_BLSX = jax.nn.one_hot(expert_BLS, spec.num_experts, dtype=jnp.int32)
    chosen_BX = jnp.sum(jnp.where(valid_BL[..., None, None], chosen_BLSX, 0), axis=(1, 2))
    # The fractions are of whole sequences, so every device needs the counts of the others' positions.
    if axes:
        chosen_BX = jax.lax.psum(chosen_BX, axes)
    # At least 1: a sequence of padding alone has no tokens to divide by.
    tokens_B1 = jnp.maximum(jnp.sum(chosen_BX, axis=-1, keepdims=True) // spec.top_k, 1)
    share_BX = chosen_BX * (spec.num_experts / spec.top_k) / tokens_B1
    p_BX = jnp.sum(jnp.where(valid_BL[..., None], p_BLX, 0.0), axis=1)
    z_BL = jax.nn.logsumexp(logits_BLX, axis=-1) ** 2
    losses = RouterLosses(jnp.sum(share_BX * p_BX), jnp.sum(jnp.where(valid_BL, z_BL, 0.0)))
    # Last, so that indices above are valid: `num_experts` is out of range.
    expert_BLS = jnp.where(valid_BL[..., None], expert_BLS, spec.num_experts)
    return Routing(expert_BLS, weight_BLS), losses
