"""Reads records of one file: one that cannot be read becomes a bad record, whatever else is read with it."""

import functools

import numpy as np

from jtrain.data.sources.formats import BadRecord, Records
from jtrain.data.sources.retry import NeverSkipped, retried


def read_or_why(file: Records, numbers: list[int], called: str) -> list[str | BadRecord]:
    """Reads records; where the file raises OSError, each record that fails when read alone becomes a
    BadRecord.

    Raises:
      NeverSkipped: as in `Corpus.read`.
    """
    try:
        return retried(called, lambda: file.read(numbers))
    except NeverSkipped:
        raise
    except OSError as error:
        if len(numbers) == 1:
            return [BadRecord(str(error))]
    # Reads again in parts: single records, or all those of one row group, which is decoded once.
    group = np.searchsorted(file.group_starts, numbers, side="right") - 1
    part = np.where(file.group_bytes[group] > 0, group, len(file.group_bytes) + np.arange(len(numbers)))
    texts: list[str | BadRecord] = [""] * len(numbers)
    for one in np.unique(part).tolist():
        places = np.flatnonzero(part == one).tolist()
        wanted = [numbers[place] for place in places]
        try:
            found = retried(called, functools.partial(file.read, wanted))
        except NeverSkipped:
            raise
        except OSError as error:
            found = [BadRecord(str(error)) for _ in wanted]
        for place, text in zip(places, found, strict=True):
            texts[place] = text
    return texts
