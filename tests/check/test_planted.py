"""`jtrain check` finds planted bugs, names the line that is theirs, and the record."""

import re
from pathlib import Path

import pytest

from tests.check.example_runs import check, write_chats
from tests.check.planted import BUGS, PlantedBug
from tests.planting import copy_tree, plantable, planted

BY_RECORD = ("learned = sampled", "targets per batch > 0", "packed = alone")
"""Lines of which every failure is one of a record."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the packages without the C core, so that what Python does of collation counts."""
    tree = copy_tree(tmp_path_factory.mktemp("tree"), "_core.so")
    write_chats(tree)
    return tree


def test_every_bug_can_be_planted() -> None:
    """The code that each replaces is there once: a change of it plants the bug anew."""
    assert {name for name, bug in BUGS.items() if not plantable(bug.file, bug.old)} == set()
    assert len(BUGS) >= 14


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS.keys())
def test_the_line_of_a_bug_fails(bug: PlantedBug, tree: Path) -> None:
    """The line that is about it is among those that fail, and says where; without the bug it holds."""
    with planted(tree, bug.file, bug.old, bug.new):
        code, lines, output = check(tree, *bug.words, "--without-compiler")
    assert code == 1, output
    failed = {line["name"]: line["detail"] for line in lines if line["verdict"] == "FAILS"}
    assert bug.line in failed, output
    if bug.line in BY_RECORD:
        # A file and the place of a record in it, or in a part of it.
        assert re.search(r"\.(py|jsonl)(@\d+)?:\d+", failed[bug.line]), failed
    assert "next: jtrain " in output
