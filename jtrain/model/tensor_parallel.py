"""Tensor-parallel projections of a layer, with the residual stream split by sequence.

`gather_sequence` runs before a layer's matmuls and `scatter_sequence` after them (arXiv:2205.05198, section
4.2.2). Each is the transpose of the other. With `overlap`, each collective and its matmul run as one op,
piece by piece, which hides the communication behind the matmul.
"""

import dataclasses

import jax
from jaxtyping import Array, Float, Int

from jtrain.model import ops
from jtrain.model.split_backward import SplitKernel, multiply


@dataclasses.dataclass(frozen=True)
class TensorAxis:
    """The `tensor` axis of the mesh; size 1 means no communication and needs no mesh.

    overlap: True if collectives overlap with matmuls, except where the kernels' cost model predicts a loss.
    """

    size: int = 1
    overlap: bool = False

    def project_in(
        self, x_BLD: Float[Array, "B _ D"], *kernels: ops.Kernel | SplitKernel
    ) -> tuple[Array, ...]:
        """This device's columns of each product, [B, L, ...], from its positions of x."""
        # One product for all kernels of one x: q, k and v share a single gather.
        return multiply(self._in, x_BLD, kernels)

    def project_out(
        self, y: Float[Array, "B L ..."], kernel: ops.Kernel | SplitKernel
    ) -> Float[Array, "B _ D"]:
        """This device's positions of the product, summed over all devices' parts."""
        return multiply(self._out, y, (kernel,))[0]

    def _in(self, x_BLD: Array, *kernels: ops.Kernel) -> tuple[Array, ...]:
        if self.overlap:
            return ops.all_gather_linear(x_BLD, kernels, axis_name="tensor", axis_size=self.size)
        return ops.linears(gather_sequence(x_BLD, self.size), kernels)

    def _out(self, y: Array, kernel: ops.Kernel) -> tuple[Array]:
        if self.overlap:
            return (ops.linear_reduce_scatter(y, kernel, axis_name="tensor", axis_size=self.size),)
        # y is [B, L, ...]: all dimensions after the first two are contracted.
        return (scatter_sequence(ops.linear(y, kernel, num_in=y.ndim - 2), self.size),)


def gather_sequence(x_BLD: Float[Array, "B _ D"], tensor: int) -> Float[Array, "B L D"]:
    """All positions of a residual stream split by sequence over `tensor`."""
    # Its transpose is the reduce-scatter below, so the backward pass needs no code of its own.
    return jax.lax.all_gather(x_BLD, "tensor", axis=1, tiled=True) if tensor > 1 else x_BLD


def scatter_sequence(x_BLD: Float[Array, "B L D"], tensor: int) -> Float[Array, "B _ D"]:
    """This device's positions of the sum of every device's partial x over `tensor`."""
    return jax.lax.psum_scatter(x_BLD, "tensor", scatter_dimension=1, tiled=True) if tensor > 1 else x_BLD


def local_sequence(x_BL: Int[Array, "B L"], tensor: int) -> Int[Array, "B _"]:
    """This device's positions of an array that every device along `tensor` holds whole."""
    if tensor == 1:
        return x_BL
    size = x_BL.shape[1] // tensor
    return jax.lax.dynamic_slice_in_dim(x_BL, jax.lax.axis_index("tensor") * size, size, axis=1)


def local_part(vector_N: Float[Array, "N ..."], size: int) -> Float[Array, "_ ..."]:
    """This device's `size` entries of what every device along `tensor` holds whole: those of its heads, or of
    its part of F.

    Its gradient is zero elsewhere, so that the sum over devices, as of any whole parameter, is that of all.
    """
    if vector_N.shape[0] == size:
        return vector_N
    # Several devices may share a key head: with 2 of them over 8 devices, devices 0 to 3 have the first.
    start = jax.lax.axis_index("tensor") * vector_N.shape[0] // jax.lax.axis_size("tensor")
    return jax.lax.dynamic_slice_in_dim(vector_N, start, size)
