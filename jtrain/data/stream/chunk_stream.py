"""Numbered, endless stream of the chunks of one source, which planner and loaders share."""

import copy
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int, Int64

from jtrain.data.pretokenized.reader import PreparedIndex
from jtrain.data.sources.chunk_cut import ChunkCut
from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.generations import Generation
from jtrain.data.sources.opening import Opening
from jtrain.data.sources.shuffle import epoch_key, order_seed
from jtrain.data.sources.source import FileKeys, identity_of, split_positions
from jtrain.data.stream.chunk_order import ChunkOrder, Chunks
from jtrain.data.stream.chunk_reader import ChunkReader, Read
from jtrain.data.stream.growing_order import GrowingChunks, WindowAnchor
from jtrain.data.stream.random_records import RECORDS_AT_A_TIME, random_records
from jtrain.data.stream.source_order import estimated_chunk_bytes, make_order
from jtrain.data.stream.source_setup import SourceSetup
from jtrain.data.stream.windowed_order import WindowedChunks
from jtrain.data.tokenizer import make_tokenizer
from jtrain.errors import UserError

_BYTES_AT_A_TIME = 1 << 28
"""Bytes of the files or stripes whose records are drawn together for an evaluation."""


class Origin(NamedTuple):
    """Number of files, and of files or stripes of large ones, that some records are from, of so many."""

    files: int
    parts: int
    of_parts: int


WHOLE = (0, 1)
"""Share of a grouped source that is all of it: number 0 of 1."""


class ChunkStream:
    """Stream of the chunks of one source, numbered 0, 1, 2, ... without end; each epoch is a new permutation.

    The stream is a pure function of the setup: any process may read any chunks at any time and finds the
    same. Some numbers stand for no chunk; see `ChunkOrder`.

    Attributes:
      corpus: the documents as text; None for a prepared source, which needs them no more.
      prepared: the prepared index, if there is one.
      chunk_bytes: most bytes of a chunk of text.
      opening: told of files as they are opened, now and later.

    Raises:
      UserError: the source, its tokenizer or its prepared index cannot be opened.
    """

    def __init__(self, setup: SourceSetup, opening: Opening | None = None) -> None:
        self.setup = setup
        self.opening = opening or Opening()
        with self.opening:
            self._open_files()

    def _open_files(self) -> None:
        setup = self.setup
        self.tokenizer = make_tokenizer(setup.tokenizer, end_token=setup.end_token)
        self.mask = setup.mask()
        self.corpus: Corpus | None = None
        self.prepared: PreparedIndex | None = None
        self.chunk_bytes = setup.chunk_tokens
        if setup.prepared is not None:
            index = self.prepared = PreparedIndex(
                f"{setup.prepared.rstrip('/')}/{setup.name}", Path(setup.cache_dir)
            )
            # An index prepared with other settings holds other chunks under the same numbers.
            fields = {
                name: getattr(setup.source, name) for name in ("format", "text_field", "text_piece_bytes")
            }
            index.check(on_bad_record=setup.on_bad_record, tokenizer=self.tokenizer.identity, **fields)
            index.check_mask(self.mask)
            self.names, self._file_ends = index.names, index.file_ends
            self.size_bytes = index.num_tokens * index.dtype.itemsize
        else:
            # Opening a corpus may need seconds per remote file; `opening` reports them.
            corpus = self.corpus = Corpus(
                setup.source,
                name=setup.name,
                cache_dir=Path(setup.cache_dir),
                decoded_cache_bytes=setup.decoded_cache_bytes,
                eager_bytes=setup.eager_bytes,
                num_files=setup.num_files,
                opening=self.opening,
                mask=self.mask,
            )
            (self.names, self._file_ends), self.size_bytes = corpus.identities, corpus.size_bytes
            self.chunk_bytes = setup.chunk_bytes or estimated_chunk_bytes(
                corpus, self.tokenizer, setup.chunk_tokens
            )
        # Reader before order: the order cuts texts as the reader does.
        self._reader = ChunkReader(
            setup=setup,
            tokenizer=self.tokenizer,
            corpus=self.corpus,
            prepared=self.prepared,
            cut=self._chunk_cut(),
            identities=(self.names, self._file_ends),
        )
        self.order = self._new_order()
        self._file_keys = FileKeys(self.names)
        if setup.fingerprint is not None and (fingerprint := self.fingerprint()) != setup.fingerprint:
            raise UserError(
                f"its files changed since the run opened them (fingerprint {setup.fingerprint} then, "
                f"{fingerprint} now): some were removed or rewritten, new ones sort before them, or this "
                "host sees others. Restore them and run again."
            )

    def _new_order(self) -> ChunkOrder:
        setup = self.setup
        documents = self.prepared if self.corpus is None else self.corpus
        assert documents is not None
        return make_order(
            documents,
            self._reader.cut,
            self.generations,
            seed=order_seed(setup.seed, setup.name),
            chunk_tokens=setup.chunk_tokens,
            window_bytes=setup.window_bytes,
        )

    def with_setup(self, setup: SourceSetup) -> "ChunkStream":
        """Returns the same open source in the order of another setup, by its cuts and generations."""
        # Shares the open files: opening a remote corpus once more may take minutes.
        stream = copy.copy(self)
        stream.setup, stream.chunk_bytes = setup, setup.chunk_bytes or self.chunk_bytes
        # A reader of its own, as its cut follows from the setup; what is known of long lines is the corpus's.
        stream._reader = dataclasses.replace(stream._reader, setup=setup, cut=stream._chunk_cut())
        stream.order = stream._new_order()
        return stream

    def _chunk_cut(self) -> ChunkCut:
        border_tokens = 1 + (self.tokenizer.begin_id is not None)
        return ChunkCut(self.chunk_bytes, border_tokens, exact=self.tokenizer.identity == "bytes")

    @property
    def generations(self) -> tuple[Generation, ...]:
        """Generations of the files: the one with all of them, if the setup names none."""
        return self.setup.generations or (
            Generation(0, 0, 0, 0 if self.corpus is None else len(self.corpus.names)),
        )

    @property
    def has_samples(self) -> bool:
        """True if records are samples, of which some tokens are not learned."""
        return self.setup.source.mask is not None or (self.prepared is not None and self.prepared.has_mask)

    @property
    def _growing(self) -> GrowingChunks | None:
        return self.order if isinstance(self.order, GrowingChunks) else None

    def __len__(self) -> int:
        """Number of slots in an epoch, including empty ones and those of held-out and bad documents."""
        return self.order.slots

    @property
    def num_documents(self) -> int | None:
        """Number of documents, including held-out and bad ones; None while the files are not open."""
        return None if self._growing else int(self._file_ends[-1])

    def held_out(self, records: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """True for records held out for evaluation, chosen for ever by a hash of file name and number."""
        # Nothing is held out: no record needs to be hashed.
        if not self.setup.eval_fraction:
            return np.zeros(len(records), np.bool_)
        return split_positions(self._file_ends, self._file_keys, records) < self.setup.eval_fraction

    @property
    def mean_bytes(self) -> int:
        """Bytes of the source per slot, about."""
        return self.chunk_bytes if self._growing else self.size_bytes // max(len(self), 1)

    @property
    def is_grouped(self) -> bool:
        """True if several records are decoded to read one, or to find it, so that its groups should be read
        once.
        """
        return isinstance(self.order, WindowedChunks)

    def locate(self, numbers: Int[np.ndarray, " n"]) -> Chunks:
        """Returns the contents of the slots `numbers`, of any epochs."""
        epochs, positions = self.order.numbers.split(numbers)
        # Nearly always one: masks of several epochs take as long as the look-up.
        if len(epochs) and (epochs == epochs[0]).all():
            return self.order.locate(int(epochs[0]), positions)
        chunks = Chunks(*(np.zeros(len(numbers), np.int64) for _ in range(3)))
        # Not np.unique, which imports numpy.ma: 0.1 s and 3 MB in each loader.
        for epoch in sorted(set(epochs.tolist())):
            in_epoch = epochs == epoch
            for array, values in zip(chunks, self.order.locate(epoch, positions[in_epoch]), strict=True):
                array[in_epoch] = values
        return chunks

    @property
    def can_map_ids(self) -> bool:
        """True if `SourceSetup.map_ids` may be set."""
        return self.prepared is not None and self.prepared.mapped_ids is not None

    def lengths(self, numbers: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Returns the tokens of each chunk without reading it; for prepared sources only."""
        assert self.prepared is not None
        chunks = self.locate(numbers)
        lengths = np.zeros(len(numbers), np.int64)
        is_training = self._is_training(chunks)
        start, end = self._reader.spans(Chunks(*(array[is_training] for array in chunks)))
        lengths[is_training] = end - start
        return lengths.astype(np.int32)

    def read(
        self,
        numbers: Int[np.ndarray, " n"],
        *,
        share: tuple[int, int] = WHOLE,
        skip: Collection[int] = (),
        anchor: WindowAnchor | None = None,
        watch: Callable[[int, int], Any] | None = None,
    ) -> Read:
        """Reads and tokenises chunks.

        Args:
          numbers: numbers of the chunks.
          share: see `RequestPart`.
          skip: numbers of chunks to leave out, like those of bad documents.
          anchor: where a window at or before these chunks begins, as an earlier `Read` said.
          watch: called with the number and record of each chunk before it is read.

        Raises:
          BadRecord: a record is bad, or its file is gone or cannot be read, and `data.on_bad_record` is fail.
          FileError: the prepared index cannot be read, or an error that may pass did not pass.
        """
        # Which share reads a number follows from sizes of parts alone, so every process decides alike.
        if share != WHOLE:
            assert isinstance(self.order, WindowedChunks), "only grouped sources are shared"
            numbers = numbers[self.order.share_of(numbers, share[1]) == share[0]]
        # Before `locate`: without the anchor it would open all windows from the start of the run.
        if self._growing and anchor is not None:
            self._growing.start_at(anchor)
        chunks = self.locate(numbers)
        read_anchor = self._growing.anchor(int(numbers.min())) if self._growing and len(numbers) else None
        is_training = self._is_training(chunks)
        skipped = []
        if skip:
            # These killed their loader: they must not be touched, only reported.
            is_lost = np.isin(numbers, list(skip))
            is_training &= ~is_lost
            names = map(self.identity_of, chunks.record[is_lost].tolist())
            reasons = [f"document {name}: its loader did not survive it" for name in names]
            skipped = list(zip(numbers[is_lost].tolist(), reasons, strict=True))
        indexes = np.flatnonzero(is_training)
        chunks_to_read = Chunks(*(array[indexes] for array in chunks))
        # Chunks that are not read keep the length 0, which the planner passes over.
        lengths = np.zeros(len(numbers), np.int32)
        if watch is None:  # calling a function per chunk takes as long as reading a short chunk
            read = self._reader.read(chunks_to_read, None)
        else:
            read = self._reader.read(
                chunks_to_read, lambda i: watch(int(numbers[indexes[i]]), int(chunks_to_read.record[i]))
            )
        lengths[indexes] = read.lengths
        starts = None
        if read.starts is not None:
            starts = np.zeros(len(numbers), np.int64)
            starts[indexes] = read.starts
        skipped += [(int(numbers[indexes[i]]), reason) for i, reason in read.skipped]
        numbers_read = None if share == WHOLE else numbers
        return dataclasses.replace(
            read,
            lengths=lengths,
            skipped=tuple(skipped),
            anchor=read_anchor,
            starts=starts,
            numbers=numbers_read,
        )

    def identity_of(self, record: int) -> str:
        """Returns `file:number` of a record."""
        return identity_of(self.names, self._file_ends, record)

    def held_out_records(self, *, most_bytes: int = _BYTES_AT_A_TIME) -> Iterator[Int64[np.ndarray, " n"]]:
        """Yields the held-out records in an order that is the same for every run, some at a time.

        They are those of the files with which the run began, so that evaluations stay comparable when files
        join it.

        Args:
          most_bytes: argument of `records_at_random`.
        """
        # Seed 0, not the run's: all runs with these files evaluate on the same documents.
        key = epoch_key(order_seed(0, f"held out/{self.setup.name}"), 0)
        files = None if self.corpus is None else self.generations[0].files
        for records in self.records_at_random(key, files=files, most_bytes=most_bytes):
            yield records[self.held_out(records)]

    def records_at_random(
        self, key: np.uint64, *, files: int | None = None, most_bytes: int = _BYTES_AT_A_TIME
    ) -> Iterator[Int64[np.ndarray, " n"]]:
        """Yields all records, or those of so many `files`, in the random order of `key`; opens files as they
        come.

        Args:
          most_bytes: bytes of files or stripes from all over the source that are opened, and whose records
            are shuffled, at a time; if files are opened as they are read.
        """
        return random_records(self.corpus, self.num_documents, key, files=files, most_bytes=most_bytes)

    @property
    def num_files(self) -> int:
        """Number of files; `names` has the stripes of large ones one by one."""
        if self.prepared is not None:
            return self.prepared.num_files
        assert self.corpus is not None
        return self.corpus.num_files

    def origin_of(self, records: Int[np.ndarray, " n"]) -> Origin:
        """Returns the number of files and parts that these records are from."""
        parts = sorted(set(np.searchsorted(self._file_ends, records, side="right").tolist()))
        # Stripes of a file have its name and, behind an @, their first byte.
        files = {re.sub(r"@\d+$", "", str(self.names[part])) for part in parts}
        return Origin(len(files), len(parts), len(self.names))

    def count_long_samples(self) -> int:
        """Returns the number of samples of a prepared source that are longer than a row; 0 for text."""
        if self.setup.row_tokens is None or self.prepared is None:
            return 0
        blocks = range(0, len(self.prepared), RECORDS_AT_A_TIME)
        ranges = (np.arange(start, min(start + RECORDS_AT_A_TIME, len(self.prepared))) for start in blocks)
        return sum(int((self.prepared.lengths(r) > self.setup.row_tokens).sum()) for r in ranges)

    @property
    def sizes_are_known(self) -> bool:
        """True if `rows_of` looks sizes up in an index, False if it reads the records."""
        return self.corpus is None or not self.corpus.is_open or not self.corpus.sizes_need_reading

    def rows_of(self, records: Int[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        """Returns the length of records in chunks: round up, to at least 1, for the number of chunks."""
        if self.prepared is not None:
            return self.prepared.lengths(records) / self.setup.chunk_tokens
        assert self.corpus is not None
        # One by one: the records are scattered, and `sizes` takes a range.
        sizes = np.asarray([int(self.corpus.sizes(r, r + 1)[0]) for r in records.tolist()], np.int64)
        return (sizes + self._reader.cut.border_tokens) / self.chunk_bytes

    def chunks_of(self, records: Int[np.ndarray, " n"]) -> Chunks:
        """Returns all chunks of some records, held out or not, record by record."""
        counts = np.maximum(np.ceil(self.rows_of(records)), 1).astype(np.int64)
        # Counts up from 0 within each record: a running number minus the chunks before the record.
        first = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return Chunks(np.repeat(records, counts), first, np.ones_like(first))

    def read_chunks(self, chunks: Chunks) -> Read:
        """Reads and tokenises chunks, held out or not, in the given order; for evaluation."""
        return dataclasses.replace(self._reader.read(chunks, None), skipped=())

    def fingerprint(self, files: Sequence[int] | None = None) -> str:
        """Returns a hash that changes whenever a number could stand for other tokens in the same order.

        Args:
          files: the numbers of the files that count; None: all.
        """
        setup = self.setup
        # Seed and generations are not in it: they are saved beside it, and change the order, not the tokens.
        parts = [self.tokenizer.identity, setup.eval_fraction, setup.chunk_tokens]
        if self.prepared is not None:
            parts += ["prepared", self.prepared.made_of, self.prepared.num_records, self.prepared.num_tokens]
        else:
            assert self.corpus is not None
            parts += [self.corpus.fingerprint(files), setup.source.text_field, setup.source.text_piece_bytes]
        if self.mask is not None:
            parts.append(str(self.mask))
        if setup.row_tokens is not None:
            parts.append(setup.source.on_too_long)
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()

    def close(self) -> None:
        """Closes files and frees memory."""
        if isinstance(self.order, WindowedChunks):
            self.order.close()
        if self.corpus is not None:
            self.corpus.close()

    def _is_training(self, chunks: Chunks) -> Bool[np.ndarray, " n"]:
        """True for slots that hold a chunk of a document that is not held out."""
        is_training = chunks.record >= 0
        # Held-out is a hash per record: asked only for slots that hold one.
        is_training[is_training] = ~self.held_out(chunks.record[is_training])
        return is_training
