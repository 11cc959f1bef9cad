"""Loss mask of tokens: runs of tokens that are read and not learned, or that weigh otherwise than others.

A run is first token, end, and weight in millionths: 0 is not learned. Tokens in no run weigh 1, so sources
without masks have no runs.
"""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int, Int32, Int64

from jtrain.data.chat.messages import UNIT
from jtrain.data.planner.pieces import Pieces
from jtrain.data.sources.formats.masked_text import MaskedText
from jtrain.data.tokenizer import EncodedDocuments, TextChunk, Tokenizer
from jtrain.layout.constants import IGNORE

NO_RUNS = np.zeros((0, 3), np.int32)
"""Runs of tokens of which all are learned alike."""

type Runs = Int[np.ndarray, "runs 3"]
"""Runs of tokens, int32: the first token, the end, and 0 where they are not learned."""


class ChunkPart(NamedTuple):
    """Part of a chunk whose tokens weigh alike; or the whole text of a chat template.

    weight: weight in millionths; 0 is not learned.
    template_text: the text, whose special tokens are tokens; None for other texts.
    """

    chunk: TextChunk
    weight: int
    template_text: MaskedText | None = None


def split_chunk(chunk: TextChunk, start: int, text: str) -> list[ChunkPart]:
    """Cuts a chunk at the borders of the learned spans of its text.

    Args:
      start: byte of the text at which the chunk begins.
      text: whole text, a `MaskedText`; any other text is learned.
    """
    if not isinstance(text, MaskedText):
        return [ChunkPart(chunk, UNIT)]
    if text.of_template:
        return [ChunkPart(chunk, UNIT, text)]
    parts: list[ChunkPart] = []
    stop = start + len(chunk.content)

    def add(low: int, high: int, weight: int) -> None:
        # Spans are of the whole text; only what lies in this chunk counts.
        low, high = max(low, start), min(high, stop)
        if low < high:
            # The begin id goes to the first part, the end id to a part of its own below.
            begins = chunk.begins and not parts
            parts.append(
                ChunkPart(TextChunk(chunk.content[low - start : high - start], begins, False), weight)
            )

    characters = end = 0  # of the text so far; `end` in bytes
    # Spans count characters, chunks bytes: the text between spans is encoded once, as it goes by.
    for (first, last), weight in zip(text.learned, text.weight_of_spans, strict=True):
        low = end + len(text[characters:first].encode("utf-8"))
        add(end, low, 0)
        end, characters = low + len(text[first:last].encode("utf-8")), last
        add(low, end, weight)
    add(end, stop, 0)
    if not parts or chunk.ends:
        # The border ids of the document. The begin id is no target, since nothing comes before it.
        reaches_end = bool(text.learned) and text.learned[-1][1] == len(text)
        weight = text.weight_of_spans[-1] if reaches_end else 0
        parts.append(ChunkPart(TextChunk(b"", chunk.begins and not parts, chunk.ends), weight))
    return parts


def encode_parts(
    tokenizer: Tokenizer, chunks: Sequence[list[ChunkPart]]
) -> tuple[EncodedDocuments, Int32[np.ndarray, "runs 3"]]:
    """Returns lengths and ids of chunks, each part tokenised by itself, and their runs.

    The text of a chat template is tokenised as a whole, and its spans are found by the tokenizer's offsets.
    """
    if any(part.template_text is not None for chunk in chunks for part in chunk):
        return _encode_templates(tokenizer, chunks)
    parts = [part for chunk in chunks for part in chunk]
    lengths, ids = tokenizer.encode_chunks([part.chunk for part in parts])
    # Number of the chunk of each part: the parts are summed into chunks by it.
    chunk = np.repeat(np.arange(len(chunks)), [len(chunk) for chunk in chunks])
    total = np.bincount(chunk, weights=lengths, minlength=len(chunks)).astype(np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    weights = np.asarray([part.weight for part in parts], np.int32)
    runs = np.stack([ends - lengths, ends, weights], axis=1)[(weights != UNIT) & (lengths > 0)]
    return (total, ids), runs.astype(np.int32)


def _encode_templates(
    tokenizer: Tokenizer, chunks: Sequence[list[ChunkPart]]
) -> tuple[EncodedDocuments, Int32[np.ndarray, "runs 3"]]:
    """Returns what `encode_parts` returns, for texts of chat templates and the empty ones of bad records."""
    texts = [chunk[0].template_text or MaskedText("", ()) for chunk in chunks]
    borders = [[border for span in text.learned for border in span] for text in texts]
    lengths, ids, runs = [], [np.empty(0, tokenizer.id_dtype)], [NO_RUNS]
    total = 0
    for text, (text_ids, positions) in zip(texts, tokenizer.encode_marked(texts, borders), strict=True):
        has_end = bool(text) and text.ends
        end = len(text_ids)
        learned = np.asarray(positions, np.int32).reshape(-1, 2)
        if has_end and len(learned) and text.learned[-1][1] == len(text):
            # The model stops with the end of the document.
            learned[-1, 1] = end + 1
        ids.append(np.append(text_ids, [tokenizer.end_id] * has_end).astype(tokenizer.id_dtype))
        edges = np.concatenate([[0], learned.ravel(), [end + has_end]]).astype(np.int32)
        # What is read and what is learned take turns, the first and the last of them read.
        weights = np.zeros(len(edges) - 1, np.int32)
        weights[1::2] = text.weight_of_spans
        text_runs = np.stack([edges[:-1] + total, edges[1:] + total, weights], axis=1)
        is_run = (edges[:-1] < edges[1:]) & (weights != UNIT)
        runs.append(text_runs[is_run].astype(np.int32))
        lengths.append(len(ids[-1]))
        total += len(ids[-1])
    return (np.asarray(lengths, np.int32), np.concatenate(ids)), np.concatenate(runs)


def pieces_of_sample(length: int, runs: Int[np.ndarray, "runs 2"], row_tokens: int) -> list[tuple[int, int]]:
    """Returns spans of a sample's tokens, each at most `row_tokens` long, in which each learned token has its
    prompt.

    A turn is a run of tokens that are not learned, its prompt, with the learned tokens up to the next such
    run. A span holds as many whole turns as fit. Of a turn that is longer than a row, the first `row_tokens`
    are a span of their own; a turn whose prompt fills a row by itself is left out. Learned tokens before the
    first prompt need none, and may be cut anywhere.

    Example, rows of 10 tokens, prompts [0, 3), [5, 8) and [20, 22) of 26 tokens: the turns are [0, 5),
    [5, 20) and [20, 26), and the spans are [0, 5), [5, 15) and [20, 26).

    Args:
      length: tokens of the sample.
      runs: first token and end of its runs that are not learned, ascending.
    """
    # Adjacent runs are one prompt: the parts of a text are tokenised one by one.
    # Cut to the number of runs, as there may be none.
    begins_prompt = np.append(True, runs[1:, 0] > runs[:-1, 1])[: len(runs)]
    prompts = runs[begins_prompt, 0].tolist()
    # The last run of a prompt is the one before the next prompt's first.
    prompt_ends = runs[np.append(begins_prompt[1:], True)[: len(runs)], 1].tolist()
    turns = list(zip(prompts, prompt_ends, [*prompts, length][1:], strict=True)) if prompts else []
    head = prompts[0] if prompts else length
    # Without a prompt, each row is a turn of its own.
    turns[:0] = [(start, start, min(start + row_tokens, head)) for start in range(0, head, row_tokens)]
    spans: list[tuple[int, int]] = []
    for start, prompt_end, end in turns:
        # A prompt that nothing learned follows, or that leaves no room for it.
        if prompt_end == end or prompt_end - start >= row_tokens:
            continue
        if spans and spans[-1][1] == start and end - spans[-1][0] <= row_tokens:
            spans[-1] = spans[-1][0], end
        else:
            spans.append((start, min(end, start + row_tokens)))
    return spans


def unlearned(runs: Runs) -> Int[np.ndarray, "some 2"]:
    """Returns first token and end of the runs that are not learned."""
    return runs[runs[:, 2] == 0, :2]


def learned_spans(runs: Runs, length: int) -> list[tuple[int, int]]:
    """Returns first token and end of each span of `length` tokens that is learned, empty ones too; of a pair
    those of its better text, which comes first.
    """
    end_of_text = border_of(runs) or length
    ignored = unlearned(runs)
    edges = [0, *ignored[ignored[:, 0] < end_of_text].ravel().tolist(), end_of_text]
    return list(zip(edges[::2], edges[1::2], strict=True))


def runs_within(
    runs: Int[np.ndarray, "runs columns"], start: int, end: int
) -> Int[np.ndarray, "some columns"]:
    """Returns the runs among tokens `start` to `end` - 1, counted from `start`; `runs` must ascend.

    Example: of the runs [2, 5) and [8, 12), tokens 4 to 9 have [0, 1) and [4, 6).

    Args:
      runs: first token, end, and any further columns.
    """
    # Bisected in Python: in a mapped file that reads a few pages, where NumPy would copy a column.
    low = bisect.bisect_right(runs[:, 1], start)
    high = bisect.bisect_left(runs[:, 0], end)
    runs_here = runs[low:high].copy()
    runs_here[:, :2] = np.clip(runs_here[:, :2], start, end) - start
    return runs_here


def runs_of_spans(
    runs: Int[np.ndarray, "runs columns"], starts: Int[np.ndarray, " n"], ends: Int[np.ndarray, " n"]
) -> Int32[np.ndarray, "some 3"]:
    """Returns the runs in spans of tokens, counted as if the spans were joined end to end.

    Args:
      runs: runs, or first tokens and ends of those that are not learned.
    """
    shifted_runs: list[np.ndarray] = [NO_RUNS]
    offset = 0
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if len(span_runs := runs_within(runs, start, end)):
            shifted = np.zeros((len(span_runs), 3), np.int32)
            shifted[:, : span_runs.shape[1]] = span_runs
            shifted[:, :2] += offset
            shifted_runs.append(shifted)
        offset += end - start
    return np.concatenate(shifted_runs)


def join_pairs(
    lengths: Int[np.ndarray, " texts"], runs: Int32[np.ndarray, "runs 3"]
) -> tuple[Int32[np.ndarray, " pairs"], Int32[np.ndarray, "some 3"]]:
    """Returns the lengths of pairs, each two of the texts in turn, and the runs with a mark between the two.

    The mark is an empty run [b, b) where the second text begins: it goes with the runs wherever they go, and
    ignores no target. Example, texts of 3 and 4 tokens whose first two are a prompt: the runs [0, 2) and [3,
    5) become [0, 2), [3, 3) and [3, 5).
    """
    ends = np.cumsum(lengths, dtype=np.int32)
    # A bad record is a pair of empty texts, without a border.
    borders = ends[::2][lengths[::2] > 0]
    marked = np.concatenate([runs, np.stack([borders, borders, 0 * borders], axis=1)])
    order = np.lexsort((marked[:, 1], marked[:, 0]))
    return lengths.reshape(-1, 2).sum(axis=1, dtype=np.int32), marked[order].astype(np.int32)


def border_of(runs: Runs) -> int | None:
    """Returns the token at which the second text of a pair begins; None if the runs are not those of a pair."""
    borders = runs[runs[:, 0] == runs[:, 1], 0]
    return int(borders[0]) if len(borders) else None


def number_pairs(
    position_BL: Int32[np.ndarray, "B L"],
    segment_BL: Int32[np.ndarray, "B L"],
    pieces: Pieces,
    runs: Sequence[Runs],
) -> None:
    """Makes two segments of each piece, which is a pair: pair p of a row has 2 p - 1, the better text, and 2
    p.

    Args:
      runs: runs of each piece, with the mark of `join_pairs`.
    """
    np.subtract(2 * segment_BL, segment_BL > 0, out=segment_BL)
    position, segment = position_BL.reshape(-1), segment_BL.reshape(-1)
    assert np.shares_memory(segment, segment_BL), "the batch is contiguous"
    ends = _first_positions(pieces, segment_BL.shape[1]) + pieces.end - pieces.start
    for end, length, piece_runs in zip(
        ends.tolist(), (pieces.end - pieces.start).tolist(), runs, strict=True
    ):
        border = border_of(piece_runs)
        assert border is not None, "a piece of preferences is a whole pair"
        position[end - length + border : end] -= border
        segment[end - length + border : end] += 1


def _first_positions(pieces: Pieces, row_tokens: int) -> Int64[np.ndarray, " pieces"]:
    """Returns where each piece begins in the rows laid end to end."""
    length = pieces.end - pieces.start
    tokens_before: Int64[np.ndarray, " pieces"] = np.cumsum(length) - length
    # Index of the first piece in the same row: pieces are sorted by row.
    first_of_row = np.searchsorted(pieces.row, pieces.row)
    return pieces.row * row_tokens + tokens_before - tokens_before[first_of_row]


def weigh_targets(
    target_BL: Int32[np.ndarray, "B L"],
    pieces: Pieces,
    runs: Sequence[Runs],
    weight_BL: Float32[np.ndarray, "B L"] | None = None,
) -> None:
    """Sets targets to IGNORE that are in runs which are not learned; rows must be filled already.

    Args:
      runs: runs of each piece, counted from its first token.
      weight_BL: set to the weight of each target, 0 where there is none.
    """
    first_position = _first_positions(pieces, target_BL.shape[1])
    target = target_BL.reshape(-1)
    assert np.shares_memory(target, target_BL), "the batch is contiguous"
    weight = None
    if weight_BL is not None:
        weight_BL[:] = target_BL != IGNORE
        weight = weight_BL.reshape(-1)
        assert np.shares_memory(weight, weight_BL), "the batch is contiguous"
    for position, piece_runs in zip(first_position.tolist(), runs, strict=True):
        for start, end, millionths in piece_runs.tolist():
            # Token i is the target at i - 1. A piece's first token is nobody's target.
            targets = slice(position + max(start, 1) - 1, position + end - 1)
            if millionths == 0:
                target[targets] = IGNORE
            if weight is not None:
                weight[targets] = millionths / UNIT
