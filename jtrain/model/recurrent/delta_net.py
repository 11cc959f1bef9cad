"""Gated DeltaNet (arXiv:2412.06464), and with decays of channels Kimi Delta Attention (arXiv:2510.26692)."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jtrain.errors import UserError
from jtrain.model import ops
from jtrain.model.mixer import MixerSpec
from jtrain.model.norm import Norm, NormSpec
from jtrain.model.param import aligned, weight
from jtrain.model.recurrent.channels import (
    DECAY_BIAS,
    DECAY_LOG,
    RecurrentMixer,
    ShortConv,
    gate_output,
    softplus_of_sum,
)
from jtrain.model.sizes import ModelSizes
from jtrain.model.tensor_parallel import TensorAxis, local_part

type DeltaCache = tuple[ops.RecurrentState, dict[str, ops.LeftContext]]
"""State of every head, and the last inputs of the convolutions of queries, keys and values."""


@dataclasses.dataclass(frozen=True)
class DeltaNetSpec(MixerSpec):
    """Gated delta rule over queries, keys and values that a short convolution has mixed.

    num_heads: heads of values, A.
    num_key_heads: heads of queries and keys, O; each serves A / O heads of values.
    key_dim: size of each head of queries and keys, S.
    value_dim: size of each head of values, H.
    taps: tokens that the convolutions see, W.
    decay: of the state, a number for each `head`, or for each `channel` of the keys (KDA).
    rank: width R of the two projections that make decays of channels and the gate in two steps (KDA); None
      projects in one.
    decay_floor: smallest logarithm of a decay, which is then `floor * sigmoid(rate * (x + bias))` (Ling 3);
      None for `-rate * softplus(x + bias)`, which has none.
    gate: nonlinearity of the output's gate.
    max_step: largest step size; 2 also allows negative eigenvalues (arXiv:2411.12537).
    norm_eps: added to the mean square in its own norm; None takes the model's.
    """

    name: ClassVar[str] = "delta_net"
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    decay: Literal["head", "channel"] = "head"
    rank: int | None = None
    decay_floor: float | None = None
    gate: Literal["silu", "sigmoid"] = "silu"
    max_step: float = 1.0
    norm_eps: float | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_key_heads:
            raise UserError(
                f"DeltaNetSpec.num_heads={self.num_heads} is not a multiple of num_key_heads="
                f"{self.num_key_heads}: each key head serves the same number of value heads. Set one of them."
            )
        if self.decay == "head" and self.rank is not None:
            raise UserError(
                f"DeltaNetSpec.decay=head with rank={self.rank}: decays of heads are made in one step. Set "
                "rank=None, or decay=channel."
            )
        if self.decay_floor is not None and self.decay_floor >= 0:
            raise UserError(
                f"DeltaNetSpec.decay_floor={self.decay_floor} must be below 0: it is the logarithm of a "
                "decay. Set None for no floor."
            )

    def module(self, sizes: ModelSizes, norm: NormSpec, *, layers: int) -> "DeltaNet":
        """The layer; its own norm has a scale and no more, whatever the model's have."""
        del norm
        return DeltaNet(self, sizes, layers=layers)

    def with_sizes(self, sizes: ModelSizes) -> "DeltaNetSpec":
        """This mixer with the model's epsilon if it has none."""
        return dataclasses.replace(self, norm_eps=self.norm_eps or sizes.norm_eps)

    def empty_cache(self, sizes: ModelSizes, *, batch: int, max_len: int, dtype: str) -> DeltaCache:
        """A S H numbers in float32 for each sequence, and W - 1 inputs; no more for longer ones."""
        del sizes, max_len
        key_channels, value_channels = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        channels = dict(q=key_channels, k=key_channels, v=value_channels)
        inputs = {name: ops.empty_context(batch, self.taps, count, dtype) for name, count in channels.items()}
        return ops.empty_state(batch, self.num_heads, self.key_dim, self.value_dim), inputs

    def mixing_flops(self, sizes: ModelSizes, *, seq_len: int) -> int:
        """Three products of each state with a vector, forward, and the convolutions."""
        del sizes, seq_len
        channels = 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim
        return 18 * self.num_heads * self.key_dim * self.value_dim + 6 * self.taps * channels


class DeltaNet(RecurrentMixer):
    """The layer of a `DeltaNetSpec`. Key and value heads are split over `tensor`."""

    def __init__(self, spec: DeltaNetSpec, sizes: ModelSizes, *, layers: int) -> None:
        d_model, std = sizes.d_model, sizes.d_model**-0.5
        key_heads, heads = (spec.num_key_heads, spec.key_dim), (spec.num_heads, spec.value_dim)
        self.q_DOS = weight("DOS", (d_model, *key_heads), std=std, layers=layers)
        self.k_DOS = weight("DOS", (d_model, *key_heads), std=std, layers=layers)
        self.v_DAH = weight("DAH", (d_model, *heads), std=std, layers=layers)
        self.step_DA = weight("DA", (d_model, spec.num_heads), std=std, layers=layers)
        decays = (spec.num_heads, spec.key_dim)
        if spec.rank is None:
            self.gate_DAH = weight("DAH", (d_model, *heads), std=std, layers=layers)
        if spec.decay == "head":
            self.decay_DA = weight("DA", (d_model, spec.num_heads), std=std, layers=layers)
            self.decay_bias_A = weight("A", (spec.num_heads,), layers=layers, **DECAY_BIAS)
        else:
            self.decay_bias_AS = weight("AS", decays, layers=layers, **DECAY_BIAS)
        if spec.decay == "channel" and spec.rank is None:
            self.decay_DAS = weight("DAS", (d_model, *decays), std=std, layers=layers)
        if spec.rank is not None:
            self.gate_in_DR = weight("DR", (d_model, spec.rank), std=std, layers=layers)
            self.gate_out_RAH = weight("RAH", (spec.rank, *heads), std=spec.rank**-0.5, layers=layers)
            self.decay_in_DR = weight("DR", (d_model, spec.rank), std=std, layers=layers)
            self.decay_out_RAS = weight("RAS", (spec.rank, *decays), std=spec.rank**-0.5, layers=layers)
        self.decay_log_A = weight("A", (spec.num_heads,), layers=layers, **DECAY_LOG)
        conv: Any = dict(taps=spec.taps, bias=False, layers=layers)
        self.q_conv = ShortConv("OS", key_heads, **conv)
        self.k_conv = ShortConv("OS", key_heads, **conv)
        self.v_conv = ShortConv("AH", heads, **conv)
        eps = spec.norm_eps or sizes.norm_eps
        self.norm = Norm("H", spec.value_dim, spec=NormSpec(), eps=eps, layers=layers)
        out_std = sizes.branch_std(spec.num_heads * spec.value_dim)
        self.o_AHD = weight("AHD", (*heads, d_model), std=out_std, layers=layers)
        self.spec = spec

    def mix(
        self, x_BLD: Array, segment_BL: Array, tensor: TensorAxis, context: ops.RowSplit, cache: Any
    ) -> tuple[Float[Array, "B _ D"], DeltaCache]:
        q, k, v, gate, step_BLA, log_decay = self._project(x_BLD, tensor)
        state, inputs = cache or (None, {})
        mixed, last_inputs = {}, {}
        for name, x, conv in (("q", q, self.q_conv), ("k", k, self.k_conv), ("v", v, self.v_conv)):
            y, last_inputs[name] = conv(x, segment_BL, silu=True, initial=inputs.get(name), split=context)
            # After the convolution, so that a saved one is not computed again.
            mixed[name] = checkpoint_name(y, f"attention_{name}")
        y_BLAH, state = ops.delta_rule(
            mixed["q"],
            mixed["k"],
            mixed["v"],
            log_decay,
            self.spec.max_step * jax.nn.sigmoid(step_BLA.astype(jnp.float32)),
            segment_BL,
            initial=state,
            split=context,
            normalize=True,
        )
        y_BLAH = self.norm(checkpoint_name(y_BLAH, "attention"))
        y_BLAH = gate_output(y_BLAH, gate, self.spec.gate)
        return tensor.project_out(y_BLAH, self.o_AHD[...]), (state, last_inputs)

    def _project(self, x_BLD: Array, tensor: TensorAxis) -> tuple[Array, ...]:
        """Queries, keys, values, gate, step sizes before their sigmoid, and log-decays."""
        kernels = [self.q_DOS[...], self.k_DOS[...], self.v_DAH[...], self.step_DA[...]]
        by_head = self.spec.decay == "head"
        bias = (self.decay_bias_A if by_head else self.decay_bias_AS)[...]
        if self.spec.rank is None:
            decay_kernel = (self.decay_DA if by_head else self.decay_DAS)[...]
            q, k, v, step_BLA, gate, decay = tensor.project_in(
                x_BLD, *kernels, self.gate_DAH[...], decay_kernel
            )
        else:
            q, k, v, step_BLA, gate_BLR, decay_BLR = tensor.project_in(
                x_BLD, *kernels, self.gate_in_DR[...], self.decay_in_DR[...]
            )
            # Every device has all R of all positions, and its heads of the second projection.
            (gate,) = TensorAxis().project_in(gate_BLR, self.gate_out_RAH[...])
            (decay,) = TensorAxis().project_in(decay_BLR, self.decay_out_RAS[...])
        heads = step_BLA.shape[2]
        rate_A = jnp.exp(local_part(self.decay_log_A[...], heads).astype(jnp.float32))
        rate, bias = rate_A.reshape(1, 1, heads, *[1] * (decay.ndim - 3)), local_part(bias, heads)
        if (floor := self.spec.decay_floor) is not None:
            decay = decay.astype(jnp.float32)
            log_decay = floor * jax.nn.sigmoid(rate * (decay + aligned(bias, decay)))
        else:
            log_decay = -rate * softplus_of_sum(decay, bias)
        return q, k, v, gate, step_BLA, log_decay
