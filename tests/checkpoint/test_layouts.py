"""A checkpoint does not depend on the layout that wrote it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jtrain.checkpoint import Checkpoints, CheckpointSpec
from jtrain.step.state import TrainState

MakeLike = Callable[..., TrainState]
Fill = Callable[[Any, int], Any]
BitsOf = Callable[[Any], list[bytes]]

SAVED = ({"data": 8}, 3)
LAYOUTS = (
    ({"data": 8}, 0),
    ({"data": 4, "replica": 2}, 2),
    ({"data": 2, "tensor": 4}, 1),  # two devices share each key head
    ({"data": 4, "tensor": 2}, 3),
    ({}, 0),
)


@pytest.fixture
def saved(tmp_path: Path, make_like: MakeLike, fill: Fill) -> tuple[Checkpoints, TrainState]:
    """A checkpoint of step 7, written from 8-way ZeRO-3."""
    axes, zero_stage = SAVED
    state = fill(make_like(axes, zero_stage=zero_stage), 7)
    checkpoints = Checkpoints(tmp_path, CheckpointSpec())
    checkpoints.save(7, state, {"next": 7}, "seed: int = 0\n")
    checkpoints.wait()
    return checkpoints, state


@pytest.mark.parametrize(("axes", "zero_stage"), LAYOUTS, ids=str)
def test_any_layout_reads_what_another_saved_bit_for_bit(
    saved: tuple[Checkpoints, TrainState],
    make_like: MakeLike,
    bits_of: BitsOf,
    axes: dict[str, int],
    zero_stage: int,
) -> None:
    """The values are equal to the saved ones, and every device holds exactly its part under the new
    layout.
    """
    checkpoints, state = saved
    like = make_like(axes, zero_stage=zero_stage)
    got, data_state = checkpoints.restore(7, like)
    assert bits_of(got) == bits_of(state)
    assert data_state == {"next": 7}
    assert jax.tree.structure(got) == jax.tree.structure(state)
    for leaf, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(like), strict=True):
        assert leaf.sharding == wanted.sharding
        share = wanted.sharding.shard_shape(wanted.shape)
        assert {shard.data.shape for shard in leaf.addressable_shards} == {share}
    split = [leaf.sharding.shard_shape(leaf.shape) != leaf.shape for leaf in jax.tree.leaves(got)]
    assert any(split) == (zero_stage > 0 or "tensor" in axes), (
        "the layouts must differ, or this proves nothing"
    )


def test_another_dtype_is_rounded_to_nearest_and_back_again_is_exact(
    saved: tuple[Checkpoints, TrainState], make_like: MakeLike, fill: Fill, bits_of: BitsOf, tmp_path: Path
) -> None:
    """float32 parameters restored as bfloat16 equal numpy's rounding; the moments keep their own dtype."""
    checkpoints, state = saved
    like = make_like({"data": 4}, zero_stage=2, param_dtype="bfloat16")
    got, _ = checkpoints.restore(7, like)
    for new, old in zip(jax.tree.leaves(got.params), jax.tree.leaves(state.params), strict=True):
        assert new.dtype == jax.numpy.bfloat16
        with np.errstate(all="ignore"):
            want = np.asarray(old).astype(new.dtype)
        nan = np.isnan(want)
        assert np.array_equal(np.asarray(new)[~nan].view(np.uint16), want[~nan].view(np.uint16))
        assert np.isnan(np.asarray(new)[nan]).all()
    assert bits_of(got.opt_state) == bits_of(state.opt_state)

    checkpoints.save(8, got, {}, "")
    back, _ = checkpoints.restore(8, make_like({"data": 8}, zero_stage=3))
    for new, old in zip(jax.tree.leaves(back.params), jax.tree.leaves(got.params), strict=True):
        np.testing.assert_array_equal(np.asarray(new), np.asarray(old).astype(np.float32))


def test_arrays_return_to_the_memory_kind_that_is_asked_for(
    saved: tuple[Checkpoints, TrainState], make_like: MakeLike, bits_of: BitsOf
) -> None:
    """Optimizer state restored for offload lands in pinned_host and can be saved from there."""
    checkpoints, state = saved
    like = make_like({"data": 8}, zero_stage=3)
    on_host = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind("pinned_host")),
        like.opt_state,
    )
    got, _ = checkpoints.restore(7, dataclasses.replace(like, opt_state=on_host))
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(got.opt_state)} == {"pinned_host"}
    assert bits_of(got) == bits_of(state)
    checkpoints.save(8, got, {}, "")
    again, _ = checkpoints.restore(8, like)
    assert bits_of(again) == bits_of(state)


def test_the_parameters_can_be_read_without_the_optimizer(
    saved: tuple[Checkpoints, TrainState], make_like: MakeLike, bits_of: BitsOf
) -> None:
    """Export and sampling need a third of the bytes."""
    checkpoints, state = saved
    like = make_like({}, zero_stage=0)
    got = checkpoints.restore_part(7, {"params": like.params})
    assert set(got) == {"params"}
    assert bits_of(got["params"]) == bits_of(state.params)
    with pytest.raises(ValueError, match=r"(?s)another model: \d+ of \d+.*params\.embed_VD"):
        checkpoints.restore_part(7, {"params": make_like({}, zero_stage=0, vocab_size=512).params})
