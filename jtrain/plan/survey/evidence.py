"""Claims, where their figures are read, and the verdict: pure functions of the JSON that commands write."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

type Evidence = Literal["predicted", "compiled", "measured"]
"""Source of a figure."""

type ClaimVerdict = Literal["reproduced", "not reproduced", "not decidable here"]
"""Outcome of a claim."""

KINDS: tuple[Evidence, ...] = ("predicted", "compiled", "measured")
VERDICTS: tuple[ClaimVerdict, ...] = ("reproduced", "not reproduced", "not decidable here")


@dataclasses.dataclass(frozen=True)
class Noted:
    """A figure of an experiment that left no file of results.

    page: file of the checkout that has it, in these `words`. value: in the unit of the claim.
    """

    page: str
    words: str
    value: float


@dataclasses.dataclass(frozen=True)
class Lookup:
    """One number in the JSON of a command, or that number over another one.

    command: words after `jtrain`, without `--json`; "" where the program is no longer there.
    path: keys that lead to the number. In a list a key names the first entry that has it among its values, or
      the only one with a text that contains it.
    over: keys of the divisor; empty for none. scale: factor of the result, such as 1e-9.
    published: name of a file of bench/results, whose rows are those of the command.
    noted: the figure on a page, where there is no such file.
    """

    command: str
    path: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    scale: float = 1.0
    published: str = ""
    noted: Noted | None = None

    def read(self, content: Any) -> float:
        """The figure in the JSON of the command.

        Raises:
          LookupError: the JSON does not have it.
        """
        divisor = _number(content, self.over) if self.over else 1.0
        return self.scale * _number(content, self.path) / divisor


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim of the survey.

    name: of its row; `--measure` takes it. text: the quantity of the figures.
    reported: the survey's figure as text, "" where it gives none.
    predicted, compiled, measured: where jtrain's figures are read, None for none.
    low, high: figures from `low` to `high` agree with the survey; both infinite where none can.
    decided_by: the kind of figure that decides.
    needs: what a decision takes that is not here.
    """

    name: str
    text: str
    reported: str
    predicted: Lookup | None = None
    compiled: Lookup | None = None
    measured: Lookup | None = None
    low: float = -math.inf
    high: float = math.inf
    unit: str = "x"
    decided_by: Evidence = "measured"
    needs: str = ""

    @property
    def lookups(self) -> dict[Evidence, Lookup]:
        """Lookups by kind, without the kinds that have none."""
        lookups = dict(zip(KINDS, (self.predicted, self.compiled, self.measured), strict=True))
        return {kind: lookup for kind, lookup in lookups.items() if lookup is not None}

    def agrees(self, value: float | None) -> bool | None:
        """True if a figure agrees with the survey; None without a figure on either side."""
        if value is None or (math.isinf(self.low) and math.isinf(self.high)):
            return None
        return self.low <= value <= self.high

    def verdict(self, figures: Mapping[Evidence, "Figure"]) -> ClaimVerdict:
        """The verdict by the one kind of figure that decides; figures of other kinds never do."""
        figure = figures.get(self.decided_by)
        agrees = self.agrees(None if figure is None else figure.value)
        if agrees is None:
            return "not decidable here"
        return "reproduced" if agrees else "not reproduced"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure as it was found, in the claim's unit.

    command: as a user types it. source: of the value: `this call`, or a file with date and machine.
    missing: the reason if there is no value.
    """

    command: str
    value: float | None = None
    source: str = ""
    missing: str = ""


def _number(content: Any, path: tuple[str, ...]) -> float:
    value = content
    for key in path:
        value = _entry(value, key) if isinstance(value, list) else value[key]
    # None where a machine could not measure it. A bool is an int for Python, and no figure.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LookupError(f"{' > '.join(path)} is {value!r}, no number")
    return float(value)


def _entry(entries: list[Any], key: str) -> Any:
    texts = [[str(value) for value in entry.values()] for entry in entries]
    equal = [entry for entry, values in zip(entries, texts, strict=True) if key in values]
    # Rows of benchmarks have measured numbers in their texts, such as the range over rounds.
    part = [entry for entry, values in zip(entries, texts, strict=True) if any(key in v for v in values)]
    if not equal and len(part) != 1:
        raise LookupError(f"{len(part)} entries have {key!r}")
    return (equal or part)[0]
