"""The gated feed-forward layer."""

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jtrain.model import ops
from jtrain.model.param import weight
from jtrain.model.tensor_parallel import TensorAxis


class SwiGLU(nnx.Module):
    """`down(silu(gate(x)) * up(x))` (arXiv:2002.05202)."""

    def __init__(self, *, d_model: int, d_ff: int, layers: int) -> None:
        self.gate_DF = weight("DF", (d_model, d_ff), std=d_model**-0.5, layers=layers)
        self.up_DF = weight("DF", (d_model, d_ff), std=d_model**-0.5, layers=layers)
        # Each layer adds two branches to the residual stream: 1 / sqrt(2 Y) keeps its variance at any depth.
        self.down_FD = weight("FD", (d_ff, d_model), std=(d_ff * 2 * layers) ** -0.5, layers=layers)

    def __call__(
        self,
        x_BLD: Float[Array, "B _ D"],
        tensor: TensorAxis = TensorAxis(),  # noqa: B008, frozen
    ) -> Float[Array, "B _ D"]:
        """Output at this device's positions. Inside, the device computes its block of F at all positions."""
        gate_BLF, up_BLF = tensor.project_in(x_BLD, self.gate_DF[...], self.up_DF[...])
        gate_BLF, up_BLF = checkpoint_name(gate_BLF, "mlp_gate"), checkpoint_name(up_BLF, "mlp_up")
        return tensor.project_out(ops.swiglu(gate_BLF, up_BLF), self.down_FD[...])
