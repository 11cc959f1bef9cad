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
        """Sets the shares at `step` and the state of each source, which together decide which documents are
        due.

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
        group = _Group(carry, draws.more_ahead if packing == "concat" else draws.more)
        packed = group.pack(packing, rows, seq_len)
        self.cursors, self.deficit, self.units = draws.commit(packed.used - len(carry))
        self.pieces, self.carry = group.result(packed)
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
        given = np.arange(len(self._order))
        assert np.array_equal(np.sort(self._order), given), "a row was lost or doubled"
        slot = np.empty_like(given)
        slot[self._order] = given
        _, *spans = _arrays(self.pieces)
        return GraphPlan(_by_row(slot[self.pieces.row], *spans), self._row_cost[self._order])

    def _pack_by_source(self, packing: Packing, rows: int, seq_len: int, carry: Spans) -> "Graph":
        """Packs rows of one source each; a source that ends before its rows are full leaves them to the
        others.

        Rows that no source with a share can fill take the open documents of sources whose share is now 0.
        """
        num = len(self._buffers.names)
        carries = {s: carry[carry[:, 0] == s] for s in np.unique(carry[:, 0]).tolist()}
        waiting = np.bincount(carry[:, 0], weights=carry[:, 3] - carry[:, 2], minlength=num).astype(np.int64)
        nothing = np.empty((0, 4), np.int64)
        pieces: list[Pieces] = []
        free = np.arange(rows)
        ended = np.zeros(num, bool)
        while len(free):
            active = (self.weights > 0) & ((self.cursors < self._buffers.ends) | (waiting > 0)) & ~ended
            drawing = bool(active.any())
            if not drawing and not (active := waiting > 0).any():
                break
            shares = integer_shares(np.where(active, self.weights if drawing else 1.0, 0.0))
            turns = _turns(shares, self.deficit, len(free))
            counts = np.bincount(turns, minlength=num)
            feed = _Feed(self._buffers, self.cursors, np.maximum(counts * seq_len - waiting, 0) * drawing)
            left_over = []
            for source in np.flatnonzero(counts).tolist():
                mine = free[turns == source]
                group = _Group(carries.get(source, nothing), feed.of(source) if drawing else lambda _: None)
                packed = group.pack(packing, len(mine), seq_len)
                found, carries[source] = group.result(packed)
                self.cursors = feed.commit(self.cursors, source, packed.used - group.carried)
                waiting[source] = (carries[source][:, 3] - carries[source][:, 2]).sum()
                used = np.unique(found.row)
                row = mine[np.searchsorted(used, found.row)]
                pieces.append(Pieces(row, found.source, found.document, found.start, found.end))
                left_over.append(mine[len(used) :])
                counts[source] = len(used)
                ended[source] = drawing and len(used) < len(mine)
            self.deficit = self.deficit + shares * int(counts.sum()) - (counts << SHARE_BITS)
            free = np.sort(np.concatenate(left_over))
        self.cursors = np.where(ended, self._buffers.ends, self.cursors)
        self.units, self.at_end = rows - len(free), len(free) > 0
        joined = [np.concatenate(arrays) for arrays in zip(*map(_arrays, pieces), strict=True)] or [
            nothing[:, 0]
        ] * 5
        self.pieces = _by_row(*joined)
        self.carry = np.concatenate([nothing, *(carries[source] for source in sorted(carries))])
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
        slack_tokens, best = max(1, rows // 16) * seq_len, packing == "best_fit"
        return fit(carried, self._grow, rows=rows, seq_len=seq_len, slack_tokens=slack_tokens, best=best)

    def result(self, packed: Packed) -> tuple[Pieces, Spans]:
        """Returns pieces and carry by source and number; checks that each token is there exactly once."""
        spans = np.concatenate(self._arrays)[: packed.used]
        row, at, start, end = packed.pieces
        left, left_start = packed.left
        both = (np.concatenate(two) for two in ((at, left), (start, left_start), (end, spans[left, 3])))
        _check_conserved(spans, *both)
        carry = spans[left]
        carry[:, 2] = left_start
        return Pieces(row, spans[at, 0], spans[at, 1], start, end), carry

    def _grow(self, tokens: int) -> Int64[np.ndarray, "documents 2"] | None:
        found = self._more(tokens)
        if found is None:
            self.at_end = True
            return None
        new = np.stack([found.source, found.document, np.zeros_like(found.length), found.length], axis=1)
        self._arrays.append(new)
        return new[:, 2:]


class _Feed:
    """Documents of each source separately; the first ones of all sources are looked up in one call."""

    def __init__(self, buffers: Buffers, cursors: np.ndarray, limits: np.ndarray) -> None:
        self._buffers, self._cursors = buffers, cursors
        found, _, _ = buffers.ahead(cursors, limits, by_tokens=True)
        border = np.searchsorted(found.source, np.arange(len(cursors) + 1))
        self._given = {
            s: [ChunkLengths(*(array[border[s] : border[s + 1]] for array in found))]
            for s in np.flatnonzero(limits).tolist()
        }
        self._asked: set[int] = set()

    def of(self, source: int) -> Callable[[int], ChunkLengths | None]:
        """Returns a function like `Draws.more` that gives the documents of one source."""
        given = self._given.setdefault(source, [])

        def more(tokens: int) -> ChunkLengths | None:
            first_lot = given[:1] if source not in self._asked else []
            self._asked.add(source)
            if first_lot and len(first_lot[0].source):
                return first_lot[0]
            cursors, limits = self._cursors.copy(), np.zeros_like(self._cursors)
            cursors[source] = max(
                [cursors[source], *(part.document[-1] + 1 for part in given if len(part.source))]
            )
            limits[source] = tokens
            found, _, _ = self._buffers.ahead(cursors, limits, by_tokens=True)
            if not len(found.source):
                return None
            given.append(found)
            return found

        return more

    def commit(self, cursors: np.ndarray, source: int, count: int) -> np.ndarray:
        """Returns the cursors after the first `count` of the documents that `of(source)` gave."""
        if not count:
            return cursors
        given = np.concatenate([part.document for part in self._given[source]])
        cursors = cursors.copy()
        cursors[source] = given[count - 1] + 1
        return cursors


def _turns(
    shares: Int64[np.ndarray, " s"], deficit: Int64[np.ndarray, " s"], rows: int
) -> Int64[np.ndarray, " rows"]:
    """Returns the source of each row: fair queueing as in `Draws`, where every row counts 1."""
    horizon = 2 * rows + max(0, -(int(deficit[shares > 0].sum()) // ONE)) + len(shares)
    counts = np.where(shares > 0, np.maximum(-((-horizon * shares - deficit) // ONE), 0), 0)
    source = np.repeat(np.arange(len(shares)), counts)
    number = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    due = ((number << SHARE_BITS) + ONE // 2 - deficit[source]) * 256 // shares[source]
    return source[np.argsort(due, kind="stable")][:rows]


def _check_conserved(spans: np.ndarray, at: np.ndarray, start: np.ndarray, end: np.ndarray) -> None:
    """Asserts that pieces and carry together are exactly the spans that they were cut from."""
    order = np.lexsort((start, at))
    at, start, end = at[order], start[order], end[order]
    new = np.append(True, at[1:] > at[:-1])[: len(at)]
    whole = (
        np.array_equal(at[new], np.arange(len(spans)))
        and np.array_equal(start[new], spans[:, 2])
        and np.array_equal(end[np.append(new[1:], True)[: len(at)]], spans[:, 3])
        and bool((start[1:][~new[1:]] == end[:-1][~new[1:]]).all())
        and bool((start < end).all())
    )
    assert whole, "the plan does not hold exactly the tokens of the step's documents"


def _by_row(row: Int64[np.ndarray, " pieces"], *spans: Int64[np.ndarray, " pieces"]) -> Pieces:
    """Returns pieces sorted by row; those of a row stay in their order."""
    order = np.argsort(row, kind="stable")
    return Pieces(*(array[order] for array in (row, *spans)))


def _arrays(pieces: Pieces) -> tuple[np.ndarray, ...]:
    return pieces.row, pieces.source, pieces.document, pieces.start, pieces.end
