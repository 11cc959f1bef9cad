"""Lengths of the documents of a source that a planner can use, as they arrive from loaders."""

import dataclasses

import numpy as np
from jaxtyping import Int

LENGTHS_AT_A_TIME = 256
"""Lengths of a prepared source looked up in one call: a call takes as long as a thousand lengths."""

_UNKNOWN = -1


@dataclasses.dataclass
class KnownLengths:
    """Known lengths of documents first, first + 1, ... of a source.

    lengths: lengths of documents from `first` on; `_UNKNOWN` for those that have not arrived, though later
      ones have.
    end: first document whose length is not known.
    """

    first: int
    lengths: Int[np.ndarray, " n"]
    end: int

    @classmethod
    def nothing(cls, cursor: int) -> "KnownLengths":
        return cls(cursor, np.zeros(0, np.int32), cursor)

    def add(self, numbers: Int[np.ndarray, " n"], lengths: Int[np.ndarray, " n"]) -> None:
        """Adds the lengths of some documents, ascending, in whatever order they arrive."""
        stop, have = int(numbers[-1]) + 1, self.first + len(self.lengths)
        if int(numbers[0]) == have == self.end and stop - have == len(
            numbers
        ):  # the next run, whole: nearly always
            self.lengths, self.end = np.concatenate([self.lengths, lengths]), stop
            return
        if stop > have:
            self.lengths = np.concatenate([self.lengths, np.full(stop - have, _UNKNOWN, np.int32)])
        self.lengths[numbers - self.first] = lengths
        if int(numbers[0]) == self.end:
            unknown = self.lengths[self.end - self.first :] == _UNKNOWN
            self.end += int(np.argmax(unknown)) if unknown.any() else len(unknown)

    def at(self, number: int, count: int) -> Int[np.ndarray, " known"]:
        """Returns the lengths of at most `count` documents from `number` on, which is before `end`."""
        return self.lengths[number - self.first : min(number + count, self.end) - self.first]

    def drop_before(self, number: int) -> None:
        """Drops lengths before `number`."""
        if number > self.first:
            self.lengths = self.lengths[number - self.first :]
            self.first, self.end = number, max(self.end, number)
