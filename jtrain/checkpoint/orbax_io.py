"""Reads the arrays of a checkpoint with Orbax, which takes 0.8 s to import: modules that need it are imported
late.
"""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from jtrain.checkpoint import layer_order
from jtrain.checkpoint.array_files import by_keys
from jtrain.runtime.store_paths import in_store


def restore(path: Path, like: Any, *, only_some: bool = False, order: tuple[int, ...] | None = None) -> Any:
    """Reads the arrays at `path` with the shapes, dtypes and shardings of `like`; each device reads only its
    part.

    order: as `Checkpoints.layer_order`.
    """
    # Before Orbax opens anything: its own table knows gs:// alone.
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
        restored = jax.block_until_ready(reader.restore(epath.Path(path), args=args))
    finally:
        reader.close()
    # By keys, not by position: JAX sorts the keys of dicts, and a dataclass's fields have their own order.
    arrays = dict(by_keys(restored))
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[keys] for keys, _ in by_keys(like)])


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
