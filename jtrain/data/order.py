"""The endless training order: every epoch another permutation of the records, computed by number, not stored."""

import functools
import sys
from typing import Any

import numpy as np
from jaxtyping import Int

from jtrain.data.source import ROW_GROUP_CACHE_BYTES, Corpus, splitmix64


def shuffled(records: Int[np.ndarray, " records"], corpus: Corpus, *, seed: int) -> Any:
    """A `grain.MapDataset` whose element n is the record that comes n-th, without end.

    Any record may come anywhere in an epoch, except that Parquet beyond what the row-group cache holds is shuffled in
    windows: reading a row means decoding its whole row group, so a global shuffle would decode each one a thousand
    times over.

    Args:
      records: the numbers to shuffle, ascending.
      corpus: what they are numbers of.
      seed: in [0, 2**32).
    """
    import grain  # lazy: 0.9 s, which `--help` and refusals need not pay

    window_bytes = ROW_GROUP_CACHE_BYTES // 2  # lanes straddle two windows while one ends and the next begins
    if corpus.group_bytes.sum() <= window_bytes:
        # Grain adds the epoch to the seed.
        return grain.MapDataset.source(_Numbers(records)).shuffle(seed=seed).repeat()
    return grain.MapDataset.source(WindowedOrder(records, corpus, seed=seed, window_bytes=window_bytes))


class _Numbers:
    """Record numbers as a Grain source: to filter the split inside Grain would cost its random access."""

    def __init__(self, records: Int[np.ndarray, " records"]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> int:
        return int(self._records[index])


class WindowedOrder:
    """Row groups in a shuffled order, and records shuffled among neighbouring groups worth `window_bytes` at most.

    A single row group beyond that is a window of its own.
    """

    def __init__(self, records: Int[np.ndarray, " records"], corpus: Corpus, *, seed: int, window_bytes: int) -> None:
        self._records = records
        self._seed = seed
        self._window_bytes = window_bytes
        self._group_bytes = corpus.group_bytes
        self._group_start = np.searchsorted(records, corpus.group_starts)  # the last one is len(records)
        self._epoch = functools.lru_cache(maxsize=2)(self._plan_epoch)

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> int:
        from grain.experimental import index_shuffle

        epoch, number = divmod(index, len(self._records))
        group, first, window_first, window_seed = self._epoch(epoch)
        window = int(np.searchsorted(window_first, number, side="right")) - 1
        start, end = int(window_first[window]), int(window_first[window + 1])
        number = start + index_shuffle(
            number - start, max_index=end - start - 1, seed=int(window_seed[window]), rounds=4
        )
        place = int(np.searchsorted(first, number, side="right")) - 1
        return int(self._records[self._group_start[group[place]] + number - first[place]])

    def _plan_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The groups in this epoch's order; at which number each starts, and each window; the windows' seeds.

        From a hash, not from numpy's generator, whose permutations may change between versions.
        """
        key = splitmix64(np.asarray([self._seed + (epoch << 32)], np.uint64))
        group = np.argsort(splitmix64(np.arange(len(self._group_bytes), dtype=np.uint64) ^ key), kind="stable")
        counts = np.diff(self._group_start)[group]
        group, counts = group[counts > 0], counts[counts > 0]
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        byte_start = np.cumsum(self._group_bytes[group]) - self._group_bytes[group]
        new_window = np.flatnonzero(np.diff(byte_start // self._window_bytes, prepend=-1))
        window_seed = splitmix64(~np.arange(len(new_window), dtype=np.uint64) ^ key) >> np.uint64(32)
        return group, first, np.append(first[new_window], first[-1]), window_seed
