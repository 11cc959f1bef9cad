"""Documents into rows by their lengths alone: concatenated and split, or whole by first fit or best fit."""

import itertools
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

Packing = Literal["concat", "first_fit", "best_fit"]

LANES = 32
"""Long documents open at a time; rows are taken from them in turn.

With one, the 16 rows of a batch of 256 bytes each would nearly always be one and the same file: the standard library's
mean is 17 KB.
"""

Span = tuple[int, int]
"""From this token of a document up to that one."""


class Packed(NamedTuple):
    """What went where; documents are numbered as in the list that was packed.

    pieces: (row, document, start, end), in the order in which they lie in each row.
    left: (document, start) of what waits for a later step, the one that is due first in front.
    used: documents taken from the list, counted from its beginning.
    """

    pieces: list[tuple[int, int, int, int]]
    left: list[tuple[int, int]]
    used: int


def concat(
    spans: list[Span], more: Callable[[int], bool], *, rows: int, seq_len: int, carried: int, lanes: int = LANES
) -> Packed:
    """Each row goes on with the document that has waited longest, then starts new ones; what is cut off waits.

    While fewer than `lanes` documents wait, rows begin with a new one. Every row is full until the documents end; each
    token lands in one row.

    Args:
      spans: the documents, to which `more` appends.
      more: about so many more tokens; False when there are none.
      carried: how many of `spans` were left by the step before.
    """
    pieces: list[tuple[int, int, int, int]] = []
    waiting = deque((i, spans[i][0]) for i in range(min(carried, lanes)))
    fresh, at_end = len(waiting), False
    for row in range(rows):
        room, gone_on = seq_len, False
        while room:
            if waiting and (at_end or (not gone_on and len(waiting) >= lanes)):
                document, start = waiting.popleft()
                gone_on = True
            elif fresh < len(spans):
                document, start = fresh, spans[fresh][0]
                fresh += 1
            elif not at_end:
                # About what is needed: a row that ends a document in waiting cuts another, of as much on average.
                left, turn = rows - row - 1, min(rows - row - 1, lanes)
                full = sum(spans[i][1] - start >= seq_len for i, start in itertools.islice(waiting, turn))
                at_end = not more(room + (left - left * full // max(1, turn)) * seq_len)
                continue
            else:
                break
            end = min(spans[document][1], start + room)
            pieces.append((row, document, start, end))
            room -= end - start
            if end < spans[document][1]:
                waiting.append((document, end))
    waiting.extend((i, spans[i][0]) for i in range(fresh, carried))
    return Packed(pieces, list(waiting), max(fresh, carried))


def fit(
    spans: list[Span],
    more: Callable[[int], bool],
    *,
    rows: int,
    seq_len: int,
    carried: int,
    slack_tokens: int,
    best: bool,
    most_rows: int | None = None,
) -> Packed:
    """Documents whole, except that one longer than a row fills rows of its own and only its end is packed.

    Takes `slack_tokens` more than there is room for, so that something small is always at hand for the last gap; the
    rest goes first in the next step, and the one that has waited longest before all, so none waits for ever.

    `best`: the longest first, each to the row where it leaves the least room, which looks again at a document when it
    is next; otherwise in the order given, each to the first row that has room.
    `most_rows`: of one document in one step, but for what is less than a row; a 32nd of them unless documents run out.
    """
    most = (most_rows or max(1, rows // LANES)) * seq_len
    lacking, used = rows * seq_len + slack_tokens, 0
    keys, offers = [], []  # as integers, which sort faster than tuples: 1.0 for 2.2 ms for 3,000 documents
    while used < carried or (lacking > 0 and (used < len(spans) or more(lacking))):
        start, end = spans[used]
        end = end if end - start < most + seq_len else start + most
        urgency = 2 if used >= carried else 1 if used else 0
        lacking -= end - start
        while start < end:
            length = min(end - start, seq_len)
            late = urgency * (seq_len + 1) + (seq_len - length if best else 0)
            keys.append(late << 32 | len(offers))
            offers.append((used, start, length))
            start += length
        used += 1
    if lacking > 0 and most_rows is None:
        shape = dict(rows=rows, seq_len=seq_len, carried=carried, slack_tokens=slack_tokens, most_rows=rows)
        return fit(spans, lambda _: False, best=best, **shape)
    keys.sort()

    next_start = [start for start, _ in spans[:used]]
    pieces = []
    place = _best_fit(rows, seq_len) if best else _first_fit(rows, seq_len)
    for key in keys:
        document, start, length = offers[key & 0xFFFFFFFF]
        if start == next_start[document] and (row := place(length)) >= 0:
            pieces.append((row, document, start, start + length))
            next_start[document] = start + length
    pieces.sort(key=lambda piece: piece[0])
    left = [(i, start) for i, start in enumerate(next_start) if start < spans[i][1]]
    left.sort(key=lambda item: item[1] != spans[item[0]][0])  # those that had a turn go behind
    return Packed(pieces, left, used)


def _best_fit(rows: int, seq_len: int) -> Callable[[int], int]:
    """Gives the row with the least room that is enough, or -1."""
    spaces = [seq_len * rows + row for row in range(rows)]  # room * rows + row, ascending

    def place(length: int) -> int:
        at = bisect_left(spaces, length * rows)
        if at == len(spaces):
            return -1
        room, row = divmod(spaces.pop(at), rows)
        if room > length:
            insort(spaces, (room - length) * rows + row)
        return row

    return place


def _first_fit(rows: int, seq_len: int) -> Callable[[int], int]:
    """Gives the first row with enough room, or -1: down a tree of the most room in each half."""
    leaves = 1 << (rows - 1).bit_length()
    most = [0] * leaves + [seq_len] * rows + [0] * (leaves - rows)
    for i in range(leaves - 1, 0, -1):
        most[i] = max(most[2 * i], most[2 * i + 1])

    def place(length: int) -> int:
        if most[1] < length:
            return -1
        i = 1
        while i < leaves:
            i = 2 * i + (most[2 * i] < length)
        most[i] -= length
        row = i - leaves
        while i > 1:
            i //= 2
            most[i] = max(most[2 * i], most[2 * i + 1])
        return row

    return place
