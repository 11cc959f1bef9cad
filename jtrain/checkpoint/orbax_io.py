"""Reads the arrays of a checkpoint with Orbax, which takes 0.8 s to import: modules that need it are imported
late.
"""

import functools
import os
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

from jtrain.checkpoint import layer_order
from jtrain.checkpoint.array_files import by_keys
from jtrain.runtime import stores
from jtrain.runtime.stores import in_store

_SCHEMES = ("gs://", "s3://")


def restore(path: Path, like: Any, *, only_some: bool = False, order: tuple[int, ...] | None = None) -> Any:
    """Reads the arrays at `path` with the shapes, dtypes and shardings of `like`; each device reads only its
    part.

    order: as `Checkpoints.layer_order`.
    """
    # Before Orbax opens anything: its own table knows gs:// alone.
    if in_store(path):
        _teach_orbax()
    tree = _nested(like)
    args = ocp.args.PyTreeRestore(
        item=tree,
        restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
        partial_restore=only_some,
    )
    # `ocp.Checkpointer` would wait for all processes, for ever if one of them cannot read its part.
    reader = _handler(ocp.type_handlers.ArrayHandler() if order is None else _PlacedArrays(order))
    try:
        restored = jax.block_until_ready(reader.restore(epath.Path(path), args=args))
    finally:
        reader.close()
    # By keys, not by position: JAX sorts the keys of dicts, and a dataclass's fields have their own order.
    arrays = dict(by_keys(restored))
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[keys] for keys, _ in by_keys(like)])


@functools.cache
def _teach_orbax() -> None:
    """Lets Orbax read arrays behind s3:// as well: of all stores, it hands only gs:// to TensorStore."""

    def is_url(directory: str) -> bool:
        return directory.startswith(_SCHEMES)

    def normalize(path: str) -> str:
        text = os.path.normpath(path)
        # `normpath` has made one slash of two.
        return text.replace(":/", "://", 1) if path.startswith(_SCHEMES) else text

    # Orbax has no setting for other schemes: three of its functions are replaced.
    gcs_utils.get_kvstore_for_gcs = stores.spec
    tensorstore_utils._use_gcs_driver = is_url
    tensorstore_utils._normalize_path = normalize


def _nested(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a pytree in nested dicts, without empty branches, which Orbax would count as
    content.
    """
    nested: dict[str, Any] = {}
    for (*parents, last), leaf in by_keys(tree):
        branch = nested
        for key in parents:
            branch = branch.setdefault(key, {})
        branch[last] = leaf
    return nested


class _PlacedArrays(ocp.type_handlers.ArrayHandler):
    """Reader of a pipelined run's state: layers go to their places, leaf by leaf."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self._order = order

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        arrays_by_name: dict[str, jax.Array] = {}
        unplaced: list[tuple[Any, Any]] = []
        for info, arg in zip(infos, args, strict=True):
            like = jax.ShapeDtypeStruct(arg.global_shape, arg.dtype, sharding=arg.sharding)
            if not layer_order.is_placed(like):
                unplaced.append((info, arg))
                continue
            # Chunks are files here, not entries of an OCDBT database.
            spec = ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=False)
            stored = await ts.open(spec, open=True, context=info.ts_context)
            arrays_by_name[info.name] = await layer_order.read_placed(stored, like, self._order)
        if unplaced:
            unplaced_arrays = await super().deserialize(
                *(list(column) for column in zip(*unplaced, strict=True))
            )
            arrays_by_name |= {
                info.name: array for (info, _), array in zip(unplaced, unplaced_arrays, strict=True)
            }
        # In the order in which Orbax asked: it pairs them by position.
        return [arrays_by_name[info.name] for info in infos]


def _handler(arrays: ocp.type_handlers.ArrayHandler) -> ocp.PyTreeCheckpointHandler:
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(use_zarr3=True, type_handler_registry=registry)
