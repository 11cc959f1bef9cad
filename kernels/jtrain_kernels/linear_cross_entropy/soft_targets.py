"""Targets of a teacher: what it says of its most probable tokens, and of all others together.

The divergence of a student is that of J + 1 outcomes, the J tokens and the rest: it is 0, and has no
gradient, where both say the same of each, however few tokens were kept, and with all of them it is the
divergence of the whole distributions. Renormalised over the kept tokens instead, a student that equals its
teacher would still be moved towards them.
"""

import dataclasses
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels.linear_cross_entropy.vocab import Vocab


@no_type_check  # a pytree: its leaves are also shardings, specs and shapes
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SoftTargets:
    """Log-probabilities that a teacher gives to the token after each one.

    id: [..., J] int32, its most probable tokens, all different.
    logprob: [..., J + 1] float32, of these tokens, and of all others together, -inf where there are none.
    share: part of the loss that is the divergence from them; the rest is the cross entropy of the target.
    """

    id: Any
    logprob: Any
    share: float = dataclasses.field(default=1.0, metadata={"static": True})


def block_columns(vocab: Vocab, id_CJ: Int[Array, "*C J"], width: int) -> Int[Array, "*C J"]:
    """Column of each kept token in this device's block of `width` columns; `width`, past its end, on others."""
    column_CJ = vocab.column(id_CJ, width)
    return jnp.where((column_CJ >= 0) & (column_CJ < width), column_CJ, width)


def part_columns(id_CJ: Int[Array, "*C J"], column_W: Int[Array, " W"]) -> Int[Array, "*C J"]:
    """`block_columns` of a part whose columns have the ids `column_W`, consecutive up to its padding."""
    width = column_W.shape[0]
    index_CJ = id_CJ - column_W[0]
    # Padding at the end of a part stands where ids of the next one would be.
    is_here = column_W[jnp.clip(index_CJ, 0, width - 1)] == id_CJ
    return jnp.where(is_here, index_CJ, width)


def pick(logits_CW: Float[Array, "C W"], column_CJ: Int[Array, "C J"]) -> Float[Array, "C J"]:
    """Logits of the kept tokens; 0 for those of another block."""
    width = logits_CW.shape[1]
    picked_CJ = jnp.take_along_axis(logits_CW, jnp.minimum(column_CJ, width - 1), axis=1)
    return jnp.where(column_CJ < width, picked_CJ, 0.0)


def of_others(logits_CW: Float[Array, "C W"], column_CJ: Int[Array, "C J"]) -> Float[Array, "C W"]:
    """The logits, with -inf at the kept tokens."""
    row_C1 = jnp.arange(logits_CW.shape[0])[:, None]
    return logits_CW.at[row_C1, column_CJ].set(-jnp.inf, mode="drop")


def top_and_total(logits_CW: Float[Array, "C W"]) -> tuple[Float[Array, " C"], Float[Array, " C"]]:
    """Largest logit, and the sum of exp(logit - largest); 0 where all are -inf."""
    # The lowest finite number, because -inf - -inf would be nan where every column is a kept token.
    top_C = jnp.maximum(jnp.max(logits_CW, axis=-1), jnp.finfo(jnp.float32).min)
    return top_C, jnp.sum(jnp.exp(logits_CW - top_C[:, None]), axis=-1)


def outcomes(
    vocab: Vocab, logits_CW: Float[Array, "C W"], column_CJ: Int[Array, "C J"]
) -> tuple[Float[Array, "C J"], Float[Array, " C"]]:
    """Logits of the kept tokens, and the log-partition of all others, over the blocks of all devices."""
    picked_CJ = pick(logits_CW, column_CJ)
    top_C, total_C = top_and_total(of_others(logits_CW, column_CJ))
    rest_C, _ = vocab.merge(top_C, total_C, jnp.zeros_like(top_C))
    # Each token has one device that does not add 0.
    return vocab.sum_blocks(picked_CJ), rest_C


def mixed_nats(
    soft: SoftTargets,
    nats: Float[Array, "*C"],
    lse: Float[Array, "*C"],
    picked: Float[Array, "*C J"],
    rest: Float[Array, "*C"],
) -> Float[Array, "*C"]:
    """Share of the divergence, the sum over outcomes of p (log p - log q), and the rest of `nats`.

    Args:
      picked, rest: of `outcomes`.
    """
    own = jnp.concatenate([picked, rest[..., None]], axis=-1) - lse[..., None]
    # An outcome without probability adds nothing; its logarithms may be -inf.
    terms = jnp.where(soft.logprob > -jnp.inf, jnp.exp(soft.logprob) * (soft.logprob - own), 0.0)
    return soft.share * jnp.sum(terms, axis=-1) + (1.0 - soft.share) * nats


def mixed_goal(
    soft: SoftTargets,
    is_target_CW: Array,
    logits_CW: Float[Array, "C W"],
    column_CJ: Int[Array, "C J"],
    rest_C: Float[Array, " C"],
) -> Float[Array, "C W"]:
    """Probabilities that the gradient of `mixed_nats` by the logits is the student's softmax less of.

    A kept token has the teacher's, and the others share those of the rest in the student's own proportions.
    """
    # Without others rest_C is -inf.
    rest_C = jnp.where(rest_C > -jnp.inf, rest_C, 0.0)
    p_CI = jnp.exp(soft.logprob)
    others_CW = jnp.exp(of_others(logits_CW, column_CJ) - rest_C[:, None]) * p_CI[:, -1:]
    row_C1 = jnp.arange(logits_CW.shape[0])[:, None]
    teacher_CW = others_CW.at[row_C1, column_CJ].set(p_CI[:, :-1], mode="drop")
    return soft.share * teacher_CW + (1.0 - soft.share) * is_target_CW
