"""Which tokens of which document lie where in step k: a pure function of a few kilobytes of state and of lengths."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from jtrain.data import balance
from jtrain.data.bins import LANES, Packing
from jtrain.data.graph import Graph, Spans, Unit
from jtrain.data.mixing import Buffers, Lengths, NotYet
from jtrain.data.rows import Pieces
from jtrain.data.schedule import ONE, Schedule
from jtrain.data.source import field_of

__all__ = ["EndOfData", "LoadingPlan", "NotYet", "Planner", "PlannerSpec", "PlannerState"]

_PPM = 1_000_000


class EndOfData(Exception):
    """There is no token left to plan with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerSpec:
    """What decides the stream, next to the seed, which decides the order of each source's documents.

    names: of the sources.
    documents_per_epoch: of each source, with those held out or skipped, whose length is 0.
    unit: what the shares of the schedule are shares of. rows: a row holds one source only.
    epochs: how often each source is read; None: for ever.
    balance: rows are put in an order in which contiguous parts cost the same, for any number of ranks.
    cost_linear, cost_quadratic: cost of a piece of n tokens is linear * n + quadratic * n**2.
    min_balance_gain: the order found is taken if max/mean cost falls by this share.
    """

    names: tuple[str, ...]
    documents_per_epoch: tuple[int, ...]
    seq_len: int
    global_batch: int
    schedule: Schedule
    packing: Packing = "concat"
    unit: Unit = "tokens"
    epochs: int | None = None
    balance: bool = True
    cost_linear: float = 1.0
    cost_quadratic: float = 0.0
    min_balance_gain: float = 0.0

    def __post_init__(self) -> None:
        if self.seq_len * self.global_batch >= 1 << 31:
            raise ValueError(
                f"data.seq_len={self.seq_len} * data.global_batch={self.global_batch} = "
                f"{self.seq_len * self.global_batch} tokens per step; at most {(1 << 31) - 1} can be planned."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerState:
    """Where the stream stands before `step`.

    cursors: the next document of each source, counted over all epochs.
    owed: what each source lacks of its share so far, in units of 1 / ONE token (sample, row); below 0 it is ahead.
    tokens: placed so far, by source.
    units: tokens (samples, rows) drawn so far, over all sources.
    carry: documents drawn and not yet placed to their end.
    weights_ppm: shares at the last step planned, to say on resume what has changed.
    history: (from step, identity, description) of each schedule that was followed.
    """

    step: int
    cursors: Int64[np.ndarray, " sources"]
    owed: Int64[np.ndarray, " sources"]
    tokens: Int64[np.ndarray, " sources"]
    units: int
    unit: Unit
    carry: Spans
    weights_ppm: Int64[np.ndarray, " sources"]
    history: tuple[tuple[int, str, str], ...]

    def oldest(self) -> Int64[np.ndarray, " sources"]:
        """The first document of each source that any later step can still read."""
        oldest = self.cursors.copy()
        np.minimum.at(oldest, self.carry[:, 0], self.carry[:, 1])
        return oldest

    def to_json(self, names: Sequence[str]) -> dict[str, Any]:
        """Plain integers and strings, by the names of the sources: a few kilobytes for hundreds of them."""
        columns = (self.cursors, self.owed, self.tokens, self.weights_ppm)
        rows = np.stack(columns, axis=1).tolist()
        return {
            "step": self.step,
            "unit": self.unit,
            "units": self.units,
            "sources": dict(zip(names, rows, strict=True)),
            "carry": self.carry.T.tolist(),
            "history": [list(entry) for entry in self.history],
        }

    @staticmethod
    def from_json(saved: Mapping[str, Any], names: Sequence[str]) -> tuple["PlannerState", list[str]]:
        """A state for `names`, which may be others, or in another order, than those saved; and what has changed.

        A source that is new begins at its first document and is owed nothing; of one that is gone the documents that
        were open are dropped.
        """
        old, lines, step = saved["sources"], [], saved["step"]
        for name in names:
            if name not in old:
                lines.append(f"step {step}: source {name} is new; it begins at its first document")
        place = {name: i for i, name in enumerate(names)}
        carry = np.asarray(saved["carry"], np.int64).reshape(4, -1).T
        renumbered = np.asarray([place.get(name, -1) for name in old], np.int64)
        owner = renumbered[carry[:, 0]]
        for at, name in enumerate(old):
            if name not in place:
                gone = carry[carry[:, 0] == at]
                lines.append(
                    f"step {step}: source {name} is gone, after {old[name][2]:,} tokens; "
                    f"{(gone[:, 3] - gone[:, 2]).sum():,} tokens of {len(gone)} open documents are dropped"
                )
        carry = np.concatenate([owner[:, None], carry[:, 1:]], axis=1)[owner >= 0]
        rows = np.asarray([old.get(name, [0, 0, 0, 0]) for name in names], np.int64).reshape(-1, 4)
        cursors, owed, tokens, weights_ppm = (column.copy() for column in rows.T)
        history = tuple((int(at), str(identity), str(text)) for at, identity, text in saved["history"])
        state = PlannerState(
            step=step,
            cursors=cursors,
            owed=owed,
            tokens=tokens,
            units=saved["units"],
            unit=saved["unit"],
            carry=carry,
            weights_ppm=weights_ppm,
            history=history,
        )
        return state, lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadingPlan:
    """What step `step` holds. The same on every host, whatever the mesh.

    pieces: row by row.
    cursors: after this step.
    fill: real tokens over all there is room for.
    row_cost: of each row, by the spec's cost.
    drift: how far the share of the worst source is from what the schedule asked for so far, 0 to 1.
    last: no more documents: what is missing is padding, and all ranks have the same shapes. A step whose rows the very
      last document fills to the end need not know that it is the last: the next one is `EndOfData` then.
    """

    step: int
    pieces: Pieces
    cursors: Int64[np.ndarray, " sources"]
    tokens_by_source: Int64[np.ndarray, " sources"]
    fill: float
    row_cost: Float64[np.ndarray, " rows"]
    drift: float
    last: bool

    def spread(self, ranks: int) -> float:
        """Largest over mean cost over so many data ranks."""
        return balance.spread(self.row_cost, ranks)


class Planner:
    """Plans steps from lengths. Every host holds one, and all of them plan the same.

    Args:
      lengths: see `Lengths`; it may raise `NotYet`.
    """

    def __init__(self, spec: PlannerSpec, lengths: Lengths) -> None:
        self.spec = spec
        self._buffers = Buffers(spec.names, spec.documents_per_epoch, spec.epochs, lengths)
        # More lanes than documents would read one several times side by side. More than rows, and what waits in them
        # would follow a change of the mixture too late; but not where rows themselves are what is shared out.
        most = LANES if spec.unit == "rows" else min(LANES, spec.global_batch)
        self._lanes = min(most, sum(spec.documents_per_epoch))

    def start(self) -> PlannerState:
        """The state before step 0."""
        zeros = np.zeros(len(self.spec.names), np.int64)
        return PlannerState(
            step=0,
            cursors=zeros,
            owed=zeros,
            tokens=zeros,
            units=0,
            unit=self.spec.unit,
            carry=np.empty((0, 4), np.int64),
            weights_ppm=zeros,
            history=((0, self.spec.schedule.identity, self.spec.schedule.describe(0)),),
        )

    def resume(self, saved: Mapping[str, Any]) -> tuple[PlannerState, list[str]]:
        """The state that `to_json` gave, under this spec; and in words what is different from this step on."""
        spec = self.spec
        state, lines = PlannerState.from_json(saved, spec.names)
        step, schedule = state.step, spec.schedule
        if state.unit != spec.unit:
            lines.append(f"step {step}: data.mixture_unit {state.unit} -> {spec.unit}; drift is counted from here")
            zeros = np.zeros(len(spec.names), np.int64)
            state = dataclasses.replace(state, unit=spec.unit, units=0, owed=zeros)
        if not state.history or state.history[-1][1] != schedule.identity:
            before = state.history[-1][2] if state.history else "none"
            lines.append(f"step {step}: the mixture was '{before}', from here on it is '{schedule.describe(step)}'")
            new = np.rint(schedule.weights(step, spec.names) * _PPM).astype(np.int64)
            change = np.abs(new - state.weights_ppm)
            for i in np.argsort(-change, kind="stable")[:8].tolist():
                if change[i]:
                    lines.append(
                        f"step {step}: {spec.names[i]} {state.weights_ppm[i] / _PPM:.4f} -> {new[i] / _PPM:.4f}"
                    )
            entry = (step, schedule.identity, schedule.describe(step))
            state = dataclasses.replace(state, history=(*state.history, entry))
        return state, lines

    def plan(self, state: PlannerState) -> tuple[LoadingPlan, PlannerState]:
        """The step that follows `state`, and the state after it.

        Raises:
          NotYet: lengths are missing. Nothing has changed: call again when they are there.
          EndOfData: no token is left.
          ValueError: a source holds nothing at all, or the schedule cannot be followed: as where all that have weight
            have ended, and others have it only later.
        """
        spec = self.spec
        self._buffers.forget(state.cursors)
        mean_tokens = int(state.tokens.sum()) // state.units if spec.unit == "samples" and state.units else None
        graph = (
            Graph(self._buffers)
            .mix(
                spec.schedule,
                step=state.step,
                unit=spec.unit,
                cursors=state.cursors,
                owed=state.owed,
                mean_tokens=mean_tokens,
            )
            .pack(spec.packing, rows=spec.global_batch, seq_len=spec.seq_len, carry=state.carry, lanes=self._lanes)
            .distribute(None)
            .cost(lambda n: spec.cost_linear * n + spec.cost_quadratic * (n * n))
            .balance("tree" if spec.balance else "none", min_gain=spec.min_balance_gain)
        )
        packed = graph.pieces
        if not len(packed):
            if (to_come := self._to_come(state.step, graph.cursors)) is not None:
                raise ValueError(self._gap(state, graph.weights, *to_come))
            raise EndOfData(f"data ends before step {state.step}")
        rows = graph.plan().views["text"]
        slot = np.empty(spec.global_batch, np.int64)
        slot[rows.order] = np.arange(spec.global_batch)
        row = slot[packed.row]
        order = np.argsort(row, kind="stable")
        pieces = Pieces(*(array[order] for array in (row, packed.source, packed.document, packed.start, packed.end)))

        ended = not len(graph.carry) and (graph.at_end or bool((graph.cursors >= self._buffers.ends).all()))
        num = len(spec.names)
        tokens = np.zeros(num, np.int64)
        np.add.at(tokens, pieces.source, pieces.end - pieces.start)
        after = PlannerState(
            step=state.step + 1,
            cursors=graph.cursors,
            owed=graph.owed,
            tokens=state.tokens + tokens,
            units=state.units + graph.units,
            unit=spec.unit,
            carry=graph.carry,
            weights_ppm=np.rint(graph.weights * _PPM).astype(np.int64),
            history=state.history,
        )
        plan = LoadingPlan(
            step=state.step,
            pieces=pieces,
            cursors=graph.cursors,
            tokens_by_source=tokens,
            fill=int(tokens.sum()) / (spec.global_batch * spec.seq_len),
            row_cost=rows.costs[rows.order],
            drift=_drift(after),
            last=ended and self._to_come(state.step, graph.cursors) is None,
        )
        return plan, after

    def _to_come(self, step: int, cursors: Int64[np.ndarray, " sources"]) -> tuple[int, int] | None:
        """A source not at its end that will have weight only after `step`, and from which step on; None: none known."""
        unread = np.flatnonzero(cursors < self._buffers.ends).tolist()
        for at, weights in self.spec.schedule.later(step):
            for source in unread:
                if weights.get(self.spec.names[source], 0) > 0:
                    return source, at
        return None

    def _gap(self, state: PlannerState, weights: Float64[np.ndarray, " sources"], source: int, at: int) -> str:
        spec = self.spec
        ended = [f"{field_of(spec.names[i])} ({self._buffers.ends[i]:,})" for i in np.flatnonzero(weights).tolist()]
        more = f" and {len(ended) - 4} more" if len(ended) > 4 else ""
        unread = self._buffers.ends[source] - state.cursors[source]
        return (
            f"data.mixture: at step {state.step} every source that has weight is read to its end, with "
            f"data.epochs={spec.epochs} so many documents: {', '.join(ended[:4])}{more}; and "
            f"{field_of(spec.names[source])}, with {unread:,} documents not yet read, has no weight before step {at}. "
            f"Give it weight from step {state.step} on at the latest, or set data.epochs=None."
        )

    def lookahead(self, state: PlannerState, steps: int) -> list[tuple[int, int, int]]:
        """About which documents the next `steps` will ask for: (source, first, count), from the schedule and `state`.

        An estimate, from the mean length of what has been seen of each source; a source whose share will rise is in it
        at the step where it does.
        """
        spec = self.spec
        per_step = spec.global_batch * spec.seq_len
        shares = [spec.schedule.weights(state.step + k, spec.names) for k in range(steps)]
        total: np.ndarray = np.sum(shares, axis=0)
        mean = self._buffers.mean_tokens
        if spec.unit == "tokens":
            documents = (total * per_step + state.owed / ONE) / mean
        elif spec.unit == "rows":
            documents = (total * spec.global_batch + state.owed / ONE) * spec.seq_len / mean
        else:
            documents = total * per_step / max(1.0, float(np.mean(shares, axis=0) @ mean)) + state.owed / ONE
        count = np.where(total > 0, np.ceil(np.maximum(documents, 0) * 1.1) + 2, 0).astype(np.int64)
        count = np.minimum(count, self._buffers.ends - state.cursors)
        at = np.flatnonzero(count > 0)
        return list(zip(at.tolist(), state.cursors[at].tolist(), count[at].tolist(), strict=True))


def _drift(state: PlannerState) -> float:
    """Largest difference between the share of a source and what the schedule asked for, of all that was placed."""
    owed = state.owed / ONE
    if state.unit != "tokens":
        return float(np.abs(owed).max() / max(1, state.units))
    waiting = np.bincount(state.carry[:, 0], weights=state.carry[:, 3] - state.carry[:, 2], minlength=len(owed))
    due = state.tokens + waiting + owed
    return float(np.abs(state.tokens / state.tokens.sum() - due / due.sum()).max())
