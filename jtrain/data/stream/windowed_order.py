"""Order of the chunks of a source that is read in groups: windows of parts that follow one another."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64

from jtrain.data.sources.chunk_cut import ChunkCut
from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.generations import EpochNumbers, Generation, join_key, members
from jtrain.data.sources.part_window import PartWindow, ReadPart
from jtrain.data.sources.shuffle import epoch_key, permuted, shuffled_parts, window_keys
from jtrain.data.stream.chunk_order import Chunks, permuted_within

_PART_RECORDS = 1024
"""Most records of a part of a file whose sizes are only known by reading."""

_MOST_EXPANSION = 3
"""Bytes of text per stored byte that slots are kept for, where files may be compressed inside."""


class _Epoch(NamedTuple):
    """Windows of an epoch: the parts of each, ascending; its first slot, then the end; the parts before it;
    its key.

    joined: span of places, and key, of the permutation with which each generation joined, newest first.
    """

    windows: list[Int64[np.ndarray, " _"]]
    first_slot: Int64[np.ndarray, " windows_and_end"]
    first_part: Int64[np.ndarray, " windows"]
    keys: np.ndarray
    joined: list[tuple[tuple[int, int], np.uint64]]


class WindowedChunks:
    """Order of a source whose records' sizes are only known by reading them: Parquet, ArrayRecord.

    The parts of the source (row groups; runs of 1,024 records of other files) are shuffled and cut into
    windows, and chunks are shuffled within each window, since reading a row decodes its whole row group. A
    source that is smaller than a window is shuffled as a whole. A part has slots for the chunks that its
    stored bytes may hold; if its text has more (it was compressed more than threefold), its slots hold
    several chunks of a document.

    Which part a slot belongs to follows from the sizes of the parts alone, so several processes can share the
    parts: each reads those of its share, and none is read twice.

    When files join, the parts that no window has held so far and the new ones are shuffled anew. The window
    that is being read is filled up with some of them if it is smaller than `window_bytes`: what is left of it
    and the chunks of these parts are permuted together.

    Args:
      window_bytes: most bytes of parts that are shuffled together; a larger part is a window of its own.
    """

    def __init__(
        self,
        corpus: Corpus,
        cut: ChunkCut,
        *,
        seed: int,
        generations: Sequence[Generation],
        window_bytes: int,
    ) -> None:
        self._corpus = corpus
        self._cut = cut
        self._seed = seed
        self._generations = generations
        self._window_bytes = window_bytes
        self._start, self._bytes, decoded, file_parts = _parts(corpus)
        text_bytes = self._bytes * np.where(decoded, 1, _MOST_EXPANSION)
        self._slots = np.diff(self._start) + -(-text_bytes // cut.chunk_bytes)
        self._parts = [int(file_parts[generation.files]) for generation in generations]
        slots = [int(self._slots[:parts].sum()) for parts in self._parts]
        self.slots = slots[-1]
        self.numbers = EpochNumbers(generations, slots)
        self._epoch = functools.lru_cache(maxsize=2)(self._open_epoch)
        self._windows: dict[tuple[int, int], PartWindow] = {}
        self._just_read: set[tuple[int, int]] = set()

    @property
    def largest_part(self) -> int:
        """Bytes of the largest part; 0 if the source is one part, which no window can split."""
        return int(self._bytes.max()) if len(self._bytes) > 1 else 0

    def share_of(self, numbers: Int[np.ndarray, " n"], modulus: int) -> Int64[np.ndarray, " n"]:
        """Returns the share, 0 to `modulus` - 1, that reads each number of any epochs: the same for a whole
        part.

        The shares take turns in each window. A source that fits a window has the same shares in each epoch,
        so that what is decoded once can serve the next one. Nothing is read to tell.
        """
        epochs, places = self.numbers.split(numbers)
        share = np.empty(len(numbers), np.int64)
        for epoch in sorted(set(epochs.tolist())):
            mine = np.flatnonzero(epochs == epoch)
            first_part = self._epoch(epoch).first_part
            for one, here, slot in self._by_window(epoch, places[mine]):
                share[mine[here]] = (first_part[one] + self._window(epoch, one).part_at(slot)) % modulus
        return share

    def locate(self, epoch: int, places: Int[np.ndarray, " n"]) -> Chunks:
        found = Chunks(*(np.empty(len(places), np.int64) for _ in range(3)))
        for one, here, slot in self._by_window(epoch, places):
            for array, values in zip(found, self._window(epoch, one).locate(slot), strict=True):
                array[here] = values
        return found

    def close(self) -> None:
        """Forgets what was read."""
        self._windows, self._just_read = {}, set()

    def _by_window(
        self, epoch: int, places: Int[np.ndarray, " n"]
    ) -> list[tuple[int, Int64[np.ndarray, " k"], Int64[np.ndarray, " k"]]]:
        """Returns each window of some slots of an epoch: the indexes of its slots, and their slots in the
        window.

        Forgets the windows that neither these slots nor those of the last call are in.
        """
        order = self._epoch(epoch)
        for span, key in order.joined:
            places = permuted_within(places, span, key)
        window_of = np.searchsorted(order.first_slot, places, side="right") - 1
        found = []
        for one in sorted(set(window_of.tolist())):
            here = np.flatnonzero(window_of == one)
            start, end = int(order.first_slot[one]), int(order.first_slot[one + 1])
            found.append(
                (one, here, permuted(places[here] - start, np.int64(end - start), np.uint64(order.keys[one])))
            )
        now = {(epoch, one) for one, _, _ in found}
        self._windows = {at: window for at, window in self._windows.items() if at in now | self._just_read}
        self._just_read = now
        return found

    def join(self, epoch: int, place: int, files: int) -> Generation:
        """Returns the generation with which more files join the order before `place` of an epoch."""
        order = self._epoch(epoch)
        reached = max([place, *(end for (_, end), _ in order.joined)])
        return Generation(epoch, place, int(np.searchsorted(order.first_slot, reached)), files)

    def _open_epoch(self, epoch: int) -> _Epoch:
        base, newer = members(self._generations, epoch)
        key = epoch_key(self._seed, epoch)
        windows = self._split(shuffled_parts(self._parts[base], key))
        joined = []
        for generation in newer:
            place, kept = self._generations[generation].slots_read, self._generations[generation].window
            mine = join_key(self._seed, generation, epoch)
            new = np.arange(self._parts[generation - 1], self._parts[generation])
            parts = np.sort(np.concatenate([*windows[kept:], new]))
            parts = parts[shuffled_parts(len(parts), mine)]
            windows, ends = windows[:kept], self._ends(windows[:kept])
            open_bytes = sum(
                int(self._bytes[w].sum()) for w, end in zip(windows, ends[1:], strict=True) if end > place
            )
            few = int(
                np.searchsorted(np.cumsum(self._bytes[parts]), self._window_bytes - open_bytes, side="right")
            )
            if open_bytes and few:
                windows.append(np.sort(parts[:few]))
                parts = parts[few:]
                joined.append(((place, int(self._ends(windows)[-1])), mine))
            windows += self._split(parts)
        lengths = np.asarray([len(window) for window in windows], np.int64)
        keys = window_keys(np.arange(len(windows)), key)
        return _Epoch(windows, self._ends(windows), np.cumsum(lengths) - lengths, keys, joined[::-1])

    def _split(self, parts: Int64[np.ndarray, " parts"]) -> list[Int64[np.ndarray, " _"]]:
        """Returns parts in this order as windows."""
        parts = parts[self._slots[parts] > 0]
        sizes = self._bytes[parts]
        cut = np.split(parts, np.flatnonzero(np.diff((np.cumsum(sizes) - sizes) // self._window_bytes)) + 1)
        return [np.sort(window) for window in cut] if len(parts) else []

    def _ends(self, windows: list[Int64[np.ndarray, " _"]]) -> Int64[np.ndarray, " windows_and_end"]:
        """Returns the first slot of each window, and the end of the last one."""
        return np.cumsum([0, *(int(self._slots[window].sum()) for window in windows)])

    def _window(self, epoch: int, window: int) -> PartWindow:
        if (epoch, window) not in self._windows:
            parts = self._epoch(epoch).windows[window]
            start = self._start[parts]
            lengths = self._start[parts + 1] - start
            self._windows[epoch, window] = PartWindow(
                parts, self._slots[parts], start, lengths, self._read_part
            )
        return self._windows[epoch, window]

    def _read_part(self, part: int) -> ReadPart:
        start, end = int(self._start[part]), int(self._start[part + 1])
        held = self._corpus.hold(start)
        sizes = self._corpus.sizes(start, end)
        per_slot = 1
        while int((counts := self._cut.counts(sizes, per_slot=per_slot)).sum()) > self._slots[part]:
            per_slot += 1
        return ReadPart(np.cumsum(counts), per_slot, held)


def _parts(corpus: Corpus) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the first record of each part, then the number of records; the bytes of each; True where it is
    decoded; and the first part of each file, then the number of parts.

    A part is a group of records that is decoded as a whole, or a run of records of another file.
    """
    starts, sizes, is_decoded = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.bool_)]
    bounds = zip(corpus.group_starts[:-1].tolist(), corpus.group_starts[1:].tolist(), strict=True)
    groups = zip(corpus.stored_bytes().tolist(), (corpus.group_bytes > 0).tolist(), strict=True)
    for (start, end), (size, decoded) in zip(bounds, groups, strict=True):
        cuts = np.asarray([start], np.int64) if decoded else np.arange(start, end, _PART_RECORDS)
        starts.append(cuts)
        sizes.append(-(-size * np.diff(np.append(cuts, end)) // max(end - start, 1)))
        is_decoded.append(np.full(len(cuts), decoded))
    before = np.cumsum([0, *map(len, starts[1:])])  # parts before each group
    first = np.append(np.concatenate(starts), len(corpus))
    return first, np.concatenate(sizes), np.concatenate(is_decoded), before[corpus.first_groups]
