"""Samples of a source: whole ones, and of those longer than a row the pieces that hold learned tokens'
prompts.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32, Int64, Integer

from jtrain.data.loss_mask import (
    NO_RUNS,
    encode_parts,
    join_pairs,
    pieces_of_sample,
    runs_within,
    split_chunk,
    unlearned,
)
from jtrain.data.pretokenized.reader import PreparedIndex
from jtrain.data.sources.chunk_cut import ChunkCut
from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.formats import BadRecord
from jtrain.data.sources.latest_values import LatestValues
from jtrain.data.sources.source import field_of, identity_of
from jtrain.data.stream.chunk_order import Chunks
from jtrain.data.stream.source_setup import SourceSetup
from jtrain.data.tokenizer import TextChunk, Tokenizer

_MOST_BYTES = 1 << 25
"""Bytes of samples of several slots that a process keeps."""


class _Sample(NamedTuple):
    """Sample of several slots, which are read at different times: it is parsed and tokenised for the first.

    ids, ignored: its tokens, and the runs of them that are not learned; none for a prepared source.
    pieces: first token and end of the piece in each slot; slots behind them are empty.
    reason: why the record is bad, or what of the sample is left out, for the log.
    """

    ids: Integer[np.ndarray, " tokens"]
    ignored: Int[np.ndarray, "runs 3"]
    pieces: list[tuple[int, int]]
    reason: str = ""

    @property
    def size_bytes(self) -> int:
        # A tuple of two numbers in a list takes about 120 bytes.
        return self.ids.nbytes + self.ignored.nbytes + 120 * len(self.pieces) + 1000


_KEPT = LatestValues[_Sample](_MOST_BYTES)

type ReadSamples = tuple[
    Int[np.ndarray, " n"],
    Integer[np.ndarray, " tokens"],
    tuple[tuple[int, str], ...],
    Int32[np.ndarray, "runs 3"],
]
"""Lengths, ids, reasons by index, and runs that are not learned; see `Read`."""


class SampleReader:
    """Reads the samples of one source, of whatever records, whatever their order.

    Args:
      corpus, prepared: the source as text or as a prepared index; the other one is None.
      cut: cut of its texts, by which their slots are counted.
      identities: names of the files, and the number of records up to the end of each.
    """

    def __init__(
        self,
        setup: SourceSetup,
        tokenizer: Tokenizer,
        corpus: Corpus | None,
        prepared: PreparedIndex | None,
        cut: ChunkCut,
        identities: tuple[Sequence[str], Int[np.ndarray, " files"]],
    ) -> None:
        assert setup.row_tokens is not None
        self._setup, self._row_tokens = setup, setup.row_tokens
        self._is_paired = setup.source.rejected_field is not None
        self._tokenizer = tokenizer
        self._corpus, self._prepared = corpus, prepared
        self._cut = cut
        self._identities = identities
        # Of this reader in `_KEPT`: a process may read several data sets, or one in two orders.
        self._key = object()

    def read(self, chunks: Chunks, watch: Callable[[int], None] | None) -> ReadSamples:
        """Reads chunks of text.

        Args:
          watch: called with the index of a chunk before its record is read; not for the first one.
        """
        records = chunks.record.tolist()
        samples = {n: copied for n in records if (copied := _KEPT.get((self._key, n))) is not None}
        # Record -> index of its first chunk; reversed, so that the first one stays.
        first_index = {record: i for i, record in reversed(list(enumerate(records)))}
        unread = [record for record in dict.fromkeys(records) if record not in samples]
        reasons: dict[int, str] = {}
        # Border tokens are the end id and, where the tokenizer has one, the begin id.
        begins = bool(self._cut.border_tokens - 1)
        texts = self._texts({record: first_index[record] for record in unread}, watch, reasons)
        if self._is_paired:
            # A pair is one sample: the better text, and behind it the worse one.
            texts = (side for text in texts for side in (text, getattr(text, "rejected", None) or ""))
        # Where a sample may be cut is known when it is tokenised.
        parts = [
            split_chunk(TextChunk(text.encode("utf-8"), begins and bool(text), ends=bool(text)), 0, text)
            for text in texts
        ]
        (lengths, ids), ignored = encode_parts(self._tokenizer, parts)
        if self._is_paired:
            lengths, ignored = join_pairs(lengths, ignored)
        is_cut = chunks.first.any() or (lengths > self._row_tokens).any()
        if len(unread) == len(records) and not is_cut:
            # Most samples are one chunk: nothing is copied or kept.
            by_index = tuple((first_index[record], reason) for record, reason in reasons.items())
            return lengths, ids, by_index, ignored
        ends = np.cumsum(lengths, dtype=np.int64)
        bounds = zip(unread, (ends - lengths).tolist(), ends.tolist(), strict=True)
        for record, start, end in bounds:
            runs, first = runs_within(ignored, start, end), first_index[record]
            pieces, loss = self._cut_sample(record, end - start, runs, int(chunks.num[first]))
            sample = _Sample(ids[start:end], runs, pieces, reasons.get(record) or loss)
            samples[record] = sample
            # Only samples of several slots are asked for again, or bad ones, whatever slots they have.
            if end - start > self._setup.chunk_tokens or chunks.first[first] or record in reasons:
                # Copies: views would keep the tokens of all these samples.
                copied = sample._replace(ids=sample.ids.copy(), ignored=runs.copy())
                _KEPT.add((self._key, record), copied, copied.size_bytes)
        return _join(chunks, samples, ids[:0])

    def spans(self, chunks: Chunks) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Returns first token and end of each chunk of a prepared source within its sample."""
        assert self._prepared is not None
        length = self._prepared.lengths(chunks.record).astype(np.int64)
        # A sample that fits a row is whole in its first slot, and its other slots are empty.
        start, end = np.zeros_like(length), np.where(chunks.first == 0, length, 0)
        for i in np.flatnonzero(length > self._row_tokens).tolist():
            record, num = int(chunks.record[i]), int(chunks.num[i])
            if (sample := _KEPT.get((self._key, record))) is None:
                runs = self._prepared.ignored(
                    chunks.record[i : i + 1], np.zeros(1, np.int64), length[i : i + 1]
                )
                pieces, _ = self._cut_sample(record, int(length[i]), runs, num)
                # Pieces alone: the ids are read from the index.
                sample = _Sample(np.zeros(0, np.int32), NO_RUNS, pieces)
                _KEPT.add((self._key, record), sample, sample.size_bytes)
            start[i], end[i] = _piece_of(sample, int(chunks.first[i]) // num)
        return start, end

    def _texts(
        self, indexes: dict[int, int], watch: Callable[[int], None] | None, reasons: dict[int, str]
    ) -> Iterator[str]:
        """Yields the texts of records, an empty one for a bad record, whose reason it adds to `reasons`.

        Args:
          indexes: index of a chunk of each record.
        """
        assert self._corpus is not None
        texts = self._corpus.read(np.asarray(list(indexes), np.int64))
        for record, index in indexes.items():
            if watch is not None and index:
                watch(index)
            text = next(texts)
            if isinstance(text, BadRecord):
                if self._setup.on_bad_record == "fail":
                    raise text
                reasons[record] = f"document {identity_of(*self._identities, record)}: {text}"
                # Its numbers must still stand for something: for empty chunks.
                text = ""
            yield text

    def _cut_sample(
        self, record: int, length: int, runs: Int[np.ndarray, "runs 3"], num: int
    ) -> tuple[list[tuple[int, int]], str]:
        """Returns the pieces of a sample, slot by slot, and what is left out of it, if anything is.

        Args:
          length: tokens of the sample.
          runs: runs of its tokens that are not learned.
          num: chunks per slot.

        Raises:
          BadRecord: the sample is longer than a row, and `on_too_long` is refuse.
        """
        if length <= self._row_tokens:
            return [(0, length)], ""
        rule, field = self._setup.source.on_too_long, field_of(self._setup.name)
        too_long = (
            f"document {identity_of(*self._identities, record)}: its {length:,} tokens are more than a row "
            f"of data.seq_len={self._row_tokens:,}"
        )
        if self._is_paired and rule != "drop":
            raise BadRecord(
                f"{field}: {too_long}, and a pair is in one row. Raise data.seq_len, shorten it, or set "
                f"{field}.on_too_long to 'drop'."
            )
        if rule == "refuse":
            raise BadRecord(
                f"{field}: {too_long}. Raise data.seq_len, shorten it, or set {field}.on_too_long to "
                "'split_turns' or 'drop'."
            )
        pieces = pieces_of_sample(length, unlearned(runs), self._row_tokens) if rule == "split_turns" else []
        # Where the text has more tokens per byte than was estimated, the slots may be too few.
        pieces = pieces[: self._num_slots(record, length, num)]
        left_out = _num_learned(runs, 0, length) - sum(_num_learned(runs, *piece) for piece in pieces)
        if not left_out:
            return pieces, ""
        return (
            pieces,
            f"{too_long}; {left_out:,} that are learned are left out ({field}.on_too_long={rule!r})",
        )

    def _num_slots(self, record: int, length: int, num: int) -> int:
        """Returns the number of slots of a sample, of `num` chunks each."""
        if self._corpus is None:
            return -(-length // self._setup.chunk_tokens)
        return int(self._cut.counts(self._corpus.sizes(record, record + 1), per_slot=num)[0])


def _join(chunks: Chunks, samples: dict[int, _Sample], no_ids: Integer[np.ndarray, " 0"]) -> ReadSamples:
    """Returns the pieces of samples, by record, that are in the slots of the chunks."""
    lengths, total = np.zeros(len(chunks.record), np.int32), 0
    ids, ignored, reasons = [no_ids], [NO_RUNS], []
    for i, (record, first, num) in enumerate(zip(*(array.tolist() for array in chunks), strict=True)):
        sample = samples[record]
        # Once, by the first chunk, however many slots it has.
        if sample.reason and not first:
            reasons.append((i, sample.reason))
        # Every slot of a sample has `num` chunks, so slot s begins at chunk s * num.
        start, end = _piece_of(sample, first // num)
        ids.append(sample.ids[start:end])
        # Counted from the first token of the result, in which pieces follow one another.
        ignored.append(
            (runs_within(sample.ignored, start, end) + np.asarray([total, total, 0])).astype(np.int32)
        )
        lengths[i] = end - start
        total += end - start
    return lengths, np.concatenate(ids), tuple(reasons), np.concatenate(ignored)


def _piece_of(sample: _Sample, slot: int) -> tuple[int, int]:
    return sample.pieces[slot] if slot < len(sample.pieces) else (0, 0)


def _num_learned(runs: Int[np.ndarray, "runs 3"], start: int, end: int) -> int:
    return end - start - int(np.diff(unlearned(runs_within(runs, start, end))).sum())
