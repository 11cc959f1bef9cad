"""Layers of a pipelined run's state in the order of the model, which is the order of every checkpoint.

A schedule with several chunks per stage permutes the layers of the state, and stages of unequal length pad it
(`jtrain.pipeline.pipeline_layout`). Files hold the model's own layers in ascending order, so that a
checkpoint does not know the number of stages: rows are reordered as each file is written and as each device's
part is read. No second copy of the state exists.

A leaf is in the order of the stages if `stage` alone splits its first dimension.
"""

import math
from typing import Any

import jax
import numpy as np

from jtrain.checkpoint.array_files import by_keys
from jtrain.checkpoint.array_writer import DescribedLeaf, describe
from jtrain.checkpoint.host_copy import ShardPart, Splitter, first_element

type LayerOrder = tuple[int, ...]
"""Layer of the model at each place of the state's leading dimension; -1 where there is none."""


def is_placed(leaf: Any) -> bool:
    """True if an array's, or abstract array's, first dimension holds layers in the order of the stages."""
    spec = getattr(leaf.sharding, "spec", ())
    return bool(leaf.shape) and len(spec) > 0 and spec[0] == "stage"


def checkpoint_shapes(tree: Any, order: LayerOrder | None) -> Any:
    """Returns shapes, dtypes and shardings of a pytree of arrays as a checkpoint holds them.

    The first dimension of a leaf with reordered layers is not split: their number need not be a multiple of
    the stages.
    """
    if order is None:
        return tree
    # Padding rows (-1) are not layers of the model and are not stored.
    layers = sum(layer >= 0 for layer in order)

    def leaf(array: Any) -> Any:
        if not is_placed(array):
            return array
        mesh, spec = array.sharding.mesh, array.sharding.spec
        unsplit_sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, *spec[1:]))
        return jax.ShapeDtypeStruct((layers, *array.shape[1:]), array.dtype, sharding=unsplit_sharding)

    return jax.tree.map(leaf, tree)


def describe_leaves(state: Any, order: LayerOrder | None) -> list[DescribedLeaf]:
    """Returns one description for each leaf of a state; a chunk of a reordered leaf holds layers that
    follow one another in the state as well.
    """
    if order is None:
        return describe(state)
    placed = [(keys, array) for keys, array in by_keys(state) if is_placed(array)]
    # Chunks of one leaf must have one shape, so each run is cut into parts that divide them all.
    group_sizes = {
        keys: _common_group_size(order, array.sharding.shard_shape(array.shape)[0]) for keys, array in placed
    }
    return describe(checkpoint_shapes(state, order), group_sizes)


def splitter(order: LayerOrder | None) -> Splitter:
    """Returns the function that divides a shard into parts with the places of the model's layers, without a
    copy.

    Identity layers are in no part.
    """

    def parts(array: jax.Array, shard: Any) -> list[ShardPart]:
        start = first_element(shard.index)
        shape = shard.data.shape
        if order is None or not is_placed(array):
            return [ShardPart(0, start, shape)]
        # Rows are the leading dimension, so a run of them is contiguous in the shard's memory.
        rows, row_bytes = shape[0], math.prod(shape[1:]) * shard.data.dtype.itemsize
        step = _common_group_size(order, rows)
        return [
            ShardPart((begin + offset) * row_bytes, (layer + offset, *start[1:]), (step, *shape[1:]))
            for begin, layer, length in _runs(order[start[0] : start[0] + rows])
            for offset in range(0, length, step)
        ]

    return parts


def _common_group_size(order: LayerOrder, rows: int) -> int:
    """Largest number of layers that divides the start and the length of every run in shards of `rows`
    places.
    """
    runs = (run for first in range(0, len(order), rows) for run in _runs(order[first : first + rows]))
    # Both count: a part starts at a multiple of the step in the file, and ends with its run.
    return math.gcd(*(boundary for _, layer, length in runs for boundary in (layer, length)))


def _runs(order: LayerOrder) -> list[tuple[int, int, int]]:
    """Returns first row, first layer and length of each longest run of consecutive layers.

    Example: (0, 1, -1, 6, 7, 2) -> [(0, 0, 2), (3, 6, 2), (5, 2, 1)].
    """
    runs: list[tuple[int, int, int]] = []
    for row, layer in enumerate(order):
        if layer < 0:
            continue
        # Row and layer both continue the last run: its end is start + length, in the shard and in the model.
        if runs and row == sum(runs[-1][::2]) and layer == sum(runs[-1][1:]):
            begin, start, length = runs.pop()
            runs.append((begin, start, length + 1))
        else:
            runs.append((row, layer, 1))
    return runs


async def read_placed(stored: Any, like: jax.ShapeDtypeStruct, order: LayerOrder) -> jax.Array:
    """Reads a leaf into the order of the stages; a process reads only the parts of its own devices.

    Args:
      stored: the opened TensorStore of the leaf, whose layers are those of the model in ascending order.
      like: shape, dtype and sharding in the state.
    """
    sharding = like.sharding
    assert sharding is not None
    holders: dict[str, list[tuple[jax.Device, Any]]] = {}
    # Devices that hold the same index share one read.
    for device, index in sharding.addressable_devices_indices_map(like.shape).items():
        holders.setdefault(str(index), []).append((device, index))
    arrays: list[jax.Array] = []
    for replica_holders in holders.values():
        # In a loop with await, not gathered: two parts at once could exceed the host's memory.
        part = await _read_part(stored, like, replica_holders[0][1], order)
        for device, _ in replica_holders:
            single = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            arrays.append(jax.device_put(part, single))
    return jax.make_array_from_single_device_arrays(like.shape, sharding, arrays)


async def _read_part(stored: Any, like: jax.ShapeDtypeStruct, index: Any, order: LayerOrder) -> np.ndarray:
    rows, *other_indices = index
    layers = np.asarray(order[rows])
    # Zeros: an identity layer of the padding stays zero, as `init` makes it.
    assert like.sharding is not None
    part = np.zeros(like.sharding.shard_shape(like.shape), like.dtype)
    # TensorStore reads by a list of layers: only those that are stored, in the order of the stages.
    stored_layers = await stored[(layers[layers >= 0], *other_indices)].read()
    part[layers >= 0] = stored_layers.astype(like.dtype)
    return part
