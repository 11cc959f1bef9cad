"""One trial: a setting's steps against its references, which many trials share."""

import contextlib
import dataclasses
import functools
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

from jtrain.bench.layout_trials import float64
from jtrain.bench.layout_trials.adversarial_batch import draw_batch
from jtrain.bench.layout_trials.bounds import NOISE, Comparison, References, compare
from jtrain.bench.layout_trials.descriptions import simpler
from jtrain.bench.layout_trials.settings import (
    DESCRIBED,
    DESCRIPTION,
    FACTORS,
    REJECTED,
    VOCABULARY,
    Setting,
    as_text,
    changed_factors,
    defaults,
    descent_of,
    is_float32,
    make_run,
    one_device,
    reference_of,
    refusal,
)
from jtrain.errors import UserError
from jtrain.model import expert_dispatch
from jtrain.step_comparison.comparable_run import BatchArrays, ComparableRun, RunResults

STEPS = 3
VARIANTS = 3
"""Numbers of steps of a run, and of sequences of batches of which a trial takes one."""
ULP = 2.0**-23
MOVED = (-2, -1, 1, 2, 5, 8)
"""Ulps by which embeddings are moved: an element at an edge falls to its other side in about half of the
runs.
"""
CLOSE = 3e-5
"""Difference of router logits below which float32 may choose another expert than float64."""


@dataclasses.dataclass
class Result:
    """Outcome of a trial.

    unequal: a line for each difference over its bound, or the error; empty if all is equal.
    shares: largest difference of each kind, as a share of its bound.
    refused: a refusal that came only with the step, after the config was accepted.
    """

    setting: Setting
    unequal: list[str]
    shares: dict[str, float]
    seconds: float
    refused: UserError | None = None


class Lab:
    """Runs trials and keeps their references."""

    def __init__(self) -> None:
        self._trained = functools.cache(self._train_one_device)
        self._truths = functools.cache(self._train_truth)
        self._moved = functools.cache(self._train_moved)

    def trial(self, setting: Setting, number: int) -> Result:
        """Runs a setting on the batches of trial `number`."""
        start = time.perf_counter()
        try:
            # Three sequences of batches are shared by all trials, so that references are trained once.
            references, batches = self.references(setting, number % VARIANTS)
            results = train(make_comparable(setting), setting, batches, references.one_device.first_state)
            comparison = compare(setting, results, references)
        except UserError as error:
            # A config that was accepted must run: whatever the step refuses, `validate` has to refuse before.
            return Result(setting, [str(error)], {}, time.perf_counter() - start, error)
        except Exception as error:  # whatever it is, it is a result of the trial
            # The last frames are those of the step.
            location = "".join(traceback.format_exception(error)[-4:])
            comparison = Comparison({}, [f"{type(error).__name__}: {str(error)[:600]}\n{location[-1500:]}"])
        return Result(setting, comparison.unequal, comparison.shares, time.perf_counter() - start)

    def references(self, setting: Setting, variant: int) -> tuple[References, Sequence[BatchArrays]]:
        """References of a setting, and the batches; of another variant where float32 may choose another
        expert.
        """
        # Another sequence of batches, if float32 and float64 could send a token to different experts.
        for chosen in range(variant, variant + 20):
            on_one_device = self._trained(_key(one_device(setting, precision=True)), chosen)
            truth, disturbed = self._truths(_key(one_device(setting, precision=True)), chosen)
            # In fewer bits routing differs anyway, and the bounds allow for it.
            if truth.closest > CLOSE or not is_float32(setting):
                exact = (
                    # `on_one_device` may round the optimizer's state; `exact`, for float32 only, does not.
                    self._trained(_key(one_device(setting, precision=False)), chosen)
                    if is_float32(setting)
                    else on_one_device
                )
                key = _key(one_device(setting, precision=True))
                moved = functools.partial(self._moved, key, chosen)
                return References(exact, on_one_device, truth, disturbed, moved), batches_of(chosen)
        raise AssertionError("every sequence of batches has a token that two experts serve equally well")

    def _train_one_device(self, key: tuple[tuple[str, object], ...], variant: int) -> RunResults:
        return train(_comparable(key), defaults() | dict(key), batches_of(variant), None)

    def _train_moved(self, key: tuple[tuple[str, object], ...], variant: int) -> list[RunResults]:
        """Runs whose embeddings are some ulps larger or smaller."""
        setting, first_state = defaults() | dict(key), self._trained(key, variant).first_state
        base_setting = setting | {"step.first weights": "given"}

        def moved_by(ulps: int) -> RunResults:
            run = make_run(setting)
            scale = run.model.embedding_scale * (1 + ulps * ULP)
            moved = dataclasses.replace(run, model=dataclasses.replace(run.model, embedding_scale=scale))
            comparable = ComparableRun(moved, checksums=bool(setting["step.checksums"]))
            return train(comparable, base_setting, batches_of(variant), first_state)

        return [moved_by(ulps) for ulps in MOVED]

    def _train_truth(
        self, key: tuple[tuple[str, object], ...], variant: int
    ) -> tuple[float64.ReferenceResults, list[float64.ReferenceResults]]:
        # A key holds the changes from the defaults only.
        setting = defaults() | dict(key)
        first = self._trained(key, variant).first
        rejected = (REJECTED - 1,) if setting["step.rejects"] else ()
        run = functools.partial(
            float64.train, reference_of(setting), descent_of(setting), first, batches_of(variant), rejected
        )
        # Two runs with errors, whose larger deviation counts.
        return run(), [run(noise=NOISE, seed=seed) for seed in range(2)]


# Sixteen compiled steps at most: each holds a program and its buffers.
@functools.lru_cache(maxsize=16)
def _comparable(key: tuple[tuple[str, object], ...]) -> ComparableRun:
    return make_comparable(defaults() | dict(key))


def make_comparable(setting: Setting) -> ComparableRun:
    """The compiled step of a setting."""
    return ComparableRun(make_run(setting), checksums=setting["step.checksums"])


def train(
    comparable: ComparableRun, setting: Setting, batches: Sequence[BatchArrays], first_state: object
) -> RunResults:
    """One step on each batch, as a setting says.

    Args:
      first_state: of the same run on one device, unless the setting draws its own first weights.
    """
    with _pieces_of_experts(setting["step.pieces of experts"] == "several"):
        return comparable.train(
            batches,
            None if setting["step.first weights"] == "drawn" else first_state,
            evaluates=setting["step.evaluates"],
            rejected=REJECTED if setting["step.rejects"] else None,
        )


@contextlib.contextmanager
def _pieces_of_experts(several: bool) -> Iterator[None]:
    """Cuts the tokens of a layer of experts into as many pieces as there may be, however few they are."""
    previous_rows = expert_dispatch.MIN_PIECE_ROWS
    # The library cuts large pieces only; with 1 row as the least, the small batches are cut too.
    expert_dispatch.MIN_PIECE_ROWS = 1 if several else previous_rows
    try:
        yield
    finally:
        expert_dispatch.MIN_PIECE_ROWS = previous_rows


def _key(setting: Setting) -> tuple[tuple[str, object], ...]:
    return tuple(changed_factors(setting).items())


@functools.cache
def batches_of(variant: int) -> tuple[BatchArrays, ...]:
    """The batch of each step."""
    return tuple(draw_batch(100 * variant + step, VOCABULARY) for step in range(STEPS))


def shrink(setting: Setting, fails: Callable[[Setting], bool]) -> Setting:
    """A setting that still fails with as few changes from the defaults as one pass over them finds."""
    for path in list(changed_factors(setting)):
        # A description is simplified below; the model without one is another.
        if path not in FACTORS:
            continue
        smaller = setting | {path: FACTORS[path][0]}
        # Each change is dropped once, in order; a smaller setting must still be accepted and still fail.
        if refusal(smaller) is None and fails(smaller):
            setting = smaller
    while setting["model"] == DESCRIBED:
        candidates = (setting | {DESCRIPTION: simple} for simple in simpler(setting[DESCRIPTION]))
        smaller = next((s for s in candidates if refusal(s) is None and fails(s)), None)
        if smaller is None:
            break
        setting = smaller
    return setting


def describe_result(name: str, result: Result) -> str:
    """A line for a trial, and one for each difference."""
    verdict = (
        f"refused by the step: {result.refused}"
        if result.refused
        else "UNEQUAL"
        if result.unequal
        else "equal"
    )
    lines = [f"{name}: {verdict} in {result.seconds:.1f} s: {as_text(result.setting)}", *result.unequal]
    return "\n    ".join(lines)
