"""Draws the documents of a mixture by fair queueing over the sources, in integers, from lengths alone.

Sources `web`, `code` and `math` have shares 0.5, 0.3 and 0.2 and documents of 100, 100 and 50 tokens. Half of
the first document is read at time 50 / 0.5 = 100 for `web`, at 167 for `code`, at 25 / 0.2 = 125 for `math`.
A step of 320 tokens takes the documents whose time is below 320:

    time      100    125    167    300
    source    web    math   code   web      350 tokens

Their shares of 350 tokens are 175, 105 and 70: `web` has 25 too many, `code` lacks 5 and `math` 20. These
deficits, -25, 5 and 20, move the times of the next step, whose first is `math`, at (25 - 20) / 0.2 = 25:

    time      25     150    150    275
    source    math   web    code   math     300 tokens
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
    """Raised by `lengths` if a document's length is not known yet, and by `Planner.plan` for all it lacks.

    missing: (source, first document, count) of the missing lengths.
    """

    def __init__(self, missing: Sequence[tuple[int, int, int]] = ()) -> None:
        self.missing = list(missing)
        super().__init__(f"lengths not known yet: {self.missing[:4]}")


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
        self._first_key = np.arange(num) * _ABOVE
        self._set_known(np.empty(0, np.int64), np.empty(0, np.int64))
        self._first_document = np.zeros(num, np.int64)  # lengths are known from here ...
        self._scanned_end = np.zeros(num, np.int64)  # ... to here
        # First document of the run of empty ones that ends at `_scanned_end`: an epoch of them is refused.
        self._empty_from = np.zeros(num, np.int64)
        self._is_dry = np.zeros(num, np.bool_)  # gave fewer lengths than it was asked for
        self._seen_documents = np.zeros(num, np.int64)
        self._seen_tokens = np.zeros(num, np.int64)

    @property
    def mean_tokens(self) -> Float64[np.ndarray, " sources"]:
        """Mean tokens per document seen so far, empty ones included; a guess before any is seen."""
        return (self._seen_tokens + _FIRST_GUESS_TOKENS) / (self._seen_documents + 1)

    def forget(self, cursors: Int64[np.ndarray, " sources"]) -> None:
        """Drops the lengths before `cursors`; a source whose cursor jumps has its lengths asked for again."""
        jumped = (cursors < self._first_document) | (cursors > self._scanned_end)
        if jumped.any():
            self._scanned_end = np.where(jumped, cursors, self._scanned_end)
            self._empty_from = np.where(jumped, cursors, self._empty_from)
            keep = ~jumped[self._keys // _ABOVE]
            self._set_known(self._keys[keep], self._known_lengths[keep])
        # `_ask` drops the lengths: to do so at every step would copy all the others each time.
        self._first_document = cursors.copy()

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
            # Positions in the common arrays: from each source's cursor to the end of its known documents.
            begin, end = np.searchsorted(self._keys, self._first_key + cursors), self._source_starts[1:]
            # Units are tokens, or documents, whose count is the index itself.
            start = self._tokens_before[begin] if by_tokens else begin
            # Prefix sums over all sources together: differences within one source are its own tokens.
            available = (self._tokens_before[end] if by_tokens else end) - start
            is_short = available < limits
            missing = is_short & (self._scanned_end < self.ends)
            if missing.any():
                # In samples, the missing ones are counted as mean ones: `_ask` takes tokens.
                tokens = (limits - available) * (1 if by_tokens else self.mean_tokens)
                self._ask(missing, tokens, low=(end - begin < _ASK_AT_LEAST) & (limits > 0))
                continue
            # The first document that begins at or behind the limit.
            stop_index = (
                np.searchsorted(self._tokens_before[:-1], start + limits) if by_tokens else start + limits
            )
            count = np.minimum(np.maximum(stop_index, begin), end) - begin
            source = np.repeat(np.arange(len(cursors)), count)
            # Concatenates the ranges begin[s] .. begin[s] + count[s] without a loop over the sources.
            index = np.arange(len(source)) + (begin - np.cumsum(count) + count)[source]
            units_before = (self._tokens_before[index] if by_tokens else index) - start[source]
            return (
                ChunkLengths(source, self._keys[index] - self._first_key[source], self._known_lengths[index]),
                units_before,
                is_short,
            )

    def _ask(
        self, missing: Bool[np.ndarray, " sources"], tokens: np.ndarray, low: Bool[np.ndarray, " sources"]
    ) -> None:
        """Asks for about `tokens` more tokens of each missing source; takes what is known of low ones.

        Taking the lengths of many sources together, some hundred each, is what keeps copying them cheap.
        """
        asked_sources = np.flatnonzero(missing | (low & ~self._is_dry & (self._scanned_end < self.ends)))
        # A quarter more than the mean says, so that one call is mostly enough.
        count = np.maximum(
            tokens[asked_sources] * 1.25 / self.mean_tokens[asked_sources], _ASK_AT_LEAST
        ).astype(np.int64)
        unscanned = (self.ends - self._scanned_end)[asked_sources]
        keys, lengths, missing_lengths = [self._keys], [self._known_lengths], []
        for source, num_wanted, num_left in zip(
            asked_sources.tolist(), count.tolist(), unscanned.tolist(), strict=True
        ):
            first, num_taken = int(self._scanned_end[source]), min(max(num_wanted, _TAKE_AT_LEAST), num_left)
            try:
                new_lengths = self._lengths(source, first, num_taken)
            except NotYet:
                self._is_dry[source] = True
                if missing[source]:
                    missing_lengths.append((source, first, min(num_wanted, num_left)))
                continue
            assert 0 < len(new_lengths) <= num_taken, (source, first, num_taken, len(new_lengths))
            nonempty = np.flatnonzero(new_lengths)
            length = new_lengths[nonempty].astype(np.int64)
            keys.append(self._first_key[source] + first + nonempty)
            lengths.append(length)
            # Not asked for again just because it is low: nobody has more of its lengths now.
            self._is_dry[source] = len(new_lengths) < num_taken
            self._scanned_end[source] += len(new_lengths)
            self._seen_documents[source] += len(new_lengths)
            self._seen_tokens[source] += length.sum()
            if len(nonempty):
                self._empty_from[source] = first + nonempty[-1] + 1
            elif self._scanned_end[source] - self._empty_from[source] >= self.chunks_per_epoch[source]:
                raise UserError(
                    _no_text_message(field_of(self.names[source]), int(self.chunks_per_epoch[source]))
                )
        if len(keys) > 1:
            merged = np.concatenate(keys)
            order = np.argsort(merged, kind="stable")
            # Drops the documents before the cursors, while everything is copied anyway.
            order = order[(merged >= (self._first_key + self._first_document)[merged // _ABOVE])[order]]
            self._set_known(merged[order], np.concatenate(lengths)[order])
        # Raised last, with what is known taken: the next call then asks for less.
        if missing_lengths:
            raise NotYet(missing_lengths)

    def _set_known(self, keys: Int64[np.ndarray, " known"], lengths: Int64[np.ndarray, " known"]) -> None:
        """Sets the documents whose lengths are known, ascending, and what follows from them."""
        self._keys, self._known_lengths = keys, lengths
        self._tokens_before = np.concatenate([[0], np.cumsum(lengths)])
        self._source_starts = np.searchsorted(keys, np.append(self._first_key, len(self._first_key) * _ABOVE))


def _no_text_message(field: str, documents: int) -> str:
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
        # Samples that have so many tokens on average; integers, as they decide how much is looked up.
        units = tokens if self._by_tokens else max(1, tokens * self._documents // self._tokens)
        while True:
            # Once per round, since a source may have ended in the round before.
            active = (self._weights > 0) & (self._cursors < self._buffers.ends)
            if not active.any():
                return None
            shares = integer_shares(np.where(active, self._weights, 0.0))
            # Sources that have ended may have had a positive deficit; the others then start later by that
            # amount.
            horizon = units + max(0, -(int(self._deficit[active].sum()) // ONE))
            # Rounded up: the units that each source may read until time `horizon`.
            limits = np.where(active, np.maximum(-((-horizon * shares - self._deficit) // ONE), 0), 0)
            candidates, units_before, ended = self._buffers.ahead(
                self._cursors, limits, by_tokens=self._by_tokens
            )
            # Units in 1 / ONE, as the deficit has them: half a document is length * ONE / 2.
            middle = (units_before << SHARE_BITS) + (candidates.length if self._by_tokens else 1) * (ONE // 2)
            due_time = (middle - self._deficit[candidates.source]) // np.maximum(shares, 1)[candidates.source]
            order = np.argsort(due_time, kind="stable")  # on a tie, the source that is named first wins
            num_due = int(np.searchsorted(due_time[order], horizon))
            # A source with a document behind the horizon has not ended yet.
            ended[candidates.source[order[num_due:]]] = False
            order = order[:num_due]
            drawn = ChunkLengths(*(array[order] for array in candidates))
            if not len(order) and not ended.any():
                units *= 2  # the next document of every source is a long one
                continue
            self._rounds.append(_Round(drawn, shares, ended & active))
            self._cursors, self._deficit, _ = self._advance(
                self._rounds[-1], len(order), self._cursors, self._deficit
            )
            if len(order):
                self._tokens += int(drawn.length.sum())
                self._documents += len(order)
                return drawn

    def more_ahead(self, tokens: int) -> ChunkLengths | None:
        """Draws like `more`, and an eighth more if no source ends, as a second draw takes as long as a first.

        It suits a packing that takes documents in their order, whatever comes after those that fit.
        """
        if (self._buffers.ends < ENDLESS).any():
            return self.more(tokens)
        # And two documents of mean length, for small steps, of which an eighth may be less than one.
        return self.more(tokens + tokens // 8 + 2 * self._tokens // self._documents)

    def commit(self, count: int) -> tuple[Int64[np.ndarray, " sources"], Int64[np.ndarray, " sources"], int]:
        """Returns cursors, deficit and tokens (samples) drawn, after the first `count` drawn documents."""
        (cursors, deficit), units = self._start, 0
        # Replayed from the start: the packing may take fewer documents than were drawn.
        for round_ in self._rounds:
            num_taken = min(count, len(round_.drawn.source))
            cursors, deficit, num_drawn = self._advance(round_, num_taken, cursors, deficit)
            count, units = count - num_taken, units + num_drawn
            if num_taken < len(round_.drawn.source):
                break
        assert count == 0, count
        return cursors, deficit, units

    def _advance(
        self, round_: _Round, count: int, cursors: np.ndarray, deficit: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int]:
        source, document, length = (array[:count] for array in round_.drawn)
        drawn = np.zeros(len(cursors), np.int64)
        np.add.at(drawn, source, length if self._by_tokens else 1)
        # The caller keeps the old arrays, as the state before this round.
        cursors = cursors.copy()
        # `maximum.at`, since empty documents are missing and a source occurs many times.
        np.maximum.at(cursors, source, document + 1)
        # Only a round that is used up reaches the ends of its sources.
        if count == len(round_.drawn.source):
            cursors[round_.ended] = self._buffers.ends[round_.ended]
        units = int(drawn.sum())
        return cursors, deficit + round_.shares * units - (drawn << SHARE_BITS), units
