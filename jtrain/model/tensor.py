"""A layer's projections over the `tensor` axis: the residual stream is gathered before them and scattered after them.

Over `tensor`, the residual stream is split by sequence (arXiv:2205.05198, section 4.2.2): `gather_sequence` before a
layer's matmuls, `scatter_sequence` after them, each the other's transpose; or both as one with the matmul beside them,
piece by piece, so that what travels hides behind what is multiplied.
"""

import dataclasses

import jax
from jaxtyping import Array, Float

from jtrain.model import ops


@dataclasses.dataclass(frozen=True)
class TensorAxis:
    """The devices along `tensor`; of size 1, on one device without a mesh, nothing travels.

    overlap: collectives hide behind the matmuls, where the kernels' cost model does not say that it loses.
    """

    size: int = 1
    overlap: bool = False

    def project_in(self, x_BLD: Float[Array, "B _ D"], *kernels: ops.Kernel) -> tuple[Array, ...]:
        """This device's columns of each product, [B, L, ...], from its positions of x."""
        if self.overlap:
            return ops.all_gather_linear(x_BLD, kernels, axis_name="tensor", axis_size=self.size)
        whole_BLD = gather_sequence(x_BLD, self.size)
        return tuple(ops.linear(whole_BLD, kernel) for kernel in kernels)

    def project_out(self, y: Float[Array, "B L ..."], kernel: ops.Kernel) -> Float[Array, "B _ D"]:
        """This device's positions of the product over all devices' parts of what is contracted."""
        if self.overlap:
            return ops.linear_reduce_scatter(y, kernel, axis_name="tensor", axis_size=self.size)
        return scatter_sequence(ops.linear(y, kernel, num_in=y.ndim - 2), self.size)


def gather_sequence(x_BLD: Float[Array, "B _ D"], tensor: int) -> Float[Array, "B L D"]:
    """All positions of a residual stream split by sequence over `tensor`."""
    return jax.lax.all_gather(x_BLD, "tensor", axis=1, tiled=True) if tensor > 1 else x_BLD


def scatter_sequence(x_BLD: Float[Array, "B L D"], tensor: int) -> Float[Array, "B _ D"]:
    """This device's positions of the sum of every device's partial x over `tensor`."""
    return jax.lax.psum_scatter(x_BLD, "tensor", scatter_dimension=1, tiled=True) if tensor > 1 else x_BLD
