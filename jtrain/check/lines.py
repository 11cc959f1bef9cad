"""Lines of a check: what was proved, with what difference, or the pair that differs."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from jtrain.errors import UserError, did_you_mean

type Verdict = Literal["holds", "FAILS", "not checked"]
"""Result of one check."""


@dataclasses.dataclass(frozen=True)
class Line:
    """Result of one line of the check.

    name: the pair that is compared, such as `mesh.tensor = one device`.
    detail: what was compared, how far apart it is, or the reason why the line does not apply.
    """

    name: str
    verdict: Verdict
    detail: str
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """The line as it is printed."""
        return f"{self.verdict:11}  {self.name}: {self.detail} ({self.seconds:.1f} s)"

    def to_json(self) -> dict[str, Any]:
        """The line as plain values."""
        return dataclasses.asdict(self)


class Differs(Exception):
    """Difference that a line must not have; its message names tensor and record."""


class DoesNotApply(Exception):
    """Reason why a line has nothing to prove for this run."""


def take_line(name: str, prove: Callable[[], str]) -> Line:
    """Runs one proof, which returns what it has shown."""
    start = time.perf_counter()
    try:
        verdict, detail = "holds", prove()
    except Differs as error:
        verdict, detail = "FAILS", str(error)
    except DoesNotApply as error:
        verdict, detail = "not checked", str(error)
    except UserError as error:
        verdict, detail = "FAILS", f"refused: {error}"
    # A crash of the step is what a check has to find, and the other lines still say something.
    except Exception as error:
        verdict, detail = "FAILS", f"{type(error).__name__}: {str(error)[:400]}"
    return Line(name, verdict, detail, time.perf_counter() - start)


def chosen(
    proofs: Iterable[tuple[str, Callable[[], str]]], names: Sequence[str]
) -> list[tuple[str, Callable[[], str]]]:
    """The lines of these names, all without any.

    Raises:
      UserError: there is no line of a name; says which there are.
    """
    proofs = list(proofs)
    all_names = [name for name, _ in proofs]
    for name in names:
        if name not in all_names:
            raise UserError(
                f"--only {name!r}: no such line. {did_you_mean(name, all_names)}There are: "
                f"{', '.join(all_names)}."
            )
    return [(name, prove) for name, prove in proofs if not names or name in names]


def print_lines(proofs: Iterable[tuple[str, Callable[[], str]]]) -> list[Line]:
    """Proves and prints one line after the other; returns all."""
    lines = []
    for name, prove in proofs:
        lines.append(take_line(name, prove))
        print(lines[-1].text, flush=True)
    return lines
