"""How a step's sums over tokens become the loss: by which number they are divided, and what each token
weighs.

Example: a batch of two answers, of 3 and of 1 token, with losses 1, 1, 1 and 5 nats. `tokens` has 8 / 4 = 2
nats; `per_sample` has (1 + 5) / 2 = 3. Both are means over the global batch: however it is split over
devices, microbatches, context or rows, the loss and its gradient are the same.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain.errors import UserError
from jtrain.layout.dims import IGNORE, Batch
from jtrain.layout.layout import Layout
from jtrain.layout.mesh import BATCH_AXES
from jtrain.model.ops import SoftTargets
from jtrain.step.zero import psum_batch


@dataclasses.dataclass(frozen=True)
class ObjectiveSpec:
    """Loss that a step minimises.

    mean: `tokens`: the mean over all targets of the global batch, so that a long answer counts as much as its
      tokens; `per_sample`: the mean over samples of each one's mean, so that all answers count alike. A
      sample is a document's piece in a row; a chat that `on_too_long` splits is several. Where the messages
      of a source have weights (`Batch.weight_BL`), both are weighted means: the sum of weight times nats over
      the sum of weights, of the batch or of each sample.
    """

    mean: Literal["tokens", "per_sample"] = "tokens"


TOKENS = ObjectiveSpec()


@dataclasses.dataclass(frozen=True)
class DPO:
    """Direct preference optimisation (arXiv:2305.18290): the mean over pairs of a loss that falls as the
    better text gains on the worse one, against a reference.

    Let s be the log-probability of a text's answer less that of the reference, and d the difference of s of
    the two texts.

    beta: strength of the preference against the reference.
    form: `sigmoid`: log(1 + exp(margin - beta d)), ln 2 for the reference itself; `sigmoid_norm`: the same
      with s per token, so that long answers do not count more; `ipo`: (d - 1 / (2 beta))^2 with s per token
      (arXiv:2310.12036); `simpo`: `sigmoid_norm` without a reference (arXiv:2405.14734).
    reference: `adapter_off`: the model without its adapter, in a forward pass of its own; `stored`:
      log-probabilities that `jtrain data reference` wrote beforehand; `none`: none.
    stored: their file.
    margin: how much more of `beta d` is asked for before the loss falls; the gamma of simpo.
    """

    beta: float = 0.1
    form: Literal["sigmoid", "sigmoid_norm", "ipo", "simpo"] = "sigmoid"
    reference: Literal["adapter_off", "stored", "none"] = "adapter_off"
    margin: float = 0.0
    stored: str | None = None

    def __post_init__(self) -> None:
        choices = {
            "form": ("sigmoid", "sigmoid_norm", "ipo", "simpo"),
            "reference": ("adapter_off", "stored", "none"),
        }
        for field, names in choices.items():
            if (value := getattr(self, field)) not in names:
                raise UserError(f"objective.{field}={value!r} must be one of {', '.join(names)}.")
        if not (math.isfinite(self.beta) and self.beta > 0):
            raise UserError(f"objective.beta={self.beta} must be a finite number above 0.")
        if not (math.isfinite(self.margin) and self.margin >= 0):
            raise UserError(f"objective.margin={self.margin} must be a finite number, zero or more.")
        if self.form == "simpo" and self.reference != "none":
            raise UserError(
                f"objective.form=simpo has no reference, but objective.reference={self.reference}. Set "
                "objective.reference=none, or objective.form=sigmoid_norm."
            )
        if (self.reference == "stored") != (self.stored is not None):
            raise UserError(
                f"objective.reference={self.reference} with objective.stored={self.stored!r}, which is the "
                "file of a stored reference. Set objective.stored to what `jtrain data reference` wrote and "
                "objective.reference=stored, or objective.stored=None and another reference."
            )
        if self.form == "ipo" and self.margin:
            raise UserError(
                f"objective.margin={self.margin} with objective.form=ipo, whose margin is 1 / (2 beta). Set "
                "objective.margin=0."
            )


@dataclasses.dataclass(frozen=True)
class Distillation:
    """Divergence of the model from a teacher, whose log-probabilities were stored beforehand.

    For each target it is that of `top_k` + 1 outcomes: the tokens that the teacher finds most probable, and
    all others together (`SoftTargets`). A model that equals its teacher has a loss of 0 and no gradient,
    whatever `top_k` is. Evaluation is of the cross entropy alone.

    stored: folder that `jtrain data reference` wrote; None only for that command.
    top_k: tokens of the teacher; a folder with more serves runs with fewer.
    share: part of the loss that is the divergence; the rest is the cross entropy of the data, as of
      `ObjectiveSpec`.
    mean: as of `ObjectiveSpec`.
    """

    stored: str | None = None
    top_k: int = 32
    share: float = 1.0
    mean: Literal["tokens", "per_sample"] = "tokens"

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise UserError(f"objective.top_k={self.top_k} must be at least 1.")
        if not 0 < self.share <= 1:
            raise UserError(
                f"objective.share={self.share} must be above 0 and at most 1; 1 learns from the teacher "
                "alone. Set objective.share=1.0."
            )


type Objective = ObjectiveSpec | DPO | Distillation
"""Loss of a run."""


class ForwardPasses(NamedTuple):
    """Passes of each microbatch beside the one that is differentiated: through all layers, and through the
    unembedding.
    """

    layers: int
    unembeddings: int


def forward_passes(objective: Objective, *, is_pipelined: bool) -> ForwardPasses:
    """Returns the forward passes that an objective adds to a step."""
    if not isinstance(objective, DPO):
        return ForwardPasses(0, 0)
    reference = objective.reference == "adapter_off"
    # Log-probabilities come first, from the same hidden states, and in a pipeline from a pass of their own.
    return ForwardPasses(reference + is_pipelined, reference + 1)


@dataclasses.dataclass(frozen=True)
class LossScale:
    """Numbers of the global batch, the same on every device.

    num_tokens: valid targets.
    unit: 1 / targets, or their weights if they have such, 1 / samples, or 1 / pairs.
    targets_per_token: targets, samples or pairs over tokens that are not padding; None for a model without a
      router.
    """

    num_tokens: Int[Array, ""]
    unit: Float[Array, ""]
    targets_per_token: Float[Array, ""] | None


def scale_of(
    layout: Layout, batch: Batch, spec: Objective = TOKENS, *, has_router: bool
) -> tuple[LossScale, Batch]:
    """Returns the scale of one device's sums, and its batch with the weights of the targets."""
    num_tokens = psum_batch(layout, jnp.sum(batch.target_BL != IGNORE))
    denominator = num_tokens
    summed_BL = None if isinstance(spec, DPO) or spec.mean != "tokens" else batch.weight_BL
    if isinstance(spec, DPO):
        # Whole rows have whole pairs, so each counts where both of its texts have targets.
        count_BP2 = count_targets(layout, batch)
        denominator = _sum_rows(layout, jnp.all(count_BP2 > 0, axis=-1))
    elif summed_BL is not None:
        denominator = psum_batch(layout, jnp.sum(summed_BL))
    elif spec.mean == "per_sample":
        weight_BL, denominator = _weigh_samples(layout, batch)
        batch = dataclasses.replace(batch, weight_BL=weight_BL)
    # Accumulation is exact because each microbatch is divided by the count of the whole batch, not its own.
    if summed_BL is not None:
        # A sum of weights may be less than 1.
        unit = jnp.where(denominator > 0.0, 1.0 / denominator, 1.0)
    else:
        unit = 1.0 / jnp.maximum(denominator, 1).astype(jnp.float32)
    share = None
    if has_router:
        # A router sees prompts as well: divided by the targets alone, its losses would grow with the prompts.
        num_read = psum_batch(layout, jnp.sum(batch.segment_BL != 0))
        share = 1.0 / (unit * jnp.maximum(num_read, 1).astype(jnp.float32))
    return LossScale(num_tokens, unit, share), batch


def _weigh_samples(layout: Layout, batch: Batch) -> tuple[Float[Array, "B L"], Int[Array, ""]]:
    """Returns 1 / targets of the sample of each token, or its weight as a share of the sample's, and the
    number of samples with a target.
    """
    context = layout.mesh.context
    rows, length = batch.target_BL.shape
    valid_BL = batch.target_BL != IGNORE
    # A row has at most as many segments as tokens; 0 is padding.
    row_B1 = jnp.arange(rows)[:, None]
    has_weights = batch.weight_BL is not None
    count_BS = jnp.zeros((rows, length * context + 1), jnp.float32 if has_weights else jnp.int32)
    amount_BL = batch.weight_BL if has_weights else valid_BL.astype(jnp.int32)
    count_BS = count_BS.at[row_B1, batch.segment_BL].add(amount_BL)
    if context > 1:
        # A sample may lie on several devices.
        count_BS = jax.lax.psum(count_BS, "context")
    count_BL = count_BS[row_B1, batch.segment_BL]
    # Only targets have a weight: where there is none, any divisor will do.
    count_BL = jnp.where(valid_BL, count_BL, 1.0) if has_weights else jnp.maximum(count_BL, 1)
    num_samples = _sum_rows(layout, count_BS > 0)
    if has_weights:
        return jnp.where(valid_BL, amount_BL / count_BL, 0.0), num_samples
    return jnp.where(valid_BL, 1.0 / count_BL.astype(jnp.float32), 0.0), num_samples


def count_targets(layout: Layout, batch: Batch) -> Int[Array, "B pairs 2"]:
    """Returns the targets of both texts of each pair; zeros behind the last pair of a row."""
    return sum_texts(layout, batch, (batch.target_BL != IGNORE).astype(jnp.int32), split=1)


def sum_texts(layout: Layout, batch: Batch, value_BL: Array, *, split: int) -> Array:
    """Returns sums over the texts of each pair, [B, pairs, 2], the same on all devices of a row.

    Args:
      value_BL: at this device's positions, which are split over `tensor` if `split` is more than 1.
    """
    rows, length = batch.segment_BL.shape
    # A pair has two tokens or more; segment 0 is padding.
    num_pairs = length * layout.mesh.context // 2
    segment_BL = own_positions(layout, batch.segment_BL) if split > 1 else batch.segment_BL
    sum_BS = jnp.zeros((rows, 2 * num_pairs + 1), value_BL.dtype)
    sum_BS = sum_BS.at[jnp.arange(rows)[:, None], segment_BL].add(value_BL)
    axes = ("tensor",) * (split > 1) + ("context",) * (layout.mesh.context > 1)
    sum_BS = jax.lax.psum(sum_BS, axes) if axes else sum_BS
    return sum_BS[:, 1:].reshape(rows, num_pairs, 2)


def own_positions(layout: Layout, x_BL: Array) -> Array:
    """Returns this device's positions along `tensor` of an array of all positions."""
    if layout.mesh.tensor == 1:
        return x_BL
    size = x_BL.shape[1] // layout.mesh.tensor
    return jax.lax.dynamic_slice_in_dim(x_BL, jax.lax.axis_index("tensor") * size, size, axis=1)


def _sum_rows(layout: Layout, x: Array) -> Array:
    """Sums over all elements of the rows of every device; devices of one row have the same."""
    return jax.lax.psum(jnp.sum(x), tuple(axis for axis in BATCH_AXES if layout.mesh.shape[axis] > 1))


def abstract_batch(ids: jax.ShapeDtypeStruct, objective: Objective = TOKENS) -> Batch:
    """Returns the batch of a step as shapes, those of `ids`."""

    def array(dtype: Any, *rest: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*ids.shape, *rest), dtype, sharding=ids.sharding)

    match objective:
        case DPO(reference="stored"):
            return Batch(ids, ids, ids, ids, reference_BL=array(jnp.float32))
        case Distillation(top_k=k, share=share):
            soft = SoftTargets(array(jnp.int32, k), array(jnp.float32, k + 1), share)
            return Batch(ids, ids, ids, ids, soft=soft)
    return Batch(ids, ids, ids, ids)
