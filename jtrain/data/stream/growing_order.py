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
from jtrain.data.sources.shuffle import epoch_key, permuted, spread_windows, window_keys
from jtrain.data.stream.chunk_order import Chunks
from jtrain.errors import UserError

_MOST_PARTS = 1024
"""Most files or stripes that `GrowingChunks` opens at a time: of small files each is a draw from the whole
source, so more of them mix no better."""

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

    The files and the stripes of large ones are put in a new order in each epoch, whose every run is spread
    over the whole corpus, and cut into windows (`spread_windows`). A window is opened when its first chunk is
    wanted, and its chunks are shuffled together. How many chunks the windows before it have is only known
    once they were opened, so numbers count on from an anchor: from the start of the run, or from where it was
    resumed.

    When files join, they and those that no window has held so far are cut into windows anew, which follow
    the window that is being read.

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
        # The start of the run; `start_at` adds later ones.
        self._anchors = [WindowAnchor(0, 0, 0)]
        self._windows_of = functools.lru_cache(maxsize=2)(self._files_by_window)
        self._opened: dict[WindowAnchor, _OpenWindow] = {}

    def anchor(self, number: int) -> WindowAnchor:
        """Returns where the window of a chunk begins; opens the windows from the last one known to that
        one.
        """
        # bisect_right: of several anchors with one first chunk (empty windows), the last holds the chunk.
        index = bisect.bisect_right(self._anchors, number, key=_first) - 1
        assert index >= 0, f"chunk {number} lies before the first anchor {self._anchors[0]}"
        anchor, num_empty = self._anchors[index], 0
        while number >= (end := anchor.first + self._count(anchor)):
            # Empty windows in a row: a source without any record is refused, not searched for ever.
            num_empty = num_empty + 1 if end == anchor.first else 0
            # More empty windows than an epoch has: all files are empty.
            if num_empty > len(self._windows_of(anchor.epoch)):
                raise UserError(
                    f"{self._corpus.source.path}: none of its {self._corpus.num_files:,} files holds a "
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
        # Mostly appended, as `anchor` finds windows in order; one from elsewhere may lie before the others.
        if anchor not in self._anchors:
            bisect.insort(self._anchors, anchor, key=_first)

    def join(self, number: int, files: int) -> Generation:
        """Returns the generation with which more files join the order before chunk `number`."""
        anchor = self.anchor(number)
        # A window whose first chunk was drawn stays as it is; one that nobody has started is cut anew.
        return Generation(anchor.epoch, 0, anchor.window + (number > anchor.first), files)

    def locate(self, epoch: int, positions: Int[np.ndarray, " n"]) -> Chunks:
        # Epoch and window follow from the anchor: sizes of epochs are unknown, so numbers cannot name one.
        assert epoch == 0, epoch
        chunks = Chunks(*(np.zeros(len(positions), np.int64) for _ in range(3)))
        anchors = [self.anchor(position) for position in positions.tolist()]
        for anchor in dict.fromkeys(anchors):
            in_window = np.flatnonzero([candidate == anchor for candidate in anchors])
            window = self._window(anchor)
            # The key follows from epoch and window alone: a resumed run permutes the window in the same way.
            key = window_keys(np.asarray([anchor.window]), epoch_key(self._seed, anchor.epoch))[0]
            slot = permuted(positions[in_window] - anchor.first, window.ends[-1], key)
            record_in_window = np.searchsorted(window.ends, slot, side="right")
            chunks.record[in_window] = window.records[record_in_window]
            # The first record has no predecessor; index -1 is read, and not used.
            chunks.first[in_window] = slot - np.where(
                record_in_window > 0, window.ends[record_in_window - 1], 0
            )
            chunks.num[in_window] = 1
        return chunks

    def _count(self, anchor: WindowAnchor) -> int:
        ends = self._window(anchor).ends
        return int(ends[-1]) if len(ends) else 0

    def _files_by_window(self, epoch: int) -> list[Int64[np.ndarray, " _"]]:
        """Returns the files of each window of an epoch."""
        base, joining = members(self._generations, epoch)
        windows = self._split(np.arange(self._generations[base].files), epoch_key(self._seed, epoch))
        # In the order in which they joined: each cuts anew what the one before it left unread.
        for generation in joining:
            num_started = self._generations[generation].window
            new_files = np.arange(
                self._generations[generation - 1].files, self._generations[generation].files
            )
            files = np.sort(np.concatenate([*windows[num_started:], new_files]))
            windows = windows[:num_started] + self._split(files, join_key(self._seed, generation, epoch))
        return windows

    def _split(self, files: Int64[np.ndarray, " files"], key: np.uint64) -> list[Int64[np.ndarray, " _"]]:
        return list(
            spread_windows(
                files,
                self._corpus.file_sizes()[files],
                key,
                window_bytes=self._window_bytes,
                most_parts=_MOST_PARTS,
            )
        )

    def _window(self, anchor: WindowAnchor) -> _OpenWindow:
        if anchor not in self._opened:
            files = self._windows_of(anchor.epoch)[anchor.window].tolist()
            # Two windows stay open: a run of chunks may begin in one and end in the next.
            while len(self._opened) > 1:
                self._forget(next(iter(self._opened)), keep=files)
            self._corpus.open(files)
            records, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
            for file in files:
                # Record numbers leave a gap per file, as counts are unknown until a file is opened.
                first = file * GAP
                count = self._corpus.count(file)
                records.append(np.arange(first, first + count))
                sizes.append(self._corpus.sizes(first, first + count))
            counts = self._cut.counts(np.concatenate(sizes))
            self._opened[anchor] = _OpenWindow(np.concatenate(records), np.cumsum(counts))
        return self._opened[anchor]

    def _forget(self, anchor: WindowAnchor, *, keep: list[int]) -> None:
        del self._opened[anchor]
        used_files = {
            *keep,
            *(
                file
                for open_anchor in self._opened
                for file in self._windows_of(open_anchor.epoch)[open_anchor.window].tolist()
            ),
        }
        unused_files = [
            file for file in self._windows_of(anchor.epoch)[anchor.window].tolist() if file not in used_files
        ]
        self._corpus.forget(unused_files)
