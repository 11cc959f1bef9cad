"""Policy that assigns sources to loaders, from measured costs and the mixture schedule. It is a pure function.

Any loader can read any document, so a placement never changes the training data, only how soon it arrives; nothing here
is checkpointed. The policy uses no clock and no process: times are arguments, and the same arguments give the same
placement.

It follows the AutoScaler of arXiv:2504.09844 (profile, auto-partition, follow the schedule, hysteresis) as far as it is
published, and differs where that would not work:

- The need of a source is its seconds per document x documents per step / seconds per step *without the wait for data*.
  With the whole step as the divisor, a starved trainer would lower the demand until the starved placement looks right.
- The schedule is exact, so a rising weight acts at once. Measurements have to agree in two windows, and so does every
  decision that gives loaders back.
- If the needs exceed max_loaders, they are all scaled down by the same factor.
- Cheap sources are packed once; later only sources that no longer fit are moved, because a move opens them again.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Float

from jtrain.data.autoscaler.placement import FULL, PROCESS_BYTES, LoaderAssignment, Placement, loaders_of
from jtrain.data.autoscaler.source_profile import LoaderLoad, SourceProfile, Sticky
from jtrain.errors import UserError

TARGET_BUSY = 0.75
"""Planned share of busy time of a loader; the rest absorbs changes on which the hysteresis has not acted yet."""

START_S = 10.0
"""Seconds from a decision to the first documents: start a process, open (remote) files, fill the buffers."""

TEXT_BYTES_PER_S = 4e6  # a guess for tokenising on one core, used until this source or a comparable one is measured
DOCUMENT_S = 30e-6
OPEN_BYTES = 2 << 20  # a Parquet reader with small row groups holds 1.0 to 1.5 MB

_MAX_LINES = 8


class Autoscaler:
    """Places sources on loaders: call `initial` once, then `update` after every step, or less often.

    The caller must let the former loaders of a source serve it until the new ones have started, and then ask them for
    it no more, so that a move never makes a step wait.

    Args:
      names: names of the sources; every array below has one entry per source, in this order.
      max_loaders: largest number of loader processes, standbys not counted.
      memory_bytes: memory limit of one loader: the process and its open sources. A source that alone exceeds it gets
        one loader of its own and no second one. If the sources do not all fit, the limit is exceeded with a message.
      window_s: measurements are judged once per window; two windows in a row must agree.

    Attributes:
      placement: current placement.
      needs: loaders that each source needs as planned now, fractional, before the limit of max_loaders.

    Raises:
      UserError: max_loaders is below 1, or memory_bytes is too small for any loader.
    """

    def __init__(self, names: Sequence[str], *, max_loaders: int, memory_bytes: int, window_s: float = 5.0) -> None:
        if max_loaders < 1:
            raise UserError(f"data.max_loaders={max_loaders} must be at least 1. Set data.max_loaders.")
        if memory_bytes <= PROCESS_BYTES:
            raise UserError(
                f"a loader may take {_mib(memory_bytes)}, but takes about {_mib(PROCESS_BYTES)} without any source. "
                f"Allow more memory, or set data.max_loaders={max_loaders} lower."
            )
        self.names = tuple(names)
        self.max_loaders = max_loaders
        self.memory_bytes = memory_bytes
        self.window_s = window_s
        self.placement: Placement = {}
        size = len(self.names)
        self._next_loader = 0
        self._weight = np.zeros(size)  # planned weights: rise at once, fall after two windows
        self._recent_weight = np.zeros((2, size))  # largest weights of the previous and of the current window
        # Rows: seconds per document, documents per step and unit of weight, seconds of a step without waiting.
        self._cost = Sticky(np.tile([[DOCUMENT_S], [0.0], [1.0]], (1, size)))
        self._open = Sticky(np.full((1, size), float(OPEN_BYTES)))
        self._guess_s = np.full(size, DOCUMENT_S)
        self._extra = np.ones(size)  # factors learnt from waiting, beyond the profiles
        self._window_start_s: float | None = None
        self._steps: list[tuple[float, float]] = []  # (step_s, wait_s) of this window
        self._waiting_windows = 0
        self._said: dict[str, bool] = {}

    def lookahead_steps(self, step_s: float) -> int:
        """Returns the steps until a new loader has full buffers: `weights` should look that far ahead."""
        return max(2, math.ceil(START_S / max(step_s, 1e-3)))

    @property
    def needs(self) -> Float[np.ndarray, " sources"]:
        return self._weight * _load(self._cost.value) * self._extra

    def initial(
        self,
        *,
        step_s: float,
        weights: Float[np.ndarray, " sources"],
        documents_per_step: Float[np.ndarray, " sources"],
        source_bytes: Float[np.ndarray, " sources"],
        source_documents: Float[np.ndarray, " sources"],
        open_bytes: Float[np.ndarray, " sources"] | None = None,
    ) -> tuple[Placement, list[str]]:
        """Returns a placement before anything is measured, and the reasons for it.

        Args:
          step_s: expected seconds per step; a guess is enough, two windows correct it.
          weights: shares of the mixture, for each source the largest within `lookahead_steps`.
          documents_per_step: documents that a step draws with those weights.
          source_bytes: bytes of text in each source; 0 if unknown.
          source_documents: documents in each source; 0 if unknown.
          open_bytes: memory that a loader needs per open source, if known (two row groups for Parquet).
        """
        mean_bytes = source_bytes / np.maximum(source_documents, 1)
        self._guess_s = DOCUMENT_S + mean_bytes / TEXT_BYTES_PER_S
        per_weight = documents_per_step / np.where(weights > 0, weights, np.inf)
        # For a source without weight yet, assumes the median of the others: documents per unit of weight are similar.
        known = per_weight[per_weight > 0]
        per_weight[per_weight == 0] = float(np.median(known)) if len(known) else 0.0
        self._cost.value[:] = self._guess_s, per_weight, np.full(len(self.names), max(step_s, 1e-3))
        if open_bytes is not None:
            self._open.value[0] = open_bytes
        self._weight = weights.astype(float)
        self._recent_weight[:] = weights
        limits, _ = self._replan(step=0, dead=(), reclaim=False)
        used = np.count_nonzero(weights)
        start = (
            f"start: {used} of {len(self.names)} sources have a weight; by their size they need "
            f"{self.needs.sum():.2g} loaders ({documents_per_step.sum():.4g} documents per {step_s:.3g} s step, "
            f"{TEXT_BYTES_PER_S / 1e6:.0f} MB/s of text each assumed): {_plural(len(self.placement), 'loader')}"
        )
        return self.placement, [start, *limits]

    def update(
        self,
        *,
        now_s: float,
        step: int,
        step_s: float,
        wait_s: float,
        weights: Float[np.ndarray, " sources"],
        documents_per_step: Float[np.ndarray, " sources"],
        profiles: Sequence[SourceProfile],
        loads: Mapping[int, LoaderLoad],
    ) -> tuple[Placement, list[str]]:
        """Returns the placement from this step on, and a sentence for each change.

        Between two windows, a call acts only on dead loaders and on weights that the schedule raises.

        Args:
          now_s: seconds of any monotonic clock.
          step: step number for the sentences.
          step_s: seconds of the last step, including its wait for data.
          wait_s: seconds of the last step spent waiting for data.
          weights: shares of the mixture, for each source the largest within `lookahead_steps`; the sum may exceed 1.
          documents_per_step: documents that a step draws with those weights.
          profiles: profile of each source; a source that was never read has no documents.
          loads: load of each loader; a loader without an entry has just been started.
        """
        if self._window_start_s is None:
            self._window_start_s = now_s
        self._steps.append((step_s, wait_s))
        rises = bool((weights > self._weight + 1e-9).any())
        self._weight = np.maximum(self._weight, weights)
        self._recent_weight[1] = np.maximum(self._recent_weight[1], weights)
        dead = tuple(loader for loader in self.placement if loader in loads and not loads[loader].alive)
        lines = []
        window = bool(now_s >= self._window_start_s + self.window_s)
        if window:
            lines += self._judge(step, weights, documents_per_step, profiles, loads)
            self._window_start_s = now_s
            self._steps.clear()
        if window or rises or dead:
            limits, moves = self._replan(step=step, dead=dead, reclaim=window)
            lines += moves + limits
        return self.placement, lines

    def _judge(
        self,
        step: int,
        weights: Float[np.ndarray, " sources"],
        documents_per_step: Float[np.ndarray, " sources"],
        profiles: Sequence[SourceProfile],
        loads: Mapping[int, LoaderLoad],
    ) -> list[str]:
        """Ends a window: adopts the measurements on which two windows agree."""
        self._weight = self._recent_weight.max(0)
        self._recent_weight[0], self._recent_weight[1] = self._recent_weight[1], weights

        step_s, wait_s = np.mean(self._steps, axis=0)
        documents = np.array([profile.documents for profile in profiles])
        seconds = np.array([profile.read_s + profile.send_s for profile in profiles])
        seen = documents > 0
        measured_s = np.where(seen, seconds / np.where(seen, documents, 1), self._guess_s)
        if seen.any():  # guesses unread sources by their size, corrected by the median error of the other guesses
            measured_s[~seen] *= np.median(measured_s[seen] / self._guess_s[seen])
        per_weight = np.where(weights > 0, documents_per_step / np.where(weights > 0, weights, 1), self._cost.value[1])
        computing_s = np.full(len(self.names), max(step_s - wait_s, 0.02 * step_s, 1e-3))
        changed = self._cost.judge(np.stack([measured_s, per_weight, computing_s]), _load)
        self._extra[changed] = 1.0  # the factor was learnt for the old cost
        held = np.array([profile.open_bytes for profile in profiles])
        self._open.judge(np.where(held > 0, held, self._open.value[0])[None], lambda rows: rows[0])

        lines = self._learn_from_waiting(step, float(step_s), float(wait_s), bool(changed.any()), loads)
        for loader, load in loads.items():
            planned = PROCESS_BYTES + sum(float(self._open.value[0][s]) for s in self.placement.get(loader, ()))
            if self._once(f"rss {loader}", load.alive and load.rss_bytes > max(self.memory_bytes, planned)):
                lines.append(
                    f"step {step}: loader {loader} takes {_mib(load.rss_bytes)}, more than its limit of "
                    f"{_mib(self.memory_bytes)}; by the profiles of its sources it should take {_mib(planned)}"
                )
        return lines

    def _learn_from_waiting(
        self, step: int, step_s: float, wait_s: float, changed: bool, loads: Mapping[int, LoaderLoad]
    ) -> list[str]:
        """Raises the planned cost of the sources of a loader that is busier than their profiles explain.

        Does so only while the trainer waits, because a loader that fills its buffers is also busy.
        """
        waits = wait_s > 0.05 * step_s and not changed
        self._waiting_windows = self._waiting_windows + 1 if waits else 0
        if self._waiting_windows < 2 or self.needs.sum() > self.max_loaders:
            return []
        alive = [loader for loader in self.placement if loader in loads and loads[loader].alive]
        hottest = max(alive, key=lambda n: (loads[n].busy_share, loads[n].queued, -n), default=None)
        if hottest is None or (busy := loads[hottest].busy_share) < 0.9:
            return []
        self._waiting_windows = 0
        copies = self._copies()
        sources = np.array(self.placement[hottest])
        planned = float((self.needs[sources] / copies[sources]).sum()) * TARGET_BUSY
        factor = min(4.0, max(1.25, busy / max(planned, 1e-9)))
        before = self._extra[sources].copy()
        self._extra[sources] = np.minimum(before * factor, 8.0)
        if np.array_equal(self._extra[sources], before):
            return []
        return [
            f"step {step}: steps wait {wait_s:.2g} of {step_s:.2g} s for data and loader {hottest} is {busy:.0%} busy "
            f"with {_plural(len(sources), 'source')} whose profiles explain {planned:.0%}: planning {factor:.3g} times "
            f"as much for {self._list(sources.tolist())}"
        ]

    def _replan(self, *, step: int, dead: tuple[int, ...], reclaim: bool) -> tuple[list[str], list[str]]:
        """Repairs the placement with few moves; returns messages about limits, and about moves."""
        needs = self.needs
        total = float(needs.sum())
        scale = min(1.0, self.max_loaders / total) if total else 1.0
        before = {s: on for s, on in enumerate(loaders_of(self.placement, len(self.names))) if on}
        plan = LoaderAssignment(
            self.placement,
            need=(needs * scale).tolist(),
            open_bytes=self._open.value[0].tolist(),
            max_loaders=self.max_loaders,
            memory_bytes=self.memory_bytes,
            next_loader=self._next_loader,
        )
        for loader in dead:
            plan.close(loader)
        active = (self._weight > 0).tolist()
        plan.repair(active)
        # At max_loaders, a loader that is given back would be needed again at once.
        merged = plan.reclaim() if reclaim and scale == 1.0 else {}
        self._next_loader = plan.next_loader
        self.placement = plan.placement()
        after = {s: on for s, on in enumerate(plan.on) if on}
        assert set(after) == {s for s, needed in enumerate(active) if needed}, "a source has weight but no loader"

        if moved := before != after:
            self._waiting_windows = 0  # sources that were just opened are busy filling their buffers
        moves = self._tell(step, needs, before, after, dead, merged, plan) if moved or dead else []
        return self._limits(step, needs, total, plan), moves

    def _tell(
        self,
        step: int,
        needs: Float[np.ndarray, " sources"],
        before: dict[int, frozenset[int]],
        after: dict[int, frozenset[int]],
        dead: tuple[int, ...],
        merged: dict[int, list[int]],
        plan: LoaderAssignment,
    ) -> list[str]:
        """Returns one sentence per cause; one per source only if its own need is the cause."""
        old, new = set().union(*before.values()), set().union(*after.values())
        count = f"loaders {len(old)} -> {len(new)}" if len(old) != len(new) else f"loaders stay {len(new)}"
        rest = {s for s in before.keys() | after.keys() if before.get(s) != after.get(s)}
        lines = []

        def group(sources: Iterable[int], text: str) -> None:
            found = sorted(rest.intersection(sources))
            rest.difference_update(found)
            if found:
                targets = sorted(set().union(*(after.get(s, frozenset()) for s in found)))
                where = f", now on {_numbers(targets)}" if targets else ""
                lines.append(f"step {step}: {text.format(self._list(found))}{where}; {count}")

        for loader in dead:
            group((s for s in before if loader in before[s]), f"loader {loader} is dead: its sources {{}} moved")
        group((s for s in before if s not in after), "no weight within the look-ahead: closed {}")
        own = [s for s in rest if s not in before or len(after[s]) != len(before[s])]
        own.sort(key=lambda s: (-needs[s], s))
        for s in own if len(own) <= _MAX_LINES else own[: _MAX_LINES - 1]:
            short = "" if len(after[s]) >= plan.wanted(s) else f" of {plan.wanted(s)} wanted"
            where = f"{self.names[s]} on {_numbers(after[s])}{short}"
            lines.append(f"step {step}: {self._reason(s, needs)}: {count}; {where}")
            rest.discard(s)
        group(own, "their weights or costs have changed: placed {}")
        for loader, sources in merged.items():
            group(sources, f"loader {loader} is not needed any more: its sources {{}} fit elsewhere")
        for loader, (share, heaviest) in plan.relieved.items():
            reason = self._reason(heaviest, needs).replace("{", "{{").replace("}", "}}")
            group(
                [s for s in rest if loader in before[s]],
                f"loader {loader} would be {share * TARGET_BUSY:.0%} busy, mainly because {reason}: moved {{}}",
            )
        group(tuple(rest), "to make room: moved {}")
        return lines

    def _reason(self, s: int, needs: Float[np.ndarray, " sources"]) -> str:
        cost_s, per_weight, step_s = self._cost.value[:, s]
        extra = f", x {self._extra[s]:.3g} learnt from waiting" if self._extra[s] != 1 else ""
        return (
            f"source {self.names[s]} needs {needs[s]:.2g} loaders ({cost_s * 1e3:.3g} ms/document x "
            f"{per_weight * self._weight[s]:.4g} documents per {step_s:.3g} s step at weight {self._weight[s]:.2g}"
            f"{extra}, loaders at most {TARGET_BUSY:.0%} busy)"
        )

    def _limits(
        self, step: int, needs: Float[np.ndarray, " sources"], total: float, plan: LoaderAssignment
    ) -> list[str]:
        """Returns messages about limits that are reached; each is repeated only after it has ceased to hold."""
        lines = []
        slower = total * TARGET_BUSY / self.max_loaders
        if self._once("cap", total > self.max_loaders * FULL):
            heaviest = int(np.argmax(needs))
            lines.append(
                f"step {step}: the data plane is the bottleneck: its sources need {math.ceil(total)} loaders and "
                f"data.max_loaders={self.max_loaders}, so a step takes about {max(1.0, slower):.2g} times as long as "
                f"it would with enough of them; the largest need: {self._reason(heaviest, needs)}"
            )
        fullest = max(plan.bytes, key=lambda loader: (plan.bytes[loader], -loader), default=None)
        held = 0.0 if fullest is None else plan.bytes[fullest]
        if self._once("memory", held > self.memory_bytes + 1e-9) and fullest is not None:
            lines.append(
                f"step {step}: loader {fullest} would take {_mib(held)} with "
                f"{self._list(sorted(plan.sources[fullest]))}, more than its limit of {_mib(self.memory_bytes)}; "
                f"data.max_loaders={self.max_loaders} allows no better placement"
            )
        for s in np.flatnonzero(needs > FULL).tolist():
            short = plan.need[s] > FULL * len(plan.on[s])
            if self._once(f"short {s}", short):
                lines.append(
                    f"step {step}: {self._reason(s, needs)}, but gets {len(plan.on[s])}: no other loader has memory "
                    f"for its {_mib(plan.open_bytes[s])} per loader"
                )
        return lines

    def _once(self, what: str, holds: bool) -> bool:
        """True if `holds` is newly true: the first time, and again only after it was false."""
        first = holds and not self._said.get(what, False)
        self._said[what] = holds
        return first

    def _copies(self) -> Float[np.ndarray, " sources"]:
        return np.array([max(len(on), 1) for on in loaders_of(self.placement, len(self.names))], float)

    def _list(self, sources: list[int]) -> str:
        names = ", ".join(self.names[s] for s in sources[:4])
        return names if len(sources) <= 4 else f"{names} and {len(sources) - 4} more"


def _load(rows: Float[np.ndarray, "3 sources"]) -> Float[np.ndarray, " sources"]:
    """Returns loaders per unit of weight; rows: seconds per document, documents per step and weight, step seconds."""
    return rows[0] * rows[1] / (rows[2] * TARGET_BUSY)


def _numbers(loaders: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(loaders)))


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def _mib(size: float | int) -> str:
    return f"{size / 2**20:,.0f} MiB"
