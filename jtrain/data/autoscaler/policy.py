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
"""Planned share of busy time of a loader; the rest absorbs changes before the hysteresis acts on them."""

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
    """Places sources on loaders: call `start` once, `observe` for each run read, and `update` every so often.

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
        self.schedule, self._step_tokens, self._unit = schedule, step_tokens, unit
        self._next_loader = 0
        self._weight = np.zeros(size)  # planned weights: rise at once, fall after two windows
        self._recent_weight = np.zeros((2, size))  # largest weights of the previous and of the current window
        self._step_s = 1.0
        self._rate = _StickyRates(size)
        # Seconds, tokens and documents that were read in this window.
        self._read_totals = np.zeros((3, size))
        # Seconds and documents per token, in the last window in which the source was read.
        self._last_costs = np.full((2, size), np.nan)
        self._window = np.zeros(3)  # steps, seconds, and seconds of waiting of this window
        self._is_short = False

    @property
    def needs(self) -> Float[np.ndarray, " sources"]:
        """Loaders that each source needs as planned now, fractional, before the limit of max_loaders."""
        return self._weight * self._rate.value / TARGET_BUSY

    def start(self, step: int) -> tuple[Placement, list[str]]:
        """Returns a placement before anything is measured, and the reason for it."""
        self._weight = self.weights_ahead_of(step)
        self._recent_weight[:] = self._weight
        self._replan(step, merge=False)
        num_weighted, total = np.count_nonzero(self._weight), len(self.names)
        return self.placement, [
            f"start: {num_weighted} of {total} sources have a weight: {_loaders(len(self.placement))}"
        ]

    def observe(self, source: int, *, read_s: float, tokens: int, documents: int) -> None:
        """Adds a run: the seconds that a loader took, and what it read."""
        self._read_totals[:, source] += read_s, tokens, documents

    def update(self, step: int, *, steps: int, seconds: float, wait_s: float) -> tuple[Placement, list[str]]:
        """Returns the placement from now on, and a sentence for each decision.

        Between two windows, a call acts only on weights that the schedule raises.

        Args:
          step: step whose documents are asked for now.
          steps: steps since the last call.
          seconds: seconds since the last call.
          wait_s: seconds of these that the trainer waited for data.
        """
        # Moving average over about 10 calls: one slow step must not move the look-ahead.
        self._step_s += 0.1 * (seconds / max(steps, 1) - self._step_s)
        self._window += steps, seconds, wait_s
        weights_ahead = self.weights_ahead_of(step)
        weight_rises = bool((weights_ahead > self._weight + 1e-9).any())
        # A rise acts at once: a loader takes START_S to be of use.
        self._weight = np.maximum(self._weight, weights_ahead)
        self._recent_weight[1] = np.maximum(self._recent_weight[1], weights_ahead)
        window_ends = bool(self._window[1] >= WINDOW_S)
        if window_ends:
            # A fall acts here alone, once two windows in a row have had the lower weight.
            self._weight = self._recent_weight.max(0)
            # The current window becomes the previous one.
            self._recent_weight[0], self._recent_weight[1] = self._recent_weight[1], weights_ahead
            self._rate.judge(self._measure_rates(weights_ahead))
            self._read_totals[:] = self._window[:] = 0.0
        lines = self._replan(step, merge=window_ends) if window_ends or weight_rises else []
        return self.placement, lines

    def _measure_rates(self, weight: Float[np.ndarray, " sources"]) -> Float[np.ndarray, " sources"]:
        """Returns the loaders per unit of weight by this window; NaN for sources that were never read.

        Example, unit=samples, 1000 tokens a step: source a has documents of 100 tokens and b of 400, each
        with weight 0.5. The mean length is 250, so a step has 4 documents, and a source of weight 1 would
        give 4 * 100 = 400 tokens of it (a) or 4 * 400 = 1600 (b). At 1 ms per token and steps of 0.8 s that
        takes 0.5 and 2 loaders per unit of weight.
        """
        read_s, tokens, documents = self._read_totals
        was_read = tokens > 0
        self._last_costs[:, was_read] = (
            read_s[was_read] / tokens[was_read],
            documents[was_read] / tokens[was_read],
        )
        steps, seconds, wait_s = self._window.tolist()
        # At least 2 % of the time: a trainer that only waits has no step time of its own.
        step_s = max(seconds - wait_s, 0.02 * seconds) / max(steps, 1.0)
        cost_s, documents_per_token = self._last_costs
        tokens_per_weight = np.full(len(cost_s), float(self._step_tokens))  # tokens in a step
        if self._unit == "samples":  # weights are shares of documents
            is_measured = ~np.isnan(documents_per_token)
            # Documents of a step (its tokens / their mean length), times the source's own mean length.
            tokens_per_weight[is_measured] /= documents_per_token[is_measured] * max(
                float((weight[is_measured] / documents_per_token[is_measured]).sum()), 1e-9
            )
        return cost_s * tokens_per_weight / step_s

    def weights_ahead_of(self, step: int) -> Float[np.ndarray, " sources"]:
        """Returns each source's largest share from `step` until a loader started now would be ready."""
        num_steps = max(2, math.ceil(START_S / max(self._step_s, 1e-3)))
        # Sampled, as one weight look-up per step would cost more than it tells.
        steps = sorted({step + num_steps * i // _SCHEDULE_SAMPLES for i in range(_SCHEDULE_SAMPLES + 1)})
        return np.max([self.schedule.weights(sampled_step, self.names) for sampled_step in steps], axis=0)

    def _replan(self, step: int, *, merge: bool) -> list[str]:
        """Repairs the placement with few moves; returns the decisions."""
        needs, old_placement = self.needs, self.placement
        total = float(needs.sum())
        # Too few loaders: all sources get the same fraction of their needs, and fall behind alike.
        scale = min(1.0, self.max_loaders / total) if total else 1.0
        # A source that is read needs some loader, however little; at max_loaders, one given back would be
        # needed again.
        need = np.where(self._weight > 0, np.maximum(needs * scale, 1e-6), 0.0).tolist()
        self.placement, self._next_loader = repair(
            old_placement,
            need,
            max_loaders=self.max_loaders,
            next_loader=self._next_loader,
            # With scaled needs every loader is full: nothing to merge.
            merge=merge and scale == 1.0,
        )
        lines = (
            self._describe_moves(step, old_placement, needs)
            if old_placement and old_placement != self.placement
            else []
        )
        # Reported once per shortage, not in every window.
        was_short, self._is_short = self._is_short, total > self.max_loaders * FULL
        if self._is_short and not was_short:
            lines.append(
                f"step {step}: the data plane is the bottleneck: its sources need "
                f"{_loaders(math.ceil(total))} and data.max_loaders={self.max_loaders}; the largest need: "
                f"{self._reason(int(np.argmax(needs)), needs)}"
            )
        return lines

    def _describe_moves(
        self, step: int, old_placement: Placement, needs: Float[np.ndarray, " sources"]
    ) -> list[str]:
        """Returns a sentence on what has moved, the largest needs first."""
        old_loaders, new_loaders = (_loaders_of(placement) for placement in (old_placement, self.placement))
        moved_sources = [
            source
            for source in old_loaders.keys() | new_loaders.keys()
            if old_loaders.get(source) != new_loaders.get(source)
        ]
        moved_sources.sort(key=lambda source: (-needs[source], source))
        sentences = [
            self._reason(source, needs) + f", now on {_numbers(new_loaders.get(source, []))}"
            for source in moved_sources[:_MOST_NAMED]
        ]
        suffix = (
            f"; and {len(moved_sources) - _MOST_NAMED} more moved" if len(moved_sources) > _MOST_NAMED else ""
        )
        counts = f"{len(old_placement)} -> {len(self.placement)}"
        return [f"step {step}: loaders {counts}: {'; '.join(sentences)}{suffix}"]

    def _reason(self, s: int, needs: Float[np.ndarray, " sources"]) -> str:
        return f"{self.names[s]} needs {needs[s]:.2g} at weight {self._weight[s]:.2g}"


class _StickyRates:
    """Loaders per unit of weight, which change if two windows in a row agree, and then by the lesser change.

    Example: the planned rate is 1.0 and the windows measure 1.4, 1.5: both are above 1.0 * 1.25, so the rate
    becomes 1.4. Windows of 1.4, 0.9, 1.4 change nothing.

    Attributes:
      value: planned rates; sources that were never read have the median of the others.
    """

    def __init__(self, size: int) -> None:
        self.value = np.full(size, _GUESS)
        self._last = self.value.copy()
        self._last_side = np.zeros(size, int)

    def judge(self, rate: Float[np.ndarray, " sources"]) -> None:
        """Takes in the rates of a window; NaN for sources that were never read."""
        # 1: above the band, -1: below, 0: within; comparisons with NaN are False.
        side = (rate > self.value * _RISE).astype(int) - (rate < self.value * _FALL)
        changed = (side != 0) & (side == self._last_side)
        smaller_change = np.where(side > 0, np.minimum(rate, self._last), np.maximum(rate, self._last))
        self.value = np.where(changed, smaller_change, self.value)
        # 0 after a change: the next one needs two new windows.
        self._last, self._last_side = rate, np.where(changed, 0, side)
        unread = np.isnan(rate)
        # A source that was never read gets the median rate, so that it is planned at all.
        if unread.any() and not unread.all():
            self.value[unread] = np.median(self.value[~unread])


def _loaders_of(placement: Placement) -> dict[int, list[int]]:
    loaders_of_source: dict[int, list[int]] = {}
    for loader, sources in placement.items():
        for source in sources:
            loaders_of_source.setdefault(source, []).append(loader)
    return loaders_of_source


def _numbers(loaders: list[int]) -> str:
    return ", ".join(map(str, loaders)) or "none"


def _loaders(count: int) -> str:
    return f"{count} loader" + "s" * (count != 1)
