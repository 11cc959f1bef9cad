"""Permutations that are computed, not stored: of a source's chunks, and of the parts of a source."""

import hashlib
import itertools
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int, Int64, UInt64

from jtrain.data.native.library import address, core
from jtrain.data.sources.source import splitmix64

_ROUNDS = 6  # even, so that the two halves end at their own places

_ONE, _HALF, _MIX = np.uint64(1), np.uint64(32), np.uint64(0x9E3779B97F4A7C15)


def order_seed(seed: int, name: str) -> int:
    """Returns the seed of a source's order: sources of equal size must not have the same order."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/order/{name}".encode(), digest_size=8).digest())


def permuted(index: Int[np.ndarray, " n"], size: int | np.int64, key: np.uint64) -> Int[np.ndarray, " n"]:
    """Returns the images of `index` under a pseudorandom permutation of range(size) that `key` selects.

    A Feistel network over the next power of two, applied again until the result is below `size` (cycle
    walking, Black and Rogaway 2002). Grain's `index_shuffle` does the same with one Python call per number,
    2.5 us each; NumPy takes 1 us each for 64 numbers and 0.2 us for a thousand, the C core 0.1 us each for
    64.

    Args:
      index: numbers in [0, size).
      size: size of the permutation, at most 2**50.
    """
    if (library := core()) is not None:
        index = np.ascontiguousarray(index, np.int64)
        images = np.empty_like(index)
        library.permute(len(index), address(index, np.int64), int(size), int(key), address(images, np.int64))
        return images
    bits = np.uint64((max(int(size), 2) - 1).bit_length())
    shift = bits >> _ONE
    low_mask, high_mask = (_ONE << shift) - _ONE, (_ONE << (bits - shift)) - _ONE
    keys, limit = splitmix64(key + np.arange(_ROUNDS, dtype=np.uint64)), np.uint64(size)
    images = pending = index.astype(np.uint64)
    pending_index = None
    while len(pending):
        # An odd number of bits makes unequal halves, so their masks swap with them.
        high, low, low_m, high_m = pending >> shift, pending & low_mask, low_mask, high_mask
        for round_key in keys:
            # In place from here on: one new array per round, not five.
            mixed = low + round_key
            mixed *= _MIX
            mixed >>= _HALF
            mixed &= high_m
            mixed ^= high
            high, low, low_m, high_m = low, mixed, high_m, low_m
        high <<= shift
        high |= low
        # Cycle walking: images past `size` are permuted again until they fall below it; at most half are.
        outside = np.flatnonzero(high >= limit)
        # First round: every number has an image, and those outside of the range are overwritten later.
        if pending_index is None:
            images, pending_index = high, outside
        else:
            images[pending_index] = high
            pending_index = pending_index[outside]
        pending = high[outside]
    return images.astype(np.int64)


def epoch_key(seed: int, epoch: int) -> np.uint64:
    """Returns the key of a source's permutation in an epoch."""
    return splitmix64(splitmix64(np.asarray([seed], np.uint64)) ^ np.asarray([epoch], np.uint64))[0]


def spread_parts(parts: int, key: np.uint64) -> Int64[np.ndarray, " parts"]:
    """Returns the numbers of a source's parts in a random order whose every run is spread over all of them.

    Parts that lie side by side are mostly alike. In a plain shuffle, 64 parts of a corpus that is sorted by
    64 topics are of 41 topics; here they are of all. The numbers are halved, and the halves, in such an order
    each, take turns; which one begins, and which one has the odd number, is drawn. So of 2**k parts that
    follow one another (from a multiple of 2**k on), each 2**k-th of the source gives one (a scrambled net:
    Owen 1995).
    """
    number = np.arange(parts, dtype=np.int64)
    low, size, turn = np.zeros_like(number), np.full_like(number, parts), np.zeros_like(number)
    level_keys = splitmix64(key + np.arange(64, dtype=np.uint64))
    for level in range(max(parts - 1, 0).bit_length()):
        # One draw per interval and level: of all its numbers the same one.
        draw = splitmix64(low.astype(np.uint64) ^ level_keys[level]) & _ONE == _ONE
        left_size = size // 2 + (size % 2 & draw)
        in_left = number - low < left_size
        # The larger half has the first and the last turn.
        is_second = in_left != draw
        turn += np.where(size > 1, is_second.astype(np.int64) << level, 0)
        low, size = np.where(in_left, low, low + left_size), np.where(in_left, left_size, size - left_size)
    order = np.empty_like(number)
    order[turn] = number
    return order


def spread_windows(
    parts: Int64[np.ndarray, " parts"],
    sizes: Int64[np.ndarray, " parts"],
    key: np.uint64,
    *,
    window_bytes: int,
    most_parts: int,
) -> Iterator[Int64[np.ndarray, " _"]]:
    """Yields parts, in the order of `spread_parts`, cut into windows that are shuffled as a whole.

    One at a time: a start reads one window, and a corpus may have millions.

    Args:
      parts: the parts, ascending, so that the windows depend on the set of parts alone.
      sizes: bytes of each.
      window_bytes: bytes of a window; its last part may reach beyond.
      most_parts: most parts of a window.
    """
    if not len(parts):
        return
    order = spread_parts(len(parts), key)
    sizes = sizes[order]
    # By the byte at which a part begins: a part belongs to one window, whatever its size.
    cuts = np.flatnonzero(np.diff((np.cumsum(sizes) - sizes) // window_bytes)) + 1
    ordered = parts[order]
    for first, end in itertools.pairwise([0, *cuts.tolist(), len(parts)]):
        for start in range(first, end, most_parts):
            yield np.sort(ordered[start : min(start + most_parts, end)])


def window_keys(windows: Int[np.ndarray, " n"], key: np.uint64) -> UInt64[np.ndarray, " n"]:
    """Returns the keys of the permutations within windows of an epoch, by their numbers."""
    return splitmix64(~windows.astype(np.uint64) ^ key)
