"""Planner of steps: decides which tokens of which documents fill each row of step k.

It is a pure function of document lengths and of a few kilobytes of state.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from jtrain.data.mixture.draw import Buffers, Lengths, NotYet
from jtrain.data.mixture.schedule import ONE, Schedule
from jtrain.data.planner.graph import Graph, Spans, Unit
from jtrain.data.planner.packing import Packing
from jtrain.data.planner.pieces import Pieces
from jtrain.data.sources.source import field_of
from jtrain.errors import UserError

__all__ = ["EndOfData", "LoadingPlan", "NotYet", "Planner", "PlannerSpec", "PlannerState"]

_PPM = 1_000_000


class EndOfData(Exception):
    """Raised when no token is left to plan with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerSpec:
    """Settings that determine the stream, together with the seed, which orders the documents of each source.

    names: names of the sources.
    chunks_per_epoch: documents of each source, including held-out and skipped ones, whose length is 0.
    unit: the unit of the schedule's shares. With `rows`, a row holds one source only.
    epochs: how often each source is read; None: for ever.
    ends: documents of each source over all `epochs`, more than the product if files joined; None: product.
    balance: order rows so that contiguous parts cost about the same, for any number of ranks.
    cost_linear, cost_quadratic: cost of a piece of n tokens is linear * n + quadratic * n**2.
    """

    names: tuple[str, ...]
    chunks_per_epoch: tuple[int, ...]
    seq_len: int
    global_batch: int
    schedule: Schedule
    packing: Packing = "concat"
    unit: Unit = "tokens"
    epochs: int | None = None
    ends: tuple[int, ...] | None = None
    balance: bool = True
    cost_linear: float = 1.0
    cost_quadratic: float = 0.0

    def __post_init__(self) -> None:
        # `fill_rows` counts the tokens of all rows in int32.
        if self.seq_len * self.global_batch >= 1 << 31:
            raise UserError(
                f"data.seq_len={self.seq_len} * data.global_batch={self.global_batch} = "
                f"{self.seq_len * self.global_batch} tokens per step; at most {(1 << 31) - 1} can be "
                "planned. Lower one of the two."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerState:
    """Position in the stream before `step`.

    cursors: the next document of each source, counted over all epochs.
    deficit: how much each source lacks of its share so far, in units of 1 / ONE token (sample, row);
      negative: ahead.
    packing: packing of the rows before `step`.
    tokens: tokens placed so far, by source.
    units: tokens (samples, rows) drawn so far, over all sources.
    carry: documents drawn but not yet completely placed.
    weights_ppm: shares at the last planned step, so that a resume can report what has changed.
    history: (first step, identity, description) of each schedule that was followed.
    """

    step: int
    cursors: Int64[np.ndarray, " sources"]
    deficit: Int64[np.ndarray, " sources"]
    tokens: Int64[np.ndarray, " sources"]
    units: int
    unit: Unit
    packing: Packing
    carry: Spans
    weights_ppm: Int64[np.ndarray, " sources"]
    history: tuple[tuple[int, str, str], ...]

    def oldest(self) -> Int64[np.ndarray, " sources"]:
        """Returns the first document of each source that a later step can still read."""
        oldest = self.cursors.copy()
        # minimum.at, as a source may have several carried documents.
        np.minimum.at(oldest, self.carry[:, 0], self.carry[:, 1])
        return oldest

    def to_json(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns the state as plain integers and strings by source name: some KB for 300 sources."""
        columns = (self.cursors, self.deficit, self.tokens, self.weights_ppm)
        rows = np.stack(columns, axis=1).tolist()
        return {
            "step": self.step,
            "unit": self.unit,
            "packing": self.packing,
            "units": self.units,
            "sources": dict(zip(names, rows, strict=True)),
            "carry": self.carry.T.tolist(),
            "history": [list(entry) for entry in self.history],
        }

    @staticmethod
    def from_json(saved: Mapping[str, Any], names: Sequence[str]) -> tuple["PlannerState", list[str]]:
        """Returns the saved state for the sources `names`, and a sentence for each change.

        The names may differ from the saved ones or be in another order. A new source begins at its first
        document with a deficit of 0; if a source is gone, its open documents are dropped.
        """
        saved_sources, lines, step = saved["sources"], [], saved["step"]
        for name in names:
            if name not in saved_sources:
                lines.append(f"step {step}: source {name} is new; it begins at its first document")
        new_index = {name: i for i, name in enumerate(names)}
        carry = np.asarray(saved["carry"], np.int64).reshape(4, -1).T
        # Index among the saved sources -> index among today's, -1 for a source that is gone.
        renumbered = np.asarray([new_index.get(name, -1) for name in saved_sources], np.int64)
        carry_source = renumbered[carry[:, 0]]
        for index, name in enumerate(saved_sources):
            if name not in new_index:
                dropped_carry = carry[carry[:, 0] == index]
                dropped_tokens = (dropped_carry[:, 3] - dropped_carry[:, 2]).sum()
                lines.append(
                    f"step {step}: source {name} is gone, after {saved_sources[name][2]:,} tokens; "
                    f"{dropped_tokens:,} tokens of {len(dropped_carry)} open documents are dropped"
                )
        # Columns are source, document, start and end; documents of a source that is gone are dropped.
        carry = np.concatenate([carry_source[:, None], carry[:, 1:]], axis=1)[carry_source >= 0]
        rows = np.asarray([saved_sources.get(name, [0, 0, 0, 0]) for name in names], np.int64).reshape(-1, 4)
        # Copies: the columns of a transposed array are not contiguous.
        cursors, deficit, tokens, weights_ppm = (column.copy() for column in rows.T)
        history = tuple((int(index), str(identity), str(text)) for index, identity, text in saved["history"])
        state = PlannerState(
            step=step,
            cursors=cursors,
            deficit=deficit,
            tokens=tokens,
            units=saved["units"],
            unit=saved["unit"],
            packing=saved["packing"],
            carry=carry,
            weights_ppm=weights_ppm,
            history=history,
        )
        return state, lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadingPlan:
    """Contents of one step. They are the same on every host and for every mesh.

    pieces: document spans, row by row.
    cursors: cursors of the sources after this step.
    fill: fraction of the token positions that hold tokens; the rest is padding.
    row_cost: cost of each row, by the spec's cost.
    drift: largest difference, over the sources, between the share so far and the scheduled share, 0 to 1.
    last: True if the documents end here; the missing part is padded, so that all ranks have the same shapes.
      It may be False for a last step whose rows are exactly full: the next call of `plan` then raises
      `EndOfData`.
    """

    step: int
    pieces: Pieces
    cursors: Int64[np.ndarray, " sources"]
    tokens_by_source: Int64[np.ndarray, " sources"]
    fill: float
    row_cost: Float64[np.ndarray, " rows"]
    drift: float
    last: bool


class Planner:
    """Plans steps from lengths. Every host has a planner, and all of them make the same plan.

    Args:
      lengths: see `Lengths`; it may raise `NotYet`.
    """

    def __init__(self, spec: PlannerSpec, lengths: Lengths) -> None:
        self.spec = spec
        self._buffers = Buffers(spec.names, spec.chunks_per_epoch, spec.epochs, lengths)
        if spec.ends is not None:
            self._buffers.ends = np.asarray(spec.ends, np.int64)

    def start(self) -> PlannerState:
        """Returns the state before step 0."""
        zeros = np.zeros(len(self.spec.names), np.int64)
        return PlannerState(
            step=0,
            cursors=zeros,
            deficit=zeros,
            tokens=zeros,
            units=0,
            unit=self.spec.unit,
            packing=self.spec.packing,
            carry=np.empty((0, 4), np.int64),
            weights_ppm=zeros,
            history=((0, self.spec.schedule.identity, self.spec.schedule.describe(0)),),
        )

    def resume(self, saved: Mapping[str, Any]) -> tuple[PlannerState, list[str]]:
        """Returns the state that `to_json` saved, adapted to this spec, and a sentence for each change."""
        spec = self.spec
        state, lines = PlannerState.from_json(saved, spec.names)
        step, schedule = state.step, spec.schedule
        if state.unit != spec.unit:
            lines.append(
                f"step {step}: data.mixture_unit {state.unit} -> {spec.unit}; drift is counted from this "
                "step on"
            )
            # A deficit of tokens means nothing in samples or rows.
            zeros = np.zeros(len(spec.names), np.int64)
            state = dataclasses.replace(state, unit=spec.unit, units=0, deficit=zeros)
        if state.packing != spec.packing:
            lines.append(f"step {step}: data.packing {state.packing} -> {spec.packing}")
            state = dataclasses.replace(state, packing=spec.packing)
        # By identity, not by weights: another schedule may have the same weights at this step.
        if not state.history or state.history[-1][1] != schedule.identity:
            old_description = state.history[-1][2] if state.history else "none"
            lines.append(
                f"step {step}: the mixture was '{old_description}', from this step on it is "
                f"'{schedule.describe(step)}'"
            )
            new_weights_ppm = np.rint(schedule.weights(step, spec.names) * _PPM).astype(np.int64)
            change = np.abs(new_weights_ppm - state.weights_ppm)
            # The eight largest changes: hundreds of sources would fill the log.
            for i in np.argsort(-change, kind="stable")[:8].tolist():
                if change[i]:
                    lines.append(
                        f"step {step}: {spec.names[i]} {state.weights_ppm[i] / _PPM:.4f} -> "
                        f"{new_weights_ppm[i] / _PPM:.4f}"
                    )
            entry = (step, schedule.identity, schedule.describe(step))
            state = dataclasses.replace(state, history=(*state.history, entry))
        return state, lines

    def plan(self, state: PlannerState) -> tuple[LoadingPlan, PlannerState]:
        """Plans the step that follows `state`; returns the plan and the state after it.

        Raises:
          NotYet: lengths are missing. Nothing has changed: call again when they are known.
          EndOfData: no token is left.
          UserError: a source is empty, or the schedule cannot be followed because all sources with weight
            have ended and others get weight only later.
        """
        spec = self.spec
        # Nothing before the cursors is asked for again, so lengths are held for the look-ahead alone.
        self._buffers.forget(state.cursors)
        # Units are samples here: the mean sample so far, by which the first look-up of lengths is sized.
        mean_tokens = (
            int(state.tokens.sum()) // state.units if spec.unit == "samples" and state.units else None
        )
        graph = (
            Graph(self._buffers)
            .mix(
                spec.schedule,
                step=state.step,
                unit=spec.unit,
                cursors=state.cursors,
                deficit=state.deficit,
                mean_tokens=mean_tokens,
            )
            .pack(spec.packing, rows=spec.global_batch, seq_len=spec.seq_len, carry=state.carry)
        )
        if not len(graph.pieces):
            # A gap in the schedule is a user's mistake; an end of the data is not.
            if (to_come := self._next_unread_source(state.step, graph.cursors)) is not None:
                raise UserError(self._gap_message(state, graph.weights, *to_come))
            raise EndOfData(f"data ends before step {state.step}")
        # After packing, as only pieces have lengths; before `balance`, which orders rows by cost.
        graph.cost(lambda n: spec.cost_linear * n + spec.cost_quadratic * (n * n))
        if spec.balance:
            graph.balance()
        pieces, row_cost = graph.plan()

        # Carried documents still fill a further step, even where all sources are read.
        has_ended = not len(graph.carry) and (
            graph.at_end or bool((graph.cursors >= self._buffers.ends).all())
        )
        num = len(spec.names)
        tokens = np.zeros(num, np.int64)
        np.add.at(tokens, pieces.source, pieces.end - pieces.start)
        next_state = PlannerState(
            step=state.step + 1,
            cursors=graph.cursors,
            deficit=graph.deficit,
            tokens=state.tokens + tokens,
            units=state.units + graph.units,
            unit=spec.unit,
            packing=spec.packing,
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
            row_cost=row_cost,
            drift=_drift(next_state),
            last=has_ended and self._next_unread_source(state.step, graph.cursors) is None,
        )
        return plan, next_state

    def _next_unread_source(
        self, step: int, cursors: Int64[np.ndarray, " sources"]
    ) -> tuple[int, int] | None:
        """Returns an unread source that gets weight only after `step`, and that step; None without one."""
        unread = np.flatnonzero(cursors < self._buffers.ends).tolist()
        # The soonest first: the message names the next step at which weight would come.
        for step_of_change, weights in self.spec.schedule.later(step):
            for source in unread:
                if weights.get(self.spec.names[source], 0) > 0:
                    return source, step_of_change
        return None

    def _gap_message(
        self, state: PlannerState, weights: Float64[np.ndarray, " sources"], source: int, weight_step: int
    ) -> str:
        spec = self.spec
        ended = [
            f"{field_of(spec.names[i])} ({self._buffers.ends[i]:,})" for i in np.flatnonzero(weights).tolist()
        ]
        suffix = f" and {len(ended) - 4} more" if len(ended) > 4 else ""
        unread = self._buffers.ends[source] - state.cursors[source]
        return (
            f"data.mixture: at step {state.step} every source with weight is read to its end (documents with "
            f"data.epochs={spec.epochs}: {', '.join(ended[:4])}{suffix}), while "
            f"{field_of(spec.names[source])}, with {unread:,} unread documents, has no weight before step "
            f"{weight_step}. Give it weight from step {state.step} on at the latest, or set data.epochs=None."
        )

    def lookahead(self, state: PlannerState, steps: int) -> Int64[np.ndarray, "sources 2"]:
        """Estimates the documents of the next `steps`: rows of a source and the end of its documents.

        The estimate uses the schedule, `state` and the mean length of the documents seen so far. A source
        whose share will rise is included from the step of the rise on.
        """
        spec = self.spec
        per_step = spec.global_batch * spec.seq_len
        shares = [spec.schedule.weights(state.step + k, spec.names) for k in range(steps)]
        # Per source: sum of its shares over the steps, i.e. how many steps' worth it gives.
        total = functools.reduce(np.add, shares)
        mean = self._buffers.mean_tokens
        if spec.unit == "tokens":
            documents = (total * per_step + state.deficit / ONE) / mean
        elif spec.unit == "rows":
            documents = (total * spec.global_batch + state.deficit / ONE) * spec.seq_len / mean
        else:
            # Shares of samples: a step has tokens / (mean tokens of a sample, over all sources) samples.
            documents = total * per_step / max(1.0, float(total @ mean) / steps) + state.deficit / ONE
        # A tenth and two documents more than the mean asks for: lengths scatter.
        count = np.where(total > 0, np.ceil(np.maximum(documents, 0) * 1.1) + 2, 0).astype(np.int64)
        ends = np.minimum(state.cursors + count, self._buffers.ends)
        sources = np.flatnonzero(ends > state.cursors)
        return np.stack([sources, ends[sources]], axis=1)


def _drift(state: PlannerState) -> float:
    """Returns the largest difference of a source's share so far from its scheduled share, 0 to 1.

    Tokens of documents that are carried into the next step are drawn and not placed yet.
    """
    deficit, tokens = state.deficit / ONE, state.tokens
    if state.unit != "tokens":
        return float(np.abs(deficit).max() / max(1, state.units))
    carried_tokens = np.bincount(
        state.carry[:, 0], weights=state.carry[:, 3] - state.carry[:, 2], minlength=len(deficit)
    )
    # What a source was to have = what was drawn (placed or carried) + what it still lacks.
    scheduled_tokens = tokens + carried_tokens + deficit
    return float(np.abs(tokens / tokens.sum() - scheduled_tokens / scheduled_tokens.sum()).max())
