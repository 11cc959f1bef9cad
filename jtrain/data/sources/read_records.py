"""Reads records of one file: one that cannot be read becomes a bad record, whatever else is read with it."""

import functools

import numpy as np
from jaxtyping import Int

from jtrain.data.sources.corpus_files import CorpusFiles
from jtrain.data.sources.formats import BadRecord, Records
from jtrain.data.sources.formats.text import JsonLines, Lines
from jtrain.data.sources.retry import NeverSkipped, retried


def read_or_mark_bad(file: Records, numbers: list[int], label: str) -> list[str | BadRecord]:
    """Reads records; if the file raises OSError, each record that fails alone becomes a BadRecord.

    Raises:
      NeverSkipped: as in `Corpus.read`.
    """
    try:
        return retried(label, lambda: file.read(numbers))
    # An OSError as well, so it must be caught first.
    except NeverSkipped:
        raise
    except OSError as error:
        if len(numbers) == 1:
            return [BadRecord(str(error))]
    # Reads again in parts: single records, or all those of one row group, which is decoded once.
    group = np.searchsorted(file.group_starts, numbers, side="right") - 1
    # Group numbers for decoded rows, and numbers past them, one per record, for the others.
    units = np.where(file.group_bytes[group] > 0, group, len(file.group_bytes) + np.arange(len(numbers)))
    texts: list[str | BadRecord] = [""] * len(numbers)
    for unit in np.unique(units).tolist():
        positions = np.flatnonzero(units == unit).tolist()
        numbers_of_unit = [numbers[position] for position in positions]
        try:
            read_texts = retried(label, functools.partial(file.read, numbers_of_unit))
        except NeverSkipped:
            raise
        except OSError as error:
            read_texts = [BadRecord(str(error)) for _ in numbers_of_unit]
        for position, text in zip(positions, read_texts, strict=True):
            texts[position] = text
    return texts


def read_lines(
    files: CorpusFiles,
    file: Int[np.ndarray, " n"],
    number: Int[np.ndarray, " n"],
    *,
    below_bytes: int,
) -> Lines:
    """Returns the JSON lines of some records, unparsed; an empty one for each that is to be read otherwise:
    of another format, with a mask, of `below_bytes` or more, or in a file that cannot be read.

    Args:
      file, number: the file of each record, and its number there; see `Corpus.locate`.

    Raises:
      NeverSkipped: as in `Corpus.read`.
    """
    start, end = np.zeros(len(file), np.int64), np.zeros(len(file), np.int64)
    blocks: list[bytes] = []
    offset = 0
    for index in sorted(set(file.tolist())):
        if isinstance(records := files[index], JsonLines):
            positions = np.flatnonzero(file == index)
            read = functools.partial(records.lines, number[positions], below_bytes=below_bytes)
            try:
                lines = retried(files.label(index), read)
            except NeverSkipped:
                raise
            except OSError:
                continue
            start[positions], end[positions] = lines.start + offset, lines.end + offset
            offset += len(lines.content)
            blocks.append(lines.content)
    return Lines(b"".join(blocks), start, end)
