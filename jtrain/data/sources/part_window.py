"""Window of parts of a source whose slots are shuffled together; each part is read when a slot of it is."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64


class ReadPart(NamedTuple):
    """Contents of a part that was read.

    ends: slot of the part at which the chunks of each record end.
    per_slot: chunks per slot.
    held: what was decoded to read it, if it may be kept.
    """

    ends: Int64[np.ndarray, " records"]
    per_slot: int
    held: object


class PartWindow:
    """Parts whose slots follow one another.

    Which part a slot belongs to follows from the numbers of slots alone; what it holds is known when its part
    is read. Whatever was decoded to read a part stays alive with the window, as far as its cache allows.

    Args:
      parts: numbers of the parts.
      slots: slots of each part.
      first_record: first record of each part.
      num_records: records of each part.
      read: reads a part, by its number.
    """

    def __init__(
        self,
        parts: Int64[np.ndarray, " parts"],
        slots: Int64[np.ndarray, " parts"],
        first_record: Int64[np.ndarray, " parts"],
        num_records: Int64[np.ndarray, " parts"],
        read: Callable[[int], ReadPart],
    ) -> None:
        self._parts, self._read = parts, read
        self._first_record, self._num_records = first_record, num_records
        self._part_ends = np.cumsum(slots)
        self._part_starts = self._part_ends - slots
        self._first_row = np.cumsum(num_records) - num_records
        # Slot at which the chunks of each record end; that at which its part begins, while that was not read.
        self._ends = np.repeat(self._part_starts, num_records)
        # 0 while a part has not been read.
        self._per_slot = np.zeros(len(parts), np.int64)
        self._held: list[object] = []

    def part_at(self, slot: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Returns the index in this window of the part of each slot."""
        return np.searchsorted(self._part_ends, slot, side="right")

    def locate(
        self, slot: Int64[np.ndarray, " n"]
    ) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Returns the record of each slot, -1 for an empty one, its first chunk there and the number of
        chunks.
        """
        part = self.part_at(slot)
        # Sorted, so that parts are read in the order in which they lie in their files.
        for unread in sorted(set(part[self._per_slot[part] == 0].tolist())):
            part_content = self._read(int(self._parts[unread]))
            self._held.append(part_content.held)
            start = int(self._first_row[unread])
            # They held the slot at which the part begins; the part's own ends count from 0.
            self._ends[start : start + len(part_content.ends)] += part_content.ends
            self._per_slot[unread] = part_content.per_slot
        row = np.searchsorted(self._ends, slot, side="right")
        record_in_part = row - self._first_row[part]
        # Slots behind the last record of their part are empty: the number of slots is an upper bound.
        full = record_in_part < self._num_records[part]
        # The slot at which the record begins is that at which the one before it ends.
        first_slot = np.where(record_in_part > 0, self._ends[row - 1], self._part_starts[part])
        per_slot = self._per_slot[part]
        record = np.where(full, self._first_record[part] + record_in_part, -1)
        return record, np.where(full, (slot - first_slot) * per_slot, 0), np.where(full, per_slot, 1)
