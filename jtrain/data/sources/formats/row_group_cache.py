"""Cache of decoded row groups, one for all sources of a process."""

import collections
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

_HELD_OVER_KEPT = 4
"""Most bytes of row groups that `RowGroupCache.hold` keeps decoded, over those of the cache.

With the default window that is 1 GiB, enough for 8 sources whose row groups have a million short texts. What
is more is decoded again when it is read: hundreds of sources may have row groups, of which windows are never
smaller, far beyond what the user has given them.
"""


class RowGroupCache:
    """Cache of decoded row groups, safe to share between threads.

    It keeps the last ones used, as many as fit, and finds any other one that is held elsewhere.

    Attributes:
      decoded: row groups decoded so far.
    """

    def __init__(self, max_bytes: int) -> None:
        self.decoded = 0
        self.held_bytes = 0
        self._max_bytes = max_bytes
        self.kept_bytes = 0
        self._groups: collections.OrderedDict[tuple[Any, ...], DecodedColumns] = collections.OrderedDict()
        self._alive: weakref.WeakValueDictionary[tuple[Any, ...], DecodedColumns] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.Lock()

    def get(self, key: tuple[Any, ...], read: Callable[[], "DecodedColumns"]) -> "DecodedColumns":
        """Returns the columns under `key`, calling `read` if none are alive; keeps the latest at any size.

        Columns that are held elsewhere count here only as long as the cache keeps them too; `hold` has a
        limit of its own.
        """
        with self._lock:
            # The lock is held while `read` decodes: two threads must not decode the same group at a time.
            if key in self._groups:
                self._groups.move_to_end(key)
                return self._groups[key]
            # Dropped from the cache but alive in a window that holds it: no need to decode it again.
            if (columns := self._alive.get(key)) is None:
                columns = self._alive[key] = read()
                self.decoded += 1
            self._groups[key] = columns
            self.kept_bytes += columns.nbytes
            # The group just read stays whatever its size, or each of its rows would decode it anew.
            while self.kept_bytes > self._max_bytes and len(self._groups) > 1:
                self.kept_bytes -= self._groups.popitem(last=False)[1].nbytes
            return columns

    def hold(self, columns: "DecodedColumns") -> "Held | None":
        """Returns an object that keeps the columns decoded while it lives; None if too much is held."""
        if self.held_bytes + columns.nbytes > _HELD_OVER_KEPT * self._max_bytes:
            return None
        held = Held(columns)
        self.held_bytes += columns.nbytes
        # On the holder and not the columns: two holders of the same columns count twice, and end apart.
        weakref.finalize(held, self._release, columns.nbytes)
        return held

    def _release(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes

    def drop(self, file_key: Any) -> None:
        """Drops all columns whose key starts with `file_key`."""
        with self._lock:
            for key in [key for key in self._groups if key[0] == file_key]:
                self.kept_bytes -= self._groups.pop(key).nbytes


class Held:
    """Decoded columns that somebody needs again."""

    def __init__(self, columns: "DecodedColumns") -> None:
        self._columns = columns


class DecodedColumns(dict[str, Any]):
    """Decoded columns of a row group by name, cached together since they are read together."""

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.values())


@functools.cache
def shared_cache(max_bytes: int) -> RowGroupCache:
    """Returns this process's cache of that size, shared by its sources so that one limit bounds them all."""
    return RowGroupCache(max_bytes)
