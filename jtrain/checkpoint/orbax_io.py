"""Writes and reads the arrays of a checkpoint with Orbax. Only this module imports orbax (0.8 s), when first needed.

Orbax's `AsyncCheckpointer` copies arrays to host memory before `save` returns, writes them in its own thread, and
synchronises processes. Its `CheckpointManager` is not used, because it deletes by directory name alone and cannot hash
files before the commit.
"""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from jtrain.checkpoint import files
from jtrain.runtime import atomic_io

CHUNK_BYTES = 64 << 20
"""Largest chunk of an array on disk. A restore in another layout reads whole chunks to get its part; without a limit,
the stacked weights of all layers would be one chunk per shard, of many GB."""

_TIMEOUT_S = 3600


class Writer:
    """Writes one checkpoint at a time in the background.

    seal: called with the directory before it gets its final name; in the background, in process 0.
    after: called after the directory got its final name; in the background, in process 0.
    """

    def __init__(self, *, seal: Callable[[Path], None], after: Callable[[], None]) -> None:
        class Commit(ocp.path.atomicity.AtomicRenameTemporaryPath):
            async def finalize(self) -> None:
                seal(Path(self.get()))
                await super().finalize()
                atomic_io.sync_directory(Path(self.get_final()).parent)
                after()

        logging.getLogger("absl").addFilter(_without_tracebacks)
        self._orbax = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(state=_handler()),
            timeout_secs=_TIMEOUT_S,
            temporary_path_class=Commit,
        )

    def save(self, path: Path, state: Any, *, force: bool) -> None:
        """Waits for the previous save, starts this one, and returns when every array is on the host.

        Raises the error of either save.
        """
        tree = _nested(state)
        save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
        # The keyword `state` must equal files.STATE: Orbax makes a directory for each keyword.
        arrays = ocp.args.PyTreeSave(tree, save_args=save_args)
        self._orbax.save(path, args=ocp.args.Composite(state=arrays), force=force)

    def check(self) -> None:
        """Raises the error of a background save that has failed."""
        self._orbax.check_for_errors()

    def wait(self) -> None:
        """Returns when the last save is committed by all processes."""
        self._orbax.wait_until_finished()

    def close(self) -> None:
        """Waits for the last save, then ends Orbax's threads."""
        try:
            self._orbax.close()
        finally:
            logging.getLogger("absl").removeFilter(_without_tracebacks)


def restore(path: Path, like: Any, *, only_some: bool = False) -> Any:
    """Reads the arrays at `path` with the shapes, dtypes and shardings of `like`; each device reads only its part."""
    tree = _nested(like)
    args = ocp.args.PyTreeRestore(
        item=tree,
        restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
        partial_restore=only_some,
    )
    # `ocp.Checkpointer` would wait for all processes, for ever if one of them cannot read its part.
    reader = _handler()
    try:
        found = jax.block_until_ready(reader.restore(epath.Path(path), args=args))
    finally:
        reader.close()
    arrays = dict(_by_keys(found))
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[keys] for keys, _ in _by_keys(like)])


def _by_keys(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Returns every leaf with the keys of its path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    simple = jax.tree_util.keystr
    return [(tuple(simple((key,), simple=True) for key in path), leaf) for path, leaf in flat]


def _nested(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a pytree in nested dicts, without empty branches, which Orbax would count as content.

    A checkpoint from before a new, empty branch existed can therefore still be restored.
    """
    nested: dict[str, Any] = {}
    for (*parents, last), leaf in _by_keys(tree):
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


def written_by_process(state: Any) -> tuple[int, ...]:
    """Returns the bytes of `state` that each process writes: every shard is written once, by its first device's."""
    written = [0] * jax.process_count()
    for array in jax.tree.leaves(state):
        first: dict[str, jax.Device] = {}
        for device, index in array.sharding.devices_indices_map(array.shape).items():
            first.setdefault(str(index), device)
        shard_bytes = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for device in first.values():
            written[device.process_index] += shard_bytes
    return tuple(written)


def _without_tracebacks(record: logging.LogRecord) -> bool:
    """Drops the tracebacks that Orbax logs for a failed write, 200 lines; it raises the error anyway."""
    return not (record.exc_info and "orbax" in record.pathname)


def _handler() -> ocp.PyTreeCheckpointHandler:
    # With replica-parallel saving, Orbax would slice replicated arrays on the devices first. That takes one compile per
    # shape (1.1 s for the first save of 100 MB on 8 devices) and memory that a full device does not have.
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    return ocp.PyTreeCheckpointHandler(
        use_zarr3=True,
        use_compression=False,  # weights hardly compress: zstd saves 7 % and takes 1 s per 100 MB and core
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)),
    )
