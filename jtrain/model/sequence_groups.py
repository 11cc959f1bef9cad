"""A layer that computes groups of sequences side by side, so that one group's collectives overlap with
another's work.

Within one group every collective over `tensor` waits for a matmul, and the next matmul waits for it. Two
groups do not depend on each other: while one is on the wire the device computes the other, attention
included, with matmuls of the same shape but for their rows (arXiv:2409.15241).

XLA schedules every collective as early as it can. Left alone it gathers all groups first and computes them in
step, so that all of them are on the wire at the same time. Zeros that depend on the product of an earlier
group keep the groups apart: attention of a group begins after the last product before it, the gather of a
feed-forward layer's input after the last but one. They cost nothing, for they are added to arrays that a
fusion reads anyway.

Example: with groups a and b the products appear in the order attention(a), attention(b), mlp(a), mlp(b), so
zeros are [a, b, a', b']. attention(b) waits for zeros[-1] = a; the gather of mlp(a) waits for zeros[-2] = a,
that of mlp(b) for zeros[-2] = b: while one group's result is on the wire, the other is multiplied.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jtrain.errors import UserError
from jtrain.model import ops
from jtrain.model.attention import AttentionSpec
from jtrain.model.mixer import Rotation
from jtrain.model.mlp import MLPSpec
from jtrain.model.tensor_parallel import TensorAxis, gather_sequence, scatter_sequence

GROUP_ORDER = "group_order"
"""Name of the zeros, which every layer saves: without them the backward pass would multiply again to know the
order."""


def block_in_groups(
    block: Any,
    x_BLD: Float[Array, "B _ D"],
    rotation: Rotation,
    segment_BL: Int[Array, "B L"],
    *,
    groups: int,
    tensor: int,
    context: ops.RowSplit,
) -> Float[Array, "B _ D"]:
    """Output of the layer at this device's positions, the same as of `block` for all sequences at once.

    Args:
      block: a `block.Block` of attention with rotary positions and a dense feed-forward layer.
      groups: number of groups, at least 2; divides B.

    Raises:
      UserError: the block is of another kind.
    """
    assert groups > 1, "one group has no order"
    assert x_BLD.shape[0] % groups == 0, "check_batch refuses it"
    check_groups(block.spec, groups)
    assert rotation is not None, "checked"
    definition, weights = nnx.split(block)
    # A copy per group: gradients of shared weights would be added group by group, and rounded each time.
    blocks = [nnx.merge(definition, copy) for copy in _copies(weights, groups)]
    split_inputs = [jnp.split(array, groups) for array in (x_BLD, *rotation, segment_BL)]
    zeros: list[Array] = []

    def scatter(y_BLD: Array) -> Array:
        zeros.append(checkpoint_name(_zero_after(y_BLD), GROUP_ORDER))
        return scatter_sequence(y_BLD, tensor)

    after_attention: list[Array] = []
    for block_copy, x, cos, sin, segment in zip(blocks, *split_inputs, strict=True):
        with jax.named_scope("attention"):
            x, h = block_copy.attention_input(x)
            # The first group waits for nothing. The cosines are read by the rotation, inside a fusion.
            ordered = cos + zeros[-1].astype(cos.dtype) if zeros else cos
            h = gather_sequence(h, tensor)
            h = block_copy.mixer(h, (ordered, sin), segment, TensorAxis(), context)
            after_attention.append(block_copy.add_attention(x, scatter(h)))
    outputs: list[Array] = []
    for block_copy, x in zip(blocks, after_attention, strict=True):
        with jax.named_scope("mlp"):
            x, h = block_copy.mlp_input(x, x)
            # -2 and not -1: the product just before is still being scattered, and must not be waited for.
            h = gather_sequence(h + zeros[-2].astype(h.dtype), tensor)
            outputs.append(block_copy.add_mlp(x, scatter(block_copy.mlp(h, TensorAxis()))))
    return jnp.concatenate(outputs)


def check_groups(spec: Any, groups: int) -> None:
    """Refuses blocks whose parts are not one attention and one dense layer after the other.

    Biases of outputs would be added once for each device along `tensor`.

    Raises:
      UserError: names the part.
    """
    for conflict, applies in (
        ("a block without grouped-query attention", not isinstance(spec.mixer, AttentionSpec)),
        ("a block without a dense feed-forward layer", not isinstance(spec.feed_forward, MLPSpec)),
        ("attention without rotary positions", getattr(spec.mixer, "rope", 0) is None),
        ("temperature of attention", getattr(spec.mixer, "temperature", None) is not None),
        ("chunk_size of attention", getattr(spec.mixer, "chunk_size", None) is not None),
        ("bias=all of attention", getattr(spec.mixer, "bias", "none") == "all"),
        ("bias=True of a feed-forward layer", bool(getattr(spec.feed_forward, "bias", False))),
        (f"norms={spec.norms}, whose branches do not follow each other", spec.in_parallel),
    ):
        if applies:
            raise UserError(
                f"layout.sequence_groups={groups} with {conflict} in model.pattern. Set "
                "layout.sequence_groups=1."
            )


def _zero_after(y_BLD: Float[Array, "B L D"]) -> Float[Array, ""]:
    """0 that XLA knows only once y is there: it does not assume that nothing exceeds infinity."""
    first = jax.lax.stop_gradient(y_BLD[0, 0, 0])
    # NaN compares false too, so this is always 0.
    return jnp.where(first > jnp.inf, 1.0, 0.0)


def _copies(weights: Any, count: int) -> list[Any]:
    """`count` times the same weights; the gradients of all copies are added in float32 and rounded once."""
    leaves, tree = jax.tree.flatten(weights)
    copies = [_copy(leaf, count) for leaf in leaves]
    return [tree.unflatten(copy[index] for copy in copies) for index in range(count)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copy(weight: Array, count: int) -> tuple[Array, ...]:
    return (weight,) * count


def _copy_forward(weight: Array, count: int) -> tuple[tuple[Array, ...], None]:
    return (weight,) * count, None


def _copy_backward(count: int, saved: None, gradients: tuple[Array, ...]) -> tuple[Array]:
    del count, saved
    total = functools.reduce(jnp.add, (g.astype(jnp.float32) for g in gradients))
    return (total.astype(gradients[0].dtype),)


_copy.defvjp(_copy_forward, _copy_backward)
