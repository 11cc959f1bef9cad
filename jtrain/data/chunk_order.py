"""Order of a source's chunks: which chunk of which record is number n of an epoch.

A document is cut into chunks of at most about one row, at places that depend on the document alone, and the chunks of
all documents are shuffled together. Neighbouring rows of a batch then come from different documents however long the
documents are: a row is worth as much as the rows beside it are different from it.

Numbers count slots, and each slot holds one chunk or none. How many slots there are follows from sizes that are known
without reading the text, so nothing is read to open a source, and the position in the order is one integer.
"""

import abc
import functools
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Int, Int16, Int64

from jtrain.data.pretokenized.reader import BLOCK, PreparedIndex
from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.part_window import PartWindow, ReadPart
from jtrain.data.sources.shuffle import epoch_key, permuted, shuffled_parts, window_keys

_LOOKED_UP = 64
"""Records between two entries of the table of `SizedChunks`: 24 bytes for so many records."""

_PART_RECORDS = 1024
"""Most records of a part of a file whose sizes are only known by reading."""

_MOST_EXPANSION = 3
"""Bytes of text per stored byte that slots are kept for, where files may be compressed inside."""


_TABLE_SLOTS = 1 << 12
"""Most slots of a source whose order is kept as tables; each of these numbers fits into int16."""

_WHOLE = 1 << 20
"""Number of chunks of a record that is taken whole: at least as many as it has."""


class Chunks(NamedTuple):
    """Contents of slots: `num` chunks, nearly always one, of `record` from chunk number `first` on.

    record: -1 for an empty slot.
    """

    record: Int64[np.ndarray, " n"]
    first: Int64[np.ndarray, " n"]
    num: Int64[np.ndarray, " n"]


class ChunkOrder(Protocol):
    """Order of a source's chunks. In each epoch every chunk is in exactly one slot."""

    @property
    def slots(self) -> int:
        """Slots of an epoch."""
        ...

    def locate(self, epoch: int, places: Int[np.ndarray, " n"]) -> Chunks:
        """Returns the contents of slots `places` (0 to `slots` - 1) of an epoch."""
        ...


def chunk_counts(sizes: Int[np.ndarray, " n"], chunk: int) -> Int64[np.ndarray, " n"]:
    """Returns the number of chunks of documents of these sizes; an empty one has a chunk too, which is then empty."""
    return np.maximum(-(-sizes.astype(np.int64) // chunk), 1)


class _Permuted(abc.ABC):
    """Order that permutes all slots of a source together. A small one is computed once, in 6 bytes per slot."""

    slots: int
    _seed: int

    def locate(self, epoch: int, places: Int[np.ndarray, " n"]) -> Chunks:
        if self.slots > _TABLE_SLOTS:
            slots = permuted(places, np.int64(self.slots), epoch_key(self._seed, epoch))
            record, first = self._contents(slots)
        else:
            slots = self._table_of(epoch)[places]
            record, first = (table[slots].astype(np.int64) for table in self._tables)
        return Chunks(record, first, np.ones(len(places), np.int64))

    @abc.abstractmethod
    def _contents(self, slots: Int64[np.ndarray, " n"]) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Returns the record of each slot, -1 for an empty one, and the number of its chunk."""

    @functools.cached_property
    def _tables(self) -> tuple[Int16[np.ndarray, " slots"], Int16[np.ndarray, " slots"]]:
        record, first = self._contents(np.arange(self.slots))
        return record.astype(np.int16), first.astype(np.int16)

    def _table_of(self, epoch: int) -> Int16[np.ndarray, " slots"]:
        """Returns the permutation of an epoch; the last two are kept, as reading goes from one to the next."""
        if epoch not in self._epochs:
            if len(self._epochs) > 1:
                del self._epochs[next(iter(self._epochs))]
            key = epoch_key(self._seed, epoch)
            self._epochs[epoch] = permuted(np.arange(self.slots), np.int64(self.slots), key).astype(np.int16)
        return self._epochs[epoch]

    @functools.cached_property
    def _epochs(self) -> dict[int, Int16[np.ndarray, " slots"]]:
        return {}


class PreparedChunks(_Permuted):
    """Order of a prepared source, exact in tokens, one permutation of the whole source, without any table of its own.

    The index stores the first token of every block of 16 records. Block b gets the slots from starts[b] // chunk + 17 b
    on: at least as many as its 16 records can have chunks, because rounding up adds less than one for each of them.
    """

    def __init__(self, index: PreparedIndex, *, chunk_tokens: int, seed: int) -> None:
        self._index = index
        self._chunk = chunk_tokens
        self._seed = seed
        self._blocks = -(-len(index) // BLOCK)
        self.slots = int(self._first_slot(np.asarray([self._blocks], np.int64))[0])

    def _contents(self, slots: Int64[np.ndarray, " n"]) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        block = self._block_of(slots)
        records = block[:, None] * BLOCK + np.arange(BLOCK)
        inside = records < len(self._index)
        lengths = self._index.lengths(np.minimum(records, len(self._index) - 1).ravel()).reshape(-1, BLOCK)
        counts = np.where(inside, -(-lengths.astype(np.int64) // self._chunk), 0)
        ends = np.cumsum(counts, axis=1)
        at = slots - self._first_slot(block)
        which = (ends <= at[:, None]).sum(axis=1)
        full = which < BLOCK
        which = np.minimum(which, BLOCK - 1)
        row = np.arange(len(slots))
        first = at - (ends[row, which] - counts[row, which])
        return np.where(full, records[row, which], -1), first

    def _first_slot(self, block: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        return self._index.token_starts(block) // self._chunk + (BLOCK + 1) * block

    def _block_of(self, slots: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Finds the last block that begins at or before each slot, by bisection of all slots together."""
        low, high = np.zeros_like(slots), np.full_like(slots, self._blocks)
        while (high - low > 1).any():
            middle = (low + high) // 2
            before = self._first_slot(middle) <= slots
            low, high = np.where(before, middle, low), np.where(before, high, middle)
        return low


class WholeRecords:
    """Order of a source whose records are taken whole, since it costs as much to size one as to make it: Grain.

    A record that is longer than a row fills several, one after another.
    """

    def __init__(self, num_records: int, *, seed: int) -> None:
        self.slots = num_records
        self._seed = seed

    def locate(self, epoch: int, places: Int[np.ndarray, " n"]) -> Chunks:
        records = permuted(places, np.int64(self.slots), epoch_key(self._seed, epoch))
        return Chunks(records, np.zeros_like(records), np.full_like(records, _WHOLE))


class SizedChunks(_Permuted):
    """Order of a source whose records' sizes are known from an index, one permutation of the whole source."""

    def __init__(self, corpus: Corpus, *, chunk_bytes: int, extra_bytes: int, seed: int) -> None:
        self._corpus = corpus
        self._chunk, self._extra = chunk_bytes, extra_bytes
        self._seed = seed
        firsts, slots = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for start, end in corpus.file_bounds():
            counts = chunk_counts(corpus.sizes(start, end) + extra_bytes, chunk_bytes)
            cuts = np.arange(0, end - start, _LOOKED_UP)
            firsts.append(start + cuts)
            slots.append(np.add.reduceat(counts, cuts) if len(cuts) else cuts)
        self._first_record = np.concatenate([*firsts, [len(corpus)]])
        self._first_slot = np.concatenate([[0], np.cumsum(np.concatenate(slots))])
        self.slots = int(self._first_slot[-1])

    def _contents(self, slots: Int64[np.ndarray, " n"]) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        block = np.searchsorted(self._first_slot, slots, side="right") - 1
        record, first = np.empty_like(slots), np.empty_like(slots)
        for one in sorted(set(block.tolist())):
            here = np.flatnonzero(block == one)
            start, end = int(self._first_record[one]), int(self._first_record[one + 1])
            sizes = self._corpus.sizes(start, end)
            counts = chunk_counts(sizes + self._extra, self._chunk)
            # A file that cannot be read any more has lost its sizes: its slots go to records that cannot be read.
            counts[np.argmin(sizes)] += self._first_slot[one + 1] - self._first_slot[one] - counts.sum()
            ends = np.cumsum(counts)
            at = slots[here] - self._first_slot[one]
            which = np.searchsorted(ends, at, side="right")
            record[here], first[here] = start + which, at - (ends[which] - counts[which])
        return record, first


class OpenWindow(NamedTuple):
    """Records of a window, the slot at which the chunks of each one end, and the chunks per slot."""

    records: Int64[np.ndarray, " records"]
    ends: Int64[np.ndarray, " records"]
    per_slot: int


class _Epoch(NamedTuple):
    """Windows of an epoch: the parts of each, ascending; its first slot, then the end; the parts before it; its key."""

    windows: list[Int64[np.ndarray, " _"]]
    first_slot: Int64[np.ndarray, " windows_and_end"]
    first_part: Int64[np.ndarray, " windows"]
    keys: np.ndarray


class WindowedChunks:
    """Order of a source whose records' sizes are only known by reading them: Parquet, ArrayRecord.

    The parts of the source (row groups; runs of 1,024 records of other files) are shuffled and cut into windows, and
    chunks are shuffled within each window, since reading a row decodes its whole row group. A source that is smaller
    than a window is shuffled as a whole. A part has slots for the chunks that its stored bytes may hold; if its text
    has more (it was compressed more than threefold), its slots hold several chunks of a document.

    Which part a slot belongs to follows from the sizes of the parts alone, so several processes can share the parts:
    each reads those of its share, and none is read twice.

    Args:
      window_bytes: most bytes of parts that are shuffled together; a larger part is a window of its own.
    """

    def __init__(self, corpus: Corpus, *, chunk_bytes: int, extra_bytes: int, seed: int, window_bytes: int) -> None:
        self._corpus = corpus
        self._chunk, self._extra = chunk_bytes, extra_bytes
        self._seed = seed
        self._window_bytes = window_bytes
        self._start, self._bytes, decoded = _parts(corpus)
        text_bytes = self._bytes * np.where(decoded, 1, _MOST_EXPANSION)
        self._slots = np.diff(self._start) + -(-text_bytes // chunk_bytes)
        self.slots = int(self._slots.sum())
        self._epoch = functools.lru_cache(maxsize=2)(self._open_epoch)
        self._windows: dict[tuple[int, int], PartWindow] = {}
        self._just_read: set[tuple[int, int]] = set()

    @property
    def largest_part(self) -> int:
        """Bytes of the largest part; 0 if the source is one part, which no window can split."""
        return int(self._bytes.max()) if len(self._bytes) > 1 else 0

    def share_of(self, numbers: Int[np.ndarray, " n"], modulus: int) -> Int64[np.ndarray, " n"]:
        """Returns the share, 0 to `modulus` - 1, that reads each number of any epochs: the same for a whole part.

        The shares take turns in each window. A source that fits a window has the same shares in each epoch, so that
        what is decoded once can serve the next one. Nothing is read to tell.
        """
        epochs, places = np.divmod(numbers, max(self.slots, 1))
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
        """Returns each window of some slots of an epoch: the indexes of its slots, and their slots in the window.

        Forgets the windows that neither these slots nor those of the last call are in.
        """
        order = self._epoch(epoch)
        window_of = np.searchsorted(order.first_slot, places, side="right") - 1
        found = []
        for one in sorted(set(window_of.tolist())):
            here = np.flatnonzero(window_of == one)
            start, end = int(order.first_slot[one]), int(order.first_slot[one + 1])
            found.append((one, here, permuted(places[here] - start, np.int64(end - start), order.keys[one])))
        now = {(epoch, one) for one, _, _ in found}
        self._windows = {at: window for at, window in self._windows.items() if at in now | self._just_read}
        self._just_read = now
        return found

    def _open_epoch(self, epoch: int) -> _Epoch:
        key = epoch_key(self._seed, epoch)
        windows = self._cut(shuffled_parts(len(self._slots), key))
        lengths = np.asarray([len(window) for window in windows], np.int64)
        keys = window_keys(np.arange(len(windows)), key)
        return _Epoch(windows, self._ends(windows), np.cumsum(lengths) - lengths, keys)

    def _cut(self, parts: Int64[np.ndarray, " parts"]) -> list[Int64[np.ndarray, " _"]]:
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
            self._windows[epoch, window] = PartWindow(parts, self._slots[parts], start, lengths, self._read_part)
        return self._windows[epoch, window]

    def _read_part(self, part: int) -> ReadPart:
        start, end = int(self._start[part]), int(self._start[part + 1])
        held = self._corpus.hold(start)
        sizes = self._corpus.sizes(start, end) + self._extra
        per_slot = 1
        while int((counts := chunk_counts(sizes, self._chunk * per_slot)).sum()) > self._slots[part]:
            per_slot += 1
        return ReadPart(np.cumsum(counts), per_slot, held)


def _parts(corpus: Corpus) -> tuple[Int64[np.ndarray, " parts_and_end"], Int64[np.ndarray, " parts"], np.ndarray]:
    """Returns the first record of each part, then the number of records; the bytes of each; True where it is decoded.

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
    return np.append(np.concatenate(starts), len(corpus)), np.concatenate(sizes), np.concatenate(is_decoded)
