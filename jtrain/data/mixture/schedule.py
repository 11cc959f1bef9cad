"""Schedules of the mixture: shares of the sources per step, constant, staged, linear or by a function."""

import abc
import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from jtrain.errors import UserError, did_you_mean
from jtrain.runtime.user_code import load_function

SHARE_BITS = 28
ONE = 1 << SHARE_BITS
"""Sum of the integer shares. Resolution 4e-9; a step of 2**34 tokens times a share still fits into 63
bits."""

Weights = Mapping[str, float | int]

Points = tuple[tuple[int, Weights], ...]
"""Pairs of a step and the weights by source from that step on."""


class Schedule(abc.ABC):
    """Shares of the sources per step."""

    @abc.abstractmethod
    def weights(self, step: int, names: Sequence[str]) -> Float64[np.ndarray, " sources"]:
        """Returns the shares of `names` at `step`, which add up to 1."""

    def later(self, step: int) -> Points:
        """Returns the changes of weights after `step`: (first step, weights by source), the soonest first.

        Returns nothing if the shares never change, or nobody knows how.
        """
        return ()

    @property
    def jumps(self) -> tuple[int, ...]:
        """Steps whose shares are others, all at once, than those of the step before; those of a function are
        not known.
        """
        return ()

    @abc.abstractmethod
    def describe(self, step: int) -> str:
        """Describes the shares at `step` for logs."""

    @property
    @abc.abstractmethod
    def identity(self) -> str:
        """Text that changes whenever the weights of some step may; for a function, whenever its file does."""


@dataclasses.dataclass(frozen=True)
class Constant(Schedule):
    """Shares that are the same at every step.

    weights_by_source: a source that is not named has weight 0. None: use the `weight` of each source.
    """

    weights_by_source: Weights | None = None

    def __post_init__(self) -> None:
        if self.weights_by_source is not None:
            _check_weights(self.weights_by_source, "data.mixture.weights_by_source")

    def weights(self, step: int, names: Sequence[str]) -> Float64[np.ndarray, " sources"]:
        # The weights of the sources are known only where the sources are, not in the mixture.
        assert self.weights_by_source is not None, "call own_weights() first"
        names = tuple(names)
        if names not in self._shares_by_names:
            self._shares_by_names[names] = _shares(
                self.weights_by_source, names, "data.mixture.weights_by_source"
            )
        return self._shares_by_names[names]

    @functools.cached_property
    def _shares_by_names(self) -> dict[tuple[str, ...], Float64[np.ndarray, " sources"]]:
        """Shares by names: every step ahead asks for the same ones."""
        return {}

    def describe(self, step: int) -> str:
        return f"constant: {_list_shares(self.weights_by_source or {})}"

    @property
    def identity(self) -> str:
        return _identity("constant", [(0, self.weights_by_source or {})])


@dataclasses.dataclass(frozen=True)
class Staged(Schedule):
    """Shares in stages, each from its step until the next one.

    `((0, {"web": 1}), (5000, {"web": 1, "code": 1}))` halves the share of `web` at step 5000.

    stages: first step of each stage, and the shares of the sources in it.
    """

    stages: Points

    def __post_init__(self) -> None:
        _check_steps(self.stages, "data.mixture.stages")
        # A linear schedule has shares before its first point; stages have none.
        if self.stages[0][0] != 0:
            raise UserError(
                f"data.mixture.stages begin at step {self.stages[0][0]}: earlier steps have no shares. "
                "Let the first stage begin at step 0."
            )

    def weights(self, step: int, names: Sequence[str]) -> Float64[np.ndarray, " sources"]:
        return _shares(self._stage(step)[1], names, "data.mixture.stages")

    def later(self, step: int) -> Points:
        return tuple(stage for stage in self.stages if stage[0] > step)

    @property
    def jumps(self) -> tuple[int, ...]:
        return tuple(step for step, _ in self.stages[1:])

    def describe(self, step: int) -> str:
        first, weights = self._stage(step)
        return f"stage from step {first}: {_list_shares(weights)}"

    @property
    def identity(self) -> str:
        return _identity("staged", self.stages)

    def _stage(self, step: int) -> tuple[int, Weights]:
        # Never empty: the first stage begins at step 0.
        return max((stage for stage in self.stages if stage[0] <= step), key=lambda stage: stage[0])


@dataclasses.dataclass(frozen=True)
class Linear(Schedule):
    """Shares interpolated linearly between points; constant before the first and after the last point.

    points: step of each point, and the shares of the sources there.
    """

    points: Points

    def __post_init__(self) -> None:
        _check_steps(self.points, "data.mixture.points")

    def weights(self, step: int, names: Sequence[str]) -> Float64[np.ndarray, " sources"]:
        steps = [point[0] for point in self.points]
        num_passed = sum(point_step <= step for point_step in steps)
        # Index of the last point at or before `step`, and of the next one.
        neighbours = max(num_passed - 1, 0), min(num_passed, len(steps) - 1)
        neighbour_shares = [_shares(self.points[i][1], names, "data.mixture.points") for i in neighbours]
        # Before the first point and behind the last one the shares stay as they are there.
        if num_passed in (0, len(steps)):
            return neighbour_shares[0]
        fraction = (step - steps[num_passed - 1]) / (steps[num_passed] - steps[num_passed - 1])
        return neighbour_shares[0] * (1.0 - fraction) + neighbour_shares[1] * fraction

    def later(self, step: int) -> Points:
        # Sources of a point have weight one step after the previous point.
        changes = (
            (earlier_step + 1, weights) for (earlier_step, _), (_, weights) in itertools.pairwise(self.points)
        )
        return tuple(point for point in changes if point[0] > step)

    def describe(self, step: int) -> str:
        # Only the names that the points have: the sources are not known here.
        names = sorted({name for _, weights in self.points for name in weights})
        shares = dict(zip(names, self.weights(step, names).tolist(), strict=True))
        return (
            f"linear over steps {self.points[0][0]} to {self.points[-1][0]}, at {step}: "
            f"{_list_shares(shares)}"
        )

    @property
    def identity(self) -> str:
        return _identity("linear", self.points)


@dataclasses.dataclass(frozen=True)
class Custom(Schedule):
    """Shares from a function of the step alone, since every host calls it itself.

    function: `module:name`, or `path/to/file.py:name`; takes a step, returns weights by source.
    """

    function: str

    def weights(self, step: int, names: Sequence[str]) -> Float64[np.ndarray, " sources"]:
        weights: Any = _load(self.function)[0](step)
        setting = f"data.mixture.function={self.function!r} at step {step}"
        if not isinstance(weights, Mapping):
            raise UserError(
                f"{setting} returned a {type(weights).__name__}, not a dict of weights by source."
            )
        _check_weights(weights, setting)
        return _shares(weights, names, setting)

    def describe(self, step: int) -> str:
        return f"{self.function} at step {step}: {_list_shares(_load(self.function)[0](step))}"

    @property
    def identity(self) -> str:
        return f"custom {self.function} {_load(self.function)[1]}"


def own_weights(schedule: Schedule, weights: Weights) -> Schedule:
    """Returns the schedule; `Constant()` is replaced by constant shares from the sources' own `weights`.

    Raises:
      UserError: a weight is negative or not a number, or no weight is above zero.
    """
    # A constant without weights stands for the weights of the sources.
    if schedule != Constant():
        return schedule
    _check_weights(weights, "data.sources.*.weight")
    return Constant(dict(weights))


def integer_shares(weights: Float64[np.ndarray, " sources"]) -> Int64[np.ndarray, " sources"]:
    """Returns shares proportional to `weights` that add up to `ONE`; at least 1 for a weight above 0.

    The result must not be written to: it is cached, as most steps have the same weights.
    """
    # By their bytes, as arrays cannot be keys of a cache.
    return _integer_shares(weights.tobytes())


@functools.lru_cache(maxsize=4)
def _integer_shares(content: bytes) -> Int64[np.ndarray, " sources"]:
    weights = np.frombuffer(content, np.float64)
    # `fsum` rounds once, so the order of the sources does not change the sum.
    scaled = np.floor(weights * (ONE / math.fsum(weights))).astype(np.int64)
    # At least 1 unit, since a source with a weight must be read at some time.
    shares = np.where(weights > 0, np.maximum(scaled, 1), 0)
    # The largest share takes what rounding left: up to one unit per source, of 2**28.
    shares[np.argmax(weights)] += ONE - shares.sum()
    shares.flags.writeable = False
    return shares


def _check_weights(weights: Weights, setting: str) -> None:
    """Refuses weights that are negative, not finite numbers, or all zero."""
    for name, weight in weights.items():
        # True is an int to Python, and surely a mistake as a weight.
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise UserError(
                f"{setting}: the weight of {name!r} is {weight!r}. Set a number of at least 0 (0: left out)."
            )
    if not any(weight > 0 for weight in weights.values()):
        raise UserError(
            f"{setting}: no source has a weight above 0 ({_list_shares(weights) or 'no source is named'}). "
            "Give at least one source a weight."
        )


def _check_steps(points: Points, setting: str) -> None:
    steps = [step for step, _ in points]
    if not steps or steps[0] < 0 or any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        raise UserError(
            f"{setting}: the steps are {steps}. Give at least one step, none below 0, in ascending order."
        )
    for step, weights in points:
        _check_weights(weights, f"{setting} at step {step}")


def _shares(weights: Weights, names: Sequence[str], setting: str) -> Float64[np.ndarray, " sources"]:
    # A source that is missing from `weights` has weight 0; one that does not exist is a typing error.
    unknown = sorted(weights.keys() - set(names))
    if unknown:
        omitted = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise UserError(
            f"{setting}: there is no source {unknown[0]!r}. {did_you_mean(unknown[0], names)}"
            f"data.sources has {', '.join(names[:8])}{omitted}."
        )
    return _normalize(tuple(weights.items()), tuple(names))


@functools.lru_cache(maxsize=8)
def _normalize(
    weights: tuple[tuple[str, float | int], ...], names: tuple[str, ...]
) -> Float64[np.ndarray, " sources"]:
    """Returns normalized shares in the order of `names`; cached, since every step ahead asks for the same."""
    by_name = dict(weights)
    shares = np.asarray([by_name.get(name, 0.0) for name in names], np.float64)
    shares /= math.fsum(shares)
    shares.flags.writeable = False
    return shares


def _list_shares(weights: Weights, max_names: int = 8) -> str:
    """Lists shares, the largest first: `web 0.5, code 0.3, 4 more`."""
    total = math.fsum(weights.values()) or 1.0
    ranked = sorted(weights.items(), key=lambda item: -item[1])
    omitted = [f"{len(ranked) - max_names} more"] if len(ranked) > max_names else []
    return ", ".join([f"{name} {weight / total:.4g}" for name, weight in ranked[:max_names]] + omitted)


def _identity(kind: str, points: Iterable[tuple[int, Weights]]) -> str:
    shares = [
        (
            step,
            # Sorted and without zeros, as neither the order of sources nor one that is left out matters.
            sorted(
                (name, weight / math.fsum(weights.values())) for name, weight in weights.items() if weight
            ),
        )
        for step, weights in points
    ]
    # Of shares and not of weights: weights 1 and 1 are the same mixture as 2 and 2.
    return f"{kind} {hashlib.blake2b(json.dumps(shares).encode(), digest_size=8).hexdigest()}"


@functools.cache
def _load(function: str) -> tuple[Callable[[int], Any], str]:
    """Loads a function by its location; returns it and a hash of its file."""
    loaded, module = load_function("data.mixture.function", function)
    # Of the whole file: a change in a helper of the function changes the weights too.
    text = Path(module.__file__).read_bytes() if module.__file__ else b""
    return loaded, hashlib.blake2b(text, digest_size=8).hexdigest()
