"""Router of a mixture of experts: each token's experts, their weights, and the load-balancing losses.

Each device routes only its own positions, also where a sequence is split over devices. Each token's logits
and loss terms therefore exist once, and the router's gradient is the sum over all devices.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jtrain.errors import UserError
from jtrain.model.mlp import ClampedSwiGLU, Pointwise


@dataclasses.dataclass(frozen=True)
class MoESpec:
    """Mixture of experts: a feed-forward layer of which each token passes through a few parts.

    No token is ever dropped. Padding goes to no expert.

    num_experts: experts per layer, X.
    top_k: experts per token: those with the highest scores.
    d_ff: hidden width F of one expert; None takes `model.d_ff`.
    activation: nonlinearity of experts and shared experts, as in `MLPSpec`.
    gated: True gives experts and shared experts a gate, as in `MLPSpec`.
    bias: True adds a learned vector to each projection of each expert, and to the router's logits (gpt-oss).
    normalize_top_k: True if the weights of a token's experts are scaled to add up to one (Qwen3); False keeps
      the scores.
    shared_experts: additional experts that every token uses (arXiv:2401.06066, section 3.2).
    shared_d_ff: hidden width of the shared experts together; None takes `shared_experts` times F.
    shared_gate: True multiplies what shared experts add by the sigmoid of a projection to one number
      (Qwen2-MoE).
    shared_scale: multiplies what shared experts add.
    score: of an expert, from the router's logits: `softmax` over experts, or `sigmoid` of each
      (arXiv:2412.19437, section 2.1.2).
    correction_bias: True adds a learned number per expert to the scores that choose a token's experts, not to
      their weights (arXiv:2408.15664).
    chosen_by: what the correction bias is added to: `score`, or the router's `logits` (Kolibri).
    bias_update_rate: step by which every update of the optimizer moves the correction bias of each expert: up
      if fewer tokens of the global batch than the mean chose it, down if more; padding does not count
      (arXiv:2408.15664, algorithm 1; DeepSeek-V3 has 0.001). 0 leaves the bias as it is.
    num_groups: groups of experts that lie side by side; 1 for no groups.
    top_groups: groups from which a token's experts are taken: those with the highest scores.
    group_score: score of a group: the sum of its two best experts (DeepSeek-V3), or its best (DeepSeek-V2).
    weight_scale: multiplies the weights of a token's experts.
    weight_input: True multiplies what a token's only expert reads by its weight, not what it returns (Llama
      4).
    balance_loss: coefficient of the load-balancing loss (arXiv:2101.03961, section 2.2), computed per
      sequence (arXiv:2412.19437, section 2.1.2) so that it is the same on any mesh and with any number of
      microbatches. Per token and layer: num_experts / top_k * the sum over experts of (fraction of slots sent
      to the expert) * (mean probability of the expert); 1 when all experts are used equally.
    router_z_loss: coefficient of the squared log-partition of the router's logits (arXiv:2202.08906, section
      2.2).
    """

    num_experts: int
    top_k: int
    d_ff: int | None = None
    activation: Pointwise | ClampedSwiGLU = "silu"
    gated: bool = True
    bias: bool = False
    normalize_top_k: bool = True
    shared_experts: int = 0
    shared_d_ff: int | None = None
    shared_gate: bool = False
    shared_scale: float = 1.0
    score: Literal["softmax", "sigmoid"] = "softmax"
    correction_bias: bool = False
    chosen_by: Literal["score", "logits"] = "score"
    bias_update_rate: float = 0.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["best_two", "best"] = "best_two"
    weight_scale: float = 1.0
    weight_input: bool = False
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
        if self.num_experts % self.num_groups or not 1 <= self.top_groups <= self.num_groups:
            raise UserError(
                f"model.moe.num_groups={self.num_groups} must divide "
                f"model.moe.num_experts={self.num_experts}, and model.moe.top_groups={self.top_groups} be "
                "from 1 to num_groups. Set one of them."
            )
        if (
            self.group_score == "best_two"
            and self.top_groups < self.num_groups
            and self.num_experts < 2 * self.num_groups
        ):
            raise UserError(
                f"model.moe.group_score=best_two with {self.num_experts} experts in model.moe.num_groups="
                f"{self.num_groups}: a group has one expert. Set model.moe.group_score=best."
            )
        if self.top_k > self.num_experts // self.num_groups * self.top_groups:
            raise UserError(
                f"model.moe.top_k={self.top_k} is more than the experts of model.moe.top_groups="
                f"{self.top_groups} groups. Set one of the two."
            )
        if self.weight_input and self.top_k > 1:
            raise UserError(
                f"model.moe.weight_input=True with model.moe.top_k={self.top_k}: a token's experts would "
                "each read another input. Set model.moe.top_k=1."
            )
        if isinstance(self.activation, ClampedSwiGLU) and not self.gated:
            raise UserError(
                f"model.moe.activation={self.activation} with model.moe.gated=False: a clamped SwiGLU has a "
                "gate. Set one of the two."
            )
        if self.bias and (self.shared_experts or self.shared_d_ff):
            raise UserError(
                f"model.moe.bias=True with model.moe.shared_experts={self.shared_experts} and shared_d_ff="
                f"{self.shared_d_ff}: shared experts have no biases. Set bias=False, or no shared experts."
            )
        if self.bias_update_rate and not self.correction_bias:
            raise UserError(
                f"model.moe.bias_update_rate={self.bias_update_rate} moves a correction bias, but model.moe."
                "correction_bias=False. Set correction_bias=True, or bias_update_rate=0."
            )
        for name in ("shared_experts", "balance_loss", "router_z_loss", "bias_update_rate"):
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
    load: 0, through which the tokens of each expert reach the gradient of the correction bias; None without
      `MoESpec.bias_update_rate`.
    """

    balance: Any
    z: Any
    load: Any = None

    @classmethod
    def zeros(cls, spec: MoESpec) -> "RouterLosses":
        """The sums before the first layer."""
        return cls(*jnp.zeros((2,)), load=jnp.zeros(()) if spec.bias_update_rate else None)

    def mean(
        self, spec: MoESpec, num_routers: int, targets_per_token: Float[Array, ""] | None
    ) -> Float[Array, ""]:
        """Sum of the losses with their coefficients: a mean over routers, so that a coefficient means the
        same at any depth.

        Args:
          targets_per_token: targets over tokens that are not padding; the caller divides by the targets.
        """
        loss = (spec.balance_loss * self.balance + spec.router_z_loss * self.z) / num_routers
        loss = loss if targets_per_token is None else loss * targets_per_token
        return loss if self.load is None else loss + self.load


def route(
    logits_BLX: Float[Array, "B L X"],
    valid_BL: Bool[Array, "B L"],
    spec: MoESpec,
    *,
    bias_X: Float[Array, " X"] | None = None,
    axes: tuple[str, ...] = (),
) -> tuple[Routing, RouterLosses]:
    """Experts, weights and losses from the router's logits.

    Args:
      logits_BLX: float32, at this device's positions.
      valid_BL: False for padding, which goes to no expert and counts in no loss.
      bias_X: of `MoESpec.correction_bias`; it gets no gradient.
      axes: mesh axes over which sequences are split.
    """
    softmax = spec.score == "softmax"
    score_BLX = jax.nn.softmax(logits_BLX, axis=-1) if softmax else jax.nn.sigmoid(logits_BLX)
    # The k largest logits, not probabilities: distinct logits may round to equal probabilities. Sums of two
    # best have another order.
    sums = spec.top_groups < spec.num_groups and spec.group_score == "best_two"
    by_logits = spec.chosen_by == "logits" or (softmax and bias_X is None and not sums)
    choice_BLX = jax.lax.stop_gradient(logits_BLX if by_logits else score_BLX)
    if bias_X is not None:
        choice_BLX += jax.lax.stop_gradient(bias_X.astype(jnp.float32))[None, None]
    _, expert_BLS = jax.lax.top_k(_of_best_groups(choice_BLX, spec), spec.top_k)
    weight_BLS = jnp.take_along_axis(score_BLX, expert_BLS, axis=-1)
    if spec.normalize_top_k:
        weight_BLS /= jnp.sum(weight_BLS, axis=-1, keepdims=True)
    if spec.weight_scale != 1:
        weight_BLS *= spec.weight_scale
    # The loss needs probabilities; sigmoids do not add up to one.
    p_BLX = score_BLX if softmax else score_BLX / jnp.sum(score_BLX, axis=-1, keepdims=True)
    # int32, so that counts of long sequences are exact; they carry no gradient.
    chosen_BLSX = jax.nn.one_hot(expert_BLS, spec.num_experts, dtype=jnp.int32)
    chosen_BX = jnp.sum(jnp.where(valid_BL[..., None, None], chosen_BLSX, 0), axis=(1, 2))
    load = None
    if spec.bias_update_rate:
        assert bias_X is not None
        load = _count_load(bias_X, jnp.sum(chosen_BX, axis=0))
    # The fractions are of whole sequences, so every device needs the counts of the others' positions.
    if axes:
        chosen_BX = jax.lax.psum(chosen_BX, axes)
    # At least 1: a sequence of padding alone has no tokens to divide by.
    tokens_B1 = jnp.maximum(jnp.sum(chosen_BX, axis=-1, keepdims=True) // spec.top_k, 1)
    share_BX = chosen_BX * (spec.num_experts / spec.top_k) / tokens_B1
    p_BX = jnp.sum(jnp.where(valid_BL[..., None], p_BLX, 0.0), axis=1)
    z_BL = jax.nn.logsumexp(logits_BLX, axis=-1) ** 2
    losses = RouterLosses(jnp.sum(share_BX * p_BX), jnp.sum(jnp.where(valid_BL, z_BL, 0.0)), load)
    # Last, so that indices above are valid: `num_experts` is out of range.
    expert_BLS = jnp.where(valid_BL[..., None], expert_BLS, spec.num_experts)
    return Routing(expert_BLS, weight_BLS), losses


@jax.custom_vjp
def _count_load(bias_X: Float[Array, " X"], count_X: Int[Array, " X"]) -> Float[Array, ""]:
    """Returns 0; the gradient of the bias is the number of this device's tokens of each expert.

    Gradients are summed over microbatches, devices and stages, so these counts are too, on every layout. They
    are not weighted by the loss: sums of whole numbers are exact, and equal loads are equal.
    """
    del bias_X, count_X
    return jnp.zeros(())


def _count_forward(bias_X: Array, count_X: Array) -> tuple[Array, tuple[Array, Array]]:
    return _count_load(bias_X, count_X), (count_X, jnp.zeros((0,), bias_X.dtype))


def _count_backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, None]:
    count_X, like = saved
    # A place of a pipeline without work, or with an identity layer, has a cotangent of 0.
    return jnp.where(cotangent != 0, count_X, 0).astype(like.dtype), None


_count_load.defvjp(_count_forward, _count_backward)


def _of_best_groups(choice_BLX: Float[Array, "B L X"], spec: MoESpec) -> Float[Array, "B L X"]:
    """Scores of experts in a token's best groups, and minus infinity for all others."""
    if spec.top_groups == spec.num_groups:
        return choice_BLX
    *rest, num_experts = choice_BLX.shape
    group_BLGE = choice_BLX.reshape(*rest, spec.num_groups, num_experts // spec.num_groups)
    best_BLGE, _ = jax.lax.top_k(group_BLGE, 2 if spec.group_score == "best_two" else 1)
    _, chosen_BLS = jax.lax.top_k(jnp.sum(best_BLGE, axis=-1), spec.top_groups)
    is_chosen_BLG = jnp.sum(jax.nn.one_hot(chosen_BLS, spec.num_groups, dtype=jnp.int32), axis=-2) > 0
    return jnp.where(is_chosen_BLG[..., None], group_BLGE, -jnp.inf).reshape(choice_BLX.shape)
