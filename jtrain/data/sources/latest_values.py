"""Cache of the values that a process has used last, within a number of bytes."""

import collections
from collections.abc import Hashable


class LatestValues[Value]:
    """Values by key; those that were added or asked for the longest ago go.

    Args:
      most_bytes: bytes of all values, by what `add` says of each.
    """

    def __init__(self, most_bytes: int) -> None:
        self._values: collections.OrderedDict[Hashable, tuple[Value, int]] = collections.OrderedDict()
        self._most_bytes = most_bytes
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> Value | None:
        """Returns a value, which is then the last to go; None if it is not there."""
        if (entry := self._values.get(key)) is None:
            return None
        self._values.move_to_end(key)
        return entry[0]

    def add(self, key: Hashable, value: Value, size_bytes: int) -> None:
        """Keeps a value, and drops others if they are too many."""
        if key in self._values:
            return
        self._values[key] = value, size_bytes
        self._bytes += size_bytes
        # The newest one stays whatever its size, or it would be made anew each time.
        while self._bytes > self._most_bytes and len(self._values) > 1:
            self._bytes -= self._values.popitem(last=False)[1][1]
