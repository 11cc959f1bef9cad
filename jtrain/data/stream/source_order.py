"""Chunks and order of a source by what is known of its records, and how more files join the order."""

from collections.abc import Sequence

import numpy as np

from jtrain.data.loss_mask import encode_parts, split_chunk
from jtrain.data.pretokenized.reader import PreparedIndex
from jtrain.data.sources.chunk_cut import ChunkCut
from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.generations import Generation
from jtrain.data.stream.chunk_order import ChunkOrder, PreparedChunks, SizedChunks, WholeRecords
from jtrain.data.stream.growing_order import GrowingChunks, WindowAnchor
from jtrain.data.stream.windowed_order import WindowedChunks
from jtrain.data.tokenizer import Tokenizer, encode_documents, whole_document

_SAMPLE_RECORDS, _SAMPLE_CHARACTERS = 64, 1 << 16
"""First records of a source, and most of their characters, that are tokenised to learn its bytes per
token."""

_FULL = 0.9
"""Share of a row that a chunk fills on average where bytes per token are an estimate, so that few exceed a
row."""


def make_order(
    documents: Corpus | PreparedIndex,
    cut: ChunkCut,
    generations: Sequence[Generation],
    *,
    seed: int,
    chunk_tokens: int,
    window_bytes: int,
) -> ChunkOrder:
    """Returns the order of a source.

    Args:
      documents: the source as text, or prepared.
      cut: cut of its texts; without meaning for prepared sources.
      generations: generations of its files; without meaning for prepared sources and Grain datasets.
      seed: seed of the order.
      chunk_tokens: most tokens of a chunk of a prepared source.
      window_bytes: argument of `WindowedChunks` and `GrowingChunks`.
    """
    # By what is known of the records' sizes: tokens, nothing, bytes, or bytes once they are read.
    if isinstance(documents, PreparedIndex):
        return PreparedChunks(documents, chunk_tokens=chunk_tokens, seed=seed)
    # The size of a Grain record is known only after its pipeline has made it.
    if documents.source.format == "grain":
        return WholeRecords(len(documents), seed=seed)
    if documents.is_open and not documents.sizes_need_reading:
        return SizedChunks(documents, cut, seed=seed, generations=generations)
    order = WindowedChunks if documents.is_open else GrowingChunks
    return order(documents, cut, seed=seed, generations=generations, window_bytes=window_bytes)


def join(
    order: ChunkOrder, number: int, anchor: WindowAnchor | None, *, files: int, epochs: int | None
) -> Generation:
    """Returns the generation with which more files join an order, such that chunks from `number` on follow
    it.

    Args:
      number: the first chunk that was not drawn.
      anchor: where a window at or before it begins, if the order is one of `GrowingChunks`.
      files: number of files from then on.
      epochs: how often the source is read; None: without end.
    """
    if isinstance(order, GrowingChunks):
        # Without the anchor the order would open every window from the start of the run.
        if anchor is not None:
            order.start_at(anchor)
        return order.join(number, files)
    assert isinstance(order, SizedChunks | WindowedChunks)
    (epoch,), (position,) = (
        values.tolist() for values in order.numbers.split(np.asarray([number], np.int64))
    )
    if epochs is not None and number >= order.numbers.first_of(epochs):  # at its end: its last epoch goes on
        epoch, position = epochs - 1, number - order.numbers.first_of(epochs - 1)
    return order.join(epoch, position, files)


def estimated_chunk_bytes(corpus: Corpus, tokenizer: Tokenizer, chunk_tokens: int) -> int:
    """Returns the bytes of text that make about a row, by the first documents of a source."""
    if corpus.mask is not None and corpus.mask.rule.template.identity:
        return _chat_bytes(corpus, tokenizer, chunk_tokens)
    # One byte is one token: nothing to estimate.
    if tokenizer.identity == "bytes":
        return chunk_tokens
    texts, characters = [], 0
    first = range(min(len(corpus), _SAMPLE_RECORDS)) if corpus.is_open else _first_records(corpus)
    for text in corpus.beginnings(np.asarray(first, np.int64), 4 * _SAMPLE_CHARACTERS):
        if isinstance(text, str) and text:
            # One long first document must not decide alone how long opening takes.
            texts.append(text[: _SAMPLE_CHARACTERS - characters])
            characters += len(texts[-1])
        if characters >= _SAMPLE_CHARACTERS:
            break
    # Without a sample, one token per byte: chunks are then too short, never too long for a row.
    if not texts:
        return chunk_tokens
    tokens = int(encode_documents(tokenizer, texts)[0].sum())
    content = sum(len(text.encode("utf-8")) for text in texts)
    # At least a byte per token, even where a tokenizer needs more tokens than the text has bytes.
    return max(chunk_tokens, int(_FULL * chunk_tokens * content / tokens))


def _chat_bytes(corpus: Corpus, tokenizer: Tokenizer, chunk_tokens: int) -> int:
    """Returns the bytes of chats as stored that make about a row as text: a template may write far more."""
    first = range(min(len(corpus), _SAMPLE_RECORDS)) if corpus.is_open else _first_records(corpus)
    records = [
        (int(corpus.sizes(record, record + 1)[0]), text)
        for record, text in zip(first, corpus.read(np.asarray(first, np.int64)), strict=True)
        if isinstance(text, str)
    ]
    parts = [split_chunk(whole_document(tokenizer, text), 0, text) for _, text in records]
    tokens = int(encode_parts(tokenizer, parts)[0][0].sum())
    return (
        max(16, int(_FULL * chunk_tokens * sum(size for size, _ in records) / tokens))
        if tokens
        else chunk_tokens
    )


def _first_records(corpus: Corpus) -> list[int]:
    """Returns the first records of the first file that has some; opens files up to that one."""
    # File by file: opening all of a growing corpus may take minutes.
    for file in range(len(corpus.names)):
        if count := corpus.count(file):
            first = corpus.records_before(file)
            return list(range(first, first + min(count, _SAMPLE_RECORDS)))
    return []
