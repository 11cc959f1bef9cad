"""Base of recurrent mixers: their two calls, convolutions over heads, decays, and gated norms."""

import abc
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jtrain.model import ops
from jtrain.model.mixer import Mixer, Rotation
from jtrain.model.param import aligned, vector, weight
from jtrain.model.tensor_parallel import TensorAxis, local_part


class RecurrentMixer(Mixer):
    """Mixer without positions, whose cache is what it knows after the last token."""

    def __call__(
        self,
        x_BLD: Float[Array, "B _ D"],
        rotation: Rotation,
        segment_BL: Int[Array, "B L"],
        tensor: TensorAxis = TensorAxis(),  # noqa: B008 - frozen
        context: ops.RowSplit = ops.WHOLE_ROWS,
    ) -> Float[Array, "B _ D"]:
        """Output at this device's positions; inside, its heads or channels at all positions along `tensor`."""
        del rotation
        return self.mix(x_BLD, segment_BL, tensor, context, None)[0]

    def extend(
        self,
        x_BLD: Float[Array, "B L D"],
        rotation: Rotation,
        position_BL: Int[Array, "B L"],
        valid_BL: Bool[Array, "B L"],
        cache: Any,
    ) -> tuple[Float[Array, "B L D"], Any]:
        """Output at the next positions of one document, on one device, and what is known after them."""
        del rotation, position_BL
        # Segment 0 is padding, which leaves a state as it is.
        return self.mix(x_BLD, valid_BL.astype(jnp.int32), TensorAxis(), ops.WHOLE_ROWS, cache)

    @abc.abstractmethod
    def mix(
        self,
        x_BLD: Float[Array, "B _ D"],
        segment_BL: Int[Array, "B L"],
        tensor: TensorAxis,
        context: ops.RowSplit,
        cache: Any,
    ) -> tuple[Float[Array, "B _ D"], Any]:
        """Output at this device's positions, and the cache after them; no `cache` at the start of rows."""


class ShortConv(nnx.Module):
    """Causal convolution of every channel by itself over a few tokens, which restarts at each document.

    Kernels are of all channels on every device; a device computes its own.
    """

    def __init__(self, dims: str, shape: tuple[int, ...], *, taps: int, bias: bool, layers: int) -> None:
        # As PyTorch draws them, but for the form of the distribution: uniform up to 1 / sqrt(taps).
        std = (3 * taps) ** -0.5
        setattr(self, f"taps_{dims}W", weight(f"{dims}W", (*shape, taps), std=std, layers=layers))
        if bias:
            setattr(self, f"bias_{dims}", vector(dims, shape, ones=False, layers=layers))
        self.dims, self.bias = dims, bias

    def __call__(
        self,
        x_BLNH: Float[Array, "B L *channels"],
        segment_BL: Int[Array, "B L"],
        *,
        silu: bool,
        initial: ops.LeftContext | None,
        split: ops.RowSplit = ops.WHOLE_ROWS,
    ) -> tuple[Float[Array, "B L *channels"], ops.LeftContext]:
        """Result at every position, and the last inputs, for the next tokens."""
        heads = x_BLNH.shape[2]
        taps_NHW = local_part(getattr(self, f"taps_{self.dims}W")[...], heads)
        bias_C = local_part(getattr(self, f"bias_{self.dims}")[...], heads).reshape(-1) if self.bias else None
        kernel_WC = taps_NHW.reshape(-1, taps_NHW.shape[-1]).T
        x_BLC = x_BLNH.reshape(*x_BLNH.shape[:2], -1)
        y_BLC, context = ops.short_conv(
            x_BLC, kernel_WC, bias_C, segment_BL, silu=silu, initial=initial, split=split
        )
        return y_BLC.reshape(x_BLNH.shape), context


DECAY_LOG: Any = dict(mean=2.0, std=0.6)
"""Initial logarithm of the rates of decay: rates of 2 to 25, as of the numbers from 1 to 16."""

DECAY_BIAS: Any = dict(mean=-4.6, std=1.3)
"""Initial bias of step sizes before their softplus: steps of 0.001 to 0.1, evenly by their logarithm
(arXiv:2405.21060)."""


def softplus_of_sum(x: Float[Array, "*dims"], bias: Float[Array, "..."]) -> Float[Array, "*dims"]:
    """`softplus(x + bias)` in float32."""
    x32 = x.astype(jnp.float32)
    return jax.nn.softplus(x32 + aligned(bias, x32))


def gate_output(
    y: Float[Array, "*dims"], gate: Float[Array, "*dims"], activation: Literal["silu", "sigmoid"]
) -> Float[Array, "*dims"]:
    """`act(gate) * y`, computed in float32, in gate's dtype."""
    if activation == "silu":
        return ops.swiglu(gate, y)
    return (jax.nn.sigmoid(gate.astype(jnp.float32)) * y.astype(jnp.float32)).astype(gate.dtype)
