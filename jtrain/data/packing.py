"""Documents to rows: concatenate and split, from several documents at a time."""

from collections.abc import Callable
from typing import NamedTuple, TypedDict

import numpy as np
from jaxtyping import Int

from jtrain.dims import IGNORE, Batch

LANES = 32
"""Documents open at a time; rows are taken from them in turn.

With one, the 16 rows of a batch of 256 bytes each would nearly always be one and the same file: the standard library's
mean is 17 KB.
"""


class Piece(NamedTuple):
    """Where one segment came from: tokens `start` to `end` of a document, in a row of the batch."""

    row: int
    document: int
    start: int
    end: int


class PackerState(TypedDict):
    """Which token the next row starts with; integers for JSON, 200 to 600 bytes.

    row: rows taken so far.
    next_document: the first document that no lane has opened.
    lanes: for each lane the document that is open, or -1, and the offset of its next token.
    """

    row: int
    next_document: int
    lanes: list[int]


class RowPacker:
    """Packs a numbered sequence of documents into rows of exactly `seq_len` tokens; every token lands in one row.

    A lane that has ended its document takes the next of the sequence, so documents are started strictly in order, each
    once. A document that does not fit goes on in its lane's next row, as a segment of its own with positions from 0.

    Our own, not `grain.experimental.ConcatThenSplitIterDataset`: that one packs a single document at a time (see
    `LANES`) and gives no targets; restoring it re-packs from its last checkpoint, where this one reads only what is
    open. Measured per second of one CPU (busy machine, both in one run), the standard library as bytes from disk, grain
    0.2.18: 40 against 15 million tokens in rows of 256, 121 against 60 in rows of 2048.

    Args:
      document: ids of document n; an empty one is passed over. Called again for the documents that were open when
        a state was saved, so it must be a pure function.
      lanes: documents open at a time.
      count: documents there are; None for endless. Once they are used up the rest of a row is padding.
      epoch_documents: after so many empty documents in a row there is no token to be had: an error, not a hang.

    Attributes:
      pieces: where the segments of the batch last taken came from, in order.
    """

    def __init__(
        self,
        document: Callable[[int], Int[np.ndarray, " tokens"]],
        *,
        seq_len: int,
        lanes: int,
        count: int | None = None,
        epoch_documents: int,
    ) -> None:
        self._document = document
        self._seq_len = seq_len
        self._count = count
        self._epoch_documents = epoch_documents
        self._arange_L = np.arange(seq_len, dtype=np.int32)
        self.pieces: list[Piece] = []
        self._row = 0
        self._next_document = 0
        self._open: list[tuple[int, int]] = [(-1, 0)] * lanes
        self._ids: list[np.ndarray | None] = [None] * lanes

    @property
    def exhausted(self) -> bool:
        """True when every document has been packed to its end."""
        return self._next_document == self._count and all(document < 0 for document, _ in self._open)

    def state(self) -> PackerState:
        """What `restore` needs to go on from here."""
        return PackerState(
            row=self._row, next_document=self._next_document, lanes=[number for lane in self._open for number in lane]
        )

    def restore(self, state: PackerState) -> None:
        """Goes on where `state` was taken. Reads nothing now, and an open document again when its lane's turn comes."""
        lanes = state["lanes"]
        assert len(lanes) == 2 * len(self._open), (len(lanes), len(self._open))
        self._row, self._next_document = state["row"], state["next_document"]
        self._open = list(zip(lanes[::2], lanes[1::2], strict=True))
        self._ids = [None] * len(self._open)

    def take(self, rows: int) -> Batch:
        """The next `rows` rows, as numpy arrays that nobody else holds."""
        shape = (rows, self._seq_len)
        token_BL = np.zeros(shape, np.int32)
        target_BL = np.full(shape, IGNORE, np.int32)
        position_BL = np.zeros(shape, np.int32)
        segment_BL = np.zeros(shape, np.int32)
        self.pieces = []
        for row, (token_L, target_L, position_L, segment_L) in enumerate(
            zip(token_BL, target_BL, position_BL, segment_BL, strict=True)
        ):
            at, segment, lane = 0, 0, self._lane_of_next_row()
            while at < self._seq_len and (piece := self._take_piece(row, lane, self._seq_len - at)) is not None:
                end, segment = at + len(piece), segment + 1
                token_L[at:end] = piece
                target_L[at : end - 1] = piece[1:]
                position_L[at:end] = self._arange_L[: len(piece)]
                segment_L[at:end] = segment
                at = end
            self._row += 1
        return Batch(token_BL=token_BL, target_BL=target_BL, position_BL=position_BL, segment_BL=segment_BL)

    def _lane_of_next_row(self) -> int:
        """Each lane in turn; once no documents are left, only those with one still open."""
        lanes = len(self._open)
        turns = [(self._row + i) % lanes for i in range(lanes if self._next_document == self._count else 1)]
        return next((lane for lane in turns if self._open[lane][0] >= 0), turns[0])

    def _take_piece(self, row: int, lane: int, most: int) -> np.ndarray | None:
        """Up to `most` tokens of one document; None when there are no more documents."""
        document, offset = self._open[lane]
        if document < 0:
            started = self._start_next()
            if started is None:
                return None
            (document, ids), offset = started, 0
            self._ids[lane] = ids
        elif (ids := self._ids[lane]) is None:  # restored
            ids = self._ids[lane] = self._document(document)
            if offset >= len(ids):
                raise ValueError(
                    f"the data state goes on at token {offset} of a document that now has {len(ids)}: the files of "
                    "data.path have changed since it was saved. Put them back, or start in a new --workdir."
                )
        end = min(offset + most, len(ids))
        self.pieces.append(Piece(row, document, offset, end))
        self._open[lane] = (document, end) if end < len(ids) else (-1, 0)
        return ids[offset:end]

    def _start_next(self) -> tuple[int, np.ndarray] | None:
        """The next document that holds a token, with its ids; None when there is none left."""
        for _ in range(self._epoch_documents):
            if self._next_document == self._count:
                return None
            document = self._next_document
            ids = self._document(document)
            self._next_document += 1
            if len(ids):
                return document, ids
        raise ValueError(
            f"data.path holds no text: {self._epoch_documents} documents in a row, a whole epoch, were empty or "
            "skipped. Set data.on_bad_record='fail' to see why."
        )
