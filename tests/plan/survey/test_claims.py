"""Data of the claims: every command exists and parses, every committed figure is where it is said to be."""

import importlib
import json
import math
import re
import shlex
from pathlib import Path

import pytest

from jtrain.bench.__main__ import FOLDERS, benchmarks, parse
from jtrain.cli import plan
from jtrain.cli.survey import record_file
from jtrain.plan.survey.claims import CLAIMS
from jtrain.plan.survey.evidence import Claim

ROOT = Path(__file__).parents[3]
COMMANDS = sorted({lookup.command for claim in CLAIMS for lookup in claim.lookups.values() if lookup.command})
WORDS = {
    "data": ("OVERLORD", "4.5x", "13.5x"),
    "memory": ("Table I:", "Table II:", "ZeRO-Offload", "about 40 B", "over 10"),
    "network": (
        "Table III:",
        "Triton-distributed",
        "UniOrch",
        "E-ECMP",
        "39.8 s",
        "4.45 s",
        "up to 1.4x",
        "44.97x",
    ),
    "computation": ("Figure 1", "1.3x to 2x", "1.5x to 3x"),
    "clocks": (
        "Chopper",
        "about 1.2x",
    ),
    "scale": ("2e+28", "2e+31", "cost of ownership"),
}
"""Words of the mission's table that a row has to have."""


@pytest.mark.parametrize("subject", WORDS)
def test_every_claim_of_the_mission_has_a_row(subject: str) -> None:
    texts = " ".join(f"{claim.text} {claim.reported} " for claim in CLAIMS)
    assert [word for word in WORDS[subject] if word not in texts] == []


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_a_row_can_be_decided_or_says_what_it_needs(claim: Claim) -> None:
    """By a figure of the kind that decides; without a range no figure can."""
    assert claim.lookups
    has_range = not (math.isinf(claim.low) and math.isinf(claim.high))
    assert has_range == bool(claim.reported)
    decides = has_range and claim.decided_by in claim.lookups
    decider = claim.lookups.get(claim.decided_by)
    is_there = decider is not None and (
        decides and (claim.decided_by == "predicted" or decider.published or decider.noted)
    )
    assert is_there or claim.needs
    for kind, lookup in claim.lookups.items():
        assert lookup.command or lookup.noted
        assert (kind == "predicted") <= lookup.command.startswith("plan ")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_there_and_takes_its_options(command: str) -> None:
    verb, *words = shlex.split(command)
    if verb == "plan":
        is_named = words[0] in plan.VERB.commands
        named = plan.VERB.commands[words[0]] if is_named else plan.VERB.alone
        assert named is not None
        named.parser("").parse([*named.name_subject(words[is_named:]), "--json", "-"])
        return
    assert verb == "bench"
    (package,) = (package for package, folder in FOLDERS.items() if folder == benchmarks()[words[0]].parent)
    options = getattr(importlib.import_module(f"{package}.{words[0]}"), "OPTIONS", ())
    assert parse(options, [*words, "--json", "rows.json"]).name == words[0]


def test_each_command_has_a_file_of_its_own() -> None:
    files = {command: record_file(command, Path("out")) for command in COMMANDS}
    assert len(set(files.values())) == len(files) - 1, "the 14B with --compile begins as the one without"
    assert all(len(file.name) < 100 for file in files.values())


def test_every_committed_figure_is_read() -> None:
    """Rows of bench/results, and words of the pages: at least one of either."""
    published, noted = 0, 0
    for claim in CLAIMS:
        for lookup in claim.lookups.values():
            if lookup.published:
                content = json.loads((ROOT / "bench" / "results" / f"{lookup.published}.json").read_text())
                assert math.isfinite(lookup.read(content)), claim.name
                published += 1
            if lookup.noted is not None:
                page = re.sub(r"\s+", " ", (ROOT / lookup.noted.page).read_text())
                assert lookup.noted.words in page, claim.name
                noted += 1
    assert published >= 10
    assert noted == 2
