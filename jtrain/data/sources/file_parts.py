"""Stripes of large files: ranges of bytes whose records are found separately."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

import numpy as np
from jaxtyping import Int, Int64

from jtrain.data.sources.formats import Records
from jtrain.data.sources.formats.suffix import format_of
from jtrain.data.sources.source import Source
from jtrain.data.sources.storage import StoredFile

STRIPE_BYTES = 1 << 18
"""Bytes of a stripe, whose records are those that begin in it.

A window draws its stripes from all over a source, so a small stripe mixes better: records that lie side by
side in a file are mostly alike. 256 KiB are read at the speed of a whole file from disks and stores alike.
"""


def stripe_bytes(file: StoredFile, source: Source) -> int:
    """Returns the bytes of the stripes of a file; 0 if it is one part, of whatever size."""
    kind, compression = format_of(file.name, field="path")
    kind = (file.kind or kind) if source.format == "auto" else source.format
    if compression is not None:
        return 0  # can only be read from its start
    if kind == "jsonl":
        return STRIPE_BYTES
    if kind == "text" and not file.is_remote:
        # Whole pieces: they begin at multiples of their size.
        return max(STRIPE_BYTES // source.text_piece_bytes, 1) * source.text_piece_bytes
    return 0  # no byte of it surely begins a record


class FileParts(Sequence[StoredFile]):
    """Files and stripes of files by number, in the order of their files; made when they are asked for.

    Args:
      files: the files.
      stripe_bytes: bytes of the stripes of each file; 0 for a file that is one part.
      num_parts: takes only so many parts, the first ones; None: all.

    Attributes:
      starts, ends: number of the first part of each file, and of the first one behind it.
    """

    def __init__(
        self, files: Sequence[StoredFile], stripe_bytes: Sequence[int], *, num_parts: int | None = None
    ) -> None:
        self.files = files
        self._stripe_bytes = np.asarray(stripe_bytes, np.int64)
        self._file_sizes = np.asarray([max(file.size_bytes, 0) for file in files], np.int64)
        counts = -(-self._file_sizes // np.maximum(self._stripe_bytes, 1))
        # An empty file is one part too, so that every file has a number.
        counts = np.where(self._stripe_bytes > 0, np.maximum(counts, 1), 1)
        self.ends = np.cumsum(counts)
        self.starts = self.ends - counts
        total = int(counts.sum())
        self._count = total if num_parts is None else min(num_parts, total)

    def to_json(self) -> dict[str, Any]:
        """Returns what the names of the parts follow from, in the form that `from_json` reads."""
        names = {"names": [file.name for file in self.files]}
        if int(self.ends[-1]) == len(self.files):
            return names
        return {**names, "sizes": self._file_sizes.tolist(), "stripe_bytes": self._stripe_bytes.tolist()}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "FileParts":
        """Returns parts for their names alone: the files need not be there."""
        names = saved["names"]
        stripes = saved.get("stripe_bytes", [0] * len(names))
        sizes = saved["sizes"] if "stripe_bytes" in saved else stripes
        files = [StoredFile(n, n, size, "", n) for n, size in zip(names, sizes, strict=True)]
        return cls(files, stripes)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, number: int) -> StoredFile: ...
    @overload
    def __getitem__(self, number: slice) -> list[StoredFile]: ...
    def __getitem__(self, number: int | slice) -> StoredFile | list[StoredFile]:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        number %= len(self)
        index = int(np.searchsorted(self.ends, number, side="right"))
        file, start = self.files[index], int(self.starts[index])
        if int(self.ends[index]) - start == 1:
            return file
        begin = (number - start) * int(self._stripe_bytes[index])
        end = min(begin + int(self._stripe_bytes[index]), file.size_bytes)
        return dataclasses.replace(file, span=(begin, end))

    def file_of(self, numbers: Int[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Returns the number of the file to which each part belongs."""
        return np.searchsorted(self.ends, numbers, side="right")

    def sizes(self) -> Int64[np.ndarray, " parts"]:
        """Returns the bytes of each part; 0 where a server does not tell."""
        counts = self.ends - self.starts
        sizes = np.repeat(self._stripe_bytes, counts)
        # The last part of each file has what the others leave.
        sizes[self.ends - 1] = self._file_sizes - (counts - 1) * self._stripe_bytes
        return sizes[: self._count]

    def record_ends(self, opened: Iterable[Records]) -> Int64[np.ndarray, " parts"]:
        """Returns the number of records up to the end of each part, of files that were opened as a whole."""
        record_ends, first = np.zeros(len(self), np.int64), 0
        bounds = zip(self.starts.tolist(), self.ends.tolist(), self._stripe_bytes.tolist(), strict=True)
        for records, (start, end, stripe) in zip(opened, bounds, strict=True):
            if end - start > 1:
                offsets = np.arange(1, end - start) * stripe
                # Record ends at each stripe's border; the last part ends with the file.
                record_ends[start : end - 1] = first + records.count_before(offsets)
            first += len(records)
            record_ends[end - 1] = first
        return record_ends


class PartNames(Sequence[str]):
    """Names that identify parts; the first part of a file has the file's name, so that it keeps it as it
    grows.
    """

    def __init__(self, parts: FileParts) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return len(self._parts)

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        file = self._parts[number]
        return file.name if file.span is None or not file.span[0] else f"{file.name}@{file.span[0]}"


def part_names(parts: FileParts) -> Sequence[str]:
    """Returns the names that identify parts: a list of the files' names where no file has stripes."""
    if int(parts.ends[-1]) > len(parts.files):
        return PartNames(parts)
    # Not over `parts`, which looks up each one: 0.3 s for 100,000 files.
    return [file.name for file in parts.files[: len(parts)]]


def evenly_spread(count: int, max_count: int) -> list[int]:
    """Returns at most `max_count` of the numbers below `count`, evenly spread, the first one included."""
    return [n * count // min(max_count, count) for n in range(min(max_count, count))]
