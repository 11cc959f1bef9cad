"""The dense feed-forward layer."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jtrain.model import ops
from jtrain.model.param import aligned, vector, weight
from jtrain.model.sizes import ModelSizes
from jtrain.model.tensor_parallel import TensorAxis, local_part

type Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
"""Nonlinearity of a feed-forward layer: `gelu` is exact, `gelu_tanh` its approximation, `relu2` relu
squared."""


@dataclasses.dataclass(frozen=True)
class MLPSpec:
    """Feed-forward layer `down(act(gate(x)) * up(x))` (arXiv:2002.05202), or without a gate `down(act(up(x)))`.

    d_ff: hidden width F; None takes `model.d_ff`.
    activation: of the gate, or of the only projection without a gate.
    gated: False has no gate.
    bias: True adds a learned vector to each projection.
    gate_scale, out_scale: multiply the gate before its activation, and the output (Falcon-H1).
    """

    d_ff: int | None = None
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    gate_scale: float = 1.0
    out_scale: float = 1.0

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
        self.spec = spec

    def __call__(
        self,
        x_BLD: Float[Array, "B _ D"],
        tensor: TensorAxis = TensorAxis(),  # noqa: B008, frozen
    ) -> Float[Array, "B _ D"]:
        """Output at this device's positions. Inside, the device computes its block of F at all positions."""
        if not self.spec.gated:
            (up_BLF,) = tensor.project_in(x_BLD, self.up_DF[...])
            wide_BLF = activate(checkpoint_name(self._biased(up_BLF, "up"), "mlp_up"), self.spec.activation)
        else:
            gate_BLF, up_BLF = tensor.project_in(x_BLD, self.gate_DF[...], self.up_DF[...])
            gate_BLF = checkpoint_name(
                _scaled(self._biased(gate_BLF, "gate"), self.spec.gate_scale), "mlp_gate"
            )
            up_BLF = checkpoint_name(self._biased(up_BLF, "up"), "mlp_up")
            wide_BLF = gated(gate_BLF, up_BLF, self.spec.activation)
        y_BLD = tensor.project_out(wide_BLF, self.down_FD[...])
        # Once, at the positions that this device keeps of the sum.
        y_BLD = y_BLD + aligned(self.down_bias_D[...], y_BLD) if self.spec.bias else y_BLD
        return _scaled(y_BLD, self.spec.out_scale)

    def _biased(self, wide_BLF: Float[Array, "B L F"], name: str) -> Float[Array, "B L F"]:
        if not self.spec.bias:
            return wide_BLF
        bias_F = getattr(self, f"{name}_bias_F")[...]
        return wide_BLF + aligned(local_part(bias_F, wide_BLF.shape[-1]), wide_BLF)


def _scaled(x: Float[Array, "*dims"], scale: float) -> Float[Array, "*dims"]:
    return x if scale == 1 else x * scale


def activate(x: Float[Array, "*dims"], activation: Activation) -> Float[Array, "*dims"]:
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
    gate: Float[Array, "*dims"], up: Float[Array, "*dims"], activation: Activation
) -> Float[Array, "*dims"]:
    """`act(gate) * up`, computed in float32, in gate's dtype; keeps only its inputs for the backward pass."""
    if activation == "silu":
        return ops.swiglu(gate, up)

    # Nothing between the inputs and the product is kept: it is cheap to compute again.
    @jax.checkpoint
    def product(gate: Array, up: Array) -> Array:
        return activate(gate.astype(jnp.float32), activation) * up.astype(jnp.float32)

    return product(gate, up).astype(gate.dtype)
