"""Pieces: the spans of documents that fill the rows of one step."""

import dataclasses

import numpy as np
from jaxtyping import Int64


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Spans of documents as parallel arrays: piece i is tokens start[i] to end[i] of a document, in row[i].

    Pieces are sorted by row; the pieces of a row are in the order in which they are placed.
    """

    row: Int64[np.ndarray, " pieces"]
    source: Int64[np.ndarray, " pieces"]
    document: Int64[np.ndarray, " pieces"]
    start: Int64[np.ndarray, " pieces"]
    end: Int64[np.ndarray, " pieces"]

    def of_rows(self, rows: Int64[np.ndarray, " rows"]) -> "Pieces":
        """Returns the pieces in `rows`, renumbered by their index in `rows`, which must be ascending."""
        # Index of the first of `rows` that is not smaller; equal only if the row is among them.
        row_index = np.searchsorted(rows, self.row)
        selected = (
            np.flatnonzero(rows[np.minimum(row_index, len(rows) - 1)] == self.row)
            if len(rows)
            else row_index[:0]
        )
        return Pieces(
            row_index[selected],
            self.source[selected],
            self.document[selected],
            self.start[selected],
            self.end[selected],
        )

    def __len__(self) -> int:
        return len(self.row)
