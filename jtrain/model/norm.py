"""Root-mean-square normalisation."""

from flax import nnx
from jaxtyping import Array, Float

from jtrain.model import ops
from jtrain.model.param import scale


class RMSNorm(nnx.Module):
    """`x / rms(x) * scale` over the last dimension, in float32, back in x's dtype (arXiv:1910.07467)."""

    def __init__(self, dim: str, size: int, *, eps: float, layers: int = 0) -> None:
        # Named by its dimension, as all parameters are: scale_D, scale_H.
        setattr(self, f"scale_{dim}", scale(dim, (size,), layers=layers))
        self.dim = dim
        self.eps = eps

    def __call__(self, x: Float[Array, "*rest C"]) -> Float[Array, "*rest C"]:
        return ops.rms_norm(x, getattr(self, f"scale_{self.dim}")[...], eps=self.eps)

    def branch(self, x: Float[Array, "*rest C"]) -> tuple[Float[Array, "*rest C"], Float[Array, "*rest C"]]:
        """The residual stream unchanged, and its norm as the input of the branch that is added to it."""
        return ops.rms_norm_branch(x, getattr(self, f"scale_{self.dim}")[...], eps=self.eps)
