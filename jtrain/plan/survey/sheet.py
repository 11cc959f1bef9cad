"""The survey's claims with their verdicts: as JSON, and as a page for a terminal and a browser."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jtrain.plan.survey.evidence import KINDS, VERDICTS, Claim, Evidence, Figure
from jtrain.report.page import Page, Section
from jtrain.report.table import CellLike, Facts, Table, numbers, words


def to_json(
    claims_by_subject: Mapping[str, tuple[Claim, ...]], figures: Mapping[str, Mapping[Evidence, Figure]]
) -> dict[str, Any]:
    """The claims with figures and verdicts, and how many have each verdict.

    Args:
      figures: name of a claim -> its figures by kind.
    """
    rows = [
        _claim_json(subject, claim, figures[claim.name])
        for subject, claims in claims_by_subject.items()
        for claim in claims
    ]
    verdicts = [row["verdict"] for row in rows]
    return {"verdicts": {verdict: verdicts.count(verdict) for verdict in VERDICTS}, "claims": rows}


def _claim_json(subject: str, claim: Claim, figures: Mapping[Evidence, Figure]) -> dict[str, Any]:
    return {
        **{
            name: getattr(claim, name) for name in ("name", "text", "reported", "unit", "decided_by", "needs")
        },
        "subject": subject,
        # JSON has no infinity.
        **{name: None if math.isinf(bound := getattr(claim, name)) else bound for name in ("low", "high")},
        "verdict": claim.verdict(figures),
        "figures": {
            kind: dataclasses.asdict(figure) | {"agrees": claim.agrees(figure.value)}
            for kind, figure in figures.items()
        },
    }


def page_of(content: Mapping[str, Any]) -> Page:
    """Describes the page of what `to_json` made: a table per subject, then the commands."""
    facts = Facts(content)
    subjects = dict.fromkeys(row["subject"] for row in content["claims"])
    sections = [
        Section(subject.split()[0].lower(), subject, [_claims_table(subject, facts)]) for subject in subjects
    ]
    return Page(
        "The survey's claims",
        [*sections, Section("commands", "Where the figures are from", [_commands_table(content)])],
        introduction=[
            "arXiv:2603.26823 beside what jtrain predicts now, what compilers for absent chips say, and what "
            "was measured. Bytes are decided by plans and compilers, times and rates by measurements alone."
        ],
        tiles=[(verdict, facts.cell(f"verdicts.{verdict}")) for verdict in VERDICTS],
        kind="survey",
        content=content,
    )


def _claims_table(subject: str, facts: Facts) -> Table:
    table = Table(subject, words("claim", "survey") + numbers(*KINDS) + words("verdict"), css="many")
    for index, row in enumerate(facts.value("claims")):
        if row["subject"] == subject:
            cells = [_figure_cell(facts, index, kind) for kind in KINDS]
            table.add(f"{row['name']}: {row['text']}", row["reported"] or "no figure", *cells, _verdict(row))
    return table


def _figure_cell(facts: Facts, index: int, kind: Evidence) -> CellLike:
    row = facts.value("claims")[index]
    figure = row["figures"].get(kind, {"value": None})
    if figure["value"] is None:
        return ""

    def text(value: float) -> str:
        # Three digits: 11.9x, 2, 9.79e+27, 1,081,349.
        number = f"{value:,.0f}" if 999.5 <= abs(value) < 1e9 else f"{value:.3g}"
        return number + (row["unit"] if row["unit"] in ("x", "") else f" {row['unit']}")

    return facts.cell(f"claims.{index}.figures.{kind}.value", text, title=figure["source"])


def _verdict(row: Mapping[str, Any]) -> str:
    """The verdict with what decided; of one that is open, which figures agree, and what it needs."""
    if row["verdict"] != "not decidable here":
        return f"{row['verdict']}, {row['decided_by']}"
    opinions = [
        f"; {kind} {'agrees' if figure['agrees'] else 'differs'}"
        for kind, figure in row["figures"].items()
        if figure["agrees"] is not None
    ]
    # A figure that decides and is not there says itself what it takes, such as a checkout.
    reason = row["figures"].get(row["decided_by"], {"missing": ""})["missing"] or f"needs {row['needs']}"
    return f"{row['verdict']}{''.join(opinions)}; {reason}"


def _commands_table(content: Mapping[str, Any]) -> Table:
    """A row for each command and source, with the claims that it serves."""
    names_by_source: dict[tuple[str, str], list[str]] = {}
    for row in content["claims"]:
        for figure in row["figures"].values():
            source = figure["command"], figure["source"] or f"not there: {figure['missing']}"
            names_by_source.setdefault(source, []).append(row["name"])
    table = Table("commands", words("command", "claims", "from"))
    for (command, source), names in names_by_source.items():
        table.add(command, ", ".join(names), source)
    return table
