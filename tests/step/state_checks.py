"""Checks that hold for every layout and every option, so each run that a test compares ends with them."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jtrain.layout.dims import Batch
from jtrain.step.guard import LEFT_OUT, GuardState
from jtrain.step.state import TrainState


def assert_copies_agree(tree: Any) -> None:
    """The devices that hold the same part of an array hold the same bits of it.

    A sum that leaves out an axis gives each device along it a sum of its own, and a comparison of global
    arrays reads only the first one's.
    """
    for path, array in jax.tree_util.tree_leaves_with_path(tree):
        first: dict[str, bytes] = {}
        for shard in array.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            assert first.setdefault(str(shard.index), bits) == bits, (
                f"{jax.tree_util.keystr(path)}: {shard.device}"
            )


def assert_a_rejected_step_changes_nothing(step: Any, state: TrainState, batch: Batch) -> None:
    """Of parameters, moments and histories of 8-bit matmuls every bit stays; the step and the guard count
    it.
    """
    guard, number = state.guard, int(state.step) + 1
    assert isinstance(guard, GuardState)
    left_out: Any = np.zeros(LEFT_OUT, np.int32)
    left_out[3] = number
    state = dataclasses.replace(
        state, guard=dataclasses.replace(guard, left_out=jax.device_put(left_out, guard.left_out.sharding))
    )
    before = jax.device_get((state.params, state.opt_state, state.scaling))
    skipped = int(guard.skipped)
    after, metrics = step(state, batch)
    assert not bool(metrics["applied"])
    assert isinstance(after.guard, GuardState)
    assert (int(after.step), int(after.guard.skipped)) == (number, skipped + 1)
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get((after.params, after.opt_state, after.scaling)), before
    )
