"""Held-out sets: documents that are evaluated and never trained on, as the same batches each time.

`held_out` in `jtrain/data/stream/chunk_stream.py` decides which documents of a training source these are.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32, Int64

from jtrain.data.constructor.collate import Rows, fill_rows, iterate_pieces, spans_of
from jtrain.data.constructor.context_order import context_order
from jtrain.data.loss_mask import learned_spans, number_pairs, runs_within, unlearned, weigh_targets
from jtrain.data.mixture.schedule import Constant
from jtrain.data.planner.pieces import Pieces
from jtrain.data.planner.planner import EndOfData, Planner, PlannerSpec
from jtrain.data.sources.opening import opening_of
from jtrain.data.sources.shuffle import epoch_key, permuted
from jtrain.data.sources.source import HELD_OUT_PREFIX, Source, field_of
from jtrain.data.sources.storage import find_files
from jtrain.data.spec import PackedText
from jtrain.data.stream.chunk_order import Chunks
from jtrain.data.stream.chunk_reader import Read
from jtrain.data.stream.chunk_stream import ChunkStream, Origin
from jtrain.data.stream.source_setup import SourceSetup
from jtrain.data.tokenizer import Ids
from jtrain.errors import FileError, UserError
from jtrain.layout.dims import Batch

_READ_AHEAD = 16
"""Number of chunks read at a time."""

_DOCUMENTS_PER_ROW, _DOCUMENTS_PER_ROW_READ = 4.0, 1.25
"""Documents, and rows of text, from which an evaluation draws, over the rows that it needs.

With as many documents as rows the standard error would be a quarter larger than with four times as many.
Sizes from an index may also count what is no text, such as other fields of a JSON line. Where sizes are only
known by reading, they are right, and more of them would cost time."""

_MANY_PARTS = 64
"""Parts of a source of which one alone does not stand for it."""


@dataclasses.dataclass(frozen=True)
class HeldOutBatch:
    """Batch of held-out text.

    batch: packed rows; the last batch of a set is padded.
    document_BL: number of each token's document within the set, from 0 on; -1 in padding.
    text_bytes: UTF-8 bytes of the text of all tokens that are targets; None if their tokenizer cannot tell.
    """

    batch: Batch
    document_BL: Int32[np.ndarray, "B L"]
    text_bytes: int | None


class Question(NamedTuple):
    """Turn of a held-out sample, or a prompt without an answer that is known.

    source: number of the stream.
    prompt, answer: ids that are read, and those that are learned behind them.
    """

    source: int
    prompt: Ids
    answer: Ids | None


class _Documents(NamedTuple):
    """Documents from which an evaluation draws its chunks, and the number of chunks up to each one's end.

    origins: where the documents of each source are from.
    """

    source: Int64[np.ndarray, " documents"]
    record: Int64[np.ndarray, " documents"]
    end: Int64[np.ndarray, " documents"]
    origins: tuple[Origin, ...]


class HeldOutSet:
    """Held-out documents of some sources, of which an evaluation reads a fixed sample.

    Documents are taken in a random order that is the same for every run, from all over each source, the same
    number from each, until there are some for every row of an evaluation, or all are taken. Rows are filled
    with chunks drawn from all of these at random: the more documents an evaluation has, the smaller its
    standard error. A set that is smaller than an evaluation is read whole.

    A target is a token whose predecessor is in the same piece of the same document: all but the first token
    of a chunk, and the token after each cut where a row ends. End ids are targets, of 0 bytes of text.

    Args:
      streams: sources; their documents that `ChunkStream.held_out` chooses.
      spec: gives the shape of the rows, and the most batches of an evaluation.
      field: config path of the sources, for messages.
      say: called with the line of `describe_sample` when the documents are drawn.
    """

    def __init__(
        self,
        streams: Sequence[ChunkStream],
        spec: PackedText,
        *,
        field: str = "data",
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.streams = streams
        self.spec = spec
        self._field, self._say = field, say

    @property
    def num_documents(self) -> int:
        """Number of documents from which the sample is drawn."""
        return len(self.document_table.record)

    @property
    def vocab_size(self) -> int:
        """Upper bound (exclusive) of the ids of all sources."""
        return max(stream.tokenizer.vocab_size for stream in self.streams)

    def describe(self) -> str:
        """Returns the size of the sources, for the plan of a run."""
        counts = [stream.num_documents for stream in self.streams if stream.num_documents is not None]
        documents = f"{sum(counts):,} documents" if len(counts) == len(self.streams) else "documents"
        files, size = (sum(s.num_files for s in self.streams), sum(s.size_bytes for s in self.streams))
        return f"{documents} in {files:,} files, {size / 2**20:,.1f} MiB, all held out"

    def describe_sample(self) -> str:
        """Returns from how many files, parts of files and sources the documents are drawn."""
        origins = self.document_table.origins
        files, parts = (sum(getattr(origin, name) for origin in origins) for name in ("files", "parts"))
        sources = sum(origin.parts > 0 for origin in origins)
        return (
            f"{self._field}: evaluations draw from {self.num_documents:,} held-out documents of "
            f"{parts:,} {'part' if parts == 1 else 'parts'} in {files:,} {'file' if files == 1 else 'files'} "
            f"of {sources:,} {'source' if sources == 1 else 'sources'}"
        )

    def fingerprint(self) -> str:
        """Returns a text that changes whenever the batches could."""
        return " ".join(stream.fingerprint() for stream in self.streams)

    def has_targets(self) -> bool:
        """True if some chunk has a learned token after its first one; reads chunks up to that one."""
        reads = (self._read(number) for number in range(int(self.document_table.end[-1])))
        return any(
            # Targets are all tokens but the first; the ignored runs are counted from token 1 on.
            len(read.ids) - 1 > np.diff(np.maximum(unlearned(read.ignored), 1)).sum()
            for read in reads
        )

    def questions(self, count: int, *, context: int) -> list[Question]:
        """Returns turns of the first documents, at most `count`: what is learned behind a prompt.

        Args:
          context: most tokens of prompt and answer; longer ones are left out.
        """
        questions: list[Question] = []
        for number in range(int(self.document_table.end[-1])):
            if len(questions) >= count:
                break
            document, chunk = self._document_of(number)
            # The rest of a document that is cut lacks its beginning.
            if chunk:
                continue
            read = self._read(number)
            source = int(self.document_table.source[document])
            questions += [
                Question(source, read.ids[:start], read.ids[start:end])
                for start, end in learned_spans(read.ignored, len(read.ids))
                # What ends with a row may have been cut there.
                if 0 < start < end < context
            ]
        return questions[:count]

    def batches(self, *, context: int = 1) -> Iterator[HeldOutBatch]:
        """Yields the batches of an evaluation, at most `data.eval_batches`.

        Args:
          context: size of the mesh axis that splits rows.
        """
        spec = self.spec
        if self._say is not None:
            self._say(self.describe_sample())
            self._say = None  # once: every evaluation reads the same documents
        reads: dict[int, Read] = {}
        order = context_order(spec.seq_len, context, spec.context_order)

        def lengths(source: int, first: int, count: int) -> Int[np.ndarray, " read"]:
            # Reads ahead of the planner in small portions: an evaluation may end in the middle of a set.
            numbers = range(first, first + min(count, _READ_AHEAD))
            reads.update((number, self._read(number)) for number in numbers)
            return np.asarray([len(reads[number].ids) for number in numbers], np.int64)

        planner = Planner(
            PlannerSpec(
                names=("held out",),
                chunks_per_epoch=(int(self.document_table.end[-1]),),
                seq_len=spec.seq_len,
                global_batch=spec.global_batch,
                schedule=Constant({"held out": 1.0}),
                packing=spec.packing_of(has_samples=any(stream.has_samples for stream in self.streams)),
                epochs=1,
                balance=False,
            ),
            lengths,
        )
        state = planner.start()
        for _ in range(spec.eval_batches):
            try:
                plan, state = planner.plan(state)
            except EndOfData:
                return
            # New arrays per batch: the caller may hold several.
            rows = Rows.empty(spec.global_batch, spec.seq_len)
            fill_rows(rows, plan.pieces, spans_of(lambda _, number: reads[number].ids))
            runs = [
                runs_within(reads[n].ignored, start, end) for _, n, start, end in iterate_pieces(plan.pieces)
            ]
            weigh_targets(rows.target_BL, plan.pieces, runs)
            if spec.has_pairs:
                number_pairs(rows.position_BL, rows.segment_BL, plan.pieces, runs)
            arrays = rows.token_BL, rows.target_BL, rows.position_BL, rows.segment_BL
            # Permuted last, as targets and runs are computed on neighbouring tokens.
            batch = Batch(*(array[:, order] for array in arrays))
            yield HeldOutBatch(
                batch, self._document_BL(plan.pieces)[:, order], self._text_bytes(plan.pieces, reads)
            )
            # Chunks before the oldest that a later step can need are in their batches by now.
            for number in [number for number in reads if number < state.oldest()[0]]:
                del reads[number]

    @functools.cached_property
    def document_table(self) -> _Documents:
        """Raises UserError if the documents of a source of many parts are all of one part."""
        # Rows per source, rounded up: each source gives the same number, however large it is.
        share = -(-self.spec.eval_batches * self.spec.global_batch // len(self.streams))
        columns: list[np.ndarray] = [np.empty((0, 3), np.int64)]
        origins = []
        for source, stream in enumerate(self.streams):
            documents = rows = share * (
                _DOCUMENTS_PER_ROW if stream.sizes_are_known else _DOCUMENTS_PER_ROW_READ
            )
            samples = [np.empty(0, np.int64)]
            for records in stream.held_out_records():
                # Some at a time: their lengths, by which the sample ends, may have to be read.
                while len(records) and (documents > 0 or rows > 0):
                    sample, records = np.split(records, [max(_READ_AHEAD, math.ceil(documents))])
                    # Sorted: neighbours in a Parquet file are decoded together.
                    sample = np.sort(sample)
                    lengths = stream.rows_of(sample)
                    chunks = np.maximum(np.ceil(lengths), 1).astype(np.int64)
                    columns.append(np.stack([np.full_like(sample, source), sample, chunks], axis=1))
                    samples.append(sample)
                    # Chunks of whole samples are shorter than rows.
                    in_rows = float(lengths.sum()) * stream.setup.chunk_tokens / self.spec.seq_len
                    documents, rows = documents - len(sample), rows - in_rows
                # Both: enough documents for the standard error, and enough text for the rows.
                if documents <= 0 and rows <= 0:
                    break
            origins.append(stream.origin_of(np.concatenate(samples)))
            self._check_origin(stream, origins[-1])
        sources, records, chunks = np.concatenate(columns).T
        return _Documents(sources, records, np.cumsum(chunks), tuple(origins))

    def _check_origin(self, stream: ChunkStream, origin: Origin) -> None:
        """Refuses documents that are all of one part of a source that has many."""
        # A set of its own is all held out: its documents are of one part only where the others are empty.
        is_drawn = stream.setup.eval_fraction < 1
        if is_drawn and origin.parts == 1 and origin.of_parts >= _MANY_PARTS:
            raise UserError(
                f"{field_of(stream.setup.name)}: the documents held out for evaluation are of 1 of its "
                f"{origin.of_parts:,} files and parts of 256 KiB, so that evaluations would not stand for "
                "the others. Raise data.eval_fraction or data.eval_batches, or hold out files of their own "
                "with eval.sets."
            )

    def _document_of(self, number: int) -> tuple[int, int]:
        """Returns the document of chunk `number` of the sample, and the chunk's number in the document."""
        # Chunk numbers are permuted once more, so that the rows mix documents of all sources.
        total = np.int64(self.document_table.end[-1])
        chunk = int(permuted(np.asarray([number], np.int64), total, epoch_key(0, 0))[0])
        document = int(np.searchsorted(self.document_table.end, chunk, side="right"))
        return document, chunk - (int(self.document_table.end[document - 1]) if document else 0)

    def _read(self, number: int) -> Read:
        document, chunk = self._document_of(number)
        record = int(self.document_table.record[document])
        chunks = Chunks(*(np.asarray([value], np.int64) for value in (record, chunk, 1)))
        return self.streams[int(self.document_table.source[document])].read_chunks(chunks)

    def _document_BL(self, pieces: Pieces) -> Int32[np.ndarray, "B L"]:
        document_BL = np.full((self.spec.global_batch, self.spec.seq_len), -1, np.int32)
        row_tokens = np.zeros(self.spec.global_batch, np.int64)
        for row, (_, number, start, end) in zip(pieces.row.tolist(), iterate_pieces(pieces), strict=True):
            document_BL[row, row_tokens[row] : row_tokens[row] + end - start] = self._document_of(number)[0]
            row_tokens[row] += end - start
        return document_BL

    def _text_bytes(self, pieces: Pieces, reads: Mapping[int, Read]) -> int | None:
        total = 0
        for _, number, start, end in iterate_pieces(pieces):
            source = int(self.document_table.source[self._document_of(number)[0]])
            sizes = self.streams[source].tokenizer.text_bytes(reads[number].ids)
            if sizes is None:
                return None
            # + 1: the first token of a piece is nobody's target, so its bytes do not count.
            total += int(sizes[start + 1 : end].sum())
            for first, last in unlearned(runs_within(reads[number].ignored, start + 1, end)).tolist():
                total -= int(sizes[start + 1 + first : start + 1 + last].sum())
        return total


def open_sets(
    sets: Mapping[str, Source],
    spec: PackedText,
    setups: Sequence[SourceSetup],
    say: Callable[[str], None] | None = None,
) -> dict[str, HeldOutSet]:
    """Opens the held-out sets of `eval.sets`, all of whose documents are held out.

    Args:
      sets: sources by name.
      spec: the data that is trained on.
      setups: settings of its sources.
      say: argument of `open_dataset`.

    Raises:
      UserError: a set has files of a training source, or no text; the message names field, file and way out.
      FileError: nothing is there, or it cannot be read.
    """
    held_out_sets = {}
    for name, source in sets.items():
        field = f"{HELD_OUT_PREFIX}{name}"
        has_samples = source.mask is not None
        spec.check_samples(field, source, has_samples=has_samples)
        tokenizer = source.tokenizer or spec.tokenizer
        chunk_tokens, row_tokens = spec.cut_of(has_samples=has_samples)
        setup = dataclasses.replace(
            # For what sources share: the seed, the caches, and what a bad record does.
            setups[0],
            name=field,
            source=source,
            tokenizer=tokenizer,
            end_token=spec.end_token if tokenizer == spec.tokenizer else None,
            eval_fraction=1.0,
            chunk_tokens=chunk_tokens,
            row_tokens=row_tokens,
            chunk_bytes=None,
            prepared=None,
            fingerprint=None,
        )
        held_out_sets[name] = HeldOutSet(
            [ChunkStream(setup, opening_of(field, say))], spec, field=field, say=say
        )
        # After opening: a wrong path is reported as such, not as a set without shared files.
        _check_apart(source, field, setups)
        # Found now and not at the first evaluation, hours later.
        if not held_out_sets[name].has_targets():
            learned = "" if source.mask is None else " of which the second is learned"
            raise UserError(
                f"{field}.path={source.path!r}: none of its {held_out_sets[name].num_documents} documents "
                f"has two tokens{learned}, so there is nothing to predict. Set {field}.path to files with "
                "text in them."
            )
    return held_out_sets


def _check_apart(source: Source, field: str, setups: Sequence[SourceSetup]) -> None:
    """Refuses a set that shares a file with a training source."""
    locations = _locations(source, f"{field}.path")
    for setup in setups:
        training_field = field_of(setup.name)
        try:
            shared = locations & _locations(setup.source, f"{training_field}.path")
        except FileError:
            if setup.prepared is None:
                raise
            continue  # a prepared source needs its files no more
        if shared:
            raise UserError(
                f"{field}.path={source.path!r}: {len(shared)} of its {len(locations)} files are trained on "
                f"by {training_field}.path={setup.source.path!r} (first: {min(shared)}). Move them out of "
                f"{training_field}.path, set {field}.path to other files, or remove {field}: "
                f"data.eval_fraction holds out documents of {training_field}."
            )


def _locations(source: Source, field: str) -> set[str]:
    """Returns the files of a source, by their real paths; a Grain dataset by its name."""
    if source.format == "grain":
        return {source.path}
    files = find_files(source.path, field=field)
    return {file.location if file.is_remote else os.path.realpath(file.location) for file in files}
