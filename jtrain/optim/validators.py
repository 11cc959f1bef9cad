"""Validators of single fields of an optimizer spec; each error names the field and the allowed values."""

import math
from collections.abc import Callable

from jtrain.errors import UserError


def check_number(field: str, value: object, allowed: str, is_allowed: Callable[[float], bool]) -> None:
    """Raises UserError unless `value` is a finite number that `is_allowed`; `allowed` describes it."""
    if (
        not isinstance(value, int | float)
        # True is an int in Python, but not a number that a user means.
        or isinstance(value, bool)
        or not math.isfinite(value)
        or not is_allowed(value)
    ):
        raise UserError(f"optimizer.{field}={value!r} must be a number {allowed}.")


def check_steps(field: str, value: object) -> None:
    """Raises UserError unless `value` is a number of steps (int) or a fraction of the run (float)."""
    steps = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    # 1.0 is refused: it could mean one step or the whole run.
    fraction = isinstance(value, float) and 0.0 <= value < 1.0
    if not (steps or fraction):
        raise UserError(
            f"optimizer.{field}={value!r} must be an int of at least 0, in steps, or a float of at least 0.0 "
            "and below 1.0, a fraction of num_steps. Write 2000 for steps, 0.01 for one percent of the run."
        )


def check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises UserError unless `value` is one of `choices`."""
    if value not in choices:
        raise UserError(f"optimizer.{field}={value!r} must be one of {', '.join(choices)}.")
