"""Reader of chunks: token ids of a prepared source, or text that is read, cut and tokenised."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int, Int32, Int64, Integer

from jtrain.data.loss_mask import (
    NO_RUNS,
    ChunkPart,
    encode_parts,
    pieces_of_sample,
    runs_of_spans,
    runs_within,
    split_chunk,
)
from jtrain.data.pretokenized.reader import PreparedIndex
from jtrain.data.sources.chunk_cut import ChunkCut
from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.formats import BadRecord
from jtrain.data.sources.formats.long_lines import TextPart
from jtrain.data.sources.source import field_of, identity_of
from jtrain.data.stream.chunk_order import Chunks
from jtrain.data.stream.growing_order import WindowAnchor
from jtrain.data.stream.source_setup import SourceSetup
from jtrain.data.tokenizer import TextChunk, Tokenizer


@dataclasses.dataclass(frozen=True)
class Read:
    """Result of reading some chunks, in the order of the request.

    lengths: tokens of each chunk; 0 if there is none, or its document is held out for evaluation or skipped.
    ids: token ids of all chunks, one after another; or those of the whole source in a memory map, see
      `starts`.
    skipped: number of the first chunk of each bad document that was left out, and its `file:number` and the
      reason.
    ignored: runs (start, end) of `ids` that are read and not learned, ascending; none without a loss mask.
    numbers: numbers of the chunks; None if they are those of the request, in its order.
    """

    lengths: Int[np.ndarray, " n"]
    ids: Integer[np.ndarray, " tokens"]
    skipped: tuple[tuple[int, str], ...] = ()
    ignored: Int32[np.ndarray, "runs 2"] = dataclasses.field(default_factory=lambda: NO_RUNS)
    anchor: WindowAnchor | None = None
    """Where the window of the first chunk begins, if the order is one of `GrowingChunks`."""
    starts: Int64[np.ndarray, " n"] | None = None
    """Index in `ids` of the first token of each chunk; None if the chunks are one after another."""
    numbers: Int[np.ndarray, " n"] | None = None


@dataclasses.dataclass(eq=False, kw_only=True)
class ChunkReader:
    """Reads the chunks of one source, of whatever records, whatever their order.

    corpus, prepared: the source as text or as a prepared index; the other one is None.
    cut: cut of its texts; without meaning for a prepared source.
    identities: names of the files, and the number of records up to the end of each.
    """

    setup: SourceSetup
    tokenizer: Tokenizer
    corpus: Corpus | None
    prepared: PreparedIndex | None
    cut: ChunkCut
    identities: tuple[Sequence[str], Int[np.ndarray, " files"]]

    def read(self, chunks: Chunks, watch: Callable[[int], None] | None) -> Read:
        """Reads chunks; `skipped` has their indexes instead of their numbers."""
        if watch is not None and len(chunks.record):
            # These reads open or decode everything in one call: the first chunk stands for all of them.
            watch(0)
        if self.prepared is not None:
            start, end = self.spans(chunks)
            if self.setup.map_ids:
                assert self.prepared.mapped_ids is not None
                token_starts = self.prepared.places(chunks.record, start, end)
                # Nothing is copied: the caller slices the memory map itself.
                return Read((end - start).astype(np.int32), self.prepared.mapped_ids, starts=token_starts)
            ids = self.prepared.read_spans(chunks.record, start, end)
            ignored = self.prepared.ignored(chunks.record, start, end)
            return Read((end - start).astype(np.int32), ids, ignored=ignored)
        assert self.corpus is not None
        has_mask = self.setup.source.mask is not None
        text_chunks: list[TextChunk] = []
        masked_parts: list[list[ChunkPart]] = []
        reasons = []
        marked_parts = self._marked_parts(chunks)
        begin = bool(self.cut.border_tokens - 1)
        # Chunks with marks are read by `_marked_parts`; every other one takes the next of `texts`, in order.
        texts = self.corpus.read(
            np.delete(chunks.record, list(marked_parts)) if marked_parts else chunks.record
        )
        for i, (record, first, num) in enumerate(zip(*(array.tolist() for array in chunks), strict=True)):
            if i in marked_parts:
                text_chunks.append(self.cut.chunk(marked_parts[i], first, num)[0])
                continue
            if watch is not None and i:
                watch(i)
            text = next(texts)
            if isinstance(text, BadRecord):
                if self.setup.on_bad_record == "fail":
                    raise text
                # A bad document is reported once, by its first chunk, however many slots it has.
                if first == 0:
                    reasons.append((i, f"document {identity_of(*self.identities, record)}: {text}"))
                # A bad record becomes an empty chunk: its number must still stand for something.
                text = ""
            content = text.encode("utf-8")
            if self.setup.row_tokens is not None:
                # Where a sample may be cut is known when it is tokenised.
                chunk, start = TextChunk(content, begin and bool(content), ends=bool(content)), 0
            elif (
                content and not first and len(content) + self.cut.border_tokens <= num * self.cut.chunk_bytes
            ):
                # Most documents are one chunk, and a cut takes 2 us.
                chunk, start = TextChunk(content, begin, ends=True), 0
            else:
                chunk, start = self.cut.chunk(TextPart(content, 0, len(content)), first, num)
            if has_mask:
                masked_parts.append(split_chunk(chunk, start, text))
            else:
                text_chunks.append(chunk)
        if not has_mask:
            return Read(*self.tokenizer.encode_chunks(text_chunks), tuple(reasons))
        (lengths, ids), ignored = encode_parts(self.tokenizer, masked_parts)
        if self.setup.row_tokens is None:
            return Read(lengths, ids, tuple(reasons), ignored)
        first_token = np.cumsum(lengths, dtype=np.int64) - lengths
        start, end = np.zeros(len(lengths), np.int64), lengths.astype(np.int64)
        for i in np.flatnonzero((lengths > self.setup.row_tokens) | (chunks.first > 0)).tolist():
            runs = runs_within(ignored, int(first_token[i]), int(first_token[i]) + int(lengths[i]))
            start[i], end[i], loss = self._piece(_chunk_at(chunks, i), int(lengths[i]), runs)
            reasons += [(i, loss)] if loss else []
        if np.array_equal(lengths, end - start):
            return Read(lengths, ids, tuple(reasons), ignored)
        start, end = first_token + start, first_token + end
        spans = zip(start.tolist(), end.tolist(), strict=True)
        pieces = np.concatenate([ids[:0], *(ids[first:last] for first, last in spans)])
        ignored = runs_of_spans(ignored, start, end)
        return Read((end - start).astype(np.int32), pieces, tuple(reasons), ignored)

    def _piece(self, chunk: Chunks, length: int, runs: Int[np.ndarray, "runs 2"]) -> tuple[int, int, str]:
        """Returns first token and end of one chunk of a sample, and what is left out of the sample, if this
        is its first chunk.

        Args:
          length: tokens of the sample.
          runs: runs of its tokens that are not learned.

        Raises:
          BadRecord: the sample is longer than a row, and `on_too_long` is refuse.
        """
        setup, row_tokens = self.setup, self.setup.row_tokens
        assert row_tokens is not None
        record, first, num = (int(array[0]) for array in chunk)
        if length <= row_tokens:
            return (0, 0, "") if first else (0, length, "")
        rule, field = setup.source.on_too_long, field_of(setup.name)
        too_long = (
            f"document {identity_of(*self.identities, record)}: its {length:,} tokens are more than a row of "
            f"data.seq_len={row_tokens:,}"
        )
        if rule == "refuse":
            raise BadRecord(
                f"{field}: {too_long}. Raise data.seq_len, shorten it, or set {field}.on_too_long to "
                "'split_turns' or 'drop'."
            )
        pieces = pieces_of_sample(length, runs, row_tokens) if rule == "split_turns" else []
        # Where the text has more tokens per byte than was estimated, the slots may be too few.
        pieces = pieces[: self._num_slots(record, length, num)]
        loss = ""
        left_out = _num_learned(runs, 0, length) - sum(_num_learned(runs, *piece) for piece in pieces)
        if not first and left_out:
            loss = f"{too_long}; {left_out:,} that are learned are left out ({field}.on_too_long={rule!r})"
        start, end = pieces[first // num] if first // num < len(pieces) else (0, 0)
        return start, end, loss

    def _num_slots(self, record: int, length: int, num: int) -> int:
        """Returns the number of slots of a sample, of `num` chunks each."""
        if self.corpus is None:
            return -(-length // self.setup.chunk_tokens)
        return int(self.cut.counts(self.corpus.sizes(record, record + 1), per_slot=num)[0])

    def spans(self, chunks: Chunks) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Returns first token and end of each chunk of a prepared source within its document."""
        assert self.prepared is not None
        length = self.prepared.lengths(chunks.record).astype(np.int64)
        if self.setup.row_tokens is not None:
            start, end = np.zeros_like(length), np.where(chunks.first == 0, length, 0)
            for i in np.flatnonzero(length > self.setup.row_tokens).tolist():
                chunk = _chunk_at(chunks, i)
                runs = self.prepared.ignored(chunk.record, np.zeros(1, np.int64), length[i : i + 1])
                start[i], end[i], _ = self._piece(chunk, int(length[i]), runs)
            return start, end
        start = np.minimum(chunks.first * self.setup.chunk_tokens, length)
        return start, np.minimum((chunks.first + chunks.num) * self.setup.chunk_tokens, length)

    def _marked_parts(self, chunks: Chunks) -> dict[int, TextPart]:
        """Reads the chunks of long lines: for each, by its index, the text around it."""
        if self.setup.source.mask is not None or not len(chunks.record):
            return {}
        assert self.corpus is not None
        # A document of one chunk is read as a whole, in one go.
        spans = self.cut.spans(chunks.first, chunks.num)
        parts = self.corpus.parts(chunks.record, spans, min_bytes=2 * self.cut.chunk_bytes)
        return {i: part for i, part in enumerate(parts) if part is not None}


def _num_learned(runs: Int[np.ndarray, "runs 2"], start: int, end: int) -> int:
    return end - start - int(np.diff(runs_within(runs, start, end)).sum())


def _chunk_at(chunks: Chunks, index: int) -> Chunks:
    return Chunks(*(array[index : index + 1] for array in chunks))
