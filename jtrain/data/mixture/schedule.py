"""Schedules of the mixture: shares of the sources per step, constant, in stages, piecewise linear or by a
function.
"""

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

    @abc.abstractmethod
    def describe(self, step: int) -> str:
        """Describes the shares at `step` for logs."""

    @property
    @abc.abstractmethod
    def identity(self) -> str:
        """Text that changes if, and only if, the weights of some step can change; of a function, with its
        file.
        """


@dataclasses.dataclass(frozen=True)
class Constant(Schedule):
    """Shares that are the same at every step.

    weights_by_source: a source that is not named has weight 0. None: use the `weight` of each source.
    """

    weights_by_source: Weights | None = None

    def __post_init__(self) -> None:
        if self.weights_by_source is not None:
            _check(self.weights_by_source, "data.mixture.weights_by_source")

    def weights(self, step: int, names: Sequence[str]) -> Float64[np.ndarray, " sources"]:
        assert self.weights_by_source is not None, "call own_weights() first"
        names = tuple(names)
        if names not in self._found:
            self._found[names] = _shares(self.weights_by_source, names, "data.mixture.weights_by_source")
        return self._found[names]

    @functools.cached_property
    def _found(self) -> dict[tuple[str, ...], Float64[np.ndarray, " sources"]]:
        """Shares by names: every step ahead asks for the same ones."""
        return {}

    def describe(self, step: int) -> str:
        return f"constant: {_listed(self.weights_by_source or {})}"

    @property
    def identity(self) -> str:
        return _identity("constant", [(0, self.weights_by_source or {})])


@dataclasses.dataclass(frozen=True)
class Staged(Schedule):
    """Shares in stages, each from its step until the next one: `((0, {"web": 1}), (5000, {"web": 1, "code":
    1}))`.
    """

    stages: Points

    def __post_init__(self) -> None:
        _check_steps(self.stages, "data.mixture.stages")
        if self.stages[0][0] != 0:
            raise UserError(
                f"data.mixture.stages begin at step {self.stages[0][0]}: earlier steps have no shares. "
                "Let the first stage begin at step 0."
            )

    def weights(self, step: int, names: Sequence[str]) -> Float64[np.ndarray, " sources"]:
        return _shares(self._stage(step)[1], names, "data.mixture.stages")

    def later(self, step: int) -> Points:
        return tuple(stage for stage in self.stages if stage[0] > step)

    def describe(self, step: int) -> str:
        first, weights = self._stage(step)
        return f"stage from step {first}: {_listed(weights)}"

    @property
    def identity(self) -> str:
        return _identity("staged", self.stages)

    def _stage(self, step: int) -> tuple[int, Weights]:
        return max((stage for stage in self.stages if stage[0] <= step), key=lambda stage: stage[0])


@dataclasses.dataclass(frozen=True)
class Linear(Schedule):
    """Shares interpolated linearly between points; constant before the first and after the last point."""

    points: Points

    def __post_init__(self) -> None:
        _check_steps(self.points, "data.mixture.points")

    def weights(self, step: int, names: Sequence[str]) -> Float64[np.ndarray, " sources"]:
        steps = [point[0] for point in self.points]
        after = sum(at <= step for at in steps)
        around = max(after - 1, 0), min(after, len(steps) - 1)
        ends = [_shares(self.points[i][1], names, "data.mixture.points") for i in around]
        if after in (0, len(steps)):
            return ends[0]
        done = (step - steps[after - 1]) / (steps[after] - steps[after - 1])
        return ends[0] * (1.0 - done) + ends[1] * done

    def later(self, step: int) -> Points:
        # Sources of a point have weight one step after the previous point.
        rising = ((before + 1, weights) for (before, _), (_, weights) in itertools.pairwise(self.points))
        return tuple(point for point in rising if point[0] > step)

    def describe(self, step: int) -> str:
        names = sorted({name for _, weights in self.points for name in weights})
        shares = dict(zip(names, self.weights(step, names).tolist(), strict=True))
        return f"linear over steps {self.points[0][0]} to {self.points[-1][0]}, at {step}: {_listed(shares)}"

    @property
    def identity(self) -> str:
        return _identity("linear", self.points)


@dataclasses.dataclass(frozen=True)
class Custom(Schedule):
    """Shares from a function of the step. The function may depend on nothing else, because every host calls
    it itself.

    function: `module:name`, or `path/to/file.py:name`; takes a step, returns weights by source.
    """

    function: str

    def weights(self, step: int, names: Sequence[str]) -> Float64[np.ndarray, " sources"]:
        weights: Any = _load(self.function)[0](step)
        where = f"data.mixture.function={self.function!r} at step {step}"
        if not isinstance(weights, Mapping):
            raise UserError(f"{where} returned a {type(weights).__name__}, not a dict of weights by source.")
        _check(weights, where)
        return _shares(weights, names, where)

    def describe(self, step: int) -> str:
        return f"{self.function} at step {step}: {_listed(_load(self.function)[0](step))}"

    @property
    def identity(self) -> str:
        return f"custom {self.function} {_load(self.function)[1]}"


def own_weights(schedule: Schedule, weights: Weights) -> Schedule:
    """Returns the schedule; `Constant()` is replaced by constant shares from the sources' own `weights`.

    Raises:
      UserError: a weight is negative or not a number, or no weight is above zero.
    """
    if schedule != Constant():
        return schedule
    _check(weights, "data.sources.*.weight")
    return Constant(dict(weights))


def integer_shares(weights: Float64[np.ndarray, " sources"]) -> Int64[np.ndarray, " sources"]:
    """Returns shares in proportion to `weights` that add up to exactly `ONE`; at least 1 for a weight above
    zero.

    The result must not be written to: the shares of the last weights are kept, as most steps have the same
    ones.
    """
    return _integer_shares(weights.tobytes())


@functools.lru_cache(maxsize=4)
def _integer_shares(content: bytes) -> Int64[np.ndarray, " sources"]:
    weights = np.frombuffer(content, np.float64)
    scaled = np.floor(weights * (ONE / math.fsum(weights))).astype(np.int64)
    shares = np.where(weights > 0, np.maximum(scaled, 1), 0)
    shares[np.argmax(weights)] += ONE - shares.sum()
    shares.flags.writeable = False
    return shares


def _check(weights: Weights, where: str) -> None:
    """Refuses weights that are negative, not finite numbers, or all zero."""
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise UserError(
                f"{where}: the weight of {name!r} is {weight!r}. Set a number of at least 0 (0: left out)."
            )
    if not any(weight > 0 for weight in weights.values()):
        raise UserError(
            f"{where}: no source has a weight above 0 ({_listed(weights) or 'no source is named'}). Give at "
            "least one source a weight."
        )


def _check_steps(points: Points, where: str) -> None:
    steps = [step for step, _ in points]
    if not steps or steps[0] < 0 or any(b <= a for a, b in itertools.pairwise(steps)):
        raise UserError(
            f"{where}: the steps are {steps}. Give at least one step, none below 0, in ascending order."
        )
    for step, weights in points:
        _check(weights, f"{where} at step {step}")


def _shares(weights: Weights, names: Sequence[str], where: str) -> Float64[np.ndarray, " sources"]:
    unknown = sorted(weights.keys() - set(names))
    if unknown:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise UserError(
            f"{where}: there is no source {unknown[0]!r}. {did_you_mean(unknown[0], names)}"
            f"data.sources has {', '.join(names[:8])}{more}."
        )
    return _in_order(tuple(weights.items()), tuple(names))


@functools.lru_cache(maxsize=8)
def _in_order(
    weights: tuple[tuple[str, float | int], ...], names: tuple[str, ...]
) -> Float64[np.ndarray, " sources"]:
    """Returns normalized shares in the order of `names`; cached, because every step ahead asks for the same
    mixture.
    """
    by_name = dict(weights)
    found = np.asarray([by_name.get(name, 0.0) for name in names], np.float64)
    found /= math.fsum(found)
    found.flags.writeable = False
    return found


def _listed(weights: Weights, most: int = 8) -> str:
    """Lists shares, the largest first: `web 0.5, code 0.3, 4 more`."""
    total = math.fsum(weights.values()) or 1.0
    ranked = sorted(weights.items(), key=lambda item: -item[1])
    more = [f"{len(ranked) - most} more"] if len(ranked) > most else []
    return ", ".join([f"{name} {weight / total:.4g}" for name, weight in ranked[:most]] + more)


def _identity(kind: str, points: Iterable[tuple[int, Weights]]) -> str:
    shares = [
        (
            step,
            sorted(
                (name, weight / math.fsum(weights.values())) for name, weight in weights.items() if weight
            ),
        )
        for step, weights in points
    ]
    return f"{kind} {hashlib.blake2b(json.dumps(shares).encode(), digest_size=8).hexdigest()}"


@functools.cache
def _load(function: str) -> tuple[Callable[[int], Any], str]:
    """Loads a function by its location; returns it and a hash of its file."""
    found, module = load_function("data.mixture.function", function)
    text = Path(module.__file__).read_bytes() if module.__file__ else b""
    return found, hashlib.blake2b(text, digest_size=8).hexdigest()
