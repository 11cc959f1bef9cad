"""Reader of chunks: token ids of a prepared source, or text that is read, cut and tokenised."""

import ctypes
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int, Int32, Int64, Integer

from jtrain.data.loss_mask import NO_RUNS, ChunkPart, encode_parts, split_chunk
from jtrain.data.native.library import address, core
from jtrain.data.pretokenized.reader import PreparedIndex
from jtrain.data.sources.chunk_cut import ChunkCut
from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.formats import BadRecord
from jtrain.data.sources.formats.long_lines import LONG_LINE_BYTES, TextPart
from jtrain.data.sources.read_records import read_lines
from jtrain.data.sources.source import identity_of
from jtrain.data.stream.chunk_order import Chunks
from jtrain.data.stream.growing_order import WindowAnchor
from jtrain.data.stream.samples import SampleReader
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
    ignored: Int32[np.ndarray, "runs 3"] = dataclasses.field(default_factory=lambda: NO_RUNS)
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

    def __post_init__(self) -> None:
        # Only where the rows hold samples whole.
        self._samples = (
            None
            if self.setup.row_tokens is None
            else SampleReader(
                self.setup, self.tokenizer, self.corpus, self.prepared, self.cut, self.identities
            )
        )

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
        if self._samples is not None:
            return Read(*self._samples.read(chunks, watch))
        # Only rows of bytes are cut at any byte of a text.
        if self.cut.exact and self.setup.source.mask is None and (library := core()) is not None:
            return self._read_by_core(library, chunks, watch)
        return self._read_texts(chunks, watch)

    def _read_texts(self, chunks: Chunks, watch: Callable[[int], None] | None) -> Read:
        """Reads texts, cuts them and tokenises the chunks."""
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
            if content and not first and len(content) + self.cut.border_tokens <= num * self.cut.chunk_bytes:
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
        return Read(lengths, ids, tuple(reasons), ignored)

    def _read_by_core(
        self, library: ctypes.CDLL, chunks: Chunks, watch: Callable[[int], None] | None
    ) -> Read:
        """Reads chunks of bytes: those of JSON lines without an object of Python per document.

        Lines about which only Python can tell, and records of other formats, are read as `_read_texts` does.
        """
        assert self.corpus is not None
        located = self.corpus.locate(chunks.record)
        lines = read_lines(self.corpus.files, *located, below_bytes=self._long_line_bytes)
        if not lines.content:
            return self._read_texts(chunks, watch)
        # Room for a begin and an end id of each text, and for the eight bytes that the core writes at a time.
        room = int((lines.end - lines.start).sum()) + 10 * len(chunks.record)
        ids, lengths = np.empty(room, np.uint8), np.empty(len(chunks.record), np.int32)
        field = self.setup.source.text_field.encode()
        num_ids = library.json_chunks(
            len(chunks.record),
            lines.content,
            *(address(column, np.int64) for column in (lines.start, lines.end, chunks.first, chunks.num)),
            self.cut.chunk_bytes,
            field,
            len(field),
            address(ids, np.uint8),
            address(lengths, np.int32),
        )
        ids = ids[:num_ids]
        in_python = np.flatnonzero(lengths < 0)
        if not len(in_python):
            return Read(lengths, ids)
        if watch is not None and in_python[0]:
            watch(int(in_python[0]))
        read = self._read_texts(
            Chunks(*(column[in_python] for column in chunks)),
            None if watch is None else lambda i: watch(int(in_python[i])),
        )
        lengths[in_python] = 0
        # Each text goes before the ids of the chunks that follow it.
        ids_before = np.cumsum(lengths, dtype=np.int64)[in_python]
        lengths[in_python] = read.lengths
        skipped = tuple((int(in_python[i]), reason) for i, reason in read.skipped)
        return Read(lengths, np.insert(ids, np.repeat(ids_before, read.lengths), read.ids), skipped)

    @property
    def _long_line_bytes(self) -> int:
        """Bytes of a line from which on marks are looked for, so that a part of it is read alone."""
        return max(LONG_LINE_BYTES, 2 * self.cut.chunk_bytes)

    def spans(self, chunks: Chunks) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Returns first token and end of each chunk of a prepared source within its document."""
        assert self.prepared is not None
        if self._samples is not None:
            return self._samples.spans(chunks)
        length = self.prepared.lengths(chunks.record).astype(np.int64)
        start = np.minimum(chunks.first * self.setup.chunk_tokens, length)
        return start, np.minimum((chunks.first + chunks.num) * self.setup.chunk_tokens, length)

    def _marked_parts(self, chunks: Chunks) -> dict[int, TextPart]:
        """Reads the chunks of long lines: for each, by its index, the text around it."""
        if self.setup.source.mask is not None or not len(chunks.record):
            return {}
        assert self.corpus is not None
        # A document of one chunk is read as a whole, in one go.
        spans = self.cut.spans(chunks.first, chunks.num)
        parts = self.corpus.parts(chunks.record, spans, min_bytes=self._long_line_bytes)
        return {i: part for i, part in enumerate(parts) if part is not None}
