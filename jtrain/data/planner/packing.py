"""Packs documents into rows from their lengths alone: concatenate and split, first fit or best fit."""

import itertools
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int64

Packing = Literal["concat", "first_fit", "best_fit"]

LANES = 32
"""Long documents that are open at the same time; rows continue them in turn.

With one open document, a batch of 16 rows of 256 bytes would nearly always come from a single file: the files of the
standard library have 17 KB on average.
"""

Spans = Int64[np.ndarray, "documents 2"]
"""First token and end (exclusive) of each span of a document; no span is empty."""

More = Callable[[int], Spans | None]
"""more(tokens) returns further documents of about that many tokens, or None at the end of the data."""


class Packed(NamedTuple):
    """Result of packing. Documents are numbered in the order given: first the carried ones, then those of `more`.

    pieces: row, document, start, end; sorted by row, and within a row in the order of placement.
    left: document and start of each remainder that waits for a later step, the next one due first.
    used: number of documents taken, from the first one on.
    """

    pieces: Int64[np.ndarray, "4 pieces"]
    left: Int64[np.ndarray, "2 left"]
    used: int


def concat(carried: Spans, more: More, *, rows: int, seq_len: int, lanes: int = LANES) -> Packed:
    """Concatenates documents and cuts them at row ends.

    A row first continues the document that has waited longest, then starts new ones; the part of a document that does
    not fit waits for a later row. While fewer than `lanes` documents wait, rows begin with a new document. Every row is
    full until the documents end, and each token is in exactly one row. The loop runs over rows, not over documents,
    for speed (`bench data_balance` times it).

    Args:
      carried: remainders that the previous step left.
    """
    spans, at_end = carried, False
    end, before = _ends_and_sums(spans)
    waiting = deque(enumerate(spans[:lanes, 0].tolist()))
    begun = fresh = len(waiting)
    heads, tails, news = [], [], []  # pieces before and after a row's new documents; number of new documents per row
    cuts = []  # (document, end of its first piece)

    def go_on(row: int, room: int, pieces: list[tuple[int, int, int, int]]) -> int:
        document, start = waiting.popleft()
        stop = min(end[document], start + room)
        pieces.append((row, document, start, stop))
        if stop < end[document]:
            waiting.append((document, stop))
        return room - (stop - start)

    for row in range(rows):
        room = go_on(row, seq_len, heads) if len(waiting) >= lanes else seq_len
        stop = fresh
        while room:
            stop = bisect_left(before, before[fresh] + room, fresh)  # the row is full with the documents before `stop`
            if stop < len(before) or at_end:
                break
            # Estimates the need: a row that finishes a waiting document cuts another one, of the same size on average.
            left, turn = rows - row - 1, min(rows - row - 1, lanes)
            full = sum(end[i] - start >= seq_len for i, start in itertools.islice(waiting, turn))
            there = before[-1] - before[fresh]
            found = more(room - there + (left - left * full // max(1, turn)) * seq_len)
            if found is None:
                at_end = True
                continue
            spans = np.concatenate([spans, found])
            end, before = _ends_and_sums(spans)
        stop = min(stop, len(end))
        news.append(stop - fresh)
        if stop > fresh:
            over = max(0, before[stop] - before[fresh] - room)
            room -= before[stop] - before[fresh] - over
            if over:
                cuts.append((stop - 1, end[stop - 1] - over))
                waiting.append(cuts[-1])
            fresh = stop
        while room and waiting:  # no new document is left
            room = go_on(row, room, tails)

    document = np.arange(begun, fresh)
    first_end = spans[begun:fresh, 1].copy()
    if cuts:
        cut, at = np.asarray(cuts, np.int64).T
        first_end[cut - begun] = at
    new = np.stack([np.repeat(np.arange(rows), news), document, spans[begun:fresh, 0], first_end])
    before_new, after_new = (np.asarray(single, np.int64).reshape(-1, 4).T for single in (heads, tails))
    pieces = np.concatenate([before_new, new, after_new], axis=1)
    used = max(fresh, len(carried))
    left = [np.asarray(waiting, np.int64).reshape(-1, 2).T, np.stack([np.arange(fresh, used), spans[fresh:used, 0]])]
    return Packed(pieces[:, np.argsort(pieces[0], kind="stable")], np.concatenate(left, axis=1), used)


def _ends_and_sums(spans: Spans) -> tuple[list[int], list[int]]:
    """Returns the end of each document, and the cumulative token counts: before each document, then in total."""
    return spans[:, 1].tolist(), [0, *np.cumsum(spans[:, 1] - spans[:, 0]).tolist()]


def fit(carried: Spans, more: More, *, rows: int, seq_len: int, slack_tokens: int, best: bool) -> Packed:
    """Packs whole documents; one longer than a row fills rows of its own, and only its remainder is packed.

    Takes `slack_tokens` more than the rows hold, so that small documents are at hand for the last gaps. The documents
    that are left over go first in the next step, the longest waiting one before all others, so that no document waits
    for ever. One document gets at most a 32nd of the rows plus part of a row, unless documents run out.

    best: best fit decreasing: the longest document first, each into the row where it leaves the least room. Otherwise
      first fit: in the given order, each into the first row that has room.
    """
    spans, most, need = carried, max(1, rows // LANES) * seq_len, rows * seq_len + slack_tokens
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

    # Splits each document into parts of at most a row. Carried ones go first, then the longest or the given order.
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
    left = left[np.argsort(next_start[left] != spans[left, 0], kind="stable")]  # partly placed documents go last
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
