"""Reads the arrays of a checkpoint with Orbax. Only this module imports orbax (0.8 s), when first needed."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from jtrain.checkpoint import files
from jtrain.runtime.store_paths import in_store


def restore(path: Path, like: Any, *, only_some: bool = False, order: tuple[int, ...] | None = None) -> Any:
    """Reads the arrays at `path` with the shapes, dtypes and shardings of `like`; each device reads only its part.

    order: as `Checkpoints.layer_order`.
    """
    if in_store(path):
        from jtrain.checkpoint.object_stores import teach_orbax

        teach_orbax()
    tree = _nested(like)
    args = ocp.args.PyTreeRestore(
        item=tree,
        restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
        partial_restore=only_some,
    )
    # `ocp.Checkpointer` would wait for all processes, for ever if one of them cannot read its part.
    reader = _handler(ocp.type_handlers.ArrayHandler() if order is None else _PlacedArrays(order))
    try:
        found = jax.block_until_ready(reader.restore(epath.Path(path), args=args))
    finally:
        reader.close()
    arrays = dict(by_keys(found))
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[keys] for keys, _ in by_keys(like)])


def by_keys(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Returns every leaf with the keys of its path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    simple = jax.tree_util.keystr
    return [(tuple(simple((key,), simple=True) for key in path), leaf) for path, leaf in flat]


def _nested(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a pytree in nested dicts, without empty branches, which Orbax would count as content.

    A checkpoint from before a new, empty branch existed can therefore still be restored.
    """
    nested: dict[str, Any] = {}
    for (*parents, last), leaf in by_keys(tree):
        branch = nested
        for key in parents:
            branch = branch.setdefault(key, {})
        branch[last] = leaf
    return nested


def leaves(tree: Any) -> dict[str, files.ManifestLeaf]:
    """Returns path joined by dots -> shape and dtype, for a pytree of arrays or of `jax.ShapeDtypeStruct`."""

    def leaf(array: Any) -> files.ManifestLeaf:
        dtype = jnp.dtype(array.dtype)
        return files.ManifestLeaf(tuple(array.shape), dtype.name, math.prod(array.shape) * dtype.itemsize)

    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf(array) for path, array in flat}


def sharding_text(sharding: jax.sharding.Sharding) -> str:
    """Returns a sharding as Orbax notes it, for those who restore without saying which they want."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        return ocp.metadata.NamedShardingMetadata.from_jax_sharding(sharding).to_serialized_string()
    assert isinstance(sharding, jax.sharding.SingleDeviceSharding), sharding
    return ocp.metadata.SingleDeviceShardingMetadata.from_jax_sharding(sharding).to_serialized_string()


class _PlacedArrays(ocp.type_handlers.ArrayHandler):
    """Reader of a pipelined run's state: layers go to their places, leaf by leaf."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self._order = order

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        from jtrain.checkpoint import layer_order  # lazy: it reads `by_keys` from here

        found: dict[str, jax.Array] = {}
        others: list[tuple[Any, Any]] = []
        for info, arg in zip(infos, args, strict=True):
            like = jax.ShapeDtypeStruct(arg.global_shape, arg.dtype, sharding=arg.sharding)
            if not layer_order.is_placed(like):
                others.append((info, arg))
                continue
            spec = ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=bool(info.is_ocdbt_checkpoint))
            stored = await ts.open(spec, open=True, context=info.ts_context)
            found[info.name] = await layer_order.read_placed(stored, like, self._order)
        if others:
            arrays = await super().deserialize(*(list(column) for column in zip(*others, strict=True)))
            found |= {info.name: array for (info, _), array in zip(others, arrays, strict=True)}
        return [found[info.name] for info in infos]


def _handler(arrays: ocp.type_handlers.ArrayHandler) -> ocp.PyTreeCheckpointHandler:
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(use_zarr3=True, type_handler_registry=registry)
