"""Shuffled order of a source without end: each epoch is a new permutation of its records, computed, not stored."""

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int

from jtrain.data.sources.source import splitmix64

_ROUNDS = 6  # even, so that the two halves end at their own places
_KEPT_RECORDS = 1 << 12
"""Largest source whose order of an epoch is kept whole, 16 KB: looking it up takes a tenth of computing it."""

_ONE, _HALF, _MIX = np.uint64(1), np.uint64(32), np.uint64(0x9E3779B97F4A7C15)


class ShuffleOrder:
    """Shuffled order of a source: document n is record `records([n])`; epoch n // num_records is a new permutation.

    A record may come anywhere in an epoch, with one exception. Records that are decoded in groups (Parquet) are
    shuffled within windows of groups if the source is larger than `window_bytes`: reading a row decodes its whole row
    group, so a global shuffle would decode each group a thousand times.

    Args:
      num_records: records of the source, at least one.
      seed: seed of the run and the source; see `order_seed`.
      group_starts: number of the first record of each group, then `num_records`.
      group_bytes: bytes decoded to read any record of each group; 0 if records are read one by one.
      window_bytes: most bytes of groups that are shuffled together; a larger group is a window of its own.
    """

    def __init__(
        self,
        num_records: int,
        *,
        seed: int,
        group_starts: Int[np.ndarray, " groups_and_end"],
        group_bytes: Int[np.ndarray, " groups"],
        window_bytes: int,
    ) -> None:
        assert num_records > 0
        self.num_records = num_records
        self._seed = seed
        self._whole = functools.lru_cache(maxsize=2)(self._permutation)
        self._windows: Callable[[int], _Windows] | None = None
        if int(group_bytes.sum()) > window_bytes:

            def windows(epoch: int) -> _Windows:
                key = _key(seed, epoch)
                return _Windows(key, group_starts=group_starts, group_bytes=group_bytes, bytes=window_bytes)

            self._windows = functools.lru_cache(maxsize=2)(windows)

    def records(self, numbers: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Returns the records of the documents `numbers`."""
        if not len(numbers):
            return numbers
        epoch = int(numbers.min()) // self.num_records
        if int(numbers.max()) // self.num_records == epoch:
            return self._of_epoch(epoch, numbers - epoch * self.num_records)
        epochs, places = np.divmod(numbers, self.num_records)
        found = np.empty_like(places)
        for epoch in sorted(set(epochs.tolist())):  # np.unique would import numpy.ma: 0.1 s and 3 MB in each loader
            here = epochs == epoch
            found[here] = self._of_epoch(epoch, places[here])
        return found

    def _of_epoch(self, epoch: int, places: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        if self._windows is not None:
            return self._windows(epoch).records(places)
        if self.num_records <= _KEPT_RECORDS:
            return self._whole(epoch)[places].astype(np.int64)
        return permuted(places, np.int64(self.num_records), _key(self._seed, epoch))

    def _permutation(self, epoch: int) -> Int[np.ndarray, " records"]:
        return permuted(np.arange(self.num_records), self.num_records, _key(self._seed, epoch)).astype(np.int32)


class _Windows:
    """Order of one epoch: row groups are shuffled and cut into windows, and records are shuffled within each window."""

    def __init__(
        self,
        key: np.uint64,
        *,
        group_starts: Int[np.ndarray, " groups_and_end"],
        group_bytes: Int[np.ndarray, " groups"],
        bytes: int,
    ) -> None:
        counts = np.diff(group_starts)
        shuffled = np.argsort(splitmix64(np.arange(len(counts), dtype=np.uint64) ^ key), kind="stable")
        shuffled = shuffled[counts[shuffled] > 0]
        self._group_start = group_starts[shuffled]
        self._first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts[shuffled])])
        sizes = group_bytes[shuffled]
        byte_start = np.cumsum(sizes) - sizes
        new_window = np.flatnonzero(np.diff(byte_start // bytes, prepend=-1))
        self._window_first = np.append(self._first[new_window], self._first[-1])
        self._window_key = splitmix64(~np.arange(len(new_window), dtype=np.uint64) ^ key)

    def records(self, places: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        window = np.searchsorted(self._window_first, places, side="right") - 1
        start = self._window_first[window]
        moved = start + permuted(places - start, self._window_first[window + 1] - start, self._window_key[window])
        group = np.searchsorted(self._first, moved, side="right") - 1
        return self._group_start[group] + moved - self._first[group]


def order_seed(seed: int, name: str) -> int:
    """Returns the seed of a source's order: sources of equal size must not have the same order."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/order/{name}".encode(), digest_size=8).digest())


def permuted(index: Int[np.ndarray, " n"], size: Any, key: Any) -> Int[np.ndarray, " n"]:
    """Returns the images of `index` under a pseudorandom permutation of range(size) that `key` selects.

    A Feistel network over the next power of two, applied again until the result is below `size` (cycle walking, Black
    and Rogaway 2002). Grain's `index_shuffle` does the same with one Python call per number, 2.5 us each; this takes
    1 us each for 64 numbers and 0.2 us for a thousand.

    Args:
      index: numbers in [0, size).
      size: size of the permutation, at most 2**50; one for all, or int64 per item.
      key: uint64, one for all or one per item.
    """
    size, key = np.atleast_1d(size), np.atleast_1d(key)  # scalars would warn about overflows, which are intended here
    bits = np.ceil(np.log2(np.maximum(size, 2))).astype(np.uint64)
    low_bits = bits >> _ONE
    low_mask, high_mask = (_ONE << low_bits) - _ONE, (_ONE << (bits - low_bits)) - _ONE
    keys = splitmix64((key + np.arange(_ROUNDS, dtype=np.uint64)[:, None]).ravel()).reshape(_ROUNDS, -1)
    limit = size.astype(np.uint64)
    found = index.astype(np.uint64)
    walking = np.arange(len(index))
    while len(walking):
        each = [v[walking] if len(v) > 1 else v for v in (low_bits, low_mask, high_mask, limit, *keys)]
        shift, low_m, high_m, inside = each[:4]
        high, low = found[walking] >> shift, found[walking] & low_m
        for round_key in each[4:]:
            high, low, low_m, high_m = low, high ^ (((low + round_key) * _MIX >> _HALF) & high_m), high_m, low_m
        found[walking] = moved = (high << shift) | low
        walking = walking[moved >= inside]
    return found.astype(np.int64)


def _key(seed: int, epoch: int) -> np.uint64:
    return splitmix64(splitmix64(np.asarray([seed], np.uint64)) ^ np.asarray([epoch], np.uint64))[0]
