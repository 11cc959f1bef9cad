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

    Example: after documents 5, 6 and then 9, 10 have arrived with `first` = 5, lengths is
    [l5, l6, -1, -1, l9, l10] and `end` is 7; the arrival of 7 and 8 moves `end` to 11.
    """

    first: int
    lengths: Int[np.ndarray, " n"]
    end: int

    @classmethod
    def nothing(cls, cursor: int) -> "KnownLengths":
        return cls(cursor, np.zeros(0, np.int32), cursor)

    def add(self, numbers: Int[np.ndarray, " n"], lengths: Int[np.ndarray, " n"]) -> None:
        """Adds the lengths of some documents, ascending, in whatever order they arrive."""
        stop, known_stop = int(numbers[-1]) + 1, self.first + len(self.lengths)
        # Nearly always: the run that follows the known ones, without a gap.
        if int(numbers[0]) == known_stop == self.end and stop - known_stop == len(numbers):
            self.lengths, self.end = np.concatenate([self.lengths, lengths]), stop
            return
        if stop > known_stop:
            self.lengths = np.concatenate([self.lengths, np.full(stop - known_stop, _UNKNOWN, np.int32)])
        self.lengths[numbers - self.first] = lengths
        # Runs arrive in any order: this one may close a gap, and make those behind it usable.
        if int(numbers[0]) == self.end:
            is_unknown = self.lengths[self.end - self.first :] == _UNKNOWN
            self.end += int(np.argmax(is_unknown)) if is_unknown.any() else len(is_unknown)

    def at(self, number: int, count: int) -> Int[np.ndarray, " known"]:
        """Returns the lengths of at most `count` documents from `number` on, which is before `end`."""
        return self.lengths[number - self.first : min(number + count, self.end) - self.first]

    def drop_before(self, number: int) -> None:
        """Drops lengths before `number`."""
        if number > self.first:
            self.lengths = self.lengths[number - self.first :]
            # A cursor may jump beyond `end` when a source ends at its last epoch.
            self.first, self.end = number, max(self.end, number)
