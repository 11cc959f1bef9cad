"""The short convolution against a sum over taps in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jtrain_kernels.attention.context import RowSplit
from jtrain_kernels.short_conv.api import LeftContext, short_conv
from jtrain_kernels.short_conv.reference import short_conv_reference
from tests.kernels.gradients import agree_with, normal
from tests.kernels.test_context_attention import mesh_of, order_of

B, L, C = 2, 16, 6
SEGMENTS = np.asarray([[1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4, 4, 5, 6, 0, 0], [1] * 16], np.int32)
"""Documents shorter and longer than a kernel, and one over the whole row."""


@pytest.mark.parametrize(
    ("width", "bias", "silu", "dtype"),
    [(3, False, False, "float32"), (4, True, True, "float32"), (3, True, False, "bfloat16")],
)
def test_taps_end_at_documents(width: int, bias: bool, silu: bool, dtype: str) -> None:
    """Value and gradients of inputs, kernel and bias; without the restart a token would see the one before."""
    segment = jnp.asarray(SEGMENTS)
    inputs = (normal(0, B, L, C), normal(1, width, C), *([normal(2, C)] if bias else []))

    def run(x: Any, kernel: Any, bias: Any = None) -> jax.Array:
        return short_conv(x, kernel, bias, segment, silu=silu)[0]

    def reference(x: Any, kernel: Any, bias: Any = None) -> jax.Array:
        return short_conv_reference(x, kernel, bias, segment, silu=silu)

    agree_with(run, reference, inputs, dtype)
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x) for x in inputs]
        want, leaky = (
            short_conv_reference(arrays[0], arrays[1], arrays[2] if bias else None, s, silu=silu)
            for s in (segment, jnp.ones_like(segment))
        )
        assert np.abs(want - leaky)[0, 1].max() > 0.1


def test_one_token_at_a_time_is_the_row() -> None:
    """A padded prompt shorter than the kernel, then single tokens, each with the context before it."""
    x, kernel = jnp.asarray(normal(0, B, L, C)), jnp.asarray(normal(1, 4, C))
    ones = jnp.ones((B, L), jnp.int32)
    prompt = jnp.broadcast_to((jnp.arange(8) < 2).astype(jnp.int32), (B, 8))

    def step(context: LeftContext, x_BC: jax.Array) -> tuple[LeftContext, jax.Array]:
        y, context = short_conv(x_BC[:, None], kernel, None, ones[:, :1], silu=True, initial=context)
        return context, y[:, 0]

    @jax.jit
    def both() -> Any:
        y, context = short_conv(x[:, :8], kernel, None, prompt, silu=True)
        row = short_conv(x, kernel, None, ones, silu=True)
        return y, jax.lax.scan(step, context, jnp.moveaxis(x[:, 2:], 1, 0)), row

    y, (context, y_LB), (want, after) = both()
    got = jnp.concatenate([y[:, :2], jnp.moveaxis(y_LB, 0, 1)], axis=1)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(context.x_BWC, after.x_BWC)
    np.testing.assert_array_equal(after.x_BWC, x[:, -3:])


@pytest.mark.parametrize("split", [RowSplit(4), RowSplit(2, "ulysses", "contiguous")], ids=str)
def test_split_rows_are_whole_rows(split: RowSplit) -> None:
    """Taps reach into the part before, with its gradients, and into no part of another document."""
    segment = np.concatenate([SEGMENTS, SEGMENTS[:, ::-1] + 6], axis=1)
    order = order_of(split, segment.shape[1])
    row = PartitionSpec(None, "context")
    local = jax.shard_map(
        lambda x, kernel, segment: short_conv(x, kernel, None, segment, silu=True, split=split)[0],
        mesh=mesh_of(split),
        in_specs=(row, PartitionSpec(), row),
        out_specs=row,
        check_vma=False,
    )
    agree_with(
        lambda x, kernel: local(x[:, order], kernel, jnp.asarray(segment[:, order]))[:, np.argsort(order)],
        lambda x, kernel: short_conv_reference(x, kernel, None, jnp.asarray(segment), silu=True),
        (normal(0, B, 2 * L, C), normal(1, 4, C)),
        "float32",
    )
    short = jnp.zeros((B, 4 * split.size, C))
    with pytest.raises(
        ValueError, match=r"6 taps reach over 5 positions, but a part of a row has [24]\. Set"
    ):
        jax.eval_shape(local, short, jnp.zeros((6, C)), jnp.ones(short.shape[:2], jnp.int32))
