"""Optimizer configurations `AdamW` and `Muon`, with all checks that need no parameters."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array

from jtrain.errors import UserError
from jtrain.optim.decay_schedules import Cosine, StepsOrFraction, WarmupStableDecay
from jtrain.optim.rounding import moving_mean
from jtrain.optim.update import Update
from jtrain.optim.validators import check_choice, check_number, check_steps

_STALL = {"float32": 0.0, "bfloat16": 2.0**-8, "bfloat16_sr": 0.0, "int8": 0.0}
"""Relative change, by `moment_dtype`, below which a stored moment may always round back to its old value."""

_MAX_STALL = 0.1
"""Largest allowed relative error of a moment that stalls because its updates round away."""


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, after clipping the gradients by their global norm.

        m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2,   both divided by 1 - b^(k + 1)
        p = p - lr(k) (m / (sqrt(v) + eps) + weight_decay p)

    The state takes 8 bytes per parameter, 4 with bfloat16, 2.06 with int8, and 4 more for master weights;
    arithmetic is always f32. `jtrain.optim.state_bytes` is exact.

    peak_lr: the highest learning rate; `schedule` sets the rate after the warm-up.
    schedule: course of the rate after the warm-up.
    warmup_steps: update k < warmup_steps uses peak_lr * (k + 1) / warmup_steps. An int is steps, a float
      below 1.0 a fraction of the run (`StepsOrFraction`).
    b1: decay rate of the first moment, the mean of the gradient.
    b2: decay rate of the second moment, the mean of its square.
    eps: added to the square root of the second moment.
    weight_decay: multiplied by the learning rate, as in PyTorch. Applies to matrices only
      (`ParamInfo.is_matrix`): norm scales never decay; embedding and unembedding do, as in Megatron-LM and
      nanoGPT (not in OLMo 2).
    clip_norm: largest global norm of the gradients; None does not clip.
    moment_dtype: storage of both moments. bfloat16 keeps 8 bits, rounded to nearest, so a moment stalls up to
      2^-8 / (1 - b) short of its target: 8 % at b = 0.95, and at b = 0.999 it never falls again. Errors above
      10 % are refused: set b2 to 0.96 at most, or choose another dtype. bfloat16_sr rounds stochastically, so
      that a moment is right on average at any b. int8 keeps 8 bits in blocks that share a scale and rounds
      stochastically as well (`jtrain.optim.quantized_moments`); embedding, unembedding and norm scales stay
      float32.
    master_dtype: float32 keeps an unrounded copy of the parameters beside the bfloat16 ones
      (`precision.param_dtype`).
    param_rounding: rounding of bfloat16 parameters without master weights. `nearest` always loses a change
      below 2^-9 of the weight; `stochastic` keeps the change on average.

    Raises:
      UserError: a value out of range; names the field and the allowed range.

    Source: arXiv:1711.05101; arXiv:2010.06192 for stochastic rounding; arXiv:2110.02861 for int8.
    """

    peak_lr: float
    schedule: Cosine | WarmupStableDecay = Cosine()  # noqa: RUF009 - frozen
    warmup_steps: StepsOrFraction = 0.01
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    moment_dtype: Literal["float32", "bfloat16", "bfloat16_sr", "int8"] = "float32"
    master_dtype: Literal["none", "float32"] = "none"
    param_rounding: Literal["nearest", "stochastic"] = "nearest"

    moments: ClassVar[tuple[Literal["mu", "nu"], ...]] = ("mu", "nu")
    """Moments that the state keeps of each parameter: `mu`, and `nu`, which is never negative. A subclass of
    a user's own may do without `nu`."""

    def direction(
        self, gradient: Array, moments: Mapping[str, Array], update: Update
    ) -> tuple[Array, dict[str, Array]]:
        """Direction of a step, which the learning rate multiplies, and the new moments; f32.

        A subclass of a user's own overrides it. The arrays are a parameter, a layer of it or a slice, so that
        only elementwise operations give every layout the same numbers.

        Args:
          gradient: clipped gradient, f32.
          moments: the old ones, f32, by the names in `AdamW.moments`.
          update: scalars of the step.
        """
        mu, nu = moments["mu"], moments["nu"]
        new_mu, new_nu = moving_mean(gradient, mu, self.b1), moving_mean(gradient**2, nu, self.b2)
        # Selected as they will be written: otherwise XLA:CPU computes them twice, from copies of the old
        # moments.
        written_mu, written_nu = (
            jnp.where(update.applied, new, old) for new, old in ((new_mu, mu), (new_nu, nu))
        )
        direction = written_mu * update.mu_scale / (jnp.sqrt(written_nu * update.nu_scale) + self.eps)
        return direction, {"mu": new_mu, "nu": new_nu}

    def __post_init__(self) -> None:
        check_number("peak_lr", self.peak_lr, "above 0", lambda x: x > 0)
        if not isinstance(self.schedule, Cosine | WarmupStableDecay):
            raise UserError(f"optimizer.schedule={self.schedule!r} must be Cosine or WarmupStableDecay.")
        check_steps("warmup_steps", self.warmup_steps)
        check_number("eps", self.eps, "above 0", lambda x: x > 0)
        check_number("weight_decay", self.weight_decay, "of at least 0", lambda x: x >= 0)
        if self.clip_norm is not None:
            check_number(
                "clip_norm", self.clip_norm, "above 0, or None, which does not clip", lambda x: x > 0
            )
        check_choice("moment_dtype", self.moment_dtype, tuple(_STALL))
        check_choice("master_dtype", self.master_dtype, ("none", "float32"))
        check_choice("param_rounding", self.param_rounding, ("nearest", "stochastic"))
        # After `check_choice`: `_STALL` has no entry for a dtype that does not exist.
        _check_decay_rate("b1", self.b1, self.moment_dtype)
        _check_decay_rate("b2", self.b2, self.moment_dtype)
        # Both keep small changes, so asking for two is a mistake, not a stronger setting.
        if self.master_dtype != "none" and self.param_rounding != "nearest":
            raise UserError(
                f"optimizer.param_rounding={self.param_rounding} with "
                f"optimizer.master_dtype={self.master_dtype}: the masters lose nothing, so parameters are "
                "masters rounded to nearest. Set optimizer.param_rounding=nearest, or "
                "optimizer.master_dtype=none."
            )

    def check_param_dtype(self, param_dtype: str) -> None:
        """Refuses options that have no effect on parameters of dtype `precision.param_dtype`.

        Raises:
          UserError: master weights of float32 parameters, or stochastic rounding to float32.
        """
        # Both options below exist to make up for bfloat16 parameters.
        if param_dtype == "bfloat16":
            return
        if self.master_dtype != "none":
            raise UserError(
                f"optimizer.master_dtype={self.master_dtype} with precision.param_dtype={param_dtype}: such "
                "parameters are their own masters. Set precision.param_dtype=bfloat16, or "
                "optimizer.master_dtype=none."
            )
        if self.param_rounding != "nearest":
            raise UserError(
                f"optimizer.param_rounding={self.param_rounding} with precision.param_dtype={param_dtype}: "
                "nothing is rounded. Set precision.param_dtype=bfloat16, or optimizer.param_rounding=nearest."
            )


@dataclasses.dataclass(frozen=True)
class Muon(AdamW):
    """Muon for the layers' matrices, AdamW for all else; adds three fields to `AdamW`.

        m = momentum m + (1 - momentum) g,   o = orthogonalize(Nesterov(m, g))
        p = p - lr(k) (update_rms sqrt(max(fan_in, fan_out)) o + weight_decay p)

    `orthogonalize` is `newton_schulz_steps` steps towards U V^T of each layer's matrix (inputs, outputs): q
    is D x NH, o is NH x D. Five cost 20 m^2 n + 10 m^3 FLOPs for m x n, m <= n, and hold one layer's
    temporaries at a time. The factor gives every matrix an update of root mean square `update_rms`, close to
    AdamW's, so that one learning rate and one weight decay suit both.

    A layer's matrix has only one moment, which takes half of AdamW's bytes.

    momentum: decay rate of that moment.
    update_rms: root mean square of an update before the learning rate.
    newton_schulz_steps: iterations of the orthogonalization.

    Source: kellerjordan.github.io/posts/muon; arXiv:2502.16982 for `update_rms` and the weight decay.
    """

    momentum: float = 0.95
    update_rms: float = 0.2
    newton_schulz_steps: int = 5

    def __post_init__(self) -> None:
        # AdamW's fields still rule embedding, unembedding and norm scales.
        super().__post_init__()
        _check_decay_rate("momentum", self.momentum, self.moment_dtype)
        check_number("update_rms", self.update_rms, "above 0", lambda x: x > 0)
        is_int = isinstance(self.newton_schulz_steps, int)
        check_number(
            "newton_schulz_steps", self.newton_schulz_steps, "(int) above 0", lambda x: is_int and x > 0
        )


def _check_decay_rate(field: str, rate: float, moment_dtype: str) -> None:
    """Refuses a decay rate whose updates round to nothing in the moment's dtype."""
    check_number(field, rate, "of at least 0 and below 1", lambda x: 0 <= x < 1)
    # An update moves a moment by (1 - b) of its distance to the target; below half an ulp it rounds back.
    stall = _STALL[moment_dtype] / (1.0 - rate)
    if stall > _MAX_STALL:
        raise UserError(
            f"optimizer.{field}={rate} with optimizer.moment_dtype={moment_dtype}: small updates round to "
            f"nothing, and the moment comes to rest up to {stall:.0%} off (at most {_MAX_STALL:.0%} is "
            f"allowed). Set optimizer.moment_dtype=float32 or bfloat16_sr, or optimizer.{field} to 0.96 at "
            "most."
        )
