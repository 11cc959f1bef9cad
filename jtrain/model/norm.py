"""Normalisation of the residual stream and of heads."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jtrain.errors import UserError
from jtrain.model import ops
from jtrain.model.param import aligned, vector


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """Kind of the norms of a model.

    kind: `rms` divides by the root mean square (arXiv:1910.07467); `layer` subtracts the mean and divides by
      the deviation (arXiv:1607.06450).
    scale: `ones` multiplies with a learned scale; `one_plus` with 1 + a learned number, which begins at zero
      (Gemma); `none` with nothing.
    bias: adds a learned vector; for `layer` only.
    """

    kind: Literal["rms", "layer"] = "rms"
    scale: Literal["ones", "one_plus", "none"] = "ones"
    bias: bool = False

    def __post_init__(self) -> None:
        if self.bias and self.kind != "layer":
            raise UserError(
                f"model.norm.bias=True with model.norm.kind={self.kind}, which has no bias. Set "
                "model.norm.bias=False, or model.norm.kind=layer."
            )

    def module(self, dims: str, shape: int | tuple[int, ...], *, eps: float, layers: int = 0) -> "Norm":
        """The norm of a residual stream; a subclass may have one of its own."""
        return Norm(dims, shape, spec=self, eps=eps, layers=layers)


class Norm(nnx.Module):
    """Norm over the last dimensions of x, in float32, back in x's dtype."""

    def __init__(
        self, dims: str, shape: int | tuple[int, ...], *, spec: NormSpec, eps: float, layers: int = 0
    ) -> None:
        shape = (shape,) if isinstance(shape, int) else shape
        # Named by their dimensions, as all parameters are: scale_D, scale_H.
        if spec.scale != "none":
            setattr(self, f"scale_{dims}", vector(dims, shape, ones=spec.scale == "ones", layers=layers))
        if spec.bias:
            setattr(self, f"bias_{dims}", vector(dims, shape, ones=False, layers=layers))
        self.dims, self.spec, self.eps = dims, spec, eps

    def __call__(self, x: Float[Array, "*rest C"]) -> Float[Array, "*rest C"]:
        if self.spec.kind == "rms":
            return ops.rms_norm(x, self.scale(x), eps=self.eps)
        return self._layer_norm(x)

    def branch(self, x: Float[Array, "*rest C"]) -> tuple[Float[Array, "*rest C"], Float[Array, "*rest C"]]:
        """The residual stream unchanged, and its norm as the input of the branch that is added to it."""
        if self.spec.kind == "rms":
            return ops.rms_norm_branch(x, self.scale(x), eps=self.eps)
        return x, self._layer_norm(x)

    def scale(self, x: Float[Array, "*rest C"]) -> Float[Array, "..."]:
        """Factor of the normalised x; 1 without a learned scale."""
        if self.spec.scale == "none":
            return jnp.ones(x.shape[-1:], jnp.float32)
        learned = getattr(self, f"scale_{self.dims}")[...]
        # In float32: 1 + w rounded to 16 bits would lose most of w.
        return learned if self.spec.scale == "ones" else 1 + learned.astype(jnp.float32)

    def _layer_norm(self, x: Float[Array, "*rest C"]) -> Float[Array, "*rest C"]:
        x32 = x.astype(jnp.float32)
        x32 -= jnp.mean(x32, axis=-1, keepdims=True)
        y32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        y32 *= aligned(self.scale(x), y32)
        if self.spec.bias:
            y32 += aligned(getattr(self, f"bias_{self.dims}")[...], y32)
        return y32.astype(x.dtype)


def unscaled_norm(dims: str, size: int, *, eps: float) -> Norm:
    """Norm by the root mean square that has no parameters."""
    return Norm(dims, size, spec=NormSpec(scale="none"), eps=eps)
