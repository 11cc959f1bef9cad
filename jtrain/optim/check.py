"""Refusals of single values of an optimizer's fields: each names the field and what would do."""

import math
from collections.abc import Callable


def check_number(field: str, value: object, wanted: str, good: Callable[[float], bool]) -> None:
    """A number that is `good`; `wanted` says which are."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or not good(value):
        raise ValueError(f"optimizer.{field}={value!r} must be a number {wanted}.")


def check_steps(field: str, value: object) -> None:
    """Steps of a run, or a fraction of them."""
    steps = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    fraction = isinstance(value, float) and 0.0 <= value < 1.0
    if not (steps or fraction):
        raise ValueError(
            f"optimizer.{field}={value!r} must be an int of at least 0, in steps, or a float of at least 0.0 and below "
            f"1.0, a fraction of num_steps. Write 2000 for steps, 0.01 for one percent of the run."
        )


def check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """One of the names."""
    if value not in choices:
        raise ValueError(f"optimizer.{field}={value!r} must be one of {', '.join(choices)}.")
