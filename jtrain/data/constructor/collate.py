"""Collation of planned document pieces into the rows of a batch: tokens, targets, positions, segments."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Int32

from jtrain.data.planner.pieces import Pieces
from jtrain.errors import UserError
from jtrain.layout.constants import IGNORE

ARRAYS = ("token_BL", "target_BL", "position_BL", "segment_BL")
"""Arrays of a batch, in their order in a slot of shared memory."""

_BLOCK_TOKENS = 1 << 15
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


Views = Callable[[Pieces], list[np.ndarray]]
"""views(pieces) returns the ids of each piece; raises UserError if a document is shorter than planned."""


def views_of(ids_of: Callable[[int, int], np.ndarray]) -> Views:
    """Returns `Views` into the ids of whole documents, which `ids_of` returns by source and number."""

    def views(pieces: Pieces) -> list[np.ndarray]:
        piece_ids = []
        for source, document, start, end in iterate_pieces(pieces):
            ids = ids_of(source, document)[start:end]
            if len(ids) != end - start:
                raise shrunk_error(source, document, end, start + len(ids))
            piece_ids.append(ids)
        return piece_ids

    return views


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


def fill_rows(out: Rows, pieces: Pieces, views: Views) -> None:
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
    num_rows, seq_len = out.token_BL.shape
    if not num_rows:
        return
    ids, lengths = views(pieces), pieces.end - pieces.start
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
    block = max(1, _BLOCK_TOKENS // seq_len) * seq_len
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
