"""Draws the documents of a mixture by fair queueing over the sources, in integers, from document lengths
alone.
"""

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

_TAKE_AT_LEAST = 256
"""Smallest number of lengths to take in one call, if they are known already."""

_ABOVE = 1 << 40
"""Upper bound of document numbers, so that source * _ABOVE + number orders documents by source, then by
number."""


class NotYet(Exception):
    """Raised by `lengths` if the length of a document is not known yet, and by `plan` after it has asked for
    them all.

    wanted: (source, first document, count) of the missing lengths.
    """

    def __init__(self, wanted: Sequence[tuple[int, int, int]] = ()) -> None:
        self.wanted = list(wanted)
        super().__init__(f"lengths not known yet: {self.wanted[:4]}")


Lengths = Callable[[int, int, int], np.ndarray]
"""lengths(source, first, count): token counts of documents first, first + 1, ... of a source; 0: skip the
document.

Returns between one and `count` lengths; raises `NotYet` if the first one is not known yet. It must be a pure
function.
"""


class ChunkLengths(NamedTuple):
    """Documents by source and number, with their length in tokens."""

    source: Int64[np.ndarray, " documents"]
    document: Int64[np.ndarray, " documents"]
    length: Int64[np.ndarray, " documents"]


class Buffers:
    """Cache of the lengths of the next documents of each source. Its contents never change a plan.

    Empty documents are left out, so that a source with many of them costs no more time than another. Looking
    ahead takes time for the documents that are found, not for all that are known.

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
        self._base = np.arange(num) * _ABOVE
        self._know(np.empty(0, np.int64), np.empty(0, np.int64))
        self._first = np.zeros(num, np.int64)  # lengths are known from here ...
        self._scanned = np.zeros(num, np.int64)  # ... to here
        self._empty_since = np.zeros(num, np.int64)
        self._dry = np.zeros(num, np.bool_)  # gave fewer lengths than it was asked for
        self._seen_documents = np.zeros(num, np.int64)
        self._seen_tokens = np.zeros(num, np.int64)

    @property
    def mean_tokens(self) -> Float64[np.ndarray, " sources"]:
        """Mean tokens per document seen so far, empty ones included; a guess before any is seen."""
        return (self._seen_tokens + _FIRST_GUESS_TOKENS) / (self._seen_documents + 1)

    def forget(self, cursors: Int64[np.ndarray, " sources"]) -> None:
        """Drops the lengths before `cursors`. If a cursor jumps, the lengths of its source are asked for
        again.
        """
        jumped = (cursors < self._first) | (cursors > self._scanned)
        if jumped.any():
            self._scanned = np.where(jumped, cursors, self._scanned)
            self._empty_since = np.where(jumped, cursors, self._empty_since)
            keep = ~jumped[self._keys // _ABOVE]
            self._know(self._keys[keep], self._known[keep])
        self._first = (
            cursors.copy()
        )  # `_ask` drops them: to do so at every step would copy all the others each time

    def ahead(
        self,
        cursors: Int64[np.ndarray, " sources"],
        limits: Int64[np.ndarray, " sources"],
        *,
        by_tokens: bool,
    ) -> tuple[ChunkLengths, Int64[np.ndarray, " documents"], Bool[np.ndarray, " sources"]]:
        """Looks ahead from each cursor, up to `limits` tokens (or samples) per source.

        Returns:
          The documents that begin before the limit, by source and number; the number of tokens (samples) of
          its source before each of them; and True for each source that ends before its limit.

        Raises:
          NotYet: lengths are missing; the exception lists all of them.
          UserError: a whole epoch of a source is empty.
        """
        while True:
            begin, end = np.searchsorted(self._keys, self._base + cursors), self._border[1:]
            start = self._total[begin] if by_tokens else begin
            here = (self._total[end] if by_tokens else end) - start
            short = here < limits
            missing = short & (self._scanned < self.ends)
            if missing.any():
                tokens = (limits - here) * (1 if by_tokens else self.mean_tokens)
                self._ask(missing, tokens, low=(end - begin < _ASK_AT_LEAST) & (limits > 0))
                continue
            stop = np.searchsorted(self._total[:-1], start + limits) if by_tokens else start + limits
            count = np.minimum(np.maximum(stop, begin), end) - begin
            source = np.repeat(np.arange(len(cursors)), count)
            at = np.arange(len(source)) + (begin - np.cumsum(count) + count)[source]
            before = (self._total[at] if by_tokens else at) - start[source]
            return ChunkLengths(source, self._keys[at] - self._base[source], self._known[at]), before, short

    def _ask(
        self, missing: Bool[np.ndarray, " sources"], tokens: np.ndarray, low: Bool[np.ndarray, " sources"]
    ) -> None:
        """Asks for about `tokens` more tokens of each missing source, and takes what is known of those that
        are low.

        Taking the lengths of many sources together, some hundred each, is what keeps copying them cheap.
        """
        asked = np.flatnonzero(missing | (low & ~self._dry & (self._scanned < self.ends)))
        count = np.maximum(tokens[asked] * 1.25 / self.mean_tokens[asked], _ASK_AT_LEAST).astype(np.int64)
        most = (self.ends - self._scanned)[asked]
        keys, lengths, wanted = [self._keys], [self._known], []
        for source, want, left in zip(asked.tolist(), count.tolist(), most.tolist(), strict=True):
            first, take = int(self._scanned[source]), min(max(want, _TAKE_AT_LEAST), left)
            try:
                got = self._lengths(source, first, take)
            except NotYet:
                self._dry[source] = True
                if missing[source]:
                    wanted.append((source, first, min(want, left)))
                continue
            assert 0 < len(got) <= take, (source, first, take, len(got))
            at = np.flatnonzero(got)
            length = got[at].astype(np.int64)
            keys.append(self._base[source] + first + at)
            lengths.append(length)
            self._dry[source] = len(got) < take
            self._scanned[source] += len(got)
            self._seen_documents[source] += len(got)
            self._seen_tokens[source] += length.sum()
            if len(at):
                self._empty_since[source] = first + at[-1] + 1
            elif self._scanned[source] - self._empty_since[source] >= self.chunks_per_epoch[source]:
                raise UserError(_no_text(field_of(self.names[source]), int(self.chunks_per_epoch[source])))
        if len(keys) > 1:
            merged = np.concatenate(keys)
            order = np.argsort(merged, kind="stable")
            order = order[(merged >= (self._base + self._first)[merged // _ABOVE])[order]]
            self._know(merged[order], np.concatenate(lengths)[order])
        if wanted:
            raise NotYet(wanted)

    def _know(self, keys: Int64[np.ndarray, " known"], lengths: Int64[np.ndarray, " known"]) -> None:
        """Sets the documents whose lengths are known, ascending, and what follows from them."""
        self._keys, self._known = keys, lengths
        self._total = np.concatenate([[0], np.cumsum(lengths)])
        self._border = np.searchsorted(keys, np.append(self._base, len(self._base) * _ABOVE))


def _no_text(field: str, documents: int) -> str:
    ways_out = [
        "Set data.on_bad_record='fail' to see why records are skipped",
        f"set {field}.path to files with text",
    ]
    if field != field_of(ONE_SOURCE):
        ways_out.append(
            f"leave it out: set {field}.weight=0, or drop it from data.mixture if that names weights"
        )
    ways_out.append("if all of it is held out, lower data.eval_fraction, which needs a new --workdir")
    return (
        f"{field} has no text to train on: a whole epoch of {documents:,} documents is empty, held out or "
        f"skipped. {'; or '.join(ways_out)}."
    )


class _Round(NamedTuple):
    drawn: ChunkLengths
    shares: Int64[np.ndarray, " sources"]
    ended: Bool[np.ndarray, " sources"]


class Draws:
    """Documents of a mixture in the order in which they are due, drawn on demand.

    Fair queueing: a document is due at the time at which half of it would be read if every source were read
    at exactly its share. (With the start of the document as the time, all sources would run ahead of their
    shares by half a document; with its end, behind.) The `deficit` of a source is what it lacks of its share
    so far; it is carried on, so that the drift stays at about one document per source for any schedule and
    any number of steps. All numbers are integers, so that no machine rounds differently.

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
            # Sources that have ended may have had a positive deficit; the others then start later by that
            # amount.
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
            self._cursors, self._deficit, _ = self._after(
                self._rounds[-1], len(order), self._cursors, self._deficit
            )
            if len(order):
                self._tokens += int(drawn.length.sum())
                self._documents += len(order)
                return drawn

    def more_ahead(self, tokens: int) -> ChunkLengths | None:
        """Draws like `more`, but an eighth more where no source ends, as a second draw would take as long as
        the first.

        It suits a packing that takes documents in their order, whatever comes after those that fit.
        """
        if (self._buffers.ends < ENDLESS).any():
            return self.more(tokens)
        return self.more(tokens + tokens // 8 + 2 * self._tokens // self._documents)

    def commit(self, count: int) -> tuple[Int64[np.ndarray, " sources"], Int64[np.ndarray, " sources"], int]:
        """Returns cursors, deficit and the tokens (samples) drawn, after the first `count` of the drawn
        documents.
        """
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
