"""The dense feed-forward layer."""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jtrain.errors import UserError
from jtrain.model import ops
from jtrain.model.param import aligned, scalar, vector, weight
from jtrain.model.sizes import ModelSizes
from jtrain.model.tensor_parallel import TensorAxis, local_part

type Pointwise = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
"""Nonlinearity without parameters: `gelu` is exact, `gelu_tanh` its approximation, `relu2` relu squared."""


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU:
    """Gate `g * sigmoid(alpha * g) * (u + 1)` of clamped g = min(gate, limit) and u = clip(up, -limit,
    limit), as in gpt-oss (arXiv:2508.10925).

    alpha: steepness of the sigmoid.
    limit: largest size of gate and up that counts.
    """

    alpha: float = 1.702
    limit: float = 7.0

    def __call__(self, gate32: Float[Array, "*dims"], up32: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
        gate32, up32 = jnp.minimum(gate32, self.limit), jnp.clip(up32, -self.limit, self.limit)
        return gate32 * jax.nn.sigmoid(self.alpha * gate32) * (up32 + 1.0)


type Activation = Pointwise | ClampedSwiGLU | Literal["xielu"]
"""Nonlinearity of a feed-forward layer; `xielu` has learned numbers of its own (arXiv:2411.13010)."""


@dataclasses.dataclass(frozen=True)
class MLPSpec:
    """Feed-forward layer `down(act(gate(x)) * up(x))` (arXiv:2002.05202), or without a gate
    `down(act(up(x)))`.

    d_ff: hidden width F; None takes `model.d_ff`.
    activation: of the gate, or of the only projection without a gate.
    gated: False has no gate.
    bias: True adds a learned vector to each projection.
    gate_scale: multiplies the gate before its activation (Falcon-H1).
    out_scale: multiplies the output (Falcon-H1).
    inner_norm: True divides the hidden layer by its root mean square, and multiplies with a learned scale
      (BitNet).
    """

    d_ff: int | None = None
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    gate_scale: float = 1.0
    out_scale: float = 1.0
    inner_norm: bool = False

    def __post_init__(self) -> None:
        if self.gated and self.activation == "xielu":
            raise UserError(
                "feed_forward.activation=xielu is for layers without a gate. Set feed_forward.gated=False, "
                "or another activation."
            )
        if isinstance(self.activation, ClampedSwiGLU) and not self.gated:
            raise UserError(
                "feed_forward.activation=ClampedSwiGLU(...) clamps a gate, but feed_forward.gated=False has "
                "none. Set gated=True, or another activation."
            )

    def module(self, sizes: ModelSizes, *, layers: int) -> "MLP":
        """The layer; a subclass may have one of its own."""
        return MLP(self, sizes, layers=layers)


class MLP(nnx.Module):
    """The layer of an `MLPSpec`. F is split over `tensor`."""

    def __init__(self, spec: MLPSpec, sizes: ModelSizes, *, layers: int) -> None:
        d_model, d_ff = sizes.d_model, spec.d_ff or sizes.d_ff
        if spec.gated:
            self.gate_DF = weight("DF", (d_model, d_ff), std=d_model**-0.5, layers=layers)
        self.up_DF = weight("DF", (d_model, d_ff), std=d_model**-0.5, layers=layers)
        self.down_FD = weight("FD", (d_ff, d_model), std=sizes.branch_std(d_ff), layers=layers)
        if spec.bias:
            if spec.gated:
                self.gate_bias_F = vector("F", (d_ff,), ones=False, layers=layers)
            self.up_bias_F = vector("F", (d_ff,), ones=False, layers=layers)
            self.down_bias_D = vector("D", (d_model,), ones=False, layers=layers)
        if spec.inner_norm:
            self.inner_scale_F = vector("F", (d_ff,), ones=True, layers=layers)
        if spec.activation == "xielu":
            # Softplus of the first two is 0.8, and 0.8 - 0.5.
            self.xielu_positive = scalar(math.log(math.expm1(0.8)), layers=layers)
            self.xielu_negative = scalar(math.log(math.expm1(0.3)), layers=layers)
            self.xielu_linear = scalar(0.5, layers=layers)
            self.xielu_edge = scalar(-1e-6, layers=layers)
        self.spec, self.eps = spec, sizes.norm_eps

    def __call__(
        self,
        x_BLD: Float[Array, "B _ D"],
        tensor: TensorAxis = TensorAxis(),  # noqa: B008, frozen
    ) -> Float[Array, "B _ D"]:
        """Output at this device's positions. Inside, the device computes its block of F at all positions."""
        if not self.spec.gated:
            (up_BLF,) = tensor.project_in(x_BLD, self.up_DF[...])
            up_BLF = checkpoint_name(self._biased(up_BLF, "up"), "mlp_up")
            wide_BLF = self._activated(up_BLF)
        else:
            gate_BLF, up_BLF = tensor.project_in(x_BLD, self.gate_DF[...], self.up_DF[...])
            gate_BLF = checkpoint_name(
                _scaled(self._biased(gate_BLF, "gate"), self.spec.gate_scale), "mlp_gate"
            )
            up_BLF = checkpoint_name(self._biased(up_BLF, "up"), "mlp_up")
            assert self.spec.activation != "xielu"
            wide_BLF = gated(gate_BLF, up_BLF, self.spec.activation)
        if self.spec.inner_norm:
            wide_BLF = self._normed(wide_BLF)
        y_BLD = tensor.project_out(wide_BLF, self.down_FD[...])
        # Once, at the positions that this device keeps of the sum.
        y_BLD = y_BLD + aligned(self.down_bias_D[...], y_BLD) if self.spec.bias else y_BLD
        return _scaled(y_BLD, self.spec.out_scale)

    def _normed(self, wide_BLF: Float[Array, "B L F"]) -> Float[Array, "B L F"]:
        """Root mean square over F of all devices along `tensor`."""
        wide32, scale_F = wide_BLF.astype(jnp.float32), self.inner_scale_F[...]
        square_BL1 = jnp.sum(wide32 * wide32, axis=-1, keepdims=True)
        if scale_F.shape[0] != wide_BLF.shape[-1]:
            square_BL1 = jax.lax.psum(square_BL1, "tensor")
        inverse_BL1 = jax.lax.rsqrt(square_BL1 / scale_F.shape[0] + self.eps)
        scale_F = local_part(scale_F, wide_BLF.shape[-1])
        return (wide32 * inverse_BL1 * aligned(scale_F, wide32)).astype(wide_BLF.dtype)

    def _activated(self, up_BLF: Float[Array, "B L F"]) -> Float[Array, "B L F"]:
        if self.spec.activation == "xielu":
            return self._xielu(up_BLF)
        assert not isinstance(self.spec.activation, ClampedSwiGLU)
        return activate(up_BLF, self.spec.activation)

    def _xielu(self, x_BLF: Float[Array, "B L F"]) -> Float[Array, "B L F"]:
        """`p x^2 + b x` above 0, `n (e^min(x, edge) - 1 - x) + b x` below; b and edge are saved, not trained."""
        x32 = x_BLF.astype(jnp.float32)

        def number(parameter: nnx.Param[Any]) -> Array:
            return parameter[...].astype(jnp.float32).reshape(1, 1, 1)

        linear = jax.lax.stop_gradient(number(self.xielu_linear))
        edge = jax.lax.stop_gradient(number(self.xielu_edge))
        above = jax.nn.softplus(number(self.xielu_positive)) * x32 * x32
        below = (jnp.expm1(jnp.minimum(x32, edge)) - x32) * (
            linear + jax.nn.softplus(number(self.xielu_negative))
        )
        return (jnp.where(x32 > 0, above, below) + linear * x32).astype(x_BLF.dtype)

    def _biased(self, wide_BLF: Float[Array, "B L F"], name: str) -> Float[Array, "B L F"]:
        if not self.spec.bias:
            return wide_BLF
        bias_F = getattr(self, f"{name}_bias_F")[...]
        return wide_BLF + aligned(local_part(bias_F, wide_BLF.shape[-1]), wide_BLF)


def in_chunks(
    mlp: MLP, x_BLD: Float[Array, "B L D"], tensor: TensorAxis, chunk: int | None
) -> Float[Array, "B L D"]:
    """`mlp(x, tensor)` for `chunk` positions of each sequence at a time; the backward pass computes each
    chunk again.

    Example: of 10 positions in chunks of 4, two are looped over, and the last 2 positions are computed behind
      them.

    Args:
      chunk: None for all positions at once.
    """
    if chunk is None or x_BLD.shape[1] <= chunk:
        return mlp(x_BLD, tensor)
    definition, weights = nnx.split(mlp)
    batch, length, width = x_BLD.shape
    num_chunks, remainder = divmod(length, chunk)
    looped_BLD, last_BLD = jnp.split(x_BLD, [length - remainder], axis=1)
    # What the loop sums up are gradients of these, in float32: each chunk's is rounded, as a microbatch's,
    # not the sum.
    total = jax.tree.map(lambda w: w.astype(jnp.float32), weights)

    # Without it the loop would keep the hidden units of all chunks for the backward pass.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one_chunk(x_BcD: Float[Array, "B c D"]) -> Float[Array, "B c D"]:
        return nnx.merge(definition, jax.tree.map(_with_gradient_of, weights, total))(x_BcD, tensor)

    x_ZBcD = jnp.moveaxis(looped_BLD.reshape(batch, num_chunks, chunk, width), 1, 0)
    y_ZBcD = jax.lax.map(one_chunk, x_ZBcD)
    y_BLD = jnp.moveaxis(y_ZBcD, 0, 1).reshape(looped_BLD.shape)
    return jnp.concatenate([y_BLD, one_chunk(last_BLD)], axis=1) if remainder else y_BLD


@jax.custom_vjp
def _with_gradient_of(weight: Array, total: Array) -> Array:
    """`weight`, whose gradient becomes that of `total`, in float32; the value of `total` is never read."""
    del total
    return weight


_with_gradient_of.defvjp(
    lambda weight, total: (weight, None), lambda _, grad: (None, grad.astype(jnp.float32))
)


def _scaled(x: Float[Array, "*dims"], scale: float) -> Float[Array, "*dims"]:
    return x if scale == 1 else x * scale


def activate(x: Float[Array, "*dims"], activation: Pointwise) -> Float[Array, "*dims"]:
    """The nonlinearity, computed in float32, in x's dtype."""
    x32 = x.astype(jnp.float32)
    match activation:
        case "silu":
            y32 = jax.nn.silu(x32)
        case "gelu" | "gelu_tanh":
            y32 = jax.nn.gelu(x32, approximate=activation == "gelu_tanh")
        case "relu":
            y32 = jax.nn.relu(x32)
        case "relu2":
            y32 = jnp.square(jax.nn.relu(x32))
    return y32.astype(x.dtype)


def gated(
    gate: Float[Array, "*dims"], up: Float[Array, "*dims"], activation: Pointwise | ClampedSwiGLU
) -> Float[Array, "*dims"]:
    """`act(gate) * up`, computed in float32, in gate's dtype; keeps only its inputs for the backward pass."""
    if activation == "silu":
        return ops.swiglu(gate, up)

    # Nothing between the inputs and the product is kept: it is cheap to compute again.
    @jax.checkpoint
    def product(gate: Array, up: Array) -> Array:
        if isinstance(activation, ClampedSwiGLU):
            return activation(gate.astype(jnp.float32), up.astype(jnp.float32))
        return activate(gate.astype(jnp.float32), activation) * up.astype(jnp.float32)

    return product(gate, up).astype(gate.dtype)
