"""Each mesh axis = one device, and accumulation = one batch: two updates of the real train step."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jtrain.check.lines import Differs
from jtrain.check.records import Piece, Sample
from jtrain.check.rounding import MARGIN, RUNS, Worst, bisect, largest, moved
from jtrain.config.course import GRADIENT, LOSS, Course, Trainer
from jtrain.config.run import Run
from jtrain.layout.constants import IGNORE

UPDATE = 1e-3
"""Root mean square by which an update may differ, as a share of its own, beside what was measured."""


class LayoutReference:
    """Updates of one device, and what rounding makes of them."""

    def __init__(self, trainer: Trainer, samples: Sequence[Sample]) -> None:
        self.samples, self.trainer = samples, trainer
        self.first_state = self.trainer.first_state()
        self.course = self._train(self.first_state)
        # From weights that are an ulp or two off: what rounding alone makes of each figure.
        self.runs = [
            self._train(dataclasses.replace(self.first_state, params=moved(self.first_state.params, seed)))
            for seed in range(RUNS)
        ]

    def _train(self, state: object) -> Course:
        return self.trainer.train([sample.arrays for sample in self.samples], state, evaluates=True)

    @functools.cached_property
    def spread(self) -> "dict[str, float]":
        """Largest difference that rounding made to each array of the first update's state."""
        base = _floats(self.course)
        return largest([_floats(run) for run in self.runs], base)

    def compare(self, run: Run) -> str:
        """Compares the updates of a layout with those of one device, from the same weights.

        Raises:
          Differs: names the tensor and the record.
        """
        trainer = Trainer(run)
        course = trainer.train([s.arrays for s in self.samples], self.first_state, evaluates=True)
        self._compare_counts(course)
        worst, record_text = self._differences(course), self._first_place(course)
        if worst.over or record_text:
            tensor = worst.text if worst.over else "nats of an evaluation"
            count_text = f" and {worst.over - 1} others" if worst.over > 1 else ""
            raise Differs(
                f"{tensor}{count_text}; first record that differs: {record_text or self._record(trainer)}"
            )
        return f"{len(self.course.losses)} updates; {worst.text}"

    def _compare_counts(self, course: Course) -> None:
        """Raises Differs for what must be the same bits."""
        names = ("batch hash", "targets", "applied", "learning rate", "elements that are not finite")
        for step, (got, want) in enumerate(zip(course.exact, self.course.exact, strict=True)):
            for name, a, b in zip(names, got, want, strict=True):
                if a != b:
                    raise Differs(f"{name} of step {step + 1}: {a}, on one device {b}")
            # Against the batch too: both runs could count alike and wrong.
            if got[1] != (num_targets := self.samples[step].num_targets):
                raise Differs(f"targets of step {step + 1}: {got[1]} counted, the batch has {num_targets}")

    def _first_place(self, course: Course) -> str:
        """Place of the first record with a token whose nats differ in an evaluation; empty if there is none."""
        nats_BL, got_BL = _nats(self.course), _nats(course)
        spread = max(float(np.abs(_nats(run) - nats_BL).max()) for run in self.runs)
        bound = LOSS * float(np.abs(nats_BL).max()) + MARGIN * spread
        for piece in self.samples[0].pieces:
            # Not `> bound`, which no nan is.
            if not np.abs(piece.of(got_BL) - piece.of(nats_BL)).max(initial=0.0) <= bound:
                return piece.place
        return ""

    def _differences(self, course: Course) -> Worst:
        worst, want = Worst(), self.course
        for step in range(len(want.losses)):
            for name, got, base in (
                ("loss", course.losses[step], want.losses[step]),
                ("gradient norm", course.norms[step], want.norms[step]),
            ):
                field = "losses" if name == "loss" else "norms"
                spread = max(abs(getattr(run, field)[step] - base) for run in self.runs)
                factor = LOSS if name == "loss" else 2 * LOSS
                worst.add(
                    f"{name} of step {step + 1}",
                    abs(got - base),
                    factor * base + MARGIN * spread,
                    is_tensor=False,
                )
        for path, base in _floats(want).items():
            # 2: a second moment is a square, with twice the relative difference of its gradient.
            bound = 2 * GRADIENT * float(np.abs(base).max(initial=0.0)) + MARGIN * self.spread[path]
            difference = float(np.abs(course.moments[path] - base).max(initial=0.0))
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
                worst.add(f"update of {path}", _rms(course.last[path] - want.last[path]), 0.0)
                continue
            spread = max(_rms(run.last[path] - run.first[path] - update) for run in self.runs)
            difference = _rms(course.last[path] - want.last[path])
            worst.add(f"update of {path}", difference / size, UPDATE + MARGIN * spread / size)
        return worst

    def _record(self, trainer: Trainer) -> str:
        """Name of a record whose gradient differs when it alone has targets."""
        sample = self.samples[0]

        def differs(units: Sequence[Sequence[Piece]]) -> bool:
            arrays = [sample.only(units).arrays]
            if not (arrays[0]["target_BL"] != IGNORE).any():
                return False
            got, want = (t.train(arrays, self.first_state) for t in (trainer, self.trainer))
            base = _floats(want)
            far = (
                np.abs(got.moments[path] - x).max(initial=0.0) > 1e-3 * np.abs(x).max()
                for path, x in base.items()
            )
            return any(far) or abs(got.losses[0] - want.losses[0]) > 1e-4 * want.losses[0]

        return bisect(sample.units, differs)


def _floats(course: Course) -> dict[str, np.ndarray]:
    """State of the optimizer after the first update; second moments are squares of what the first are of."""
    # Sorted: `mu`, the gradient itself, comes before `nu`.
    return {path: x for path, x in sorted(course.moments.items()) if x.dtype == np.float32}


def _nats(course: Course) -> np.ndarray:
    assert course.nats_BL is not None
    return course.nats_BL


def _rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))) if array.size else 0.0
