"""The constructor stage's last step: host batches to global arrays on the mesh, ahead of the consumer."""

import collections
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jtrain.dims import Batch
from jtrain.mesh import BATCH_AXES, shard_size


def put_batch(batch: Batch, mesh: Mesh) -> Batch:
    """A host batch as global arrays: sequences split over replica, data and expert, positions over context.

    Every process passes the same global batch; each device is sent its own block and no other.

    Raises:
      ValueError: `data.global_batch` or `data.seq_len` does not split evenly over the mesh.
    """
    rows, length = batch.token_BL.shape
    shape = dict(mesh.shape)
    shard_size("data.global_batch", rows, shape, BATCH_AXES)
    shard_size("data.seq_len", length, shape, ("context",))
    sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES, "context"))

    def place(array: Any) -> jax.Array:
        host = np.asarray(array)
        # Asks only for this process's blocks; on one process also quicker than device_put: 0.17 ms against 0.20 for
        # 16 x 256 on 8 emulated devices, 0.06 against 0.11 on one.
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    with jax.transfer_guard_host_to_device("allow"):  # this transfer is meant, also where none by accident may happen
        return jax.tree.map(place, batch)


@runtime_checkable
class Batches(Protocol):
    """What `prefetch` reads: host batches, and the state that leads to the next one."""

    def __next__(self) -> Batch: ...

    def state(self) -> dict[str, Any]: ...


def prefetch(batches: Batches, put: Callable[[Batch], Batch], *, depth: int = 2) -> "Prefetch":
    """Builds and places up to `depth` batches ahead of the consumer, on one thread.

    Yields `(batch, state_after, wait_ms)`: the batch on device, the data state to save once that batch has been used,
    and how long the consumer waited for it. Close it, or use it as a context manager.
    """
    return Prefetch(batches, put, depth)


class Prefetch:
    """See `prefetch`. At most `depth` batches are ready or in the making, however slow the consumer is."""

    def __init__(self, batches: Batches, put: Callable[[Batch], Batch], depth: int) -> None:
        assert depth >= 1, depth
        self._ready: collections.deque[tuple[Batch, dict[str, Any]]] = collections.deque()
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._depth = depth
        self._thread = threading.Thread(target=self._produce, args=(batches, put), name="data-prefetch", daemon=True)
        self._thread.start()

    def _produce(self, batches: Batches, put: Callable[[Batch], Batch]) -> None:
        try:
            while True:
                with self._changed:  # wait for room first: building before that would hold one batch more
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                    if self._closed:
                        return
                item = (put(next(batches)), batches.state())
                with self._changed:
                    self._ready.append(item)
                    self._changed.notify_all()
        except BaseException as error:  # handed to the consumer, StopIteration included
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def __iter__(self) -> Iterator[tuple[Batch, dict[str, Any], float]]:
        return self

    def __next__(self) -> tuple[Batch, dict[str, Any], float]:
        """Raises what the thread raised, after the batches before it."""
        start_s = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error or self._closed)
            if self._closed:
                raise RuntimeError("this prefetch is closed")
            if not self._ready:
                assert self._error is not None
                raise self._error
            batch, state = self._ready.popleft()
            self._changed.notify_all()
        return batch, state, (time.perf_counter() - start_s) * 1e3

    def close(self) -> None:
        """Stops the thread, waits for it and lets go of the batches that were ready. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._ready.clear()

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
