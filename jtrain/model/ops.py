"""Ops that the model calls; the only module that imports the ops of the kernels package."""

from collections.abc import Sequence

import jax
from jaxtyping import Array, Float

from jtrain.model.adapters.adapted_kernel import AdaptedKernel
from jtrain.model.adapters.dropout import InputDropout
from jtrain_kernels.attention.api import ATTENTION_BACKWARD, ATTENTION_FORWARD, UNMASKED, attention
from jtrain_kernels.attention.context import WHOLE_ROWS, RowSplit, context_attention
from jtrain_kernels.delta_rule.api import delta_rule
from jtrain_kernels.embedding_lookup.api import embedding_lookup
from jtrain_kernels.fp8.api import AMAX, Fp8Kernel, linear_fp8, of_one_x, rounded_weight
from jtrain_kernels.fp8.formats import unsupported as fp8_unsupported
from jtrain_kernels.fp8.history import empty as no_amax
from jtrain_kernels.fp8.history import pushed as amax_pushed
from jtrain_kernels.fp8.history import scales as amax_scales
from jtrain_kernels.grouped_matmul.api import grouped_matmul
from jtrain_kernels.linear.api import linear as linear_in_dtype
from jtrain_kernels.linear_cross_entropy.api import (
    linear_cross_entropy,
    token_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from jtrain_kernels.linear_cross_entropy.chunking import best_chunk
from jtrain_kernels.linear_cross_entropy.parts import (
    NO_COLUMN,
    linear_cross_entropy_in_parts,
    token_cross_entropy_in_parts,
    top_k_in_parts,
)
from jtrain_kernels.linear_cross_entropy.soft_targets import SoftTargets
from jtrain_kernels.linear_cross_entropy.vocab import Axis as VocabAxis
from jtrain_kernels.mamba2.api import mamba2
from jtrain_kernels.overlap.api import (
    all_gather_matmul,
    all_gather_matmul_fp8,
    matmul_reduce_scatter,
    matmul_reduce_scatter_fp8,
)
from jtrain_kernels.recurrence.documents import RecurrentState, empty_state
from jtrain_kernels.rms_norm.api import rms_norm, rms_norm_branch
from jtrain_kernels.rope.api import rope
from jtrain_kernels.short_conv.api import LeftContext, empty_context, short_conv
from jtrain_kernels.soft_cap import capped
from jtrain_kernels.swiglu.api import grouped_swiglu, swiglu

__all__ = [
    "AMAX",
    "ATTENTION_BACKWARD",
    "ATTENTION_FORWARD",
    "NO_COLUMN",
    "UNMASKED",
    "WHOLE_ROWS",
    "Fp8Kernel",
    "Kernel",
    "LeftContext",
    "RecurrentState",
    "RowSplit",
    "SoftTargets",
    "VocabAxis",
    "all_gather_linear",
    "amax_pushed",
    "amax_scales",
    "attention",
    "best_chunk",
    "capped",
    "context_attention",
    "delta_rule",
    "embedding_lookup",
    "empty_context",
    "empty_state",
    "fp8_unsupported",
    "grouped_matmul",
    "grouped_swiglu",
    "linear",
    "linear_cross_entropy",
    "linear_cross_entropy_in_parts",
    "linear_reduce_scatter",
    "linears",
    "mamba2",
    "no_amax",
    "rms_norm",
    "rms_norm_branch",
    "rope",
    "rounded_weight",
    "short_conv",
    "swiglu",
    "token_cross_entropy",
    "token_cross_entropy_in_parts",
    "top_k_in_parts",
    "vocab_parallel_linear_cross_entropy",
]


type Kernel = Array | Fp8Kernel | AdaptedKernel
"""A weight and the precision of its products: an array multiplies in the dtype of x, an `Fp8Kernel` in 8
bits; an `AdaptedKernel` is the sum of two products."""


def linear(x: Float[Array, "..."], kernel: Kernel, num_in: int = 1) -> Float[Array, "..."]:
    """`x @ kernel` in the kernel's precision, over the last `num_in` dimensions of x."""
    if isinstance(kernel, AdaptedKernel):
        # x A first: its rows are short, and A B would be a second matrix of the base's size.
        base = linear_in_dtype(x, jax.lax.stop_gradient(kernel.base), num_in)
        return base + kernel.scale * linear_in_dtype(_down(x, kernel, num_in), kernel.up)
    if isinstance(kernel, Fp8Kernel):
        # The weight's type selects the precision, so layers have one call for both.
        return linear_fp8(x, kernel, num_in)
    return linear_in_dtype(x, kernel, num_in)


def _down(x: Float[Array, "..."], kernel: AdaptedKernel, num_in: int) -> Float[Array, "..."]:
    """Inputs of an adapter times A."""
    if kernel.dropout is None:
        return linear_in_dtype(x, kernel.down, num_in)

    # Kept are x and the bits of its tokens: the mask, and x under it, are as large as x for each matrix.
    @jax.checkpoint
    def product(x: Array, down: Array, dropout: InputDropout) -> Array:
        return linear_in_dtype(dropout.apply(x), down, num_in)

    return product(x, kernel.down, kernel.dropout)


def linears(x: Float[Array, "..."], kernels: Sequence[Kernel]) -> tuple[Float[Array, "..."], ...]:
    """Products of one x with each kernel, as `linear`; kernels in 8 bits share what is made of x."""
    in_8_bits = [kernel for kernel in kernels if isinstance(kernel, Fp8Kernel)]
    # x is rounded to 8 bits once for all of them: q, k and v, or gate and up.
    shared = of_one_x(in_8_bits) if len(in_8_bits) == len(kernels) else kernels
    return tuple(linear(x, kernel) for kernel in shared)


def all_gather_linear(
    x: Float[Array, "B _ D"], kernels: Sequence[Kernel], *, axis_name: str, axis_size: int
) -> tuple[Float[Array, "B L ..."], ...]:
    """Products of all rows of `x` with each kernel; each device along the axis holds a part of the rows.

    Kernels are all arrays or all `Fp8Kernel`s.
    """
    in_8_bits = [kernel for kernel in kernels if isinstance(kernel, Fp8Kernel)]
    # 8-bit kernels gather x after rounding it, half of the bytes, in an op of their own.
    if not in_8_bits:
        arrays = (kernel for kernel in kernels if isinstance(kernel, Array))
        return all_gather_matmul(x, *arrays, axis_name=axis_name, axis_size=axis_size)
    assert len(in_8_bits) == len(kernels)
    return all_gather_matmul_fp8(x, *in_8_bits, axis_name=axis_name, axis_size=axis_size)


def linear_reduce_scatter(
    y: Float[Array, "B L ..."], kernel: Kernel, *, axis_name: str, axis_size: int
) -> Float[Array, "B _ D"]:
    """This device's rows of `y @ kernel`, summed over the axis; contracts all dimensions but the last."""
    if isinstance(kernel, Fp8Kernel):
        return matmul_reduce_scatter_fp8(y, kernel, axis_name=axis_name, axis_size=axis_size)
    assert isinstance(kernel, Array)
    return matmul_reduce_scatter(y, kernel, axis_name=axis_name, axis_size=axis_size)
