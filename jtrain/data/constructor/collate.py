"""Collation of planned document pieces into the rows of a batch: tokens, targets, positions, segments."""

import ctypes
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64, Shaped

from jtrain.data.native.library import address, core
from jtrain.data.planner.pieces import Pieces
from jtrain.errors import UserError
from jtrain.layout.constants import IGNORE

ARRAYS = ("token_BL", "target_BL", "position_BL", "segment_BL")
"""Arrays of a batch, in their order in a slot of shared memory."""

WEIGHTS = "weight_BL"
"""Array behind these of a batch whose targets have weights, float32."""

type RowArrays = dict[str, Shaped[np.ndarray, "rows L"]]
"""Arrays of a batch by name: int32, but for the weights."""

BLOCK_TOKENS = 1 << 15
"""Tokens filled at a time, so that intermediate arrays stay in the CPU cache."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Arrays of a batch, or of part of one, to be filled. The fields are those of
    `jtrain.layout.dims.Batch`.
    """

    token_BL: Int32[np.ndarray, "B L"]
    target_BL: Int32[np.ndarray, "B L"]
    position_BL: Int32[np.ndarray, "B L"]
    segment_BL: Int32[np.ndarray, "B L"]

    @staticmethod
    def empty(rows: int, seq_len: int) -> "Rows":
        """Returns uninitialised arrays of shape [rows, seq_len]."""
        return Rows(*(np.empty((rows, seq_len), np.int32) for _ in range(4)))


def name_words(words: Int32[np.ndarray, "arrays rows L"]) -> RowArrays:
    """Returns the arrays of a batch, by name, that lie in memory one after another: `ARRAYS`, and weights if
    there are five.
    """
    arrays: RowArrays = dict(zip(ARRAYS, words, strict=False))
    return arrays if len(words) == len(ARRAYS) else arrays | {WEIGHTS: words[-1].view(np.float32)}


class Spans(NamedTuple):
    """Places of the ids of some pieces: piece i begins at index start[i] of arrays[array[i]].

    memory: address and bytes per id of each array, as `memory_of` returns them.
    """

    arrays: Sequence[np.ndarray]
    memory: Int64[np.ndarray, "arrays 2"]
    array: Int64[np.ndarray, " pieces"]
    start: Int64[np.ndarray, " pieces"]


SpansOf = Callable[[Pieces], Spans]
"""spans(pieces) returns where the ids of each piece lie; raises UserError if a document is shorter than
planned."""


def memory_of(ids: np.ndarray) -> tuple[int, int]:
    """Returns the address and the bytes per id of an array of ids, as the C core reads it."""
    assert ids.dtype.isnative, ids.dtype
    # The core tells types by their width; ids are not negative, so only these signed ones can be meant.
    assert ids.dtype.kind == "u" or ids.dtype in (np.int32, np.int64), ids.dtype
    assert ids.flags.c_contiguous, ids.strides
    return ids.ctypes.data, ids.itemsize


def spans_of(ids_of: Callable[[int, int], np.ndarray]) -> SpansOf:
    """Returns `Spans` of whole documents, which `ids_of` returns by source and number."""

    def spans(pieces: Pieces) -> Spans:
        arrays = []
        for source, document, start, end in iterate_pieces(pieces):
            ids = ids_of(source, document)
            if len(ids) < end:
                raise shrunk_error(source, document, end, max(start, len(ids)))
            arrays.append(ids)
        memory = np.asarray([memory_of(ids) for ids in arrays], np.int64).reshape(-1, 2)
        return Spans(arrays, memory, np.arange(len(arrays)), pieces.start)

    return spans


def iterate_pieces(pieces: Pieces) -> Iterator[tuple[int, int, int, int]]:
    """Yields source, document, start and end of every piece, as plain integers."""
    columns = (pieces.source, pieces.document, pieces.start, pieces.end)
    return zip(*(column.tolist() for column in columns), strict=True)


def shrunk_error(source: int, document: int, planned_end: int, end: int) -> UserError:
    """Returns the error for a document that is shorter than planned."""
    return UserError(
        f"document {document} of source {source} was planned up to token {planned_end}, but ends at {end}: "
        "its files have changed. Restore them, or start in a new --workdir."
    )


def fill_rows(out: Rows, pieces: Pieces, spans_of_pieces: SpansOf) -> None:
    """Fills every row of `out`. A target is the next token of the same piece, or IGNORE.

    Positions count from 0 in each piece, segments from 1 in each row. Example, a row of 6 with a piece of
    the tokens 7 8 9 and one of 4 5:

        token     7  8  9       4  5       0
        target    8  9  IGNORE  5  IGNORE  IGNORE
        position  0  1  2       0  1       0
        segment   1  1  1       2  2       0

    Args:
      out: contiguous arrays.
      pieces: document pieces, with rows numbered as in `out`.

    Raises:
      UserError: a document is shorter than planned.
    """
    spans = spans_of_pieces(pieces)
    if (library := core()) is None:
        fill_by_numpy(out, pieces, spans)
    else:
        fill_by_core(library, out, pieces, spans)


def fill_by_core(library: ctypes.CDLL, out: Rows, pieces: Pieces, spans: Spans) -> None:
    """`fill_rows` by the C core: it writes each array once, where NumPy passes over them three times."""
    rows = (out.token_BL, out.target_BL, out.position_BL, out.segment_BL)
    columns = (pieces.row, spans.array, spans.start, pieces.end - pieces.start, spans.memory)
    num_placed = library.fill_rows(
        *(address(array, np.int32) for array in rows),
        *out.token_BL.shape,
        len(pieces),
        *(address(column, np.int64) for column in columns),
        IGNORE,
    )
    assert num_placed == len(pieces), "a piece lies beyond the last row, or a row holds more than its room"


def fill_by_numpy(out: Rows, pieces: Pieces, spans: Spans) -> None:
    """`fill_rows` where there is no C core."""
    num_rows, seq_len = out.token_BL.shape
    if not num_rows:
        return
    lengths = pieces.end - pieces.start
    piece_spans = zip(
        spans.array.tolist(), spans.start.tolist(), (spans.start + lengths).tolist(), strict=True
    )
    ids = [spans.arrays[array][start:end] for array, start, end in piece_spans]
    row_tokens = np.bincount(pieces.row, weights=lengths, minlength=num_rows).astype(np.int64)
    assert len(row_tokens) == num_rows, "a piece lies beyond the last row"
    assert (row_tokens <= seq_len).all(), "a row holds more than there is room for"
    # Pieces are sorted by row: first_piece[r] is the first of row r, and its last entry the number of pieces.
    first_piece = np.searchsorted(pieces.row, np.arange(num_rows + 1))
    segment = np.arange(1, len(pieces) + 1) - first_piece[pieces.row]
    padded_rows = np.flatnonzero(row_tokens < seq_len)
    # Padding becomes one more piece, of segment 0, at the end of its row: all rows are then full.
    if len(padded_rows):
        insert_index, padding_tokens = first_piece[padded_rows + 1], seq_len - row_tokens[padded_rows]
        lengths, segment = (
            np.insert(lengths, insert_index, padding_tokens),
            np.insert(segment, insert_index, 0),
        )
        zeros = np.zeros(int(padding_tokens.max()), np.int8)
        # From the end, so that the indexes of earlier insertions stay right.
        for index, size in zip(
            reversed(insert_index.tolist()), reversed(padding_tokens.tolist()), strict=True
        ):
            ids.insert(index, zeros[:size])
    # All rows together are one long sequence from here on, with no gaps between pieces.
    ends = np.cumsum(lengths)
    starts, segment = (ends - lengths).astype(np.int32), segment.astype(np.int32)

    tokens = num_rows * seq_len
    # A block is a number of whole rows, so no piece crosses its border.
    block = max(1, BLOCK_TOKENS // seq_len) * seq_len
    borders = np.searchsorted(ends, np.arange(0, tokens + block, block), side="right").tolist()
    # One arange serves the positions of every block.
    counting = np.arange(min(block, tokens), dtype=np.int32)
    arrays = (array.reshape(-1) for array in (out.token_BL, out.target_BL, out.position_BL, out.segment_BL))
    token_out, target_out, position_out, segment_out = arrays
    for first_token, (low, high) in zip(range(0, tokens, block), itertools.pairwise(borders), strict=True):
        block_slice = slice(first_token, min(first_token + block, tokens))
        token, target = token_out[block_slice], target_out[block_slice]
        # Straight into the batch: ids of uint16 sources are widened on the way, without another array.
        np.concatenate(ids[low:high], out=token, casting="same_kind")
        target[:-1] = token[1:]
        # Also overwrites the block's last target, which the shift above left unset.
        target[ends[low:high] - (first_token + 1)] = IGNORE
        if high - low == len(token) // seq_len:  # each row is one piece
            segment_out[block_slice].reshape(-1, seq_len)[:] = segment[low:high, None]
            position_out[block_slice].reshape(-1, seq_len)[:] = counting[:seq_len]
            continue
        segment_out[block_slice] = np.repeat(segment[low:high], lengths[low:high])
        # Position = index in the block - index at which the piece begins.
        start = np.repeat(starts[low:high] - np.int32(first_token), lengths[low:high])
        np.subtract(counting[: len(token)], start, out=position_out[block_slice])
    # The padding piece counted positions and took targets like any other.
    for row in padded_rows.tolist():
        out.target_BL[row, row_tokens[row] :] = IGNORE
        out.position_BL[row, row_tokens[row] :] = 0
