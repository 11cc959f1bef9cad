"""Files of the arrays of a checkpoint: zarr version 3 without compression, in the layout that Orbax reads.

    state/_METADATA, _sharding         Orbax's lists of the leaves and of how they were sharded
    state/params.layers.q/zarr.json    shape, dtype and chunk shape of one leaf
    state/params.layers.q/c.0.3        one chunk of it: only its elements, in C order, little-endian

A chunk is a contiguous part of one device's shard, so a file is written straight from the memory of the shard
and its hash is known without reading it back. Orbax's own writer would put all arrays of a process into a few
OCDBT files; it holds them in memory until they are complete, and their hashes are known only after reading
them.
"""

import base64
import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.checkpoint.files import ManifestLeaf

CHUNK_BYTES = 64 << 20
"""Largest chunk, where the dimensions have divisors that allow it. A restore in another layout reads whole
chunks to get its part; without a limit, the stacked weights of all layers would be one chunk per shard, of
many GB."""

LEAVES = "_METADATA"
"""Orbax's list of the leaves."""
SHARDINGS = "_sharding"
"""Orbax's list of how the leaves were sharded."""
SHAPE = "zarr.json"
"""Shape, dtype and chunk shape of a leaf."""
CHUNK = "c"
"""Start of the names of the chunks of a leaf."""


@dataclasses.dataclass(frozen=True)
class StoredChunk:
    """One file, and the bytes of a shard that it holds.

    name: file name within the directory of the leaf.
    """

    name: str
    start_byte: int
    num_bytes: int


def chunk_shape(shard_shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Returns the shape of the chunks of a shard of this shape, each contiguous in C order.

    Every dimension of a chunk divides the shard's. A dimension without a fitting divisor, such as a large
    prime, stays larger than `CHUNK_BYTES` rather than fall into very many small files.
    """
    # An empty dimension counts as 1, so that no product below is 0.
    shape = [max(1, dim) for dim in shard_shape]
    for dim, size in enumerate(shape):
        one_bytes = math.prod(shape[dim + 1 :]) * itemsize  # of one index; earlier dimensions are 1 by now
        # From the outermost dimension inwards: a chunk stays
        # contiguous only if all before the divided one are 1.
        if size * one_bytes <= CHUNK_BYTES:
            break
        # Divisors, since zarr takes one chunk shape for the
        # whole leaf and a shard must end where a chunk ends.
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        fitting = max((d for d in divisors if d * one_bytes <= CHUNK_BYTES), default=1)
        if fitting == 1 and one_bytes > CHUNK_BYTES:
            shape[dim] = 1  # and the next dimension is divided, too
            continue
        # Chunks below 1/16 of the limit would be too many files:
        # then rather the next divisor, past the limit.
        if fitting * one_bytes * 16 < CHUNK_BYTES:
            fitting = min(d for d in divisors if d > fitting)
        shape[dim] = fitting
        break
    return tuple(shape)


def chunks(shard_shape: tuple[int, ...], start: tuple[int, ...], itemsize: int) -> Iterator[StoredChunk]:
    """Yields the files of one shard, in the order of its memory.

    start: index of the shard's first element in the whole array.
    """
    if 0 in shard_shape:
        return
    shape = chunk_shape(shard_shape, itemsize)
    num_bytes = math.prod(shape) * itemsize
    # Chunk indices count over the whole array: `first` is the shard's corner in that grid.
    grid = [range(size // chunk) for size, chunk in zip(shard_shape, shape, strict=True)]
    first = [begin // chunk for begin, chunk in zip(start, shape, strict=True)]
    # `product` runs its last index fastest, as C order does, so `number` counts chunks in memory order.
    for number, index in enumerate(itertools.product(*grid)):
        name = ".".join([CHUNK, *(str(begin + offset) for begin, offset in zip(first, index, strict=True))])
        yield StoredChunk(name, number * num_bytes, num_bytes)


def leaf_metadata(shape: tuple[int, ...], chunk: tuple[int, ...], dtype: np.dtype) -> bytes:
    """Returns the zarr.json of a leaf, as TensorStore writes it."""
    import tensorstore as ts

    metadata = {
        "shape": list(shape),
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }
    # TensorStore writes the document itself, into a store in memory: it adds the fields that zarr requires.
    shared = ts.Context()  # both calls see one store in memory
    memory = ts.KvStore.open({"driver": "memory"}, context=shared).result()
    ts.open(
        {"driver": "zarr3", "kvstore": {"driver": "memory"}, "metadata": metadata},
        create=True,
        context=shared,
    ).result()
    return memory.read(SHAPE).result().value


def orbax_lists(shardings: Mapping[tuple[str, ...], str], *, has_zeros: bool = False) -> dict[str, bytes]:
    """Returns Orbax's files beside the leaves: the list of them, and the shardings that a restore takes by
    default.

    shardings: keys of each leaf, all of dicts -> its sharding as Orbax notes it.
    has_zeros: True if chunks without a file stand for zeros; otherwise Orbax takes them for lost.
    """
    tree = {
        str(keys): {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],  # 2: key of a dict
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
        for keys in shardings
    }
    body = {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": not has_zeros,
        "custom_metadata": None,
    }
    # Orbax names a leaf by the base64 of its dotted path in `_sharding`, and by `str(keys)` in `_METADATA`.
    noted = {base64.b64encode(".".join(keys).encode()).decode(): text for keys, text in shardings.items()}
    return {LEAVES: json.dumps(body).encode(), SHARDINGS: json.dumps(noted).encode()}


def sharding_text(sharding: jax.sharding.Sharding) -> str:
    """Returns a sharding as Orbax notes it, for those who restore without saying which they want."""
    import orbax.checkpoint as ocp  # 0.8 s

    if isinstance(sharding, jax.sharding.NamedSharding):
        return ocp.metadata.NamedShardingMetadata.from_jax_sharding(sharding).to_serialized_string()
    assert isinstance(sharding, jax.sharding.SingleDeviceSharding), sharding
    return ocp.metadata.SingleDeviceShardingMetadata.from_jax_sharding(sharding).to_serialized_string()


def by_keys(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Returns every leaf with the keys of its path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    simple = jax.tree_util.keystr
    # `simple=True`: `q` for a dict key, an attribute and a NamedTuple field alike.
    return [(tuple(simple((key,), simple=True) for key in path), leaf) for path, leaf in flat]


def leaves(tree: Any) -> dict[str, ManifestLeaf]:
    """Returns path joined by dots -> shape and dtype, for a pytree of arrays or of `jax.ShapeDtypeStruct`."""

    def leaf(array: Any) -> ManifestLeaf:
        dtype = jnp.dtype(array.dtype)
        return ManifestLeaf(tuple(array.shape), dtype.name, math.prod(array.shape) * dtype.itemsize)

    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf(array) for path, array in flat}
