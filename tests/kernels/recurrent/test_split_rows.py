"""Recurrences over rows split over devices are those over whole rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from jtrain_kernels.attention.context import RowSplit
from tests.kernels.gradients import agree_with, normal
from tests.kernels.recurrent.mixers import KDA, MAMBA2, B, H, Mixer, N, P, wide
from tests.kernels.test_context_attention import mesh_of, order_of

LENGTH = 32
SEGMENTS = np.asarray([[1] * 25 + [2] + [3] * 3 + [0] * 3, [4] * 3 + [7] * 21 + [8] * 8], np.int32)
"""A document over several parts of a row, one of one token, one that starts where a part does, padding."""


def over_devices(mixer: Mixer, split: RowSplit) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Results for whole rows in text order, and the state after them, computed over the devices of a split."""
    order = order_of(split, LENGTH)
    row = Spec(None, "context")
    others = len(mixer.shapes(LENGTH)) - mixer.per_token

    def local(segment: jax.Array, *inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, state = mixer.run(*inputs, segment, split=split)
        return y, state.state_BNHP[None]

    mapped = jax.shard_map(
        local,
        mesh=mesh_of(split),
        in_specs=(row, *[row] * mixer.per_token, *[Spec()] * others),
        out_specs=(row, Spec("context")),
        check_vma=False,
    )

    def run(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        per_token = (x[:, order] for x in inputs[: mixer.per_token])
        y, state = mapped(jnp.asarray(SEGMENTS[:, order]), *per_token, *inputs[mixer.per_token :])
        return y[:, np.argsort(order)], state

    return run


@pytest.mark.parametrize(
    ("mixer", "split"),
    [pytest.param(KDA, RowSplit(4), marks=pytest.mark.slow), (MAMBA2, RowSplit(4, "ulysses", "contiguous"))],
    ids=str,
)
def test_split_rows_are_whole_rows(mixer: Mixer, split: RowSplit) -> None:
    """Results, the gradients of all inputs, and the state after the row, which all devices have."""
    run = over_devices(mixer, split)
    valid = jnp.asarray(SEGMENTS > 0)[..., None, None]
    # Different weights, so that the state of one device does not stand for another's.
    weight = np.linspace(0.5, 1.5, split.size).reshape(-1, 1, 1, 1, 1)

    def flat(y: jax.Array, state: jax.Array) -> jax.Array:
        parts = jnp.where(valid, wide(y), 0.0), state * weight.astype(state.dtype)
        return jnp.concatenate([x.reshape(-1) for x in parts])

    def reference(*inputs: jax.Array) -> jax.Array:
        zeros = jnp.zeros((B, N, H, P), inputs[0].dtype)
        y, state = mixer.reference(*inputs, jnp.asarray(SEGMENTS), zeros, jnp.zeros(B, jnp.int32))
        return flat(y, state[None])

    agree_with(lambda *inputs: flat(*run(*inputs)), reference, mixer.inputs(LENGTH), "float32")


def test_a_later_part_sees_an_earlier_one_only_within_a_document() -> None:
    """Changing one token of the second row's long document changes that document's later tokens alone."""
    run = jax.jit(over_devices(MAMBA2, RowSplit(2)))
    inputs = [jnp.asarray(x) for x in MAMBA2.inputs(LENGTH)]
    before, _ = run(*inputs)
    want, _ = jax.jit(lambda *x: MAMBA2.run(*x, jnp.asarray(SEGMENTS)))(*inputs)
    valid = SEGMENTS > 0
    np.testing.assert_allclose(before[valid], want[valid], atol=1e-5 * float(jnp.abs(want).max()))
    after, _ = run(inputs[0].at[1, 5].add(1.0), *inputs[1:])
    changed = np.any(np.asarray(before) != np.asarray(after), axis=(2, 3))
    assert not changed[0].any()
    np.testing.assert_array_equal(np.flatnonzero(changed[1]), np.arange(5, 24))


def test_positions_that_zigzag_cannot_halve_are_refused() -> None:
    """The message has the numbers and the way out."""
    split, x = RowSplit(2), jnp.asarray(normal(0, B, 2, 4, 4))
    row = Spec(None, "context")

    def local(x: jax.Array) -> Any:
        gate, heads = x[..., 0], jnp.ones(4)
        return MAMBA2.run(x, gate, x, x, heads, heads, jnp.ones(x.shape[:2], jnp.int32), split=split)[0]

    mapped = jax.shard_map(local, mesh=mesh_of(split), in_specs=row, out_specs=row, check_vma=False)
    with pytest.raises(ValueError, match=r"mamba2: a device has L=1 positions.*2 \* mesh\.context = 4"):
        jax.eval_shape(mapped, x)
