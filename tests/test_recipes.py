"""The recipes of CONTRIBUTING.md, followed word for word in a copy of the tree: their tests pass there.

A block with a file's name as its title is a new file (`python`) or lines of a file that change (`diff`). The last
block of a recipe runs its test. All recipes are followed in one copy, and one process runs all of their tests.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.pages import Block, blocks

ROOT = Path(__file__).parents[1]
COPIED = ("jtrain", "kernels", "configs", "tests", "pyproject.toml")
NEEDED = {"layer", "layout option", "verb", "format", "kernel", "metric"}
LISTS = (
    "tests/bench/test_layouts.py::test_every_option_of_the_layout_is_drawn",
    "tests/plan/test_options.py",
    "tests/telemetry/test_metrics.py",
    "tests/test_layering.py::test_a_module_imports_only_rows_above_its_own",
)
"""Tests of lists that a change has to extend: a recipe that forgets one leaves them failing."""


def recipes(page: str) -> dict[str, list[Block]]:
    """The blocks of each recipe, by what it adds."""
    _, _, section = page.partition("\n## Recipes\n")
    section = re.split(r"^## ", section, flags=re.MULTILINE)[0]
    found = {}
    for part in re.split(r"^### Add an? ", section, flags=re.MULTILINE)[1:]:
        name, _, text = part.partition("\n")
        found[name] = blocks(text)
    return found


RECIPES = recipes((ROOT / "CONTRIBUTING.md").read_text())


def test_every_kind_of_change_has_a_recipe_that_ends_with_its_test() -> None:
    assert RECIPES.keys() == NEEDED
    for steps in RECIPES.values():
        *changes, run = steps
        assert run.language == "bash"
        assert run.text.startswith("pytest tests/")
        assert all(block.language in ("python", "diff") and block.title for block in changes)
        assert shlex.split(run.text)[1] in {block.title for block in changes}


def changed(text: str, diff: str) -> str:
    """The text with the lines of a diff, which must be in exactly one place."""
    lines = diff.splitlines()
    assert all(line[:1] in ("", " ", "+", "-") for line in lines), diff
    before = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
    after = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
    count = f"\n{text}".count(f"\n{before}")
    assert count == 1, f"these lines are in {count} places:\n{before}"
    return f"\n{text}".replace(f"\n{before}", f"\n{after}")[1:]


def test_lines_that_are_not_there_are_noticed() -> None:
    """The guard of the recipes: a diff is refused where its lines are missing, or in two places."""
    assert changed("a\nb\nc\n", " a\n-b\n+d\n") == "a\nd\nc\n"
    with pytest.raises(AssertionError, match="in 0 places"):
        changed("a\nb\n", "-ab\n+c\n")
    with pytest.raises(AssertionError, match="in 2 places"):
        changed("a\nb\na\n", " a\n+c\n")


def linked(source: str, target: str) -> None:
    """Links a file instead of copying it, where the file system can."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def follow(steps: list[Block], tree: Path) -> None:
    """Makes the changes of a recipe in a copy of the tree."""
    for block in steps[:-1]:
        path = tree / block.title
        assert path.exists() == (block.language == "diff"), f"{block.title} is there already, or missing"
        text = block.text if block.language == "python" else changed(path.read_text(), block.text)
        path.unlink(missing_ok=True)  # it may be a link to the file of this tree
        path.write_text(text)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree in which all recipes were followed."""
    tree = tmp_path_factory.mktemp("recipes")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, copy_function=linked)
        else:
            shutil.copy2(ROOT / name, tree / name)
    for steps in RECIPES.values():
        follow(steps, tree)
    return tree


@pytest.fixture(scope="module")
def outcomes(tree: Path) -> dict[str, list[str]]:
    """Outcomes of the tests by file: of each recipe's, and of `LISTS`."""
    files = [shlex.split(steps[-1].text)[1] for steps in RECIPES.values()]
    options = ["-q", "--continue-on-collection-errors", "--junitxml=results.xml", "-o", "junit_family=xunit1"]
    environment = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{tree / 'kernels'}"}
    command = [sys.executable, "-m", "pytest", *options, *files, *LISTS]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert (tree / "results.xml").exists(), done.stdout + done.stderr
    found: dict[str, list[str]] = {file.partition("::")[0]: [] for file in (*files, *LISTS)}
    for case in ET.parse(tree / "results.xml").iter("testcase"):
        failure = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        found[case.attrib["file"]].append("passed" if failure is None else str(failure.text))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_test_of_a_recipe_passes(name: str, outcomes: dict[str, list[str]]) -> None:
    file = shlex.split(RECIPES[name][-1].text)[1]
    assert len(outcomes[file]) >= 1, "no test ran"
    assert [outcome for outcome in outcomes[file] if outcome != "passed"] == []


@pytest.mark.slow
@pytest.mark.parametrize("test", LISTS)
def test_a_recipe_extends_every_list(test: str, outcomes: dict[str, list[str]]) -> None:
    results = outcomes[test.partition("::")[0]]
    assert len(results) >= 1, "no test ran"
    assert [outcome for outcome in results if outcome != "passed"] == []


def test_the_changed_files_pass_lint(tree: Path) -> None:
    """Also as they are formatted: a recipe can be committed as it stands."""
    files = sorted({block.title for steps in RECIPES.values() for block in steps if block.title})
    for command in (["check", "-q"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *files],
            cwd=tree,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
