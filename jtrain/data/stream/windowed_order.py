"""Order of the chunks of a source that is read in groups: windows of parts that follow one another."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64

from jtrain.data.sources.chunk_cut import ChunkCut
from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.file_parts import STRIPE_BYTES
from jtrain.data.sources.generations import EpochNumbers, Generation, join_key, members
from jtrain.data.sources.part_window import PartWindow, ReadPart
from jtrain.data.sources.shuffle import epoch_key, permuted, spread_parts, spread_windows, window_keys
from jtrain.data.stream.chunk_order import Chunks, permuted_within

_MOST_PARTS = 1 << 14
"""Most parts of a window."""

_MOST_EXPANSION = 3
"""Bytes of text per stored byte that slots are kept for, where files may be compressed inside."""


class _Epoch(NamedTuple):
    """Windows of an epoch: the parts of each, ascending; its first slot, then the end; the parts before it;
    its key.

    join_spans: span of positions and key of the permutation with which each generation joined, newest first.
    """

    windows: list[Int64[np.ndarray, " _"]]
    first_slot: Int64[np.ndarray, " windows_and_end"]
    first_part: Int64[np.ndarray, " windows"]
    keys: np.ndarray
    join_spans: list[tuple[tuple[int, int], np.uint64]]


class WindowedChunks:
    """Order of a source whose records' sizes are only known by reading them: Parquet, ArrayRecord.

    The parts of the source (row groups; runs of records of other files, of 256 KiB) are shuffled and cut into
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
      window_bytes: bytes of parts that are shuffled together; the last part of a window may reach beyond.
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
        # From the metadata of the files alone: no record is read to know how many slots there are.
        self._start, self._bytes, decoded, file_parts = _list_parts(corpus)
        # Where a part is not decoded as a whole, its stored bytes may be compressed, and the roles of
        # messages are one dictionary for all of them: room for three times.
        is_exact = decoded & (corpus.source.mask is None)
        text_bytes = self._bytes * np.where(is_exact, 1, _MOST_EXPANSION)
        # One slot per record for rounding up, and the bytes divided into chunks.
        self._slots = np.diff(self._start) + -(-text_bytes // cut.chunk_bytes)
        self._parts = [int(file_parts[generation.files]) for generation in generations]
        slots = [int(self._slots[:parts].sum()) for parts in self._parts]
        self.slots = slots[-1]
        self.numbers = EpochNumbers(generations, slots)
        # Two epochs: a read may straddle the end of one.
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
        epochs, positions = self.numbers.split(numbers)
        share = np.empty(len(numbers), np.int64)
        for epoch in sorted(set(epochs.tolist())):
            in_epoch = np.flatnonzero(epochs == epoch)
            first_part = self._epoch(epoch).first_part
            for window, in_window, slot in self._by_window(epoch, positions[in_epoch]):
                # Turns count on over the windows of an epoch, so that small windows do not all go to share 0.
                share[in_epoch[in_window]] = (
                    first_part[window] + self._window(epoch, window).part_at(slot)
                ) % modulus
        return share

    def locate(self, epoch: int, positions: Int[np.ndarray, " n"]) -> Chunks:
        chunks = Chunks(*(np.empty(len(positions), np.int64) for _ in range(3)))
        for window, in_window, slot in self._by_window(epoch, positions):
            for array, values in zip(chunks, self._window(epoch, window).locate(slot), strict=True):
                array[in_window] = values
        return chunks

    def close(self) -> None:
        """Forgets what was read."""
        self._windows, self._just_read = {}, set()

    def _by_window(
        self, epoch: int, positions: Int[np.ndarray, " n"]
    ) -> list[tuple[int, Int64[np.ndarray, " k"], Int64[np.ndarray, " k"]]]:
        """Returns each window of some slots of an epoch: the indexes of its slots, and their slots in the
        window.

        Forgets the windows that neither these slots nor those of the last call are in.
        """
        order = self._epoch(epoch)
        # Newest generation first: each maps to positions of the order before it.
        for span, key in order.join_spans:
            positions = permuted_within(positions, span, key)
        window_of = np.searchsorted(order.first_slot, positions, side="right") - 1
        by_window = []
        for window in sorted(set(window_of.tolist())):
            in_window = np.flatnonzero(window_of == window)
            start, end = int(order.first_slot[window]), int(order.first_slot[window + 1])
            by_window.append(
                (
                    window,
                    in_window,
                    permuted(
                        positions[in_window] - start, np.int64(end - start), np.uint64(order.keys[window])
                    ),
                )
            )
        # Windows hold decoded text. Those of this call and the last stay: neighbouring runs may lie in two.
        requested = {(epoch, window) for window, _, _ in by_window}
        self._windows = {
            epoch_and_window: part_window
            for epoch_and_window, part_window in self._windows.items()
            if epoch_and_window in requested | self._just_read
        }
        self._just_read = requested
        return by_window

    def join(self, epoch: int, place: int, files: int) -> Generation:
        """Returns the generation with which more files join the order before `place` of an epoch."""
        order = self._epoch(epoch)
        # A window that was filled up at an earlier join is permuted as a whole: it stays, even where unread.
        reached = max([place, *(end for (_, end), _ in order.join_spans)])
        return Generation(epoch, place, int(np.searchsorted(order.first_slot, reached)), files)

    def _open_epoch(self, epoch: int) -> _Epoch:
        base, newer = members(self._generations, epoch)
        key = epoch_key(self._seed, epoch)
        # The epoch as it began, before any file joined in it.
        windows = self._split(np.arange(self._parts[base]), key)
        join_spans = []
        for generation in newer:
            position, num_started = (
                self._generations[generation].slots_read,
                self._generations[generation].window,
            )
            generation_key = join_key(self._seed, generation, epoch)
            new_parts = np.arange(self._parts[generation - 1], self._parts[generation])
            # Windows that have been started stay as they are; all other parts are dealt into windows anew.
            parts = np.sort(np.concatenate([*windows[num_started:], new_parts]))
            windows, ends = windows[:num_started], self._ends(windows[:num_started])
            # Bytes of started windows that reach beyond the position of the join: the one being read.
            open_bytes = sum(
                int(self._bytes[w].sum()) for w, end in zip(windows, ends[1:], strict=True) if end > position
            )
            # Parts that still fit into the window being read, from all over the others.
            order = parts[spread_parts(len(parts), generation_key)]
            num_fillers = int(
                np.searchsorted(np.cumsum(self._bytes[order]), self._window_bytes - open_bytes, side="right")
            )
            if open_bytes and num_fillers:
                windows.append(np.sort(order[:num_fillers]))
                parts = np.sort(order[num_fillers:])
                join_spans.append(((position, int(self._ends(windows)[-1])), generation_key))
            windows += self._split(parts, generation_key)
        lengths = np.asarray([len(window) for window in windows], np.int64)
        # Keys follow from a window's number, so windows before the join keep their order.
        keys = window_keys(np.arange(len(windows)), key)
        return _Epoch(windows, self._ends(windows), np.cumsum(lengths) - lengths, keys, join_spans[::-1])

    def _split(self, parts: Int64[np.ndarray, " parts"], key: np.uint64) -> list[Int64[np.ndarray, " _"]]:
        # Parts without slots (empty files) would make windows that no position falls into.
        parts = parts[self._slots[parts] > 0]
        sizes, window_bytes = self._bytes[parts], self._window_bytes
        return list(spread_windows(parts, sizes, key, window_bytes=window_bytes, most_parts=_MOST_PARTS))

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
        # Before `sizes`, which decodes the part: holding it keeps what was decoded.
        held = self._corpus.hold(start)
        sizes = self._corpus.sizes(start, end)
        per_slot = 1
        # More text than the slots were reserved for: chunks are grouped 2, 3, ... per slot until they fit.
        while int((counts := self._cut.counts(sizes, per_slot=per_slot)).sum()) > self._slots[part]:
            per_slot += 1
        return ReadPart(np.cumsum(counts), per_slot, held)


def _list_parts(corpus: Corpus) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the first record of each part, then the number of records; the bytes of each; True where it is
    decoded; and the first part of each file, then the number of parts.

    A part is a group of records that is decoded as a whole, or a run of records of another file.
    """
    starts, sizes, is_decoded = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.bool_)]
    bounds = zip(corpus.group_starts[:-1].tolist(), corpus.group_starts[1:].tolist(), strict=True)
    groups = zip(corpus.stored_bytes().tolist(), (corpus.group_bytes > 0).tolist(), strict=True)
    for (start, end), (size, decoded) in zip(bounds, groups, strict=True):
        # A row group is decoded as a whole and stays one part; other files are cut into runs of records.
        num_runs = 1 if decoded else max(-(-size // STRIPE_BYTES), 1)
        # Of an empty file one part without records, so that each group has its parts.
        cuts = np.arange(start, max(end, start + 1), max(-(-(end - start) // num_runs), 1))
        starts.append(cuts)
        sizes.append(-(-size * np.diff(np.append(cuts, end)) // max(end - start, 1)))
        is_decoded.append(np.full(len(cuts), decoded))
    parts_before = np.cumsum([0, *map(len, starts[1:])])  # parts before each group
    first = np.append(np.concatenate(starts), len(corpus))
    # first_groups counts groups; through parts_before it counts parts.
    return first, np.concatenate(sizes), np.concatenate(is_decoded), parts_before[corpus.first_groups]
