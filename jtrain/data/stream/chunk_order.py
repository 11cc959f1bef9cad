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

_TABLE_STRIDE = 64
"""Records between two entries of the table of `SizedChunks`; an entry takes 16 bytes."""


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

    def locate(self, epoch: int, positions: Int[np.ndarray, " n"]) -> Chunks:
        """Returns the contents of the slots at `positions` (0 to `slots` - 1) of an epoch."""
        ...


class _Permuted(abc.ABC):
    """Order that permutes all slots of a source together. A small one is computed once, in 6 bytes per slot.

    The slots of a generation follow those of the earlier ones. In the epoch in which it joins, the positions
    not yet read and the new slots are permuted together: a position below the number of old slots then stands
    for the old order's slot at that position, a higher one for the new slot of that number.

    Example: generation 1 adds slots 6 and 7 to a source of 6 slots, before position 4 of epoch 0. Positions 0
    to 3 of that epoch keep their slots; positions 4 to 7 are permuted among themselves, then 4 and 5 go
    through the old permutation of 6 slots, while 6 and 7 are the new slots. Epoch 1 permutes all 8 together.
    """

    slots: int
    numbers: EpochNumbers
    _seed: int

    def _set_generations(self, generations: Sequence[Generation], slots: Sequence[int]) -> None:
        """Sets the generations, and the slots of an epoch with the files of each."""
        self._generations, self._slots = generations, slots
        self.slots, self.numbers = slots[-1], EpochNumbers(generations, slots)

    def locate(self, epoch: int, positions: Int[np.ndarray, " n"]) -> Chunks:
        # Only small sources have tables: their numbers are int16, and each slot takes 6 bytes.
        if self.slots > _TABLE_SLOTS:
            record, first = self._contents(self._slots_at(epoch, positions))
        else:
            slots = self._table_of(epoch)[positions]
            record, first = (table[slots].astype(np.int64) for table in self._tables)
        return Chunks(record, first, np.ones(len(positions), np.int64))

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
        """Returns the permutation of an epoch. Keeps the last two: a read may straddle an epoch's end."""
        if epoch not in self._epochs:
            if len(self._epochs) > 1:
                # dicts keep insertion order: the first key is the oldest epoch.
                del self._epochs[next(iter(self._epochs))]
            positions = np.arange(self.numbers.first_of(epoch + 1) - self.numbers.first_of(epoch))
            self._epochs[epoch] = self._slots_at(epoch, positions).astype(np.int16)
        return self._epochs[epoch]

    def _slots_at(self, epoch: int, positions: Int[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Returns the slots at positions of an epoch."""
        base, joining = members(self._generations, epoch)
        # Newest first: its permutation is the outermost, and maps into the positions of the order before it.
        for generation in reversed(joining):
            span = self._generations[generation].slots_read, self._slots[generation]
            positions = permuted_within(positions, span, join_key(self._seed, generation, epoch))
        base_slots = self._slots[base]
        # Without joined files every position is below base_slots: no need to look for those that are.
        if not joining:
            return permuted(positions, np.int64(base_slots), epoch_key(self._seed, epoch))
        return permuted_within(positions, (0, base_slots), epoch_key(self._seed, epoch))

    @functools.cached_property
    def _epochs(self) -> dict[int, Int16[np.ndarray, " slots"]]:
        return {}


def permuted_within(
    positions: Int[np.ndarray, " n"], span: tuple[int, int], key: Any
) -> Int64[np.ndarray, " n"]:
    """Returns the positions, those in range(*span) permuted among themselves."""
    start, end = span
    permuted_positions = positions.astype(np.int64)
    in_span = np.flatnonzero((positions >= start) & (positions < end))
    permuted_positions[in_span] = start + permuted(
        permuted_positions[in_span] - start, np.int64(end - start), key
    )
    return permuted_positions


class PreparedChunks(_Permuted):
    """Order of a prepared source, exact in tokens: one permutation of the whole source, without a table.

    The index stores the first token of every block of 16 records. Block b gets the slots from
    starts[b] // chunk + 17 b on: at least as many as its 16 records can have chunks, because rounding up adds
    less than one for each of them.

    Example, chunks of 100 tokens: block 0 has 1,650 tokens, so block 1 begins at slot 1650 // 100 + 17 = 33.
    The 16 records of block 0 have at most 16 + 16 = 32 chunks, and its other slots are empty.
    """

    def __init__(self, index: PreparedIndex, *, chunk_tokens: int, seed: int) -> None:
        self._index = index
        self._chunk = chunk_tokens
        self._seed = seed
        self._blocks = -(-len(index) // BLOCK)
        self._set_generations(_FIRST, [int(self._first_slot(np.asarray([self._blocks], np.int64))[0])])

    def _contents(
        self, slots: Int64[np.ndarray, " n"]
    ) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        # Every array below is [slots, BLOCK]: one index look-up serves the 16 records of each block.
        block = self._block_of(slots)
        records = block[:, None] * BLOCK + np.arange(BLOCK)
        exists = records < len(self._index)
        # The last block may be short: its missing records look up the last record, and count no chunk.
        lengths = self._index.lengths(np.minimum(records, len(self._index) - 1).ravel()).reshape(-1, BLOCK)
        counts = np.where(exists, -(-lengths.astype(np.int64) // self._chunk), 0)
        ends = np.cumsum(counts, axis=1)
        slot_in_block = slots - self._first_slot(block)
        # Number of records whose chunks all lie before the slot: the index of the record that holds it.
        record_in_block = (ends <= slot_in_block[:, None]).sum(axis=1)
        has_chunk = record_in_block < BLOCK
        # Only keeps the look-up inside the block; has_chunk already marks these slots as empty.
        record_in_block = np.minimum(record_in_block, BLOCK - 1)
        row = np.arange(len(slots))
        chunk = slot_in_block - (ends[row, record_in_block] - counts[row, record_in_block])
        return np.where(has_chunk, records[row, record_in_block], -1), chunk

    def _first_slot(self, block: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        # 16 for rounding up each record, 1 for the fraction of a chunk with which the block's tokens begin.
        return self._index.token_starts(block) // self._chunk + (BLOCK + 1) * block

    def _block_of(self, slots: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Finds the last block that begins at or before each slot, by bisection of all slots together."""
        # Invariant: first_slot(low) <= slot < first_slot(high).
        low, high = np.zeros_like(slots), np.full_like(slots, self._blocks)
        while (high - low > 1).any():
            middle = (low + high) // 2
            starts_before = self._first_slot(middle) <= slots
            low, high = np.where(starts_before, middle, low), np.where(starts_before, high, middle)
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

    def locate(self, epoch: int, positions: Int[np.ndarray, " n"]) -> Chunks:
        records = permuted(positions, np.int64(self.slots), epoch_key(self._seed, epoch))
        return Chunks(records, np.zeros_like(records), np.full_like(records, _WHOLE))


class SizedChunks(_Permuted):
    """Order of a source whose records' sizes are known from an index, one permutation of the whole source."""

    def __init__(
        self, corpus: Corpus, cut: ChunkCut, *, seed: int, generations: Sequence[Generation]
    ) -> None:
        self._corpus = corpus
        self._cut = cut
        self._seed = seed
        # An empty array each: np.concatenate refuses a list without arrays.
        firsts, slots = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        # Entries start anew at each file, so that a generation, which ends with a file, ends with an entry.
        for start, end in corpus.file_bounds():
            counts = cut.counts(corpus.sizes(start, end))
            entries = np.arange(0, end - start, _TABLE_STRIDE)
            firsts.append(start + entries)
            # A file without records has no entry.
            slots.append(np.add.reduceat(counts, entries) if len(entries) else entries)
        self._first_record = np.concatenate([*firsts, [len(corpus)]])
        self._first_slot = np.concatenate([[0], np.cumsum(np.concatenate(slots))])
        first_record_after = [int(corpus.file_ends[generation.files - 1]) for generation in generations]
        self._set_generations(
            generations, self._first_slot[np.searchsorted(self._first_record, first_record_after)].tolist()
        )

    def join(self, epoch: int, place: int, files: int) -> Generation:
        """Returns the generation with which more files join the order before `place` of an epoch."""
        return Generation(epoch, place, 0, files)

    def _contents(
        self, slots: Int64[np.ndarray, " n"]
    ) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        # side="right": an entry without slots is skipped in favour of the one that holds the slot.
        block = np.searchsorted(self._first_slot, slots, side="right") - 1
        record, first = np.empty_like(slots), np.empty_like(slots)
        # Sizes are looked up once per entry, not once per slot.
        for entry in sorted(set(block.tolist())):
            in_entry = np.flatnonzero(block == entry)
            start, end = int(self._first_record[entry]), int(self._first_record[entry + 1])
            sizes = self._corpus.sizes(start, end)
            counts = self._cut.counts(sizes)
            # A record that cannot be read any more has size 0: the first one takes the missing slots.
            counts[np.argmin(sizes)] += self._first_slot[entry + 1] - self._first_slot[entry] - counts.sum()
            ends = np.cumsum(counts)
            slot_in_entry = slots[in_entry] - self._first_slot[entry]
            record_in_entry = np.searchsorted(ends, slot_in_entry, side="right")
            record[in_entry], first[in_entry] = (
                start + record_in_entry,
                slot_in_entry - (ends[record_in_entry] - counts[record_in_entry]),
            )
        return record, first
