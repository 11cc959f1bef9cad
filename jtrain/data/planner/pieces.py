"""Pieces: the spans of documents that fill the rows of one step."""

import dataclasses

import numpy as np
from jaxtyping import Int64


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Spans of documents as parallel arrays: piece i is tokens `start` to `end` of a document, placed in
    `row`.

    Pieces are sorted by row; the pieces of a row are in the order in which they are placed.
    """

    row: Int64[np.ndarray, " pieces"]
    source: Int64[np.ndarray, " pieces"]
    document: Int64[np.ndarray, " pieces"]
    start: Int64[np.ndarray, " pieces"]
    end: Int64[np.ndarray, " pieces"]

    def of_rows(self, rows: Int64[np.ndarray, " rows"]) -> "Pieces":
        """Returns the pieces in `rows`, renumbered by their index in `rows`, which must be ascending."""
        at = np.searchsorted(rows, self.row)
        here = np.flatnonzero(rows[np.minimum(at, len(rows) - 1)] == self.row) if len(rows) else at[:0]
        return Pieces(at[here], self.source[here], self.document[here], self.start[here], self.end[here])

    def __len__(self) -> int:
        return len(self.row)
