"""The arrays of a checkpoint through Orbax. The only importer of orbax (0.8 s): imported when first needed.

Orbax's `AsyncCheckpointer` copies to host memory before `save` returns and writes in a thread of its own; across
processes it holds the barriers. Its manager of many checkpoints is not used: it purges by directory name alone and has
no place for hashes before the commit.
"""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jtrain import durable
from jtrain.checkpoint import files

CHUNK_BYTES = 64 << 20
"""Largest chunk of an array on disk. Another layout reads whole chunks to get its part; the layers' stacked weights
would otherwise be one chunk per shard, of many GB."""

_TIMEOUT_S = 3600


class Writer:
    """Writes one checkpoint at a time, in the background.

    seal: called in the background, in process 0, with the directory before it gets its final name.
    after: called in the background, in process 0, once it has it.
    """

    def __init__(self, *, seal: Callable[[Path], None], after: Callable[[], None]) -> None:
        class Commit(ocp.path.atomicity.AtomicRenameTemporaryPath):
            async def finalize(self) -> None:
                seal(Path(self.get()))
                await super().finalize()
                durable.sync_directory(Path(self.get_final()).parent)
                after()

        logging.getLogger("absl").addFilter(_without_tracebacks)
        self._orbax = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(state=_handler()),
            timeout_secs=_TIMEOUT_S,
            temporary_path_class=Commit,
        )

    def save(self, path: Path, state: Any, *, force: bool) -> None:
        """Waits for the previous save; returns when every array is on the host. Raises its error, or this one's."""
        tree = _nested(state)
        save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
        # `state` is files.STATE: Orbax makes a directory of each keyword.
        arrays = ocp.args.PyTreeSave(tree, save_args=save_args)
        self._orbax.save(path, args=ocp.args.Composite(state=arrays), force=force)

    def check(self) -> None:
        """Raises the error of a save that failed meanwhile."""
        self._orbax.check_for_errors()

    def wait(self) -> None:
        """Returns when everything is committed, in every process."""
        self._orbax.wait_until_finished()

    def close(self) -> None:
        """Waits, then lets go of Orbax's threads."""
        try:
            self._orbax.close()
        finally:
            logging.getLogger("absl").removeFilter(_without_tracebacks)


def restore(path: Path, like: Any, *, only_some: bool = False) -> Any:
    """The arrays below `path`, with the shapes, dtypes and shardings of `like`; each device reads only its part."""
    tree = _nested(like)
    args = ocp.args.PyTreeRestore(
        item=tree,
        restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
        partial_restore=only_some,
    )
    with ocp.Checkpointer(_handler()) as reader:
        found = jax.block_until_ready(reader.restore(path, args=args))
    arrays = dict(_by_keys(found))
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[keys] for keys, _ in _by_keys(like)])


def _by_keys(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Every leaf with the keys that lead to it."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    simple = jax.tree_util.keystr
    return [(tuple(simple((key,), simple=True) for key in path), leaf) for path, leaf in flat]


def _nested(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree in nested dicts: without branches that hold nothing, which Orbax counts as content.

    So a checkpoint of a state that had fewer kinds of arrays is one of a state that has none of the new ones.
    """
    nested: dict[str, Any] = {}
    for (*parents, last), leaf in _by_keys(tree):
        branch = nested
        for key in parents:
            branch = branch.setdefault(key, {})
        branch[last] = leaf
    return nested


def leaves(tree: Any) -> dict[str, files.Leaf]:
    """Path joined by dots -> what is there, of a pytree of arrays or of `jax.ShapeDtypeStruct`."""

    def leaf(array: Any) -> files.Leaf:
        dtype = jnp.dtype(array.dtype)
        return files.Leaf(tuple(array.shape), dtype.name, math.prod(array.shape) * dtype.itemsize)

    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf(array) for path, array in flat}


def _without_tracebacks(record: logging.LogRecord) -> bool:
    """Drops what Orbax logs of a failed write: 200 lines from three threads. The error itself is raised once, to us."""
    return not (record.exc_info and "orbax" in record.pathname)


def _handler() -> ocp.PyTreeCheckpointHandler:
    # Orbax would let replicas share the copying of what they all hold, by slicing it on the devices first: a compile
    # for each shape (1.1 s for the first save of 100 MB on 8 devices) and memory that a full device does not have.
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    return ocp.PyTreeCheckpointHandler(
        use_zarr3=True,
        use_compression=False,  # weights are noise: zstd gains 7 % and costs 1 s per 100 MB and core
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)),
    )
