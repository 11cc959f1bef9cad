"""Order of a source's chunks: which chunk of which record is number n of an epoch.

A document is cut into chunks of at most about one row, at places that depend on the document alone, and the
chunks of all documents are shuffled together. Neighbouring rows of a batch then come from different documents
however long the documents are: a row is worth as much as the rows beside it are different from it.

Numbers count slots, and each slot holds one chunk or none. How many slots there are follows from sizes that
are known without reading the text, so nothing is read to open a source, and the position in the order is one
integer.
"""

import abc
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Int16, Int64

from jtrain.data.pretokenized.index_format import BLOCK
from jtrain.data.pretokenized.reader import PreparedIndex
from jtrain.data.sources.chunk_cut import ChunkCut
from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.generations import EpochNumbers, Generation, join_key, members
from jtrain.data.sources.shuffle import epoch_key, permuted

_LOOKED_UP = 64
"""Records between two entries of the table of `SizedChunks`: 24 bytes for so many records."""


_FIRST = (Generation(0, 0, 0, 0),)
"""Generations of an order that no files can join."""

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


@runtime_checkable
class ChunkOrder(Protocol):
    """Order of a source's chunks. In each epoch every chunk is in exactly one slot."""

    @property
    def slots(self) -> int:
        """Slots of an epoch, with all files."""
        ...

    @property
    def numbers(self) -> EpochNumbers:
        """Numbers of the slots of all epochs."""
        ...

    def locate(self, epoch: int, places: Int[np.ndarray, " n"]) -> Chunks:
        """Returns the contents of slots `places` (0 to `slots` - 1) of an epoch."""
        ...


class _Permuted(abc.ABC):
    """Order that permutes all slots of a source together. A small one is computed once, in 6 bytes per slot.

    The slots of a generation follow those of the earlier ones. In the epoch in which it joins, the places
    that are left and the new slots are permuted together: a place below the number of old slots then stands
    for what the old order has there, another one for the new slot of that number.
    """

    slots: int
    numbers: EpochNumbers
    _seed: int

    def _know(self, generations: Sequence[Generation], slots: Sequence[int]) -> None:
        """Sets the generations, and the slots of an epoch with the files of each."""
        self._generations, self._slots = generations, slots
        self.slots, self.numbers = slots[-1], EpochNumbers(generations, slots)

    def locate(self, epoch: int, places: Int[np.ndarray, " n"]) -> Chunks:
        if self.slots > _TABLE_SLOTS:
            record, first = self._contents(self._slots_at(epoch, places))
        else:
            slots = self._table_of(epoch)[places]
            record, first = (table[slots].astype(np.int64) for table in self._tables)
        return Chunks(record, first, np.ones(len(places), np.int64))

    @abc.abstractmethod
    def _contents(
        self, slots: Int64[np.ndarray, " n"]
    ) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Returns the record of each slot, -1 for an empty one, and the number of its chunk."""

    @functools.cached_property
    def _tables(self) -> tuple[Int16[np.ndarray, " slots"], Int16[np.ndarray, " slots"]]:
        record, first = self._contents(np.arange(self.slots))
        return record.astype(np.int16), first.astype(np.int16)

    def _table_of(self, epoch: int) -> Int16[np.ndarray, " slots"]:
        """Returns the permutation of an epoch; the last two are kept, as reading goes from one to the
        next.
        """
        if epoch not in self._epochs:
            if len(self._epochs) > 1:
                del self._epochs[next(iter(self._epochs))]
            places = np.arange(self.numbers.first_of(epoch + 1) - self.numbers.first_of(epoch))
            self._epochs[epoch] = self._slots_at(epoch, places).astype(np.int16)
        return self._epochs[epoch]

    def _slots_at(self, epoch: int, places: Int[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Returns the slots at places of an epoch."""
        base, joined = members(self._generations, epoch)
        for generation in reversed(joined):
            span = self._generations[generation].slots_read, self._slots[generation]
            places = permuted_within(places, span, join_key(self._seed, generation, epoch))
        old = self._slots[base]
        if not joined:
            return permuted(places, np.int64(old), epoch_key(self._seed, epoch))
        return permuted_within(places, (0, old), epoch_key(self._seed, epoch))

    @functools.cached_property
    def _epochs(self) -> dict[int, Int16[np.ndarray, " slots"]]:
        return {}


def permuted_within(
    places: Int[np.ndarray, " n"], span: tuple[int, int], key: Any
) -> Int64[np.ndarray, " n"]:
    """Returns the places with those in range(*span) permuted among themselves."""
    start, end = span
    found = places.astype(np.int64)
    inside = np.flatnonzero((places >= start) & (places < end))
    found[inside] = start + permuted(found[inside] - start, np.int64(end - start), key)
    return found


class PreparedChunks(_Permuted):
    """Order of a prepared source, exact in tokens, one permutation of the whole source, without any table of
    its own.

    The index stores the first token of every block of 16 records. Block b gets the slots from starts[b] //
    chunk + 17 b
    on: at least as many as its 16 records can have chunks, because rounding up adds less than one for each of
      them.
    """

    def __init__(self, index: PreparedIndex, *, chunk_tokens: int, seed: int) -> None:
        self._index = index
        self._chunk = chunk_tokens
        self._seed = seed
        self._blocks = -(-len(index) // BLOCK)
        self._know(_FIRST, [int(self._first_slot(np.asarray([self._blocks], np.int64))[0])])

    def _contents(
        self, slots: Int64[np.ndarray, " n"]
    ) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
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
    """Order of a source whose records are taken whole, since it costs as much to size one as to make it:
    Grain.

    A record that is longer than a row fills several, one after another.
    """

    def __init__(self, num_records: int, *, seed: int) -> None:
        self.slots = num_records
        self.numbers = EpochNumbers(_FIRST, (num_records,))
        self._seed = seed

    def locate(self, epoch: int, places: Int[np.ndarray, " n"]) -> Chunks:
        records = permuted(places, np.int64(self.slots), epoch_key(self._seed, epoch))
        return Chunks(records, np.zeros_like(records), np.full_like(records, _WHOLE))


class SizedChunks(_Permuted):
    """Order of a source whose records' sizes are known from an index, one permutation of the whole source."""

    def __init__(
        self, corpus: Corpus, cut: ChunkCut, *, seed: int, generations: Sequence[Generation]
    ) -> None:
        self._corpus = corpus
        self._cut = cut
        self._seed = seed
        firsts, slots = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for start, end in corpus.file_bounds():
            counts = cut.counts(corpus.sizes(start, end))
            cuts = np.arange(0, end - start, _LOOKED_UP)
            firsts.append(start + cuts)
            slots.append(np.add.reduceat(counts, cuts) if len(cuts) else cuts)
        self._first_record = np.concatenate([*firsts, [len(corpus)]])
        self._first_slot = np.concatenate([[0], np.cumsum(np.concatenate(slots))])
        last = [int(corpus.file_ends[generation.files - 1]) for generation in generations]
        self._know(generations, self._first_slot[np.searchsorted(self._first_record, last)].tolist())

    def join(self, epoch: int, place: int, files: int) -> Generation:
        """Returns the generation with which more files join the order before `place` of an epoch."""
        return Generation(epoch, place, 0, files)

    def _contents(
        self, slots: Int64[np.ndarray, " n"]
    ) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        block = np.searchsorted(self._first_slot, slots, side="right") - 1
        record, first = np.empty_like(slots), np.empty_like(slots)
        for one in sorted(set(block.tolist())):
            here = np.flatnonzero(block == one)
            start, end = int(self._first_record[one]), int(self._first_record[one + 1])
            sizes = self._corpus.sizes(start, end)
            counts = self._cut.counts(sizes)
            # A file that cannot be read any more has lost its sizes: its slots go to records that cannot be
            # read.
            counts[np.argmin(sizes)] += self._first_slot[one + 1] - self._first_slot[one] - counts.sum()
            ends = np.cumsum(counts)
            at = slots[here] - self._first_slot[one]
            which = np.searchsorted(ends, at, side="right")
            record[here], first[here] = start + which, at - (ends[which] - counts[which])
        return record, first
