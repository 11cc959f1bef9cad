"""Which documents come next in a mixture: fair queueing over sources, in integers, from lengths alone."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64

from jtrain.data.schedule import ONE, SHARE_BITS, integer_shares
from jtrain.data.source import ONE_SOURCE, field_of

ENDLESS = 1 << 62
"""The end of a source that is repeated for ever."""

_FIRST_GUESS_TOKENS = 512
"""Tokens per document of a source of which none has been seen. Only says how many lengths to ask for."""

_ASK_AT_LEAST = 32
"""Documents to ask the lengths of, at once: a call takes as long as a thousand of them."""


class NotYet(Exception):
    """Raised by `lengths` where a document is not known yet; and then by `plan`, after it has asked for all it needs.

    wanted: (source, first document, count) of what was asked for in vain.
    """

    def __init__(self, wanted: Sequence[tuple[int, int, int]] = ()) -> None:
        self.wanted = list(wanted)
        super().__init__(f"lengths not known yet: {self.wanted[:4]}")


Lengths = Callable[[int, int, int], np.ndarray]
"""lengths(source, first, count): tokens of documents first, first + 1, ... of a source, 0 for one to pass over.

At least one and at most `count` of them; raises `NotYet` where not even the first is known. A pure function.
"""


class Documents(NamedTuple):
    """Documents by source and number, with their length in tokens."""

    source: Int64[np.ndarray, " documents"]
    document: Int64[np.ndarray, " documents"]
    length: Int64[np.ndarray, " documents"]


class Buffers:
    """Lengths of the documents that come next in each source. A cache: what is in it never changes a plan.

    Empty documents are left out, so a source with few documents worth reading costs no more than another.

    Attributes:
      ends: the number of documents of each source over all its epochs.
    """

    def __init__(
        self, names: Sequence[str], documents_per_epoch: Sequence[int], epochs: int | None, lengths: Lengths
    ) -> None:
        num = len(names)
        self.names = tuple(names)
        self.documents_per_epoch = np.asarray(documents_per_epoch, np.int64)
        self.ends = np.full(num, ENDLESS, np.int64) if epochs is None else self.documents_per_epoch * epochs
        self._lengths = lengths
        self._known = Documents(*(np.empty(0, np.int64) for _ in range(3)))  # by source, then by number
        self._first = np.zeros(num, np.int64)  # known from here ...
        self._scanned = np.zeros(num, np.int64)  # ... to here
        self._empty_since = np.zeros(num, np.int64)
        self._seen_documents = np.zeros(num, np.int64)
        self._seen_tokens = np.zeros(num, np.int64)

    @property
    def mean_tokens(self) -> Float64[np.ndarray, " sources"]:
        """Tokens per document, empty ones counted, over what has been seen so far; a guess before that."""
        return (self._seen_tokens + _FIRST_GUESS_TOKENS) / (self._seen_documents + 1)

    def forget(self, cursors: Int64[np.ndarray, " sources"]) -> None:
        """Drops what lies before `cursors`. After a jump, back or ahead, a source is asked again."""
        jumped = (cursors < self._first) | (cursors > self._scanned)
        self._scanned = np.where(jumped, cursors, self._scanned)
        self._empty_since = np.where(jumped, cursors, self._empty_since)
        self._first = cursors.copy()
        keep = (self._known.document >= cursors[self._known.source]) & ~jumped[self._known.source]
        self._known = Documents(*(array[keep] for array in self._known))

    def ahead(
        self, cursors: Int64[np.ndarray, " sources"], limits: Int64[np.ndarray, " sources"], *, by_tokens: bool
    ) -> tuple[Documents, Int64[np.ndarray, " documents"], Bool[np.ndarray, " sources"]]:
        """From each cursor on, the documents that begin before `limits` tokens (or samples) of their source.

        Returns:
          Them, by source and number; how many tokens (samples) of its source come before each; and which sources end
          before their limit.

        Raises:
          NotYet: lengths are missing; it names all of them.
          ValueError: a whole epoch of a source was empty.
        """
        while True:
            known = self._known
            live = known.document >= cursors[known.source]
            if not live.all():
                known = Documents(*(array[live] for array in known))
            total = np.concatenate([[0], np.cumsum(known.length) if by_tokens else np.arange(1, len(known.source) + 1)])
            border = np.searchsorted(known.source, np.arange(len(cursors) + 1))
            here = total[border[1:]] - total[border[:-1]]
            short = here < limits
            missing = np.flatnonzero(short & (self._scanned < self.ends))
            if not len(missing):
                before = total[:-1] - total[border[known.source]]
                wanted = before < limits[known.source]
                return Documents(*(array[wanted] for array in known)), before[wanted], short
            self._ask(missing, (limits - here)[missing] * (1 if by_tokens else self.mean_tokens[missing]))

    def _ask(self, sources: np.ndarray, tokens: np.ndarray) -> None:
        """Asks for about so many more tokens of each source."""
        count = np.maximum(tokens * 1.25 / self.mean_tokens[sources], _ASK_AT_LEAST).astype(np.int64)
        count = np.minimum(count, (self.ends - self._scanned)[sources])
        found, wanted = [self._known], []
        for source, want in zip(sources.tolist(), count.tolist(), strict=True):
            first = int(self._scanned[source])
            try:
                got = self._lengths(source, first, want)
            except NotYet:
                wanted.append((source, first, want))
                continue
            assert 0 < len(got) <= want, (source, first, want, len(got))
            at = np.flatnonzero(got)
            length = got[at].astype(np.int64)
            found.append(Documents(np.full(len(at), source), first + at, length))
            self._scanned[source] += len(got)
            self._seen_documents[source] += len(got)
            self._seen_tokens[source] += length.sum()
            if len(at):
                self._empty_since[source] = first + at[-1] + 1
            elif self._scanned[source] - self._empty_since[source] >= self.documents_per_epoch[source]:
                raise ValueError(_no_text(field_of(self.names[source]), int(self.documents_per_epoch[source])))
        if len(found) > 1:
            merged = [np.concatenate(arrays) for arrays in zip(*found, strict=True)]
            order = np.argsort(merged[0], kind="stable")
            self._known = Documents(*(array[order] for array in merged))
        if wanted:
            raise NotYet(wanted)


def _no_text(field: str, documents: int) -> str:
    ways_out = ["Set data.on_bad_record='fail' to see what was skipped", f"set {field}.path to files with text"]
    if field != field_of(ONE_SOURCE):
        ways_out.append(f"leave it out: {field}.weight=0, or where data.mixture names weights itself, no weight there")
    ways_out.append("if all of it was held out, lower data.eval_fraction, which takes a new --workdir")
    return (
        f"{field} holds no text: {documents:,} documents in a row, a whole epoch, were empty, held out or skipped. "
        f"{'; or '.join(ways_out)}."
    )


class _Round(NamedTuple):
    drawn: Documents
    shares: Int64[np.ndarray, " sources"]
    ended: Bool[np.ndarray, " sources"]


class Draws:
    """The documents of a mixture in the order in which they are due, as many as are asked for.

    Fair queueing: a document is due when its source would be half through it if every source flowed on at exactly its
    share. (At its start, all sources would run ahead of their shares by half a document; at its end, behind.) Each
    source is `owed` what it lacks of its share so far, so that the drift stays at about a document per source over
    any schedule, for ever. All in integers: no rounding, on any machine.

    The order depends on neither how much is asked for at a time nor on where steps end, until a source ends.

    Args:
      weights: of this step; a source at its end is left out, and the others take its share.
      owed: tokens (or samples) owed to each source, in units of 1 / ONE.
      by_tokens: shares are of tokens, otherwise of documents.
      typical_tokens: of a document, where shares are of documents: how many to begin with.
    """

    def __init__(
        self,
        buffers: Buffers,
        *,
        weights: Float64[np.ndarray, " sources"],
        cursors: Int64[np.ndarray, " sources"],
        owed: Int64[np.ndarray, " sources"],
        by_tokens: bool,
        typical_tokens: int,
    ) -> None:
        self._buffers = buffers
        self._weights = weights
        self._by_tokens = by_tokens
        self._start = cursors, owed
        self._cursors, self._owed = cursors, owed
        self._rounds: list[_Round] = []
        self._tokens, self._documents = typical_tokens, 1

    def more(self, tokens: int) -> Documents | None:
        """The next documents, mostly about `tokens` in all, but perhaps fewer or more; None when there are none left.

        Raises:
          NotYet, ValueError: see `Buffers.ahead`. Nothing has changed then.
        """
        units = tokens if self._by_tokens else max(1, tokens * self._documents // self._tokens)
        while True:
            active = (self._weights > 0) & (self._cursors < self._buffers.ends)
            if not active.any():
                return None
            shares = integer_shares(np.where(active, self._weights, 0.0))
            # Sources that have left may have taken credit with them: the others begin later by as much.
            horizon = units + max(0, -(int(self._owed[active].sum()) // ONE))
            limits = np.where(active, np.maximum(-((-horizon * shares - self._owed) // ONE), 0), 0)
            found, before, ended = self._buffers.ahead(self._cursors, limits, by_tokens=self._by_tokens)
            middle = (before << SHARE_BITS) + (found.length if self._by_tokens else 1) * (ONE // 2)
            due = (middle - self._owed[found.source]) // np.maximum(shares, 1)[found.source]
            order = np.argsort(due, kind="stable")  # a tie goes to the source named first
            inside = int(np.searchsorted(due[order], horizon))
            ended[found.source[order[inside:]]] = False
            order = order[:inside]
            drawn = Documents(*(array[order] for array in found))
            if not len(order) and not ended.any():
                units *= 2  # every next document is a long one
                continue
            self._rounds.append(_Round(drawn, shares, ended & active))
            self._cursors, self._owed, _ = self._after(self._rounds[-1], len(order), self._cursors, self._owed)
            if len(order):
                self._tokens += int(drawn.length.sum())
                self._documents += len(order)
                return drawn

    def commit(self, count: int) -> tuple[Int64[np.ndarray, " sources"], Int64[np.ndarray, " sources"], int]:
        """Cursors, what is owed, and the tokens (samples) drawn, after the first `count` of all documents given out."""
        (cursors, owed), units = self._start, 0
        for drawing in self._rounds:
            here = min(count, len(drawing.drawn.source))
            cursors, owed, drawn = self._after(drawing, here, cursors, owed)
            count, units = count - here, units + drawn
            if here < len(drawing.drawn.source):
                break
        assert count == 0, count
        return cursors, owed, units

    def _after(
        self, drawing: _Round, count: int, cursors: np.ndarray, owed: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int]:
        source, document, length = (array[:count] for array in drawing.drawn)
        drawn = np.zeros(len(cursors), np.int64)
        np.add.at(drawn, source, length if self._by_tokens else 1)
        cursors = cursors.copy()
        np.maximum.at(cursors, source, document + 1)
        if count == len(drawing.drawn.source):
            cursors[drawing.ended] = self._buffers.ends[drawing.ended]
        units = int(drawn.sum())
        return cursors, owed + drawing.shares * units - (drawn << SHARE_BITS), units
