"""Policy that assigns sources to loaders, from the time that reading takes and the mixture schedule.

Any loader can read any document, so a placement never changes the training data, only how soon it arrives;
nothing here is checkpointed. The policy uses no clock and no process: times are arguments, and the same
arguments give the same placement.

It follows the AutoScaler of arXiv:2504.09844 (profile, auto-partition, follow the schedule, hysteresis) as
far as it is published, and differs where that would not work:

- The need of a source is its seconds per token x tokens per step / seconds per step *without the wait for
  data*. With the whole step as the divisor, a starved trainer would lower the demand until the starved
  placement looks right.
- The schedule is exact, so a rising weight acts at once. Measurements have to agree in two windows, and so
  does every decision that gives loaders back.
- If the needs exceed max_loaders, they are all scaled down by the same factor.
- Cheap sources are packed once; later only sources that no longer fit are moved, because a move opens them
  again.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jtrain.data.autoscaler.placement import FULL, Placement, repair
from jtrain.data.planner.graph import Unit

TARGET_BUSY = 0.75
"""Planned share of busy time of a loader; the rest absorbs changes on which the hysteresis has not acted
yet."""

START_S = 10.0
"""Seconds from a decision to the first documents: start a process, open (remote) files, fill the buffers."""

WINDOW_S = 3.0
"""Measurements are judged once in so many seconds; two windows in a row must agree."""

_GUESS = 0.5
"""Loaders that all sources together need, until one of them is measured."""

_RISE, _FALL = 1.25, 0.5  # a change: two windows in a row beyond these ratios; noise of +-30 % cannot cycle

_SCHEDULE_SAMPLES = 16
_MOST_NAMED = 4


class Autoscaler:
    """Places sources on loaders: call `start` once, `observe` for each run that was read, and `update` every
    so often.

    The caller must let the former loaders of a source serve it until the new ones have started, and then ask
    them for it no more, so that a move never makes a step wait.

    Args:
      names: names of the sources; every array below has one entry per source, in this order.
      schedule: weights of the sources by step.
      step_tokens: tokens of a step that these loaders read.
      unit: unit of the weights.
      max_loaders: largest number of loader processes, standbys not counted.

    Attributes:
      placement: current placement.
    """

    def __init__(
        self,
        names: Sequence[str],
        schedule: Any,
        *,
        step_tokens: int,
        unit: Unit = "tokens",
        max_loaders: int,
    ) -> None:
        self.names = tuple(names)
        self.max_loaders = max_loaders
        self.placement: Placement = {}
        size = len(self.names)
        self._schedule, self._step_tokens, self._unit = schedule, step_tokens, unit
        self._next_loader = 0
        self._weight = np.zeros(size)  # planned weights: rise at once, fall after two windows
        self._recent_weight = np.zeros((2, size))  # largest weights of the previous and of the current window
        self._step_s = 1.0
        self._rate = _StickyRates(size)
        self._read = np.zeros((3, size))  # seconds, tokens and documents that were read in this window
        self._known = np.full(
            (2, size), np.nan
        )  # seconds and documents per token, in the last window with some
        self._window = np.zeros(3)  # steps, seconds, and seconds of waiting of this window
        self._is_short = False

    @property
    def needs(self) -> Float[np.ndarray, " sources"]:
        """Loaders that each source needs as planned now, fractional, before the limit of max_loaders."""
        return self._weight * self._rate.value / TARGET_BUSY

    def start(self, step: int) -> tuple[Placement, list[str]]:
        """Returns a placement before anything is measured, and the reason for it."""
        self._weight = self._ahead(step)
        self._recent_weight[:] = self._weight
        self._replan(step, merge=False)
        used, total = np.count_nonzero(self._weight), len(self.names)
        return self.placement, [
            f"start: {used} of {total} sources have a weight: {_loaders(len(self.placement))}"
        ]

    def observe(self, source: int, *, read_s: float, tokens: int, documents: int) -> None:
        """Adds a run: the seconds that a loader took, and what it read."""
        self._read[:, source] += read_s, tokens, documents

    def update(self, step: int, *, steps: int, seconds: float, wait_s: float) -> tuple[Placement, list[str]]:
        """Returns the placement from now on, and a sentence for each decision.

        Between two windows, a call acts only on weights that the schedule raises.

        Args:
          step: step whose documents are asked for now.
          steps: steps since the last call.
          seconds: seconds since the last call.
          wait_s: seconds of these that the trainer waited for data.
        """
        self._step_s += 0.1 * (seconds / max(steps, 1) - self._step_s)
        self._window += steps, seconds, wait_s
        ahead = self._ahead(step)
        rises = bool((ahead > self._weight + 1e-9).any())
        self._weight = np.maximum(self._weight, ahead)
        self._recent_weight[1] = np.maximum(self._recent_weight[1], ahead)
        ends = bool(self._window[1] >= WINDOW_S)
        if ends:
            self._weight = self._recent_weight.max(0)
            self._recent_weight[0], self._recent_weight[1] = self._recent_weight[1], ahead
            self._rate.judge(self._measured(ahead))
            self._read[:] = self._window[:] = 0.0
        lines = self._replan(step, merge=ends) if ends or rises else []
        return self.placement, lines

    def _measured(self, weight: Float[np.ndarray, " sources"]) -> Float[np.ndarray, " sources"]:
        """Returns the loaders per unit of weight by this window; NaN for sources that were never read."""
        read_s, tokens, documents = self._read
        here = tokens > 0
        self._known[:, here] = read_s[here] / tokens[here], documents[here] / tokens[here]
        steps, seconds, wait_s = self._window.tolist()
        step_s = max(seconds - wait_s, 0.02 * seconds) / max(steps, 1.0)
        cost_s, per_token = self._known
        per_weight = np.full(len(cost_s), float(self._step_tokens))  # tokens in a step
        if self._unit == "samples":  # weights are shares of documents
            known = ~np.isnan(per_token)
            per_weight[known] /= per_token[known] * max(float((weight[known] / per_token[known]).sum()), 1e-9)
        return cost_s * per_weight / step_s

    def _ahead(self, step: int) -> Float[np.ndarray, " sources"]:
        """Returns each source's largest share between `step` and the step at which a new loader would be
        ready.
        """
        ahead = max(2, math.ceil(START_S / max(self._step_s, 1e-3)))
        steps = sorted({step + ahead * i // _SCHEDULE_SAMPLES for i in range(_SCHEDULE_SAMPLES + 1)})
        return np.max([self._schedule.weights(at, self.names) for at in steps], axis=0)

    def _replan(self, step: int, *, merge: bool) -> list[str]:
        """Repairs the placement with few moves; returns the decisions."""
        needs, before = self.needs, self.placement
        total = float(needs.sum())
        scale = min(1.0, self.max_loaders / total) if total else 1.0
        # A source that is read needs some loader, however little; at max_loaders, one given back would be
        # needed again.
        need = np.where(self._weight > 0, np.maximum(needs * scale, 1e-6), 0.0).tolist()
        self.placement, self._next_loader = repair(
            before,
            need,
            max_loaders=self.max_loaders,
            next_loader=self._next_loader,
            merge=merge and scale == 1.0,
        )
        lines = self._tell(step, before, needs) if before and before != self.placement else []
        was_short, self._is_short = self._is_short, total > self.max_loaders * FULL
        if self._is_short and not was_short:
            lines.append(
                f"step {step}: the data plane is the bottleneck: its sources need "
                f"{_loaders(math.ceil(total))} and data.max_loaders={self.max_loaders}; the largest need: "
                f"{self._reason(int(np.argmax(needs)), needs)}"
            )
        return lines

    def _tell(self, step: int, before: Placement, needs: Float[np.ndarray, " sources"]) -> list[str]:
        """Returns a sentence on what has moved, the largest needs first."""
        old, new = (_loaders_of(placement) for placement in (before, self.placement))
        moved = [s for s in old.keys() | new.keys() if old.get(s) != new.get(s)]
        moved.sort(key=lambda s: (-needs[s], s))
        named = [self._reason(s, needs) + f", now on {_numbers(new.get(s, []))}" for s in moved[:_MOST_NAMED]]
        more = f"; and {len(moved) - _MOST_NAMED} more moved" if len(moved) > _MOST_NAMED else ""
        return [f"step {step}: loaders {len(before)} -> {len(self.placement)}: {'; '.join(named)}{more}"]

    def _reason(self, s: int, needs: Float[np.ndarray, " sources"]) -> str:
        return f"{self.names[s]} needs {needs[s]:.2g} at weight {self._weight[s]:.2g}"


class _StickyRates:
    """Loaders per unit of weight, which change only if two windows in a row agree, and then by the lesser
    change.

    Attributes:
      value: planned rates; sources that were never read have the median of the others.
    """

    def __init__(self, size: int) -> None:
        self.value = np.full(size, _GUESS)
        self._last = self.value.copy()
        self._last_side = np.zeros(size, int)

    def judge(self, rate: Float[np.ndarray, " sources"]) -> None:
        """Takes in the rates of a window; NaN for sources that were never read."""
        side = (rate > self.value * _RISE).astype(int) - (rate < self.value * _FALL)
        changed = (side != 0) & (side == self._last_side)
        nearer = np.where(side > 0, np.minimum(rate, self._last), np.maximum(rate, self._last))
        self.value = np.where(changed, nearer, self.value)
        self._last, self._last_side = rate, np.where(changed, 0, side)
        unread = np.isnan(rate)
        if unread.any() and not unread.all():
            self.value[unread] = np.median(self.value[~unread])


def _loaders_of(placement: Placement) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for loader, held in placement.items():
        for s in held:
            found.setdefault(s, []).append(loader)
    return found


def _numbers(loaders: list[int]) -> str:
    return ", ".join(map(str, loaders)) or "none"


def _loaders(count: int) -> str:
    return f"{count} loader" + "s" * (count != 1)
