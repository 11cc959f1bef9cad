"""Parts of large files: ranges of bytes whose records are found separately."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jtrain.data.sources.formats import JsonLines, Records, format_of
from jtrain.data.sources.storage import StoredFile

PART_BYTES = 1 << 25
"""Bytes of a JSON lines file that are searched for line ends at a time."""


def parts_of(file: StoredFile, format: str) -> list[StoredFile]:
    """Returns the parts of a large JSON lines file, or the file."""
    is_lines = format == "jsonl" or (format == "auto" and _kind(file) == "jsonl")
    # A remote file is copied first, as a whole; other formats have no byte that surely begins a record.
    if not is_lines or file.is_remote or file.size_bytes <= PART_BYTES:
        return [file]
    cuts = [*range(0, file.size_bytes, PART_BYTES), file.size_bytes]
    return [dataclasses.replace(file, span=span) for span in itertools.pairwise(cuts)]


def _kind(file: StoredFile) -> str | None:
    return file.kind or format_of(file.name, field="path")[0]


def part_name(file: StoredFile) -> str:
    """Returns the name that identifies a file or its part; the first part has that of the file."""
    # The first part keeps the file's name, so identities stay when a file grows past 32 MiB.
    return file.name if file.span is None or not file.span[0] else f"{file.name}@{file.span[0]}"


def part_bytes(file: StoredFile) -> int:
    """Returns the bytes of a file or its part; -1 if a server does not tell."""
    return file.size_bytes if file.span is None else file.span[1] - file.span[0]


def evenly_spread(count: int, max_count: int) -> list[int]:
    """Returns at most `max_count` of the numbers below `count`, evenly spread, the first one included."""
    return [n * count // min(max_count, count) for n in range(min(max_count, count))]


def identities_of_parts(
    files: Sequence[StoredFile], opened: Sequence[Records], format: str
) -> tuple[list[str], Int[np.ndarray, " parts"]]:
    """Returns the names of all parts of open files, and the number of records up to the end of each part."""
    names, ends, first = [], [], 0
    for file, records in zip(files, opened, strict=True):
        parts = parts_of(file, format)
        names += [part_name(part) for part in parts]
        # The file was opened as a whole: counts its lines before the first byte of each later part.
        if len(parts) > 1 and isinstance(records, JsonLines):
            ends += [
                first + records.lines_before(part.span[0]) for part in parts[1:] if part.span is not None
            ]
        first += len(records)
        ends.append(first)
    return names, np.asarray(ends, np.int64)
