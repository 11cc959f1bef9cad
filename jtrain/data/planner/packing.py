"""Packs chunks into rows from their lengths alone: concatenate and split, first fit or best fit."""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int64

from jtrain.data.native.library import address, core

Packing = Literal["concat", "first_fit", "best_fit"]

MAX_DOCUMENT_FRACTION = 32
"""A document longer than a row gets at most 1 / MAX_DOCUMENT_FRACTION of a step's rows, with `fit`."""

Spans = Int64[np.ndarray, "documents 2"]
"""First token and end (exclusive) of each span of a document; no span is empty."""

More = Callable[[int], Spans | None]
"""more(tokens) returns further documents of about that many tokens, or None at the end of the data."""


class Packed(NamedTuple):
    """Result of packing. Documents are numbered as given: the carried ones, then those of `more`.

    pieces: row, document, start, end; sorted by row, and within a row in the order of placement.
    remainders: document and start of each remainder that waits for a later step, the next one due first.
    num_used: number of documents taken, from the first one on.
    """

    pieces: Int64[np.ndarray, "4 pieces"]
    remainders: Int64[np.ndarray, "2 remainders"]
    num_used: int


def concat(carried: Spans, more: More, *, rows: int, seq_len: int) -> Packed:
    """Fills rows one after another; what does not fit into the last row waits for the next step.

    A chunk as long as a row gets a row of its own. The others are concatenated in the order given, and cut at
    row ends, in the rows that are left. Every row is full until the documents end; each token is in exactly
    one row, and at most one chunk waits.

    Example, 3 rows of 8 tokens, documents of 5, 8, 6 and 7 tokens. The step takes 24 of the 26 tokens: all of
    documents 0, 1 and 2, and 5 tokens of document 3. Document 1 fills a row. The others are laid end to end
    as 0 0 0 0 0 2 2 2 | 2 2 2 3 3 3 3 3 and cut after 8. Sorted by the first document in each row, the rows
    are [0 and 2[0:3]], [1], [2[3:6] and 3[0:5]]; 3[5:7] waits for the next step.

    Args:
      carried: remainders that the previous step left.
    """
    spans, capacity = carried, rows * seq_len
    while True:
        total = np.cumsum(spans[:, 1] - spans[:, 0])
        lacking = capacity - (int(total[-1]) if len(total) else 0)
        if lacking <= 0 or (new_spans := more(lacking)) is None:
            break
        spans = np.concatenate([spans, new_spans])
    # The document in which the running total reaches the capacity is the last one used.
    num_used = min(len(spans), int(np.searchsorted(total, capacity)) + 1)
    start, end = spans[:num_used].T
    remainders = np.empty((2, 0), np.int64)
    excess = int(total[num_used - 1]) - capacity if num_used else 0
    if excess > 0:
        # `end` is a view of spans, which the caller still needs.
        end = end.copy()
        end[-1] -= excess
        remainders = np.asarray([[num_used - 1], [end[-1]]], np.int64)

    pieces = place_concatenated(start, end, seq_len)
    # More than one step's worth may be carried if the run used another packing before.
    if num_used < len(carried):
        untouched = np.arange(num_used, len(carried))
        remainders = np.concatenate([remainders, np.stack([untouched, spans[untouched, 0]])], axis=1)
    return Packed(pieces, remainders, max(num_used, len(carried)))


def place_concatenated(
    start: Int64[np.ndarray, " documents"], end: Int64[np.ndarray, " documents"], seq_len: int
) -> Int64[np.ndarray, "4 pieces"]:
    """Returns the `pieces` of `Packed` for documents of these tokens, as `concat` places them."""
    if (library := core()) is not None:
        start, end = np.ascontiguousarray(start), np.ascontiguousarray(end)
        # Of each document its parts of a row, and a rest, which the end of a row may cut in two.
        room = int(((end - start) // seq_len).sum()) + 2 * len(start)
        pieces = np.empty((4, room), np.int64)
        columns = (address(start, np.int64), address(end, np.int64))
        out = (address(column, np.int64) for column in pieces)
        return pieces[:, : library.place_concatenated(len(start), *columns, seq_len, *out)]
    # Full rows first: parts of a row's length, each in a row of its own.
    full_rows = (end - start) // seq_len
    document = np.repeat(np.arange(len(start)), full_rows)
    # 0, 1, ... within each document: a running number minus the parts of the documents before.
    part = np.arange(len(document)) - np.repeat(np.cumsum(full_rows) - full_rows, full_rows)
    full_start = start[document] + part * seq_len

    # Then what is left of each chunk, end to end, cut where a chunk ends and where a row ends.
    with_tail = np.flatnonzero(start + full_rows * seq_len < end)
    tail_start = (start + full_rows * seq_len)[with_tail]
    ends = np.cumsum(end[with_tail] - tail_start)
    tail_tokens = int(ends[-1]) if len(ends) else 0
    cuts = np.sort(np.concatenate([ends, np.arange(seq_len, tail_tokens, seq_len)]))
    begin = np.zeros_like(cuts)
    begin[1:] = cuts[:-1]
    # Where a document ends exactly at a row's end, both cuts coincide: an empty piece.
    begin, cuts = begin[begin < cuts], cuts[begin < cuts]
    # The tail that holds the token at `begin`; side="right", as `ends` are exclusive.
    tail = np.searchsorted(ends, begin, side="right")
    # Position in the concatenation + shift = token within the document.
    shift = tail_start[tail] - (ends[tail] - (end[with_tail] - tail_start)[tail])

    # Rows in the order in which their first chunks were drawn, so that no rank gets all the short ones.
    row = np.concatenate([np.arange(len(document)), len(document) + begin // seq_len])
    pieces = np.empty((4, len(row)), np.int64)
    pieces[1, : len(document)], pieces[1, len(document) :] = document, with_tail[tail]
    pieces[2, : len(document)], pieces[2, len(document) :] = full_start, begin + shift
    pieces[3, : len(document)], pieces[3, len(document) :] = full_start + seq_len, cuts + shift
    # Fewer than `rows` only when the documents have ended.
    num_rows = int(row.max()) + 1 if len(row) else 0
    # Smallest document number of each row: the order in which its documents were drawn.
    first_document = np.full(num_rows, len(start), np.int64)
    np.minimum.at(first_document, row, pieces[1])
    position = np.empty(num_rows, np.int64)
    # The inverse permutation: position[r] is where row r goes.
    position[np.argsort(first_document, kind="stable")] = np.arange(num_rows)
    pieces[0] = position[row]
    # Stable: within a row the pieces keep the order of placement.
    return pieces[:, np.argsort(pieces[0], kind="stable")]


def fit(carried: Spans, more: More, *, rows: int, seq_len: int, slack_tokens: int, best: bool) -> Packed:
    """Packs whole documents; one longer than a row fills rows of its own, and only its remainder is packed.

    Takes `slack_tokens` more than the rows hold, so that small documents are at hand for the last gaps. The
    documents that are left over go first in the next step, the longest waiting one before all others, so that
    no document waits for ever. One chunk gets at most a 32nd of the rows plus part of a row, unless documents
    run out.

    best: best fit decreasing: the longest document first, each into the row where it leaves the least room.
      Otherwise first fit: in the given order, each into the first row that has room.
    """
    spans, document_limit, needed_tokens = (
        carried,
        max(1, rows // MAX_DOCUMENT_FRACTION) * seq_len,
        rows * seq_len + slack_tokens,
    )
    while True:
        size = spans[:, 1] - spans[:, 0]
        # A little over the limit counts in full: its remainder is less than a row, and can be placed now.
        size = np.where(size < document_limit + seq_len, size, document_limit)
        total = np.cumsum(size)
        lacking = needed_tokens - int(total[-1]) if len(total) else needed_tokens
        if lacking > 0 and (new_spans := more(lacking)) is not None:
            spans = np.concatenate([spans, new_spans])
        # No more documents: long ones may now take every row, rather than leave rows empty.
        elif lacking > 0 and document_limit < rows * seq_len:
            document_limit = rows * seq_len
        else:
            break
    # Carried documents count as used even if unplaced: they are not drawn again.
    num_used = max(len(carried), min(len(spans), int(np.searchsorted(total, needed_tokens)) + 1))

    # Splits each document into parts of at most a row. Carried ones go first, then the longest or the given
    # order.
    size = size[:num_used]
    parts = -(-size // seq_len)
    document = np.repeat(np.arange(num_used), parts)
    part_start = (np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)) * seq_len
    length = np.minimum(size[document] - part_start, seq_len)
    start = spans[document, 0] + part_start
    # 0: the longest waiting document; 1: the other carried ones; 2: those drawn now.
    urgency = np.where(document >= len(carried), 2, np.minimum(document, 1))
    # One key: urgency first, then (best fit) the longer part. seq_len + 1 exceeds every seq_len - length.
    order = np.argsort(urgency * (seq_len + 1) + (seq_len - length if best else 0), kind="stable")

    place_parts = (_best_fit if best else _first_fit)(rows, seq_len)
    row = np.asarray(place_parts(length[order].tolist(), document[order].tolist()), np.int64)
    # Unplaced parts have row -1 and sort first: they are cut off.
    by_row = np.argsort(row, kind="stable")[np.count_nonzero(row < 0) :]
    row, placed = row[by_row], order[by_row]
    next_start = spans[:num_used, 0].copy()
    # Parts of a document are placed in order, so the sum of lengths is where its remainder starts.
    np.add.at(next_start, document[placed], length[placed])
    unfinished = np.flatnonzero(next_start < spans[:num_used, 1])
    # Partly placed documents go last: they have had their turn.
    unfinished = unfinished[np.argsort(next_start[unfinished] != spans[unfinished, 0], kind="stable")]
    pieces = np.stack([row, document[placed], start[placed], start[placed] + length[placed]])
    return Packed(pieces, np.stack([unfinished, next_start[unfinished]]), num_used)


PlaceParts = Callable[[list[int], list[int]], list[int]]
"""place_parts(lengths, documents) returns each part's row; after a -1 its document gets no further row."""


def _best_fit(rows: int, seq_len: int) -> PlaceParts:
    """Places each part into the row with the least sufficient room."""

    def place_parts(lengths: list[int], documents: list[int]) -> list[int]:
        # One integer per row sorts by room, then by row, which makes ties the same on every host.
        spaces = [seq_len * rows + row for row in range(rows)]  # room * rows + row, ascending
        part_rows, refused_documents = [], set()
        for length, document in zip(lengths, documents, strict=True):
            least_space = length * rows
            # Smallest space with room >= length: least_space is `room * rows + row` for that room and row 0.
            index = bisect_left(spaces, least_space)
            # Parts of a document must be placed in order, or its remainder would have holes.
            if index == len(spaces) or document in refused_documents:
                refused_documents.add(document)
                part_rows.append(-1)
                continue
            space = spaces.pop(index)
            # Below `rows` the room is 0: the row is full and leaves the list.
            if (remaining_space := space - least_space) >= rows:
                insort(spaces, remaining_space)
            part_rows.append(space % rows)
        return part_rows

    return place_parts


def _first_fit(rows: int, seq_len: int) -> PlaceParts:
    """Places each part into the first row with enough room, found by a tree of the most room in each half."""

    def place_parts(lengths: list[int], documents: list[int]) -> list[int]:
        # Heap layout: node n has the children 2 n and 2 n + 1; row r is node leaves + r. Other leaves have 0.
        leaves = 1 << (rows - 1).bit_length()
        most_room = [0] * leaves + [seq_len] * rows + [0] * (leaves - rows)
        for node in range(leaves - 1, 0, -1):
            most_room[node] = max(most_room[2 * node], most_room[2 * node + 1])
        part_rows, refused_documents = [], set()
        for length, document in zip(lengths, documents, strict=True):
            # Node 1, the root, has the most room of any row.
            if most_room[1] < length or document in refused_documents:
                refused_documents.add(document)
                part_rows.append(-1)
                continue
            node = 1
            while node < leaves:
                # Left child if it has room, else right: the first row from the left.
                node = 2 * node + (most_room[2 * node] < length)
            most_room[node] -= length
            part_rows.append(node - leaves)
            while node > 1:
                node //= 2
                # The maxima from the changed leaf up to the root.
                most_room[node] = max(most_room[2 * node], most_room[2 * node + 1])
        return part_rows

    return place_parts
