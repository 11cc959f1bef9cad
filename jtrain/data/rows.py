"""Rows of a batch from the documents that a plan puts there: tokens, targets, positions, segments."""

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Int32, Int64

IGNORE = -1
"""`jtrain.dims.IGNORE`, which loader processes cannot import: it is beside the arrays of jax."""


_BLOCK_TOKENS = 1 << 16
"""Filled at a time, so that what is made on the way stays in the cache: twice as fast at 64 rows of 8192."""


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Which tokens of which document lie where, row by row, in the order in which they lie there."""

    row: Int64[np.ndarray, " pieces"]
    source: Int64[np.ndarray, " pieces"]
    document: Int64[np.ndarray, " pieces"]
    start: Int64[np.ndarray, " pieces"]
    end: Int64[np.ndarray, " pieces"]

    def of_rows(self, rows: Int64[np.ndarray, " rows"]) -> "Pieces":
        """Those in `rows`, numbered by their place in `rows`, which must ascend."""
        at = np.searchsorted(rows, self.row)
        here = np.flatnonzero(rows[np.minimum(at, len(rows) - 1)] == self.row) if len(rows) else at[:0]
        return Pieces(at[here], self.source[here], self.document[here], self.start[here], self.end[here])

    def __len__(self) -> int:
        return len(self.row)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Arrays of a batch, or of part of one, to be filled; the fields of `jtrain.dims.Batch`."""

    token_BL: Int32[np.ndarray, "B L"]
    target_BL: Int32[np.ndarray, "B L"]
    position_BL: Int32[np.ndarray, "B L"]
    segment_BL: Int32[np.ndarray, "B L"]

    @staticmethod
    def empty(rows: int, seq_len: int) -> "Rows":
        """Arrays of that shape, with anything in them."""
        return Rows(*(np.empty((rows, seq_len), np.int32) for _ in range(4)))


def fill_rows(out: Rows, pieces: Pieces, ids_of: Callable[[int, int], np.ndarray]) -> None:
    """Writes every row of `out`. A target is the next token of the same piece, or IGNORE; positions count from 0.

    Args:
      out: contiguous arrays.
      pieces: with rows numbered as in `out`.
      ids_of: all ids of document (source, number), as a view: only what the piece needs is read.

    Raises:
      ValueError: a document is shorter than the plan has it.
    """
    num_rows, seq_len = out.token_BL.shape
    block = max(1, _BLOCK_TOKENS // seq_len)
    border = np.searchsorted(pieces.row, np.arange(0, num_rows + block, block))
    assert border[-1] == len(pieces), "a piece lies beyond the last row"
    for i, first in enumerate(range(0, num_rows, block)):
        p, here = slice(border[i], border[i + 1]), slice(first, first + block)
        part = Pieces(
            pieces.row[p] - first, pieces.source[p], pieces.document[p], pieces.start[p], pieces.end[p]
        )
        _fill(Rows(out.token_BL[here], out.target_BL[here], out.position_BL[here], out.segment_BL[here]), part, ids_of)


def _fill(out: Rows, pieces: Pieces, ids_of: Callable[[int, int], np.ndarray]) -> None:
    num_rows, seq_len = out.token_BL.shape
    parts: list[np.ndarray] = []
    zeros = np.zeros(seq_len, np.int32)
    length = pieces.end - pieces.start
    filled = np.bincount(pieces.row, weights=length, minlength=num_rows).astype(np.int64)
    assert (filled <= seq_len).all(), "a row holds more than there is room for"
    previous = 0
    for row, source, document, start, end in zip(
        pieces.row.tolist(),
        pieces.source.tolist(),
        pieces.document.tolist(),
        pieces.start.tolist(),
        pieces.end.tolist(),
        strict=True,
    ):
        while previous < row:
            parts.append(zeros[filled[previous] :])
            previous += 1
        ids = ids_of(source, document)[start:end]
        if len(ids) != end - start:
            raise ValueError(
                f"document {document} of source {source} was planned up to token {end}, but ends at "
                f"{start + len(ids)}: its files have changed. Put them back, or start in a new --workdir."
            )
        parts.append(ids)
    while previous < num_rows:
        parts.append(zeros[filled[previous] :])
        previous += 1
    token = out.token_BL.reshape(-1)
    np.concatenate(parts, out=token, casting="same_kind")

    # Segments with the padding of each row as one more.
    first_of_row = np.searchsorted(pieces.row, np.arange(num_rows + 1))
    number = np.arange(1, len(pieces) + 1) - first_of_row[pieces.row]
    ends = first_of_row[1:]
    lengths = np.insert(length, ends, seq_len - filled)
    segment = out.segment_BL.reshape(-1)
    segment[:] = np.repeat(np.insert(number, ends, 0).astype(np.int32), lengths)
    starts = np.cumsum(lengths) - lengths
    position = out.position_BL.reshape(-1)
    np.subtract(np.arange(len(token), dtype=np.int32), np.repeat(starts.astype(np.int32), lengths), out=position)
    target = out.target_BL.reshape(-1)
    target[:-1] = token[1:]
    padded = np.flatnonzero(filled < seq_len)
    target[(starts + lengths - 1)[lengths > 0]] = IGNORE
    for row in padded.tolist():
        out.target_BL[row, filled[row] :] = IGNORE
        out.position_BL[row, filled[row] :] = 0
