"""Records of a source in a random order, for evaluations and reports; each file is opened at its turn."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int64

from jtrain.data.sources.corpus import GAP, Corpus
from jtrain.data.sources.shuffle import permuted, spread_windows

RECORDS_AT_A_TIME = 1 << 16

_PARTS_AT_A_TIME = 1024
"""Files or stripes whose records are drawn together."""


def random_records(
    corpus: Corpus | None, total: int | None, key: np.uint64, *, files: int | None, most_bytes: int
) -> Iterator[Int64[np.ndarray, " n"]]:
    """Yields records, some at a time; see `ChunkStream.records_at_random`.

    Args:
      corpus: the documents as text; None for a prepared source.
      total: number of records; None if it is not known.
    """
    if corpus is not None and total is not None and files is not None:
        total = corpus.records_before(files)
    if total is not None:
        for start in range(0, total, RECORDS_AT_A_TIME):
            positions = np.arange(start, min(start + RECORDS_AT_A_TIME, total), dtype=np.int64)
            yield permuted(positions, np.int64(total), key)
        return
    assert corpus is not None
    num_files = files or len(corpus.names)
    sizes = corpus.file_sizes()[:num_files]
    for parts in spread_windows(
        np.arange(num_files), sizes, key, window_bytes=most_bytes, most_parts=_PARTS_AT_A_TIME
    ):
        numbers = parts.tolist()
        corpus.open(numbers)
        records = np.concatenate([n * GAP + np.arange(corpus.count(n)) for n in numbers])
        # Few of them are read, which are then opened once more: all would take too much memory.
        corpus.forget(numbers)
        yield records[permuted(np.arange(len(records)), np.int64(max(len(records), 1)), key)]
