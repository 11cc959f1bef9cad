"""Metadata graph of one step. Its stages are named as in OVERLORD: mix, pack, cost, balance, plan.

    graph = Graph(buffers).mix(schedule, step=k, ...).pack("concat", rows=256, seq_len=8192, carry=carry)
    plan = graph.cost(lambda n: 24576 * n + n * n).balance().plan()

Only lengths and numbers of documents come here, never their tokens. After `pack` the documents of the step no
longer change. The plan suits any mesh: `ClientPlaceTree` has the two stages that depend on it, distribute and
broadcast_at.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64, Shaped

from jtrain.data.mixture.draw import Buffers, ChunkLengths, Draws
from jtrain.data.mixture.schedule import ONE, SHARE_BITS, Schedule, integer_shares
from jtrain.data.planner.balance import balanced_order
from jtrain.data.planner.packing import Packed, Packing, concat, fit
from jtrain.data.planner.pieces import Pieces

Unit = Literal["tokens", "samples", "rows"]

Spans = Int64[np.ndarray, "documents 4"]
"""Documents, or their remainders: source, number, first token, end token (exclusive)."""

CostFn = Callable[[Int64[np.ndarray, " pieces"]], Shaped[np.ndarray, " pieces"]]
"""Cost of each piece as a function of its tokens; only proportions matter."""


class GraphPlan(NamedTuple):
    """Result of `Graph.plan`.

    pieces: the spans of documents in each row of the batch.
    row_cost: cost of each row of the batch.
    """

    pieces: Pieces
    row_cost: Float64[np.ndarray, " rows"]


class Graph:
    """Metadata graph of one step, over the document lengths in `buffers`.

    Attributes, after `pack`:
      pieces: the spans of documents in each packed row.
      carry: remainders that wait for the next step.
      cursors, deficit, units: state of the mixture after this step; `units` counts tokens, samples or rows.
      at_end: True if the documents ended in this step.
    """

    pieces: Pieces
    carry: Spans
    cursors: Int64[np.ndarray, " sources"]
    deficit: Int64[np.ndarray, " sources"]
    units: int
    at_end: bool

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers

    def mix(
        self,
        schedule: Schedule,
        *,
        step: int,
        unit: Unit,
        cursors: Int64[np.ndarray, " sources"],
        deficit: Int64[np.ndarray, " sources"],
        mean_tokens: int | None,
    ) -> "Graph":
        """Sets the shares at `step` and the state of each source, which decide which documents are due.

        mean_tokens: mean tokens per document, the first estimate if shares do not count tokens. It must
          follow from the state alone: when a source ends, the order of documents depends on how much is asked
          for.
        """
        self.weights = schedule.weights(step, self._buffers.names)
        self.cursors, self.deficit = cursors, deficit
        self._unit: Unit = unit
        self._mean_tokens = mean_tokens
        return self

    def pack(self, packing: Packing, *, rows: int, seq_len: int, carry: Spans) -> "Graph":
        """Chooses the documents of the step and packs them into rows. Carried ones go first."""
        self._order = np.arange(rows)
        if self._unit == "rows":
            return self._pack_by_source(packing, rows, seq_len, carry)
        draws = Draws(
            self._buffers,
            weights=self.weights,
            cursors=self.cursors,
            deficit=self.deficit,
            by_tokens=self._unit == "tokens",
            typical_tokens=self._mean_tokens or seq_len,
        )
        # concat uses documents in their order, whatever follows them: one look-up may draw more than needed.
        group = _Group(carry, draws.more_ahead if packing == "concat" else draws.more)
        packed = group.pack(packing, rows, seq_len)
        # Carried documents were drawn, and counted, by an earlier step.
        self.cursors, self.deficit, self.units = draws.commit(packed.num_used - len(carry))
        self.pieces, self.carry = group.pieces_and_carry(packed)
        self.at_end = group.at_end
        return self

    def cost(self, cost_fn: CostFn) -> "Graph":
        """Gives each row the cost of its pieces together."""
        pieces = self.pieces
        self._row_cost = np.zeros(len(self._order))
        np.add.at(self._row_cost, pieces.row, np.asarray(cost_fn(pieces.end - pieces.start), np.float64))
        return self

    def balance(self) -> "Graph":
        """Orders the rows so that equal contiguous parts cost about the same, for any number of ranks."""
        self._order = balanced_order(self._row_cost)
        return self

    def plan(self) -> GraphPlan:
        """Returns the rows in their order, and checks that each packed row is there exactly once."""
        row_numbers = np.arange(len(self._order))
        # A plan is checked on every step: a lost row would corrupt training without any error.
        assert np.array_equal(np.sort(self._order), row_numbers), "a row was lost or doubled"
        slot = np.empty_like(row_numbers)
        # The inverse permutation: order[i] is the packed row in slot i, slot[r] where packed row r goes.
        slot[self._order] = row_numbers
        _, *spans = _arrays(self.pieces)
        return GraphPlan(_by_row(slot[self.pieces.row], *spans), self._row_cost[self._order])

    def _pack_by_source(self, packing: Packing, rows: int, seq_len: int, carry: Spans) -> "Graph":
        """Packs rows of one source each; a source that ends before its rows are full leaves them to others.

        Rows that no source with a share can fill take the open documents of sources whose share is now 0.
        """
        num_sources = len(self._buffers.names)
        carries = {source: carry[carry[:, 0] == source] for source in np.unique(carry[:, 0]).tolist()}
        waiting_tokens = np.bincount(
            carry[:, 0], weights=carry[:, 3] - carry[:, 2], minlength=num_sources
        ).astype(np.int64)
        no_spans = np.empty((0, 4), np.int64)
        pieces: list[Pieces] = []
        free = np.arange(rows)
        has_ended = np.zeros(num_sources, bool)
        # Usually one round; another one when a source ended before the rows of its turns were full.
        while len(free):
            is_active = (
                (self.weights > 0) & ((self.cursors < self._buffers.ends) | (waiting_tokens > 0)) & ~has_ended
            )
            is_drawing = bool(is_active.any())
            # All sources with a share have ended: their rows go to documents that are still open.
            if not is_drawing and not (is_active := waiting_tokens > 0).any():
                break
            shares = integer_shares(np.where(is_active, self.weights if is_drawing else 1.0, 0.0))
            turns = _turns(shares, self.deficit, len(free))
            # Rows per source, lowered below to the rows that it filled.
            counts = np.bincount(turns, minlength=num_sources)
            # Tokens to look up: the rows' capacity, less what the source has open.
            feed = _Feed(
                self._buffers, self.cursors, np.maximum(counts * seq_len - waiting_tokens, 0) * is_drawing
            )
            unfilled_rows = []
            for source in np.flatnonzero(counts).tolist():
                own_rows = free[turns == source]
                group = _Group(
                    carries.get(source, no_spans), feed.of(source) if is_drawing else lambda _: None
                )
                packed = group.pack(packing, len(own_rows), seq_len)
                # The remainder stays with its source: no other source may use the row.
                source_pieces, carries[source] = group.pieces_and_carry(packed)
                self.cursors = feed.commit(self.cursors, source, packed.num_used - group.carried)
                waiting_tokens[source] = (carries[source][:, 3] - carries[source][:, 2]).sum()
                used_rows = np.unique(source_pieces.row)
                # packed numbers the rows 0, 1, ...; the group's rows lie scattered in the batch.
                row = own_rows[np.searchsorted(used_rows, source_pieces.row)]
                pieces.append(
                    Pieces(
                        row,
                        source_pieces.source,
                        source_pieces.document,
                        source_pieces.start,
                        source_pieces.end,
                    )
                )
                unfilled_rows.append(own_rows[len(used_rows) :])
                counts[source] = len(used_rows)
                # Documents ran out, or else the rows would be full.
                has_ended[source] = is_drawing and len(used_rows) < len(own_rows)
            # By rows that were filled, so that the rows handed on in the next round count for who fills them.
            self.deficit = self.deficit + shares * int(counts.sum()) - (counts << SHARE_BITS)
            free = np.sort(np.concatenate(unfilled_rows))
        # Empty documents after the last token are passed too, or the source would never count as ended.
        self.cursors = np.where(has_ended, self._buffers.ends, self.cursors)
        self.units, self.at_end = rows - len(free), len(free) > 0
        joined = [np.concatenate(arrays) for arrays in zip(*map(_arrays, pieces), strict=True)] or [
            no_spans[:, 0]
        ] * 5
        self.pieces = _by_row(*joined)
        self.carry = np.concatenate([no_spans, *(carries[source] for source in sorted(carries))])
        return self


class _Group:
    """Group of documents that may share rows: the carried ones, then the ones that `more` returns."""

    def __init__(self, carry: Spans, more: Callable[[int], ChunkLengths | None]) -> None:
        self._more = more
        self.carried = len(carry)
        self.at_end = False
        self._arrays = [carry]

    def pack(self, packing: Packing, rows: int, seq_len: int) -> Packed:
        """Packs the group with the chosen method."""
        carried = self._arrays[0][:, 2:]
        if packing == "concat":
            return concat(carried, self._grow, rows=rows, seq_len=seq_len)
        # A sixteenth of a step in hand: small documents for the last gaps of rows.
        slack_tokens, best = max(1, rows // 16) * seq_len, packing == "best_fit"
        return fit(carried, self._grow, rows=rows, seq_len=seq_len, slack_tokens=slack_tokens, best=best)

    def pieces_and_carry(self, packed: Packed) -> tuple[Pieces, Spans]:
        """Returns pieces and carry by source and number; checks that each token is there exactly once."""
        # Documents that were looked up and not used stay undrawn.
        spans = np.concatenate(self._arrays)[: packed.num_used]
        row, span, start, end = packed.pieces
        remainder, remainder_start = packed.remainders
        pieces_and_carry = (
            np.concatenate(pair)
            for pair in ((span, remainder), (start, remainder_start), (end, spans[remainder, 3]))
        )
        # Pieces and remainders together, or a token could be lost between two steps.
        _check_conserved(spans, *pieces_and_carry)
        carry = spans[remainder]
        carry[:, 2] = remainder_start
        return Pieces(row, spans[span, 0], spans[span, 1], start, end), carry

    def _grow(self, tokens: int) -> Int64[np.ndarray, "documents 2"] | None:
        lengths = self._more(tokens)
        if lengths is None:
            self.at_end = True
            return None
        new_spans = np.stack(
            [lengths.source, lengths.document, np.zeros_like(lengths.length), lengths.length], axis=1
        )
        self._arrays.append(new_spans)
        return new_spans[:, 2:]


class _Feed:
    """Documents of each source separately; the first ones of all sources are looked up in one call."""

    def __init__(self, buffers: Buffers, cursors: np.ndarray, limits: np.ndarray) -> None:
        self._buffers, self._cursors = buffers, cursors
        lengths, _, _ = buffers.ahead(cursors, limits, by_tokens=True)
        first_of_source = np.searchsorted(lengths.source, np.arange(len(cursors) + 1))
        self._batches_of = {
            s: [ChunkLengths(*(array[first_of_source[s] : first_of_source[s + 1]] for array in lengths))]
            for s in np.flatnonzero(limits).tolist()
        }
        self._has_given: set[int] = set()

    def of(self, source: int) -> Callable[[int], ChunkLengths | None]:
        """Returns a function like `Draws.more` that gives the documents of one source."""
        batches = self._batches_of.setdefault(source, [])

        def next_batch(tokens: int) -> ChunkLengths | None:
            # The first batch came from the common look-up of all sources.
            unused_batch = batches[:1] if source not in self._has_given else []
            self._has_given.add(source)
            if unused_batch and len(unused_batch[0].source):
                return unused_batch[0]
            cursors, limits = self._cursors.copy(), np.zeros_like(self._cursors)
            # After the documents given so far; an empty batch says nothing of where to go on.
            cursors[source] = max(
                [cursors[source], *(part.document[-1] + 1 for part in batches if len(part.source))]
            )
            limits[source] = tokens
            lengths, _, _ = self._buffers.ahead(cursors, limits, by_tokens=True)
            if not len(lengths.source):
                return None
            batches.append(lengths)
            return lengths

        return next_batch

    def commit(self, cursors: np.ndarray, source: int, count: int) -> np.ndarray:
        """Returns the cursors after the first `count` of the documents that `of(source)` gave."""
        if not count:
            return cursors
        numbers = np.concatenate([part.document for part in self._batches_of[source]])
        cursors = cursors.copy()
        cursors[source] = numbers[count - 1] + 1
        return cursors


def _turns(
    shares: Int64[np.ndarray, " s"], deficit: Int64[np.ndarray, " s"], rows: int
) -> Int64[np.ndarray, " rows"]:
    """Returns the source of each row: fair queueing as in `Draws`, where every row counts 1.

    Example, 4 rows of two sources with shares 3/4 and 1/4 and no deficit: row n of a source is due at
    (n + 1/2) / share: 0.67, 2, 3.33, ... and 2, 6, ...; the earliest four are of sources 0, 0, 1, 0.
    """
    # Far enough that the earliest `rows` turns are among those listed, even if all sources are ahead.
    horizon = 2 * rows + max(0, -(int(deficit[shares > 0].sum()) // ONE)) + len(shares)
    counts = np.where(shares > 0, np.maximum(-((-horizon * shares - deficit) // ONE), 0), 0)
    source = np.repeat(np.arange(len(shares)), counts)
    number = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    # In units of 1/256 row, integers: rounding must not order turns differently on another machine.
    due_time = ((number << SHARE_BITS) + ONE // 2 - deficit[source]) * 256 // shares[source]
    return source[np.argsort(due_time, kind="stable")][:rows]


def _check_conserved(spans: np.ndarray, span: np.ndarray, start: np.ndarray, end: np.ndarray) -> None:
    """Asserts that pieces and carry together are exactly the spans that they were cut from."""
    # By document, then by start: neighbours must then join without gap or overlap.
    order = np.lexsort((start, span))
    span, start, end = span[order], start[order], end[order]
    is_first = np.append(True, span[1:] > span[:-1])[: len(span)]
    is_conserved = (
        np.array_equal(span[is_first], np.arange(len(spans)))
        and np.array_equal(start[is_first], spans[:, 2])
        and np.array_equal(end[np.append(is_first[1:], True)[: len(span)]], spans[:, 3])
        and bool((start[1:][~is_first[1:]] == end[:-1][~is_first[1:]]).all())
        and bool((start < end).all())
    )
    assert is_conserved, "the plan does not hold exactly the tokens of the step's documents"


def _by_row(row: Int64[np.ndarray, " pieces"], *spans: Int64[np.ndarray, " pieces"]) -> Pieces:
    """Returns pieces sorted by row; those of a row stay in their order."""
    order = np.argsort(row, kind="stable")
    return Pieces(*(array[order] for array in (row, *spans)))


def _arrays(pieces: Pieces) -> tuple[np.ndarray, ...]:
    return pieces.row, pieces.source, pieces.document, pieces.start, pieces.end
