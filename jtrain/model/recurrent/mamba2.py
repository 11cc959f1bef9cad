"""Mamba-2 (arXiv:2405.21060)."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jtrain.errors import UserError
from jtrain.model import ops
from jtrain.model.mixer import MixerSpec
from jtrain.model.norm import NormSpec
from jtrain.model.param import aligned, vector, weight
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

type MambaCache = tuple[ops.RecurrentState, dict[str, ops.LeftContext]]
"""State of every head, and the last inputs of the three convolutions."""

_PROJECTIONS = ("gate", "x", "b", "c", "step")


@dataclasses.dataclass(frozen=True)
class Mamba2Spec(MixerSpec):
    """State space model whose inputs and outputs a short convolution has mixed.

    num_heads: heads, A.
    head_dim: channels of each head, H.
    num_groups: groups Z of A / Z heads that share inputs and outputs of their states.
    state_size: size of the state of each channel, S.
    taps: tokens that the convolutions see, W.
    conv_bias: True adds a learned vector to each convolution.
    bias: True adds a learned vector to each projection.
    norm: of the result: `gated` after its gate, `before_gate`, or `none`.
    norm_groups: groups of channels, each of which is normalised by itself.
    min_step: smallest step size.
    scales: multiply gate, x, b, c and step after their projections (Falcon-H1).
    """

    name: ClassVar[str] = "mamba"
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int = 1
    taps: int = 4
    conv_bias: bool = True
    bias: bool = False
    norm: Literal["gated", "before_gate", "none"] = "gated"
    norm_groups: int = 1
    min_step: float = 0.0
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        for field in ("num_groups", "norm_groups"):
            if self.num_heads % (groups := getattr(self, field)):
                raise UserError(
                    f"Mamba2Spec.num_heads={self.num_heads} is not a multiple of {field}={groups}: groups "
                    "are of whole heads, and of as many each. Set one of them."
                )

    def module(self, sizes: ModelSizes, norm: NormSpec, *, layers: int) -> "Mamba2":
        """The layer; its own norm has a scale and no more, whatever the model's have."""
        del norm
        return Mamba2(self, sizes, layers=layers)

    def with_sizes(self, sizes: ModelSizes) -> "Mamba2Spec":
        """Itself: all of its sizes are its own."""
        del sizes
        return self

    def empty_cache(self, sizes: ModelSizes, *, batch: int, max_len: int, dtype: str) -> MambaCache:
        """A S H numbers in float32 for each sequence, and W - 1 inputs; no more for longer ones."""
        del sizes, max_len
        groups = self.num_groups * self.state_size
        channels = dict(x=self.num_heads * self.head_dim, b=groups, c=groups)
        inputs = {name: ops.empty_context(batch, self.taps, count, dtype) for name, count in channels.items()}
        return ops.empty_state(batch, self.num_heads, self.state_size, self.head_dim), inputs

    def mixing_flops(self, sizes: ModelSizes, *, seq_len: int) -> int:
        """Two products of each state with a vector, forward, and the convolutions."""
        del sizes, seq_len
        channels = self.num_heads * self.head_dim + 2 * self.num_groups * self.state_size
        return 12 * self.num_heads * self.state_size * self.head_dim + 6 * self.taps * channels


class Mamba2(RecurrentMixer):
    """The layer of a `Mamba2Spec`.

    Heads are split over `tensor`. Every device has the projections of all groups, and uses those of its
    heads.
    """

    def __init__(self, spec: Mamba2Spec, sizes: ModelSizes, *, layers: int) -> None:
        d_model, std = sizes.d_model, sizes.d_model**-0.5
        heads, groups = (spec.num_heads, spec.head_dim), (spec.num_groups, spec.state_size)
        dims = dict(
            gate=("AH", heads), x=("AH", heads), b=("ZS", groups), c=("ZS", groups), step=("A", heads[:1])
        )
        for name, (letters, shape) in dims.items():
            setattr(
                self, f"{name}_D{letters}", weight(f"D{letters}", (d_model, *shape), std=std, layers=layers)
            )
            if spec.bias:
                setattr(self, f"{name}_bias_{letters}", vector(letters, shape, ones=False, layers=layers))
        conv: Any = dict(taps=spec.taps, bias=spec.conv_bias, layers=layers)
        self.x_conv, self.b_conv, self.c_conv = (ShortConv(*dims[name], **conv) for name in "xbc")
        self.step_shift_A = weight("A", heads[:1], layers=layers, **DECAY_BIAS)
        self.decay_log_A = weight("A", heads[:1], layers=layers, **DECAY_LOG)
        self.skip_A = vector("A", heads[:1], ones=True, layers=layers)
        if spec.norm != "none":
            self.norm_scale_AH = vector("AH", heads, ones=True, layers=layers)
        out_std = sizes.branch_std(spec.num_heads * spec.head_dim)
        self.o_AHD = weight("AHD", (*heads, d_model), std=out_std, layers=layers)
        if spec.bias:
            self.o_bias_D = vector("D", (d_model,), ones=False, layers=layers)
        self.spec, self.eps = spec, sizes.norm_eps
        self.letters = {name: letters for name, (letters, _) in dims.items()}

    def mix(
        self, x_BLD: Array, segment_BL: Array, tensor: TensorAxis, context: ops.RowSplit, cache: Any
    ) -> tuple[Float[Array, "B _ D"], MambaCache]:
        projected = self._project(x_BLD, tensor)
        state, inputs = cache or (None, {})
        mixed, last_inputs = {}, {}
        for name, conv in (("x", self.x_conv), ("b", self.b_conv), ("c", self.c_conv)):
            y, last_inputs[name] = conv(
                projected[name], segment_BL, silu=True, initial=inputs.get(name), split=context
            )
            # After the convolution, so that a saved one is not computed again.
            mixed[name] = checkpoint_name(y, f"attention_{dict(x='v', b='k', c='q')[name]}")
        heads = mixed["x"].shape[2]
        step_BLA = softplus_of_sum(projected["step"], local_part(self.step_shift_A[...], heads))
        rate_A = jnp.exp(local_part(self.decay_log_A[...], heads).astype(jnp.float32))
        y_BLAH, state = ops.mamba2(
            mixed["x"],
            jnp.maximum(step_BLA, self.spec.min_step) if self.spec.min_step else step_BLA,
            -rate_A,
            mixed["b"],
            mixed["c"],
            local_part(self.skip_A[...], heads),
            segment_BL,
            initial=state,
            split=context,
        )
        y_BLAH = self._gate(checkpoint_name(y_BLAH, "attention"), projected["gate"], tensor)
        out_BLD = tensor.project_out(y_BLAH, self.o_AHD[...])
        if self.spec.bias:
            # Once, at the positions that this device keeps of the sum.
            out_BLD += aligned(self.o_bias_D[...], out_BLD)
        return out_BLD, (state, last_inputs)

    def _project(self, x_BLD: Array, tensor: TensorAxis) -> dict[str, Array]:
        kernels = [getattr(self, f"{name}_D{self.letters[name]}")[...] for name in _PROJECTIONS]
        projected: dict[str, Array] = dict(zip(_PROJECTIONS, tensor.project_in(x_BLD, *kernels), strict=True))
        for name, scale in zip(_PROJECTIONS, self.spec.scales, strict=True):
            x = projected[name]
            if self.spec.bias:
                bias = getattr(self, f"{name}_bias_{self.letters[name]}")[...]
                x += aligned(local_part(bias, x.shape[2]), x)
            projected[name] = x if scale == 1 else x * scale
        for name in "bc":
            projected[name] = _own_groups(projected[name], tensor.size)
        return projected

    def _gate(self, y_BLAH: Array, gate_BLAH: Array, tensor: TensorAxis) -> Float[Array, "B L A H"]:
        """The result with its gate and norm, in the gate's dtype."""
        if self.spec.norm == "none":
            return gate_output(y_BLAH, gate_BLAH, "silu")
        y32 = y_BLAH.astype(jnp.float32)
        if self.spec.norm == "before_gate":
            return gate_output(self._normed(y32, tensor), gate_BLAH, "silu")
        return self._normed(gate_output(y32, gate_BLAH.astype(jnp.float32), "silu"), tensor).astype(
            gate_BLAH.dtype
        )

    def _normed(self, y32_BLAH: Float[Array, "B L A H"], tensor: TensorAxis) -> Float[Array, "B L A H"]:
        """Root mean square of each group's channels, also where devices along `tensor` share one."""
        B, L, heads, size = y32_BLAH.shape
        groups, of_group = self.spec.norm_groups, self.spec.num_heads // self.spec.norm_groups * size
        own_groups = max(1, groups // tensor.size)
        y_BLZC = y32_BLAH.reshape(B, L, own_groups, -1)
        square_BLZ1 = jnp.sum(y_BLZC * y_BLZC, axis=-1, keepdims=True)
        if tensor.size > groups:
            # Each device adds to the sum of its group.
            first_group = jax.lax.axis_index("tensor") * groups // tensor.size
            of_all_BLZ1 = square_BLZ1 * jax.nn.one_hot(first_group, groups)[None, None, :, None]
            of_all_BLZ1 = jax.lax.psum(of_all_BLZ1, "tensor")
            square_BLZ1 = jax.lax.dynamic_slice_in_dim(of_all_BLZ1, first_group, 1, axis=2)
        y_BLZC *= jax.lax.rsqrt(square_BLZ1 / of_group + self.eps)
        y_BLAH = y_BLZC.reshape(y32_BLAH.shape)
        return y_BLAH * aligned(local_part(self.norm_scale_AH[...], heads), y_BLAH)


def _own_groups(x_BLZS: Float[Array, "B L Z S"], tensor: int) -> Float[Array, "B L _ S"]:
    """Groups of this device's heads."""
    groups = x_BLZS.shape[2]
    if groups == 1 or tensor == 1:
        return x_BLZS
    if groups % tensor and tensor % groups:
        raise UserError(
            f"mesh.tensor={tensor} splits the heads of a Mamba-2 mixer within one of its num_groups={groups} "
            "groups. Set mesh.tensor to a divisor of the groups, or to a multiple."
        )
    start = jax.lax.axis_index("tensor") * groups // tensor
    return jax.lax.dynamic_slice_in_dim(x_BLZS, start, max(1, groups // tensor), axis=2)
