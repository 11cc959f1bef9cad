"""Numbers of a machine: `python -m jtrain.bench` lists the benchmarks, `... NAME` runs one.

Here is what a user measures on a machine of theirs. What only jtrain's own published figures need, beside
other projects or by compilers for absent chips, is in the folder bench/ of a checkout, and runs by the same
command. A benchmark is a module in either whose docstring's first line says what it measures, with `run(args:
Options)` that returns a list of rows or yields them as they are measured, and `OPTIONS` if it has options of
its own. One that compiles for chips that are not here has `ABSENT_CHIPS`: True, or the options with which it
does, read before the module is imported, because JAX then looks for chips. What it is compared with runs in
the same process tree, right before or after.
"""

import operator
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, TypedDict

from jtrain.errors import UserError

_COMPARE = {"<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt}


class Row(TypedDict):
    """One measured number, as the table prints it and the JSON keeps it.

    what: the quantity, with what it depends on.
    value: in `unit`; None where this machine cannot measure it.
    baseline: the same quantity of what it is compared with; None where there is nothing.
    ratio: value / baseline.
    bar: what to reach, such as `>= 1.5`: of the ratio if there is a baseline, else of the value.
    """

    what: str
    value: float | None
    unit: str
    baseline: float | None
    ratio: float | None
    bar: str | None


def row(
    what: str, value: float | None, unit: str, *, baseline: float | None = None, bar: str | None = None
) -> Row:
    """A `Row` with its ratio worked out."""
    # A baseline of 0, such as a time too short to measure, has no ratio.
    ratio = value / baseline if value is not None and baseline else None
    return Row(what=what, value=value, unit=unit, baseline=baseline, ratio=ratio, bar=bar)


class Option(NamedTuple):
    """Option of a benchmark: what argparse's `add_argument` takes."""

    flags: tuple[str, ...]
    settings: Mapping[str, Any]


def option(*flags: str, **settings: Any) -> Option:
    """An `Option`, written as a call of `add_argument`."""
    return Option(flags, settings)


class Options(SimpleNamespace):
    """Values of a benchmark's options, an attribute each."""


REHEARSE = option(
    "--rehearse",
    action="store_true",
    help="tiny shapes on whatever device is here, to see that the code runs; the rows are no measurements",
)
"""For a benchmark of an accelerator, which without it refuses other devices."""

REHEARSED = "rehearsal, no measurement: "
"""First words of a rehearsal's rows."""


def rehearsed(row: Row) -> Row:
    """The same row marked as one of a rehearsal, and held to no bar."""
    # Marked once: a step of one_gpu marks rows that its benchmark has marked already.
    quantity = row["what"] if row["what"].startswith(REHEARSED) else REHEARSED + row["what"]
    # No bar: tiny shapes on a CPU say nothing about the figure.
    return {**row, "what": quantity, "bar": None}


def meets_bar(row: Row) -> bool | None:
    """True if the number reaches its bar; None without a bar or a number.

    Raises:
      UserError: a bar that is not one of <=, <, >=, > and a number.
    """
    # A bar is for the ratio when there is a baseline, since machines differ more than ratios.
    figure = row["value"] if row["baseline"] is None else row["ratio"]
    if row["bar"] is None or figure is None:
        return None
    # fullmatch, so that a bar with a unit behind its number is an error and not a number.
    match = re.fullmatch(r"([<>]=?) *([0-9.e+-]+)", row["bar"])
    if match is None:
        raise UserError(f"bar {row['bar']!r} of {row['what']!r} must be one of <=, <, >=, > and a number.")
    return _COMPARE[match[1]](figure, float(match[2]))
