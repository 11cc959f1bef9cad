"""Each mesh axis = one device, and accumulation = one batch: two updates of the real train step."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jtrain.check.lines import Differs
from jtrain.check.records import Piece, Sample
from jtrain.check.rounding import MARGIN, RUNS, Worst, bisect, largest, moved
from jtrain.config.run import Run
from jtrain.layout.constants import IGNORE
from jtrain.step_comparison.comparable_run import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    ComparableRun,
    RunResults,
)

UPDATE = 1e-3
"""Root mean square by which an update may differ, as a share of its own, beside what was measured."""


class LayoutReference:
    """Updates of one device, and what rounding makes of them."""

    def __init__(self, comparable: ComparableRun, samples: Sequence[Sample]) -> None:
        self.samples, self.comparable = samples, comparable
        self.first_state = self.comparable.first_state()
        self.results = self._train(self.first_state)
        # From weights that are an ulp or two off: what rounding alone makes of each figure.
        self.runs = [
            self._train(dataclasses.replace(self.first_state, params=moved(self.first_state.params, seed)))
            for seed in range(RUNS)
        ]

    def _train(self, state: object) -> RunResults:
        return self.comparable.train([sample.arrays for sample in self.samples], state, evaluates=True)

    @functools.cached_property
    def spread(self) -> "dict[str, float]":
        """Largest difference that rounding made to each array of the first update's state."""
        base = _floats(self.results)
        return largest([_floats(run) for run in self.runs], base)

    def compare(self, run: Run) -> str:
        """Compares the updates of a layout with those of one device, from the same weights.

        Raises:
          Differs: names the tensor and the record.
        """
        comparable = ComparableRun(run)
        results = comparable.train([s.arrays for s in self.samples], self.first_state, evaluates=True)
        self._compare_counts(results)
        worst, record_text = self._differences(results), self._first_place(results)
        if worst.over or record_text:
            tensor = worst.text if worst.over else "nats of an evaluation"
            count_text = f" and {worst.over - 1} others" if worst.over > 1 else ""
            raise Differs(
                f"{tensor}{count_text}; first record that differs: {record_text or self._record(comparable)}"
            )
        return f"{len(self.results.losses)} updates; {worst.text}"

    def _compare_counts(self, results: RunResults) -> None:
        """Raises Differs for what must be the same bits."""
        names = ("batch hash", "targets", "applied", "learning rate", "elements that are not finite")
        for step, (got, want) in enumerate(zip(results.exact, self.results.exact, strict=True)):
            for name, a, b in zip(names, got, want, strict=True):
                if a != b:
                    raise Differs(f"{name} of step {step + 1}: {a}, on one device {b}")
            # Against the batch too: both runs could count alike and wrong.
            if got[1] != (num_targets := self.samples[step].num_targets):
                raise Differs(f"targets of step {step + 1}: {got[1]} counted, the batch has {num_targets}")

    def _first_place(self, results: RunResults) -> str:
        """Place of the first record with a token whose nats differ in an evaluation; empty if there is none."""
        nats_BL, got_BL = _nats(self.results), _nats(results)
        spread = max(float(np.abs(_nats(run) - nats_BL).max()) for run in self.runs)
        bound = LOSS_TOLERANCE * float(np.abs(nats_BL).max()) + MARGIN * spread
        for piece in self.samples[0].pieces:
            # Not `> bound`, which no nan is.
            if not np.abs(piece.of(got_BL) - piece.of(nats_BL)).max(initial=0.0) <= bound:
                return piece.place
        return ""

    def _differences(self, results: RunResults) -> Worst:
        worst, want = Worst(), self.results
        for step in range(len(want.losses)):
            for name, got, base in (
                ("loss", results.losses[step], want.losses[step]),
                ("gradient norm", results.norms[step], want.norms[step]),
            ):
                field = "losses" if name == "loss" else "norms"
                spread = max(abs(getattr(run, field)[step] - base) for run in self.runs)
                factor = LOSS_TOLERANCE if name == "loss" else 2 * LOSS_TOLERANCE
                worst.add(
                    f"{name} of step {step + 1}",
                    abs(got - base),
                    factor * base + MARGIN * spread,
                    is_tensor=False,
                )
        for path, base in _floats(want).items():
            # 2: a second moment is a square, with twice the relative difference of its gradient.
            bound = 2 * GRADIENT_TOLERANCE * float(np.abs(base).max(initial=0.0)) + MARGIN * self.spread[path]
            difference = float(np.abs(results.moments[path] - base).max(initial=0.0))
            # A scalar or an array of zeros that stays one is no news.
            if bound or difference:
                worst.add(
                    f"gradient of {path.partition(' ')[2]} ({path.partition(' ')[0]})", difference, bound
                )
        for path, first in want.first.items():
            update = want.last[path] - first
            size = _rms(update)
            # What one device does not move, no layout may move.
            if not size:
                worst.add(f"update of {path}", _rms(results.last[path] - want.last[path]), 0.0)
                continue
            spread = max(_rms(run.last[path] - run.first[path] - update) for run in self.runs)
            difference = _rms(results.last[path] - want.last[path])
            worst.add(f"update of {path}", difference / size, UPDATE + MARGIN * spread / size)
        return worst

    def _record(self, comparable: ComparableRun) -> str:
        """Name of a record whose gradient differs when it alone has targets."""
        sample = self.samples[0]

        def differs(units: Sequence[Sequence[Piece]]) -> bool:
            arrays = [sample.only(units).arrays]
            if not (arrays[0]["target_BL"] != IGNORE).any():
                return False
            got, want = (t.train(arrays, self.first_state) for t in (comparable, self.comparable))
            base = _floats(want)
            far = (
                np.abs(got.moments[path] - x).max(initial=0.0) > 1e-3 * np.abs(x).max()
                for path, x in base.items()
            )
            return any(far) or abs(got.losses[0] - want.losses[0]) > 1e-4 * want.losses[0]

        return bisect(sample.units, differs)


def _floats(results: RunResults) -> dict[str, np.ndarray]:
    """State of the optimizer after the first update; second moments are squares of what the first are of."""
    # Sorted: `mu`, the gradient itself, comes before `nu`.
    return {path: x for path, x in sorted(results.moments.items()) if x.dtype == np.float32}


def _nats(results: RunResults) -> np.ndarray:
    assert results.nats_BL is not None
    return results.nats_BL


def _rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))) if array.size else 0.0
