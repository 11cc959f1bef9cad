"""Order of the chunks of a corpus that is opened as it is read, in windows."""

import bisect
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64

from jtrain.data.sources.chunk_cut import ChunkCut
from jtrain.data.sources.corpus import GAP, Corpus
from jtrain.data.sources.generations import EpochNumbers, Generation, join_key, members
from jtrain.data.sources.shuffle import epoch_key, permuted, shuffled_parts, window_keys
from jtrain.data.stream.chunk_order import Chunks
from jtrain.errors import UserError

_MOST_FILES = 4096
"""Most files that `GrowingChunks` opens at a time."""

ENDLESS_SLOTS = 1 << 60
"""Slots of an epoch whose number is not known."""


class WindowAnchor(NamedTuple):
    """Place where a window begins: its epoch, its number in the epoch, and the number of its first chunk."""

    epoch: int
    window: int
    first: int


class _OpenWindow(NamedTuple):
    """Records of a window, and the slot at which the chunks of each one end."""

    records: Int64[np.ndarray, " records"]
    ends: Int64[np.ndarray, " records"]


def _first(anchor: WindowAnchor) -> int:
    return anchor.first


class GrowingChunks:
    """Order of a corpus that is opened as it is read, in windows: JSON lines, text, tar and others, of any
    size.

    The files (parts of 32 MiB of large JSON lines files) are shuffled anew in each epoch and cut into
    windows; a window is opened when its first chunk is wanted, and its chunks are shuffled together. How many
    chunks the windows before it have is only known once they were opened, so numbers count on from an anchor:
    from the start of the run, or from where it was resumed.

    When files join, they and those that no window has held so far are shuffled and cut into windows anew,
    which follow the window that is being read.

    Numbers go on through the epochs: `locate` is called with epoch 0.
    """

    slots = ENDLESS_SLOTS
    numbers = EpochNumbers((Generation(0, 0, 0, 0),), (ENDLESS_SLOTS,))

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
        self._anchors = [WindowAnchor(0, 0, 0)]
        self._windows_of = functools.lru_cache(maxsize=2)(self._files_by_window)
        self._opened: dict[WindowAnchor, _OpenWindow] = {}

    def anchor(self, number: int) -> WindowAnchor:
        """Returns where the window of a chunk begins; opens the windows from the last one known to that
        one.
        """
        at = bisect.bisect_right(self._anchors, number, key=_first) - 1
        assert at >= 0, f"chunk {number} lies before the first anchor {self._anchors[0]}"
        anchor, empty = self._anchors[at], 0
        while number >= (end := anchor.first + self._count(anchor)):
            empty = empty + 1 if end == anchor.first else 0
            if empty > len(self._windows_of(anchor.epoch)):
                raise UserError(
                    f"{self._corpus.source.path}: none of its {len(self._corpus.names):,} files holds a "
                    "record. Set the source's path to files with text in them."
                )
            epoch, window = anchor.epoch, anchor.window + 1
            if window == len(self._windows_of(epoch)):
                epoch, window = epoch + 1, 0
            anchor = WindowAnchor(epoch, window, end)
            self.start_at(anchor)
        return anchor

    def start_at(self, anchor: WindowAnchor) -> None:
        """Notes where a window begins, so that chunks from there on are found without those before it."""
        if anchor not in self._anchors:
            bisect.insort(self._anchors, anchor, key=_first)

    def join(self, number: int, files: int) -> Generation:
        """Returns the generation with which more files join the order before chunk `number`."""
        anchor = self.anchor(number)
        return Generation(anchor.epoch, 0, anchor.window + (number > anchor.first), files)

    def locate(self, epoch: int, places: Int[np.ndarray, " n"]) -> Chunks:
        assert epoch == 0, epoch
        found = Chunks(*(np.zeros(len(places), np.int64) for _ in range(3)))
        anchors = [self.anchor(place) for place in places.tolist()]
        for anchor in dict.fromkeys(anchors):
            here = np.flatnonzero([other == anchor for other in anchors])
            window = self._window(anchor)
            key = window_keys(np.asarray([anchor.window]), epoch_key(self._seed, anchor.epoch))[0]
            slot = permuted(places[here] - anchor.first, window.ends[-1], key)
            at = np.searchsorted(window.ends, slot, side="right")
            found.record[here] = window.records[at]
            found.first[here] = slot - np.where(at > 0, window.ends[at - 1], 0)
            found.num[here] = 1
        return found

    def _count(self, anchor: WindowAnchor) -> int:
        ends = self._window(anchor).ends
        return int(ends[-1]) if len(ends) else 0

    def _files_by_window(self, epoch: int) -> list[Int64[np.ndarray, " _"]]:
        """Returns the files of each window of an epoch."""
        base, joined = members(self._generations, epoch)
        windows = self._split(shuffled_parts(self._generations[base].files, epoch_key(self._seed, epoch)))
        for generation in joined:
            kept = self._generations[generation].window
            new = np.arange(self._generations[generation - 1].files, self._generations[generation].files)
            files = np.sort(np.concatenate([*windows[kept:], new]))
            order = shuffled_parts(len(files), join_key(self._seed, generation, epoch))
            windows = windows[:kept] + self._split(files[order])
        return windows

    def _split(self, files: Int64[np.ndarray, " files"]) -> list[Int64[np.ndarray, " _"]]:
        """Returns files in this order as windows."""
        sizes = self._corpus.file_sizes()[files]
        window = (np.cumsum(sizes) - sizes) // self._window_bytes
        return [
            part
            for same in np.split(files, np.flatnonzero(np.diff(window)) + 1)
            for part in np.split(same, range(_MOST_FILES, len(same), _MOST_FILES))
        ]

    def _window(self, anchor: WindowAnchor) -> _OpenWindow:
        if anchor not in self._opened:
            files = sorted(self._windows_of(anchor.epoch)[anchor.window].tolist())
            while len(self._opened) > 1:
                self._forget(next(iter(self._opened)), keep=files)
            self._corpus.open(files)
            records, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
            for file in files:
                first = file * GAP
                count = self._corpus.count(file)
                records.append(np.arange(first, first + count))
                sizes.append(self._corpus.sizes(first, first + count))
            counts = self._cut.counts(np.concatenate(sizes))
            self._opened[anchor] = _OpenWindow(np.concatenate(records), np.cumsum(counts))
        return self._opened[anchor]

    def _forget(self, anchor: WindowAnchor, *, keep: list[int]) -> None:
        del self._opened[anchor]
        still = {*keep, *(n for a in self._opened for n in self._windows_of(a.epoch)[a.window].tolist())}
        gone = [n for n in self._windows_of(anchor.epoch)[anchor.window].tolist() if n not in still]
        self._corpus.forget(gone)
