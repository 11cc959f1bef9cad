"""Short causal convolution of every channel by itself, which restarts at each document.

Letters here: C channels, W taps.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels import cost, registry
from jtrain_kernels.attention.context import WHOLE_ROWS, RowSplit
from jtrain_kernels.errors import UserError
from jtrain_kernels.recurrence import parts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LeftContext:
    """The last W - 1 inputs of a row and their segments, for the next tokens of the same rows.

    x_BWC: inputs; segment_BW: 0 before the first token.
    """

    x_BWC: Any
    segment_BW: Any


def empty_context(batch: int, width: int, channels: int, dtype: Any) -> LeftContext:
    """Left context of the first token, for a kernel of `width` taps."""
    return LeftContext(
        jnp.zeros((batch, width - 1, channels), dtype), jnp.zeros((batch, width - 1), jnp.int32)
    )


def short_conv(
    x_BLC: Float[Array, "B L C"],
    kernel_WC: Float[Array, "W C"],
    bias_C: Float[Array, " C"] | None,
    segment_BL: Int[Array, "B L"],
    *,
    silu: bool,
    initial: LeftContext | None = None,
    split: RowSplit = WHOLE_ROWS,
) -> tuple[Float[Array, "B L C"], LeftContext]:
    """`bias + sum over w of kernel[w] x[l - (W - 1) + w]`, and its SiLU if `silu`; float32, rounded once.

    Taps of another segment count as 0. The last tap is the token's own: PyTorch's Conv1d weight [C, 1, W] is
    the transpose. Keeps only its inputs for the backward pass.

    Args:
      initial: of the tokens before, as returned by the call for them.
      split: of the row over devices; call it under shard_map.

    Returns:
      y, and the left context after the row: of whole rows up to the last token that is no padding, so that
      the next token follows it; with `split` the last inputs as they are, the same on all devices.

    Raises:
      UserError: a part of the split has fewer than W - 1 positions, or parts do not divide.
    """
    (B, _, C), W = x_BLC.shape, kernel_WC.shape[0]
    context = empty_context(B, W, C, x_BLC.dtype) if initial is None else initial
    run = partial(registry.call, SHORT_CONV, kernel_WC=kernel_WC, bias_C=bias_C, silu=silu)
    if split.size == 1:
        y_BLC = run(
            x_BLC=x_BLC, segment_BL=segment_BL, left_BWC=context.x_BWC, left_segment_BW=context.segment_BW
        )
        return y_BLC, _last_inputs(x_BLC, segment_BL, context)
    x, segment = (parts.cut("short_conv", array, split) for array in (x_BLC, segment_BL))
    if x.shape[1] < W - 1:
        raise UserError(
            f"short_conv: {W} taps reach over {W - 1} positions, but a part of a row has {x.shape[1]}. Set "
            "data.seq_len larger or mesh.context smaller."
        )
    tail = slice(x.shape[1] - (W - 1), None)
    # Padding included: the next part's first token comes right after it, and segments part them.
    own_tail = LeftContext(x[:, tail], segment[:, tail])
    # Contexts of all parts, each after the part before; a part's own tail is the context of the next one.
    contexts_after = jax.tree.map(lambda array: parts.gather(array, split), own_tail)
    contexts_before = jax.tree.map(
        lambda first, rest: jnp.concatenate([first[None], rest[:-1]]), context, contexts_after
    )
    contexts_before = jax.tree.map(lambda array: parts.take_own(array, split), contexts_before)
    y = run(
        x_BLC=x,
        segment_BL=segment,
        left_BWC=contexts_before.x_BWC,
        left_segment_BW=contexts_before.segment_BW,
    )
    # The last part's tail is the row's.
    return parts.join(y, split), jax.tree.map(lambda array: array[-1], contexts_after)


def _last_inputs(x_BLC: Array, segment_BL: Array, left: LeftContext) -> LeftContext:
    """The W - 1 inputs up to the last token that is no padding."""
    taps = left.segment_BW.shape[1]
    x, segment = (
        jnp.concatenate([context_part, own_part], axis=1)
        for context_part, own_part in ((left.x_BWC.astype(x_BLC.dtype), x_BLC), (left.segment_BW, segment_BL))
    )
    # From 1 on, so that a row of padding alone has count 0 and keeps its context.
    position_L = jnp.arange(1, segment_BL.shape[1] + 1)
    count_B = jnp.max(jnp.where(segment_BL > 0, position_L[None], 0), axis=1)
    # The context comes first in x, so token count_B - 1 is at count_B - 1 + taps: the last index here.
    index_BW = count_B[:, None] + jnp.arange(taps)[None]
    return LeftContext(
        jnp.take_along_axis(x, index_BW[..., None], axis=1), jnp.take_along_axis(segment, index_BW, axis=1)
    )


# Argument 6 is `silu`. The shifted float32 copies are made again in the backward pass, not kept for it.
@partial(jax.checkpoint, static_argnums=(6,))
def _taps(
    x_BLC: Array,
    kernel_WC: Array,
    bias_C: Array | None,
    segment_BL: Array,
    left_BWC: Array,
    left_segment_BW: Array,
    silu: bool,
) -> Array:
    L, W = x_BLC.shape[1], kernel_WC.shape[0]
    x = jnp.concatenate([left_BWC.astype(x_BLC.dtype), x_BLC], axis=1)
    segment = jnp.concatenate([left_segment_BW, segment_BL], axis=1)
    y_BLC = jnp.zeros(x_BLC.shape, jnp.float32) if bias_C is None else bias_C.astype(jnp.float32)[None, None]
    for w in range(W):
        # x is shifted by the W - 1 inputs of the context: tap w of token l is at l + w.
        same_BL = segment[:, w : w + L] == segment_BL
        tap_BLC = jnp.where(same_BL[..., None], x[:, w : w + L].astype(jnp.float32), 0.0)
        y_BLC = y_BLC + kernel_WC[w].astype(jnp.float32)[None, None] * tap_BLC
    return (jax.nn.silu(y_BLC) if silu else y_BLC).astype(x_BLC.dtype)


def _xla(
    x_BLC: Array,
    kernel_WC: Array,
    bias_C: Array | None,
    segment_BL: Array,
    left_BWC: Array,
    left_segment_BW: Array,
    *,
    silu: bool,
) -> Float[Array, "B L C"]:
    return _taps(x_BLC, kernel_WC, bias_C, segment_BL, left_BWC, left_segment_BW, silu)


SHORT_CONV = registry.Op(
    "short_conv",
    (registry.Implementation("xla", _xla, cost_s=cost.short_conv_s),),
    cases={
        "qwen3_next": {  # queries and keys of 16 heads and values of 32 heads, 128 each
            "x_BLC": jax.ShapeDtypeStruct((1, 8192, 8192), jnp.bfloat16),
            "kernel_WC": jax.ShapeDtypeStruct((4, 8192), jnp.float32),
            "bias_C": None,
            "segment_BL": jax.ShapeDtypeStruct((1, 8192), jnp.int32),
            "left_BWC": jax.ShapeDtypeStruct((1, 3, 8192), jnp.bfloat16),
            "left_segment_BW": jax.ShapeDtypeStruct((1, 3), jnp.int32),
            "silu": True,
        }
    },
)
OPS = (SHORT_CONV,)
