"""Preference pairs: the first loss, and the loss of trained weights against the formula in float64.

Packed pairs, layouts and accumulation are compared by the lines that all runs have. Two lines are of pairs
alone. At the start the model is its reference, so no pair is preferred: the loss is one number, ln 2 of DPO,
packed or not. After two updates it is another one, and follows from the nats of each text: those of the
trained model, and those of the first one, which the reference is. A reference that is trained along, or texts
that change places, differ there.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jtrain.check.layouts import LayoutReference
from jtrain.check.lines import Differs, DoesNotApply
from jtrain.check.records import REFERENCE, Piece, Sample, one_by_one
from jtrain.check.rounding import MARGIN, RUNS, Worst, largest, moved
from jtrain.data.references import StoredReferences, sums_of_samples
from jtrain.errors import UserError
from jtrain.layout.constants import IGNORE
from jtrain.step.objective import DPO, Objective
from jtrain.step_comparison.comparable_run import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    ComparableRun,
    RunResults,
)

FIRST_LOSS = 1e-6
"""Largest relative difference of the first loss."""


def with_stored_reference(comparable: ComparableRun, samples: Sequence[Sample]) -> list[Sample]:
    """The same batches with what the small run's first weights say of their pairs, as a file would store it."""
    out = []
    for sample in samples:
        nats_BL = comparable.evaluate(sample.arrays)
        ids = sample.ids
        stored = StoredReferences(sums_of_samples(nats_BL, *ids), name="the small run")
        reference_BL = stored.at_targets(*ids, np.arange(nats_BL.shape[1]))
        out.append(Sample({**sample.arrays, REFERENCE: reference_BL}, sample.pieces))
    return out


def first_loss_is_ln_2(reference: LayoutReference, objective: Objective) -> str:
    """Proves that the first loss is that of no preference, of packed pairs and of each pair in a row of its
    own.

    Raises:
      Differs: names the loss, or the first pair that has another one.
      DoesNotApply: the objective has no reference.
    """
    assert isinstance(objective, DPO)
    if objective.reference == "none":
        raise DoesNotApply("objective.reference=none: the loss begins with what the model prefers")
    expected = loss_of_differences(objective, np.zeros(1))[0]
    sample, loss = reference.samples[0], reference.results.losses[0]
    if not abs(loss / expected - 1) <= FIRST_LOSS:
        raise Differs(f"the loss of step 1 is {loss:.7g}, and of no preference {expected:.7g}")
    pairs = _pairs_with_targets(sample)
    for alone, numbers in one_by_one(sample, pairs):
        loss = reference.comparable.train([alone.arrays], reference.first_state).losses[0]
        if not abs(loss / expected - 1) <= FIRST_LOSS:
            raise Differs(
                f"the loss is {loss:.7g} of pairs alone, and of no preference {expected:.7g}; first record "
                f"of them: {pairs[numbers[0]][0].place}"
            )
    return f"{expected:.6f} of {len(pairs)} pairs within {FIRST_LOSS:.0e}, packed and alone"


def loss_is_formula(reference: LayoutReference, objective: Objective) -> str:
    """Proves the loss and gradients of packed pairs at trained weights, which tell the texts of a pair apart.

    The loss is that of the formula in float64; gradients are the sum of those of each pair in a row of its
    own.

    Raises:
      Differs: names the loss with the pair that differs most, or the tensor.
    """
    assert isinstance(objective, DPO)
    comparable, sample = reference.comparable, reference.samples[0]
    pairs = _pairs_with_targets(sample)
    trained = dataclasses.replace(reference.first_state, params=reference.results.last_params)
    results_of_runs = [comparable.train([sample.arrays], trained, evaluates=True)] + [
        comparable.train(
            [sample.arrays],
            dataclasses.replace(trained, params=moved(trained.params, seed)),
            evaluates=True,
        )
        for seed in range(RUNS)
    ]
    reference_nats_BL = None if objective.reference == "none" else reference.results.nats_BL
    losses = np.asarray(
        [
            np.mean(
                loss_of_differences(objective, _preferences(objective, pairs, sample, c, reference_nats_BL))
            )
            for c in results_of_runs
        ]
    )
    packed, expected = results_of_runs[0], float(losses[0])
    worst = Worst()
    bound = LOSS_TOLERANCE * abs(expected) + MARGIN * float(np.abs(losses - expected).max())
    worst.add("loss of pairs at trained weights", abs(packed.losses[0] - expected), bound)
    untrained = loss_of_differences(objective, np.zeros(1))[0]
    if objective.reference != "none" and not abs(expected - untrained) > 10 * bound:
        raise Differs(f"the loss is {expected:.7g} before and after {len(reference.results.losses)} updates")
    worst.refuse()
    total: dict[str, Any] = {}
    for alone, numbers in one_by_one(sample, pairs):
        gradients = _gradients(comparable, comparable.train([alone.arrays], trained))
        total = {path: total.get(path, 0) + len(numbers) / len(pairs) * g for path, g in gradients.items()}
    base, *runs = (_gradients(comparable, results) for results in results_of_runs)
    noise = largest(runs, base)
    for path, gradient in total.items():
        bound = GRADIENT_TOLERANCE * float(np.abs(gradient).max(initial=0.0)) + MARGIN * noise[path]
        worst.add(f"gradient of {path}", float(np.abs(base[path] - gradient).max(initial=0.0)), bound)
    worst.refuse()
    return f"{len(pairs)} pairs, {packed.losses[0]:.6f} after 2 updates, and gradients of each alone; {worst.text}"


def _pairs_with_targets(sample: Sample) -> list[tuple[Piece, ...]]:
    """Pairs of which both texts have targets: others have no loss."""
    target_BL = sample.arrays["target_BL"]
    pairs = [pair for pair in sample.units if all((piece.of(target_BL) != IGNORE).any() for piece in pair)]
    if not pairs:
        raise UserError(
            "no pair of the small batch has a target in both of its texts: every answer is longer."
        )
    return pairs


def _preferences(
    objective: DPO,
    pairs: Sequence[Sequence[Piece]],
    sample: Sample,
    results: RunResults,
    reference_nats_BL: Any,
) -> np.ndarray:
    """Better minus worse of `log p(trained) - log p(reference)`, one number for each pair, in float64.

    Scores are sums over a text's targets with the form `sigmoid`, and their means with every other form.
    Without a reference log p(trained) stands alone.
    """
    nats_BL = results.nats_BL
    assert nats_BL is not None
    target_BL = sample.arrays["target_BL"]
    out = []
    for pair in pairs:
        scores = []
        for piece in sorted(pair, key=lambda piece: piece.side or 0):
            is_target = piece.of(target_BL) != IGNORE
            nats = piece.of(nats_BL).astype(np.float64) - (
                0.0 if reference_nats_BL is None else piece.of(reference_nats_BL).astype(np.float64)
            )
            score = -float(nats[is_target].sum())
            scores.append(score if objective.form == "sigmoid" else score / int(is_target.sum()))
        out.append(scores[0] - scores[1])
    return np.asarray(out)


def loss_of_differences(objective: DPO, difference: np.ndarray) -> np.ndarray:
    """Loss of pairs by the difference of their scores, in float64, as the table of docs/finetuning.md has it."""
    if objective.form == "ipo":
        return (difference - 1 / (2 * objective.beta)) ** 2
    return np.logaddexp(0.0, objective.margin - objective.beta * difference)


def _gradients(comparable: ComparableRun, results: RunResults) -> dict[str, np.ndarray]:
    """First moments of the first step by path, without the factor by which its gradient was clipped."""
    clip = comparable.optimizer.spec.clip_norm
    factor = 1.0 if clip is None else max(1.0, results.norms[0] / clip)
    assert math.isfinite(factor)
    return {
        path: moment.astype(np.float64) * factor
        for path, moment in results.moments.items()
        if path.startswith("mu ")
    }
