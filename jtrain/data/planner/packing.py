"""Packs chunks into rows from their lengths alone: concatenate and split, first fit or best fit."""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int64

Packing = Literal["concat", "first_fit", "best_fit"]

MOST_ROWS_OF_ONE = 32
"""A document that is longer than a row gets at most this fraction of a step's rows, with `fit`."""

Spans = Int64[np.ndarray, "documents 2"]
"""First token and end (exclusive) of each span of a document; no span is empty."""

More = Callable[[int], Spans | None]
"""more(tokens) returns further documents of about that many tokens, or None at the end of the data."""


class Packed(NamedTuple):
    """Result of packing. Documents are numbered in the order given: first the carried ones, then those of
    `more`.

    pieces: row, document, start, end; sorted by row, and within a row in the order of placement.
    left: document and start of each remainder that waits for a later step, the next one due first.
    used: number of documents taken, from the first one on.
    """

    pieces: Int64[np.ndarray, "4 pieces"]
    left: Int64[np.ndarray, "2 left"]
    used: int


def concat(carried: Spans, more: More, *, rows: int, seq_len: int) -> Packed:
    """Fills rows one after another; what does not fit into the last row waits for the next step.

    A chunk as long as a row gets a row of its own. The others are concatenated in the order given, and cut at
    row ends, in the rows that are left. Every row is full until the documents end; each token is in exactly
    one row, and at most one chunk waits.

    Args:
      carried: remainders that the previous step left.
    """
    spans, capacity = carried, rows * seq_len
    while True:
        total = np.cumsum(spans[:, 1] - spans[:, 0])
        lacking = capacity - (int(total[-1]) if len(total) else 0)
        if lacking <= 0 or (found := more(lacking)) is None:
            break
        spans = np.concatenate([spans, found])
    used = min(len(spans), int(np.searchsorted(total, capacity)) + 1)
    start, end = spans[:used].T
    left = np.empty((2, 0), np.int64)
    over = int(total[used - 1]) - capacity if used else 0
    if over > 0:
        end = end.copy()
        end[-1] -= over
        left = np.asarray([[used - 1], [end[-1]]], np.int64)

    # Whole rows first: parts of a row's length, each in a row of its own.
    whole = (end - start) // seq_len
    document = np.repeat(np.arange(used), whole)
    part = np.arange(len(document)) - np.repeat(np.cumsum(whole) - whole, whole)
    whole_start = start[document] + part * seq_len

    # Then what is left of each chunk, end to end, cut where a chunk ends and where a row ends.
    rest = np.flatnonzero(start + whole * seq_len < end)
    rest_start = (start + whole * seq_len)[rest]
    ends = np.cumsum(end[rest] - rest_start)
    filled = int(ends[-1]) if len(ends) else 0
    cuts = np.sort(np.concatenate([ends, np.arange(seq_len, filled, seq_len)]))
    begin = np.zeros_like(cuts)
    begin[1:] = cuts[:-1]
    begin, cuts = begin[begin < cuts], cuts[begin < cuts]
    which = np.searchsorted(ends, begin, side="right")
    shift = rest_start[which] - (ends[which] - (end[rest] - rest_start)[which])

    # Rows in the order in which their first chunks were drawn, so that no rank gets all the short ones.
    row = np.concatenate([np.arange(len(document)), len(document) + begin // seq_len])
    pieces = np.empty((4, len(row)), np.int64)
    pieces[1, : len(document)], pieces[1, len(document) :] = document, rest[which]
    pieces[2, : len(document)], pieces[2, len(document) :] = whole_start, begin + shift
    pieces[3, : len(document)], pieces[3, len(document) :] = whole_start + seq_len, cuts + shift
    num_rows = int(row.max()) + 1 if len(row) else 0
    first = np.full(num_rows, used, np.int64)
    np.minimum.at(first, row, pieces[1])
    place = np.empty(num_rows, np.int64)
    place[np.argsort(first, kind="stable")] = np.arange(num_rows)
    pieces[0] = place[row]
    if used < len(carried):  # more than one step's worth, if the packing was another one before
        waiting = np.arange(used, len(carried))
        left = np.concatenate([left, np.stack([waiting, spans[waiting, 0]])], axis=1)
    return Packed(pieces[:, np.argsort(pieces[0], kind="stable")], left, max(used, len(carried)))


def fit(carried: Spans, more: More, *, rows: int, seq_len: int, slack_tokens: int, best: bool) -> Packed:
    """Packs whole documents; one longer than a row fills rows of its own, and only its remainder is packed.

    Takes `slack_tokens` more than the rows hold, so that small documents are at hand for the last gaps. The
    documents that are left over go first in the next step, the longest waiting one before all others, so that
    no document waits for ever. One chunk gets at most a 32nd of the rows plus part of a row, unless documents
    run out.

    best: best fit decreasing: the longest document first, each into the row where it leaves the least room.
      Otherwise first fit: in the given order, each into the first row that has room.
    """
    spans, most, need = carried, max(1, rows // MOST_ROWS_OF_ONE) * seq_len, rows * seq_len + slack_tokens
    while True:
        size = spans[:, 1] - spans[:, 0]
        size = np.where(size < most + seq_len, size, most)
        total = np.cumsum(size)
        lacking = need - int(total[-1]) if len(total) else need
        if lacking > 0 and (found := more(lacking)) is not None:
            spans = np.concatenate([spans, found])
        elif lacking > 0 and most < rows * seq_len:
            most = rows * seq_len
        else:
            break
    used = max(len(carried), min(len(spans), int(np.searchsorted(total, need)) + 1))

    # Splits each document into parts of at most a row. Carried ones go first, then the longest or the given
    # order.
    size = size[:used]
    parts = -(-size // seq_len)
    document = np.repeat(np.arange(used), parts)
    part_start = (np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)) * seq_len
    length = np.minimum(size[document] - part_start, seq_len)
    start = spans[document, 0] + part_start
    urgency = np.where(document >= len(carried), 2, np.minimum(document, 1))
    order = np.argsort(urgency * (seq_len + 1) + (seq_len - length if best else 0), kind="stable")

    place = (_best_fit if best else _first_fit)(rows, seq_len)
    row = np.asarray(place(length[order].tolist(), document[order].tolist()), np.int64)
    by_row = np.argsort(row, kind="stable")[np.count_nonzero(row < 0) :]
    row, placed = row[by_row], order[by_row]
    next_start = spans[:used, 0].copy()
    np.add.at(next_start, document[placed], length[placed])
    left = np.flatnonzero(next_start < spans[:used, 1])
    left = left[
        np.argsort(next_start[left] != spans[left, 0], kind="stable")
    ]  # partly placed documents go last
    pieces = np.stack([row, document[placed], start[placed], start[placed] + length[placed]])
    return Packed(pieces, np.stack([left, next_start[left]]), used)


Place = Callable[[list[int], list[int]], list[int]]
"""place(lengths, documents) returns the row of each part, or -1; after a -1 no later part of it is placed."""


def _best_fit(rows: int, seq_len: int) -> Place:
    """Places each part into the row with the least sufficient room."""

    def place(lengths: list[int], documents: list[int]) -> list[int]:
        spaces = [seq_len * rows + row for row in range(rows)]  # room * rows + row, ascending
        found, gone = [], set()
        for length, document in zip(lengths, documents, strict=True):
            wanted = length * rows
            at = bisect_left(spaces, wanted)
            if at == len(spaces) or document in gone:
                gone.add(document)
                found.append(-1)
                continue
            space = spaces.pop(at)
            if (rest := space - wanted) >= rows:
                insort(spaces, rest)
            found.append(space % rows)
        return found

    return place


def _first_fit(rows: int, seq_len: int) -> Place:
    """Places each part into the first row with enough room, found by a tree of the most room in each half."""

    def place(lengths: list[int], documents: list[int]) -> list[int]:
        leaves = 1 << (rows - 1).bit_length()
        most = [0] * leaves + [seq_len] * rows + [0] * (leaves - rows)
        for i in range(leaves - 1, 0, -1):
            most[i] = max(most[2 * i], most[2 * i + 1])
        found, gone = [], set()
        for length, document in zip(lengths, documents, strict=True):
            if most[1] < length or document in gone:
                gone.add(document)
                found.append(-1)
                continue
            i = 1
            while i < leaves:
                i = 2 * i + (most[2 * i] < length)
            most[i] -= length
            found.append(i - leaves)
            while i > 1:
                i //= 2
                most[i] = max(most[2 * i], most[2 * i + 1])
        return found

    return place
