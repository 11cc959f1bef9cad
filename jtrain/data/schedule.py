"""Shares of the sources in the mixture, step by step: constant, in stages, linear between steps, or a function."""

import dataclasses
import difflib
import functools
import hashlib
import importlib
import importlib.util
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

SHARE_BITS = 28
ONE = 1 << SHARE_BITS
"""Shares as integers add up to this: to 4e-9, and a step of 2**34 tokens times a share still fits 63 bits."""

Weights = Mapping[str, float | int]

Points = tuple[tuple[int, Weights], ...]
"""Weights by source, each from a step on."""


@dataclasses.dataclass(frozen=True)
class Constant:
    """The same shares at every step.

    weights_by_source: a source that is not named has none. None: each source's own `weight`.
    """

    weights_by_source: Weights | None = None

    def __post_init__(self) -> None:
        if self.weights_by_source is not None:
            _check(self.weights_by_source, "data.mixture.weights_by_source")

    def weights(self, step: int, names: Sequence[str]) -> Float64[np.ndarray, " sources"]:
        """Shares of `names` at `step`, which add up to 1."""
        assert self.weights_by_source is not None, "own_weights() comes first"
        return _shares(self.weights_by_source, names, "data.mixture.weights_by_source")

    def later(self, step: int) -> Points:
        """None: see `Staged.later`."""
        return ()

    def describe(self, step: int) -> str:
        """For logs."""
        return f"constant: {_listed(self.weights_by_source or {})}"

    @property
    def identity(self) -> str:
        """Changes if, and only if, the weights of some step can."""
        return _identity("constant", [(0, self.weights_by_source or {})])


@dataclasses.dataclass(frozen=True)
class Staged:
    """Shares that hold from a step on, until the next stage: `((0, {"web": 1}), (5000, {"web": 1, "code": 1}))`."""

    stages: Points

    def __post_init__(self) -> None:
        _check_steps(self.stages, "data.mixture.stages")
        if self.stages[0][0] != 0:
            raise ValueError(
                f"data.mixture.stages begin at step {self.stages[0][0]}: nothing says what the steps before hold. "
                "Let the first stage begin at step 0."
            )

    def weights(self, step: int, names: Sequence[str]) -> Float64[np.ndarray, " sources"]:
        """Shares of `names` at `step`, which add up to 1."""
        return _shares(self._stage(step)[1], names, "data.mixture.stages")

    def later(self, step: int) -> Points:
        """Which sources will have weight at a step after `step`, and from which step on; the soonest first."""
        return tuple(stage for stage in self.stages if stage[0] > step)

    def describe(self, step: int) -> str:
        """For logs."""
        first, weights = self._stage(step)
        return f"stage from step {first}: {_listed(weights)}"

    @property
    def identity(self) -> str:
        """Changes if, and only if, the weights of some step can."""
        return _identity("staged", self.stages)

    def _stage(self, step: int) -> tuple[int, Weights]:
        return max((stage for stage in self.stages if stage[0] <= step), key=lambda stage: stage[0])


@dataclasses.dataclass(frozen=True)
class Linear:
    """Shares that move in a straight line from point to point; before the first and after the last they stand still."""

    points: Points

    def __post_init__(self) -> None:
        _check_steps(self.points, "data.mixture.points")

    def weights(self, step: int, names: Sequence[str]) -> Float64[np.ndarray, " sources"]:
        """Shares of `names` at `step`, which add up to 1: between two points the mean of their shares."""
        steps = [point[0] for point in self.points]
        after = sum(at <= step for at in steps)
        around = max(after - 1, 0), min(after, len(steps) - 1)
        ends = [_shares(self.points[i][1], names, "data.mixture.points") for i in around]
        if after in (0, len(steps)):
            return ends[0]
        done = (step - steps[after - 1]) / (steps[after] - steps[after - 1])
        return ends[0] * (1.0 - done) + ends[1] * done

    def later(self, step: int) -> Points:
        """As `Staged.later`: what a point names has weight from the step behind the point before."""
        rising = ((before + 1, weights) for (before, _), (_, weights) in itertools.pairwise(self.points))
        return tuple(point for point in rising if point[0] > step)

    def describe(self, step: int) -> str:
        """For logs."""
        names = sorted({name for _, weights in self.points for name in weights})
        shares = dict(zip(names, self.weights(step, names).tolist(), strict=True))
        return f"linear over steps {self.points[0][0]} to {self.points[-1][0]}, at {step}: {_listed(shares)}"

    @property
    def identity(self) -> str:
        """Changes if, and only if, the weights of some step can."""
        return _identity("linear", self.points)


@dataclasses.dataclass(frozen=True)
class Custom:
    """Shares from a function of the step, which must depend on nothing else: every host calls it for itself.

    function: `module:name`, or `path/to/file.py:name`; takes a step, returns weights by source.
    """

    function: str

    def weights(self, step: int, names: Sequence[str]) -> Float64[np.ndarray, " sources"]:
        """Shares of `names` at `step`, which add up to 1."""
        weights: Any = _load(self.function)[0](step)
        where = f"data.mixture.function={self.function!r} at step {step}"
        if not isinstance(weights, Mapping):
            raise ValueError(f"{where} returned a {type(weights).__name__}, not a dict of weights by source.")
        _check(weights, where)
        return _shares(weights, names, where)

    def later(self, step: int) -> Points:
        """None, since nobody can know: see `Staged.later`."""
        return ()

    def describe(self, step: int) -> str:
        """For logs."""
        return f"{self.function} at step {step}: {_listed(_load(self.function)[0](step))}"

    @property
    def identity(self) -> str:
        """Changes with the text of the function's file."""
        return f"custom {self.function} {_load(self.function)[1]}"


Schedule = Constant | Staged | Linear | Custom


def own_weights(schedule: Schedule, weights: Weights) -> Schedule:
    """The schedule, with the sources' own `weights` where it is `Constant()`.

    Raises:
      ValueError: a weight is negative or no number, or none is above zero.
    """
    if schedule != Constant():
        return schedule
    _check(weights, "data.sources.*.weight")
    return Constant(dict(weights))


def integer_shares(weights: Float64[np.ndarray, " sources"]) -> Int64[np.ndarray, " sources"]:
    """Shares in proportion to `weights` that add up to `ONE` exactly; at least 1 for a weight above zero."""
    scaled = np.floor(weights * (ONE / math.fsum(weights))).astype(np.int64)
    shares = np.where(weights > 0, np.maximum(scaled, 1), 0)
    shares[np.argmax(weights)] += ONE - shares.sum()
    return shares


def _check(weights: Weights, where: str) -> None:
    """Refuses weights that are no shares of anything."""
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ValueError(f"{where}: the weight of {name!r} is {weight!r}. Set a number from 0 (left out) up.")
    if not any(weight > 0 for weight in weights.values()):
        raise ValueError(
            f"{where}: no source has a weight above 0 ({_listed(weights) or 'none is named'}). Give at least one of "
            "them a weight."
        )


def _check_steps(points: Points, where: str) -> None:
    steps = [step for step, _ in points]
    if not steps or steps[0] < 0 or any(b <= a for a, b in itertools.pairwise(steps)):
        raise ValueError(
            f"{where}: the steps are {steps}. Give at least one, from 0 up, each later than the one before."
        )
    for step, weights in points:
        _check(weights, f"{where} at step {step}")


def _shares(weights: Weights, names: Sequence[str], where: str) -> Float64[np.ndarray, " sources"]:
    unknown = sorted(weights.keys() - set(names))
    if unknown:
        near = difflib.get_close_matches(unknown[0], names, n=3) or list(names)[:8]
        raise ValueError(
            f"{where}: there is no source {unknown[0]!r}. Nearest names in data.sources: {', '.join(near)}."
        )
    return _in_order(tuple(weights.items()), tuple(names))


@functools.lru_cache(maxsize=8)
def _in_order(weights: tuple[tuple[str, float | int], ...], names: tuple[str, ...]) -> Float64[np.ndarray, " sources"]:
    """Kept, because a constant mixture of hundreds of sources would be looked up anew for every step ahead."""
    by_name = dict(weights)
    found = np.asarray([by_name.get(name, 0.0) for name in names], np.float64)
    found /= math.fsum(found)
    found.flags.writeable = False
    return found


def _listed(weights: Weights, most: int = 8) -> str:
    """`web 0.5000, code 0.3000, 4 more`: shares, the largest first."""
    total = math.fsum(weights.values()) or 1.0
    ranked = sorted(weights.items(), key=lambda item: -item[1])
    more = [f"{len(ranked) - most} more"] if len(ranked) > most else []
    return ", ".join([f"{name} {weight / total:.4g}" for name, weight in ranked[:most]] + more)


def _identity(kind: str, points: Iterable[tuple[int, Weights]]) -> str:
    shares = [
        (step, sorted((name, weight / math.fsum(weights.values())) for name, weight in weights.items() if weight))
        for step, weights in points
    ]
    return f"{kind} {hashlib.blake2b(json.dumps(shares).encode(), digest_size=8).hexdigest()}"


@functools.cache
def _load(function: str) -> tuple[Callable[[int], Any], str]:
    """A function by its place, and a hash of the file it is in."""
    module_name, _, name = function.rpartition(":")
    where = f"data.mixture.function={function!r}"
    if not module_name or not name:
        raise ValueError(f"{where} must be 'module:name' or 'path/to/file.py:name'.")
    if module_name.endswith(".py"):
        file = Path(module_name).expanduser()
        if not file.is_file():
            raise FileNotFoundError(f"{where}: there is no file {file.absolute()}.")
        module_spec = importlib.util.spec_from_file_location(file.stem, file)
        assert module_spec is not None
        assert module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        try:
            module_spec.loader.exec_module(module)
        except ImportError as error:
            raise ValueError(f"{where}: {_why_not_imported(error, 'Install it, or mend the file')}") from error
    else:
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            way_out = "Set the path of its file, ending in .py"
            raise ValueError(f"{where}: {_why_not_imported(error, way_out)}") from error
    found: Any = getattr(module, name, None)
    if not callable(found):
        near = ", ".join(difflib.get_close_matches(name, vars(module), n=3)) or "none"
        raise ValueError(f"{where}: {module_name} has no function {name!r}. Nearest names: {near}.")
    text = Path(module.__file__).read_bytes() if module.__file__ else b""
    return found, hashlib.blake2b(text, digest_size=8).hexdigest()


def _why_not_imported(error: ImportError, way_out: str) -> str:
    if (error.name or "").partition(".")[0] == "jax":
        return (
            "its module imports jax, itself or by what it imports, and the processes that plan the data have no jax. "
            "Put the function into a file of its own that needs none."
        )
    if isinstance(error, ModuleNotFoundError):
        return f"there is no module {error.name!r}. {way_out}."
    return f"its module cannot be imported ({error}). {way_out}."
