"""Bugs planted one at a time into a copy of the packages: the quick tests find each of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planted_bugs import BUGS
from tests.planting import ROOT, Bug, copy_tree, plantable, planted

LIMIT_S = 150
"""Time limit of a test in the copy, longer than that of the processes it starts (`test_gpu_fabric.py`): what a bug
that ends in a deadlock or an endless loop takes."""


def run(tree: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Runs quick tests of a copy until the first failure."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), str(tree / "kernels")])}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-o", f"faulthandler_timeout={LIMIT_S}", *tests]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the packages and their tests."""
    return copy_tree(tmp_path_factory.mktemp("tree"))


@pytest.mark.slow
def test_without_a_bug_the_tests_pass(tree: Path) -> None:
    """A failure below is due to the bug."""
    done = run(tree, *sorted({bug.test.partition("::")[0] for bug in BUGS.values()}))
    assert done.returncode == pytest.ExitCode.OK, done.stdout


def test_every_bug_can_be_planted() -> None:
    """The code that each replaces is there once: a change of it plants the bug anew."""
    assert {name for name, bug in BUGS.items() if not plantable(bug.file, bug.old)} == set()
    assert all(bug.old != bug.new and (ROOT / bug.test.partition("::")[0]).exists() for bug in BUGS.values())


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS.keys())
def test_the_quick_tests_find_it(bug: Bug, tree: Path) -> None:
    """A test fails, or ends at its time limit; it is not that none could be collected."""
    with planted(tree, bug.file, bug.old, bug.new):
        done = run(tree, bug.test)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout[-2000:]
    assert " failed" in done.stdout or "Timeout" in done.stderr, done.stdout[-2000:] + done.stderr[-2000:]
