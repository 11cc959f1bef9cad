"""Comparison of two profiles: which parts, ops and collectives got slower, and why.

All seconds are per device and step, so windows of different lengths and runs on different numbers of devices
can be compared. Ops are matched by name, phase and layer. The compiler numbers its names differently after
any change of the program, so unmatched ops are summed by name without the number, phase and layer, and
matched by that.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console

from jtrain.profile.analysis import figures
from jtrain.profile.analysis.figures import comm_name, mean_step, per_step
from jtrain.profile.analysis.records import Breakdown, OpRow
from jtrain.report.number_formats import seconds, signed
from jtrain.report.page import Title
from jtrain.report.table import Table, numbers, words
from jtrain.report.terminal import print_blocks

TOP = 15
"""Rows of a table in the terminal, the last three for what shrank most; --json has all."""

MIN_SHARE = 0.001
"""Smallest change shown in the terminal, as a share of a step."""

# The compiler's suffixes of a name: fusion.12, fusion.12.remat2, copy.3.clone.
_NUMBER = re.compile(r"(\.\d+)+(\.(clone|remat\d*))*$")


@dataclasses.dataclass(frozen=True)
class Change:
    """Change of one part, op or collective between the profiles A and B, in seconds per step and device.

    a_s, b_s: None if it is missing in that profile.
    terms: change of each term that contributes: theoretical time and losses for an op, exposed and hidden
      time for a collective.
    """

    name: str
    where: str
    a_s: float | None
    b_s: float | None
    terms: dict[str, float]

    @property
    def growth_s(self) -> float:
        return (self.b_s or 0.0) - (self.a_s or 0.0)

    @property
    def cause(self) -> str:
        """The term that changed most in the direction of the total, or the only profile that has it."""
        if self.a_s is None or self.b_s is None:
            return "only in B" if self.a_s is None else "only in A"
        if not self.terms or self.growth_s == 0:
            return ""
        # Only terms that went the same way explain the total; the others made it smaller.
        sign = 1 if self.growth_s > 0 else -1
        term = max(self.terms, key=lambda name: sign * self.terms[name])
        term_growth_s = self.terms[term]
        return f"{term} {signed(term_growth_s)}" if sign * term_growth_s > 0 else ""


@dataclasses.dataclass(frozen=True)
class ProfileComparison:
    """Changes from profile A to B; parts, ops and communication are each sorted by growth, largest first."""

    a: str
    b: str
    a_s: float
    b_s: float
    parts: list[Change]
    ops: list[Change]
    communication: list[Change]
    clocks_mhz: tuple[float | None, float | None]
    joules_per_token: tuple[float | None, float | None]

    def to_dict(self) -> dict[str, Any]:
        """Returns the contents of the JSON file."""
        return dataclasses.asdict(self) | {"says": verdict(self)}


def compare(a: Breakdown, b: Breakdown, *, a_name: str, b_name: str) -> ProfileComparison:
    """Compares two profiles."""
    step_a, step_b = mean_step(a), mean_step(b)
    # The parts are A's: where its peak is unknown, "computing" is the name of utilisation.
    values = [
        (part, step_a.parts.get(part.key), step_b.parts.get(part.key)) for part in figures.parts_of(step_a)
    ]
    parts = [
        # A part that one profile does not know counts as 0 there.
        Change(part.name, "", a_s or 0.0, b_s or 0.0, {})
        for part, a_s, b_s in values
        if (a_s, b_s) != (None, None)
    ]
    clocks = [
        figures.mean(device.mean_mhz for device in figures.by_device(breakdown)) for breakdown in (a, b)
    ]
    return ProfileComparison(
        a_name,
        b_name,
        step_a.duration_s,
        step_b.duration_s,
        _by_growth(parts),
        _by_growth(_ops(a, b)),
        _by_growth(_communication(a, b)),
        (clocks[0], clocks[1]),
        (figures.joules_per_token(a), figures.joules_per_token(b)),
    )


def verdict(comparison: ProfileComparison) -> list[str]:
    """Summary in a few sentences: change of the step time, parts that caused it, op that changed most."""
    growth_s = comparison.b_s - comparison.a_s
    direction = "no slower" if growth_s == 0 else "slower" if growth_s > 0 else "faster"
    lines = [
        f"A step of B is {direction}: {seconds(comparison.a_s)} -> {seconds(comparison.b_s)} "
        f"({growth_s / comparison.a_s:+.1%})."
    ]
    # Slower or faster: the causes are the parts that went the same way, largest first.
    sign = 1 if growth_s >= 0 else -1
    causes = [part for part in comparison.parts if sign * part.growth_s > 0.005 * comparison.a_s]
    causes.sort(key=lambda part: -sign * part.growth_s)
    if causes:
        parts = ", ".join(f"{part.name} {signed(part.growth_s)}" for part in causes)
        lines.append(f"Because of {parts}.")
    ops = sorted(comparison.ops, key=lambda op: -sign * op.growth_s)
    if ops and sign * ops[0].growth_s > 0:
        cause = f": {ops[0].cause}" if ops[0].cause else ""
        lines.append(
            f"The op that changed most: {ops[0].name} ({ops[0].where}), {signed(ops[0].growth_s)}{cause}."
        )
    mhz_a, mhz_b = comparison.clocks_mhz
    # A difference below 1 % is not worth a line.
    if mhz_a is not None and mhz_b is not None and abs(mhz_b - mhz_a) > 0.01 * mhz_a:
        lines.append(f"The clock went from {mhz_a:,.0f} to {mhz_b:,.0f} MHz.")
    return lines


def print_comparison(comparison: ProfileComparison, console: Console) -> None:
    """Prints the comparison, per step and device."""
    print_blocks([f"A: {comparison.a}\nB: {comparison.b}", *verdict(comparison)], console)
    for title, changes, row_name in (
        ("parts of the step", comparison.parts, "part"),
        ("ops", comparison.ops, "op"),
        ("communication", comparison.communication, "collective"),
    ):
        visible = [change for change in changes if abs(change.growth_s) >= MIN_SHARE * comparison.a_s]
        # Sorted by growth: the last three are what shrank most.
        listed_changes = visible if len(visible) <= TOP else visible[: TOP - 3] + visible[-3:]
        count = (
            f"{len(listed_changes)} of {len(changes)}; changes below {MIN_SHARE:.1%} of a step are left out"
        )
        table = Table(f"{title}: {count}", words(row_name, "where", "why") + numbers("A", "B", "change"))
        for change in listed_changes:
            times = ("-" if value is None else seconds(value) for value in (change.a_s, change.b_s))
            table.add(change.name, change.where, change.cause, *times, signed(change.growth_s))
        print_blocks([table if listed_changes else Title(table.title)], console)


def _by_growth(changes: Iterable[Change]) -> list[Change]:
    return sorted(changes, key=lambda change: (-change.growth_s, change.name, change.where))


def _ops(a: Breakdown, b: Breakdown) -> list[Change]:
    # The layer too: compilers number ops anew, and `fusion.12` of one program may be elsewhere in the other.
    by_key_a, by_key_b = ({(op.name, op.phase, op.layer): op for op in breakdown.ops} for breakdown in (a, b))
    common_keys = by_key_a.keys() & by_key_b.keys()
    changes = [_change(key[0], [by_key_a[key]], [by_key_b[key]], a, b) for key in common_keys]
    # What has no partner of exactly its name gets one by its stem: fusion.12 -> fusion.
    unmatched_a, unmatched_b = (
        _stems(op for key, op in ops_by_key.items() if key not in common_keys)
        for ops_by_key in (by_key_a, by_key_b)
    )
    for key in unmatched_a.keys() | unmatched_b.keys():
        ops_a, ops_b = unmatched_a.get(key, []), unmatched_b.get(key, [])
        names = [ops[0].name if len(ops) == 1 else f"{len(ops)} of {key[0]}" for ops in (ops_a, ops_b) if ops]
        changes.append(_change(" -> ".join(names), ops_a, ops_b, a, b))
    return changes


def _stems(ops: Iterable[OpRow]) -> dict[tuple[str, str, str], list[OpRow]]:
    """Groups ops by name without its number, phase and layer."""
    ops_by_stem: dict[tuple[str, str, str], list[OpRow]] = collections.defaultdict(list)
    for op in ops:
        ops_by_stem[_NUMBER.sub("", op.name), op.phase, op.layer].append(op)
    return ops_by_stem


def _change(name: str, ops_a: list[OpRow], ops_b: list[OpRow], a: Breakdown, b: Breakdown) -> Change:
    def took(ops: list[OpRow], breakdown: Breakdown) -> float | None:
        return per_step(breakdown, sum(op.total_s for op in ops)) if ops else None

    terms: dict[str, float] = collections.defaultdict(float)
    # B minus A, each per its own steps and devices.
    for sign, ops, breakdown in ((-1, ops_a, a), (1, ops_b, b)):
        for op in ops:
            terms["theoretical"] += sign * per_step(breakdown, op.theoretical_s or 0.0)
            for term, lost in op.lost.items():
                terms[term] += sign * per_step(breakdown, lost)
    # All of them have one phase and one layer, so any stands for their place.
    return Change(name, figures.op_location([*ops_a, *ops_b][0]), took(ops_a, a), took(ops_b, b), dict(terms))


def _communication(a: Breakdown, b: Breakdown) -> list[Change]:
    rows_a, rows_b = ({comm_name(row): row for row in breakdown.communication} for breakdown in (a, b))
    changes = []
    for name in rows_a.keys() | rows_b.keys():
        row_a, row_b = rows_a.get(name), rows_b.get(name)
        terms: dict[str, float] = {}
        # A collective of one profile alone has no terms: "only in A" says it.
        if row_a and row_b:
            hidden = (row_b.total_s - row_b.exposed_s) - (row_a.total_s - row_a.exposed_s)
            terms = {"exposed": row_b.exposed_s - row_a.exposed_s, "hidden": hidden}
        a_s, b_s = row_a.total_s if row_a else None, row_b.total_s if row_b else None
        changes.append(Change(name, "", a_s, b_s, terms))
    return changes
