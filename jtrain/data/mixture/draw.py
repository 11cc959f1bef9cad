"""Draws the documents of a mixture by fair queueing over the sources, in integers, from document lengths alone."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64

from jtrain.data.mixture.schedule import ONE, SHARE_BITS, integer_shares
from jtrain.data.sources.source import ONE_SOURCE, field_of
from jtrain.errors import UserError

ENDLESS = 1 << 62
"""End of a source that is repeated for ever."""

_FIRST_GUESS_TOKENS = 512
"""Assumed tokens per document before any is seen. It only decides how many lengths to ask for."""

_ASK_AT_LEAST = 32
"""Smallest number of lengths to ask for in one call: a call takes as long as a thousand lengths."""


class NotYet(Exception):
    """Raised by `lengths` if the length of a document is not known yet, and by `plan` after it has asked for them all.

    wanted: (source, first document, count) of the missing lengths.
    """

    def __init__(self, wanted: Sequence[tuple[int, int, int]] = ()) -> None:
        self.wanted = list(wanted)
        super().__init__(f"lengths not known yet: {self.wanted[:4]}")


Lengths = Callable[[int, int, int], np.ndarray]
"""lengths(source, first, count): token counts of documents first, first + 1, ... of a source; 0: skip the document.

Returns between one and `count` lengths; raises `NotYet` if the first one is not known yet. It must be a pure function.
"""


class ChunkLengths(NamedTuple):
    """Documents by source and number, with their length in tokens."""

    source: Int64[np.ndarray, " documents"]
    document: Int64[np.ndarray, " documents"]
    length: Int64[np.ndarray, " documents"]


class Buffers:
    """Cache of the lengths of the next documents of each source. Its contents never change a plan.

    Empty documents are left out, so that a source with many of them costs no more time than another.

    Attributes:
      ends: number of documents of each source over all epochs.
    """

    def __init__(
        self, names: Sequence[str], chunks_per_epoch: Sequence[int], epochs: int | None, lengths: Lengths
    ) -> None:
        num = len(names)
        self.names = tuple(names)
        self.chunks_per_epoch = np.asarray(chunks_per_epoch, np.int64)
        self.ends = np.full(num, ENDLESS, np.int64) if epochs is None else self.chunks_per_epoch * epochs
        self._lengths = lengths
        self._known = ChunkLengths(*(np.empty(0, np.int64) for _ in range(3)))  # sorted by source, then by number
        self._first = np.zeros(num, np.int64)  # lengths are known from here ...
        self._scanned = np.zeros(num, np.int64)  # ... to here
        self._empty_since = np.zeros(num, np.int64)
        self._seen_documents = np.zeros(num, np.int64)
        self._seen_tokens = np.zeros(num, np.int64)

    @property
    def mean_tokens(self) -> Float64[np.ndarray, " sources"]:
        """Mean tokens per document seen so far, empty ones included; a guess before any is seen."""
        return (self._seen_tokens + _FIRST_GUESS_TOKENS) / (self._seen_documents + 1)

    def forget(self, cursors: Int64[np.ndarray, " sources"]) -> None:
        """Drops the lengths before `cursors`. If a cursor jumps, the lengths of its source are asked for again."""
        jumped = (cursors < self._first) | (cursors > self._scanned)
        self._scanned = np.where(jumped, cursors, self._scanned)
        self._empty_since = np.where(jumped, cursors, self._empty_since)
        self._first = cursors.copy()
        keep = (self._known.document >= cursors[self._known.source]) & ~jumped[self._known.source]
        self._known = ChunkLengths(*(array[keep] for array in self._known))

    def ahead(
        self, cursors: Int64[np.ndarray, " sources"], limits: Int64[np.ndarray, " sources"], *, by_tokens: bool
    ) -> tuple[ChunkLengths, Int64[np.ndarray, " documents"], Bool[np.ndarray, " sources"]]:
        """Looks ahead from each cursor, up to `limits` tokens (or samples) per source.

        Returns:
          The documents that begin before the limit, by source and number; the number of tokens (samples) of its source
          before each of them; and True for each source that ends before its limit.

        Raises:
          NotYet: lengths are missing; the exception lists all of them.
          UserError: a whole epoch of a source is empty.
        """
        while True:
            known = self._known
            live = known.document >= cursors[known.source]
            if not live.all():
                known = ChunkLengths(*(array[live] for array in known))
            total = np.concatenate([[0], np.cumsum(known.length) if by_tokens else np.arange(1, len(known.source) + 1)])
            border = np.searchsorted(known.source, np.arange(len(cursors) + 1))
            here = total[border[1:]] - total[border[:-1]]
            short = here < limits
            missing = np.flatnonzero(short & (self._scanned < self.ends))
            if not len(missing):
                before = total[:-1] - total[border[known.source]]
                wanted = before < limits[known.source]
                return ChunkLengths(*(array[wanted] for array in known)), before[wanted], short
            self._ask(missing, (limits - here)[missing] * (1 if by_tokens else self.mean_tokens[missing]))

    def _ask(self, sources: np.ndarray, tokens: np.ndarray) -> None:
        """Asks for the lengths of about `tokens` more tokens of each source."""
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
            found.append(ChunkLengths(np.full(len(at), source), first + at, length))
            self._scanned[source] += len(got)
            self._seen_documents[source] += len(got)
            self._seen_tokens[source] += length.sum()
            if len(at):
                self._empty_since[source] = first + at[-1] + 1
            elif self._scanned[source] - self._empty_since[source] >= self.chunks_per_epoch[source]:
                raise UserError(_no_text(field_of(self.names[source]), int(self.chunks_per_epoch[source])))
        if len(found) > 1:
            merged = [np.concatenate(arrays) for arrays in zip(*found, strict=True)]
            order = np.argsort(merged[0], kind="stable")
            self._known = ChunkLengths(*(array[order] for array in merged))
        if wanted:
            raise NotYet(wanted)


def _no_text(field: str, documents: int) -> str:
    ways_out = ["Set data.on_bad_record='fail' to see why records are skipped", f"set {field}.path to files with text"]
    if field != field_of(ONE_SOURCE):
        ways_out.append(f"leave it out: set {field}.weight=0, or drop it from data.mixture if that names weights")
    ways_out.append("if all of it is held out, lower data.eval_fraction, which needs a new --workdir")
    return (
        f"{field} has no text to train on: a whole epoch of {documents:,} documents is empty, held out or skipped. "
        f"{'; or '.join(ways_out)}."
    )


class _Round(NamedTuple):
    drawn: ChunkLengths
    shares: Int64[np.ndarray, " sources"]
    ended: Bool[np.ndarray, " sources"]


class Draws:
    """Documents of a mixture in the order in which they are due, drawn on demand.

    Fair queueing: a document is due at the time at which half of it would be read if every source were read at exactly
    its share. (With the start of the document as the time, all sources would run ahead of their shares by half a
    document; with its end, behind.) The `deficit` of a source is what it lacks of its share so far; it is carried on,
    so that the drift stays at about one document per source for any schedule and any number of steps. All numbers are
    integers, so that no machine rounds differently.

    The order does not depend on how much is asked for at a time or on where steps end, until a source ends.

    Args:
      weights: weights at this step; a source at its end is left out, and the others take its share.
      deficit: tokens (or samples) that each source lacks, in units of 1 / ONE.
      by_tokens: True if shares count tokens, False if they count documents.
      typical_tokens: first estimate of the tokens per document, used if shares count documents.
    """

    def __init__(
        self,
        buffers: Buffers,
        *,
        weights: Float64[np.ndarray, " sources"],
        cursors: Int64[np.ndarray, " sources"],
        deficit: Int64[np.ndarray, " sources"],
        by_tokens: bool,
        typical_tokens: int,
    ) -> None:
        self._buffers = buffers
        self._weights = weights
        self._by_tokens = by_tokens
        self._start = cursors, deficit
        self._cursors, self._deficit = cursors, deficit
        self._rounds: list[_Round] = []
        self._tokens, self._documents = typical_tokens, 1

    def more(self, tokens: int) -> ChunkLengths | None:
        """Draws the next documents, about `tokens` in all, sometimes fewer or more; None if none is left.

        Raises:
          NotYet, UserError: see `Buffers.ahead`; nothing is drawn.
        """
        units = tokens if self._by_tokens else max(1, tokens * self._documents // self._tokens)
        while True:
            active = (self._weights > 0) & (self._cursors < self._buffers.ends)
            if not active.any():
                return None
            shares = integer_shares(np.where(active, self._weights, 0.0))
            # Sources that have ended may have had a positive deficit; the others then start later by that amount.
            horizon = units + max(0, -(int(self._deficit[active].sum()) // ONE))
            limits = np.where(active, np.maximum(-((-horizon * shares - self._deficit) // ONE), 0), 0)
            found, before, ended = self._buffers.ahead(self._cursors, limits, by_tokens=self._by_tokens)
            middle = (before << SHARE_BITS) + (found.length if self._by_tokens else 1) * (ONE // 2)
            due = (middle - self._deficit[found.source]) // np.maximum(shares, 1)[found.source]
            order = np.argsort(due, kind="stable")  # on a tie, the source that is named first wins
            inside = int(np.searchsorted(due[order], horizon))
            ended[found.source[order[inside:]]] = False
            order = order[:inside]
            drawn = ChunkLengths(*(array[order] for array in found))
            if not len(order) and not ended.any():
                units *= 2  # the next document of every source is a long one
                continue
            self._rounds.append(_Round(drawn, shares, ended & active))
            self._cursors, self._deficit, _ = self._after(self._rounds[-1], len(order), self._cursors, self._deficit)
            if len(order):
                self._tokens += int(drawn.length.sum())
                self._documents += len(order)
                return drawn

    def commit(self, count: int) -> tuple[Int64[np.ndarray, " sources"], Int64[np.ndarray, " sources"], int]:
        """Returns cursors, deficit and the tokens (samples) drawn, after the first `count` of the drawn documents."""
        (cursors, deficit), units = self._start, 0
        for drawing in self._rounds:
            here = min(count, len(drawing.drawn.source))
            cursors, deficit, drawn = self._after(drawing, here, cursors, deficit)
            count, units = count - here, units + drawn
            if here < len(drawing.drawn.source):
                break
        assert count == 0, count
        return cursors, deficit, units

    def _after(
        self, drawing: _Round, count: int, cursors: np.ndarray, deficit: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int]:
        source, document, length = (array[:count] for array in drawing.drawn)
        drawn = np.zeros(len(cursors), np.int64)
        np.add.at(drawn, source, length if self._by_tokens else 1)
        cursors = cursors.copy()
        np.maximum.at(cursors, source, document + 1)
        if count == len(drawing.drawn.source):
            cursors[drawing.ended] = self._buffers.ends[drawing.ended]
        units = int(drawn.sum())
        return cursors, deficit + drawing.shares * units - (drawn << SHARE_BITS), units
