"""The pieces of the slow tests are all of them, each once, and a run of CI takes those that a change concerns."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import slow_pieces
from tests.conftest import SLOW_TESTS
from tests.slow_pieces import LAST_PASSED, Piece, changed_files, choose, importers, read_pieces

ROOT = Path(__file__).parents[1]
PIECES = read_pieces(slow_pieces.PIECES.read_text())
TWELVE = [
    Piece(f"{package}-{number}", 5, True, (f"tests/{package}/test_{number}.py",))
    for package in ("data", "step", "train")
    for number in range(4)
]
"""Four pieces of each of three packages."""
USERS = {"data": {"train"}, "step": {"plan", "train"}}


def misplaced(tests: list[str], pieces: list[Piece]) -> dict[str, list[str]]:
    """Tests that are not in exactly one piece, or in every share of one set of shares, with their pieces."""
    wrong = {}
    for test in tests:
        found = [piece for piece in pieces if piece.has(test)]
        shares = sorted(piece.share for piece in found)
        is_whole = shares == sorted(f"{number + 1}/{len(found)}" for number in range(len(found)))
        if not found or not is_whole or len({piece.tests for piece in found}) > 1:
            wrong[test] = [piece.name for piece in found]
    return wrong


def marked_names(source: str) -> set[str]:
    """Names of a module of helpers that mark tests as slow."""
    statements = [
        node for node in ast.parse(source).body if "mark.slow" in (ast.get_source_segment(source, node) or "")
    ]
    names = {node.name for node in statements if isinstance(node, ast.FunctionDef)}
    targets = [target for node in statements if isinstance(node, ast.Assign) for target in node.targets]
    return names | {target.id for target in targets if isinstance(target, ast.Name)}


def files_with_slow_tests() -> set[str]:
    """Files whose source marks tests as slow, or that import a name which does."""
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.glob("tests/**/*.py")}
    markers = {
        name: marked_names(source)
        for name, source in sources.items()
        if "mark.slow" in source and "/test_" not in name
    }
    found = set()
    for name, source in sources.items():
        imported = {
            alias.name
            for helper, marking in markers.items()
            if helper.removesuffix(".py").replace("/", ".") in source and marking
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.name in marking
        }
        if "/test_" in name and ("pytest.mark.slow" in source or imported):
            found.add(name)
    return found - {"tests/test_slow_pieces.py"}


def test_every_slow_test_is_in_one_piece(pytestconfig: pytest.Config) -> None:
    """Of the tests that pytest has collected: all of them, in a run of the whole suite."""
    assert misplaced(pytestconfig.stash[SLOW_TESTS], PIECES) == {}, "add them to tests/slow_pieces.txt"


def test_every_file_with_slow_tests_is_in_a_piece() -> None:
    """Also where few tests are collected: it reads the sources."""
    files = files_with_slow_tests()
    assert {"tests/step/test_zero.py", "tests/test_readme.py", "tests/kernels/test_attention.py"} & files == {
        "tests/test_readme.py",
        "tests/kernels/test_attention.py",  # marked by tests/kernels/gradients.py
    }
    listed = {file for piece in PIECES for file in piece.files}
    assert files - listed == set(), "add them to tests/slow_pieces.txt"
    assert listed - files == set(), "they have no slow tests: take them out of tests/slow_pieces.txt"


def test_a_missing_a_doubled_and_a_half_listed_test_are_found() -> None:
    pieces = read_pieces("a 1 tests/a.py tests/b.py::test_x\nb ~2.5 tests/b.py TORCH\nc 9 tests/c.py 1/2\n")
    assert pieces[1] == Piece("b", 2.5, False, ("tests/b.py",), needs="TORCH")
    assert [piece.arguments for piece in pieces[1:]] == [["tests/b.py"], ["tests/c.py", "--share=1/2"]]
    tests = [
        "tests/a.py::test_y",
        "tests/b.py::test_x[1]",
        "tests/b.py::test_xx",
        "tests/c.py::test_x",
        "tests/d.py::t",
    ]
    assert misplaced(tests, pieces) == {tests[1]: ["a", "b"], tests[3]: ["c"], tests[4]: []}
    assert misplaced([tests[3]], [*pieces, pieces[2]._replace(share="2/2")]) == {}
    with pytest.raises(ValueError, match=r"d: not tests, a share and a variable: tests/d\.py -x"):
        read_pieces("d 1 tests/d.py\n  -x\n")


def test_pieces_are_short_and_what_they_name_is_there() -> None:
    assert Counter(piece.name for piece in PIECES).most_common(1)[0][1] == 1
    assert [piece.name for piece in PIECES if not 0 < piece.minutes <= slow_pieces.PIECE_MINUTES] == []
    assert slow_pieces.EVERY_TIME in {piece.name for piece in PIECES}
    for piece in PIECES:
        for test in piece.tests:
            file, _, function = test.partition("::")
            assert f"def {function}" in (ROOT / file).read_text(), test
    longest = (slow_pieces.MOST_CHANGED + 2) * slow_pieces.PIECE_MINUTES * 60
    assert longest <= slow_pieces.LIMIT_S, "CI would end its pieces on the machine that measured them"


def test_shares_are_all_tests_each_once(tmp_path: Path) -> None:
    """`--share` of the tests that are left after `-m`."""
    (tmp_path / "test_many.py").write_text(
        "import pytest\n\n\n@pytest.mark.slow\n@pytest.mark.parametrize('n', range(7))\ndef test_it(n): pass\n"
        "def test_quick(): pass\n"
    )
    (tmp_path / "conftest.py").write_text("from tests.conftest import *  # noqa: F403\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    environment.pop("PYTEST_XDIST_WORKER", None)
    options = [
        "-q",
        "--collect-only",
        "-m",
        "slow",
        "-c",
        "/dev/null",
        f"--rootdir={tmp_path}",
        str(tmp_path),
    ]
    # One process for all shares: importing tests/conftest.py is most of its seconds.
    code = "import sys, pytest\nfor share in ('1/3', '2/3', '3/3'):\n    print('share', flush=True)\n"
    code += "    assert not pytest.main([*sys.argv[1:], f'--share={share}'])"
    command = [sys.executable, "-c", code, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    shares = [re.findall(r"::test_it\[(\d)\]", part) for part in done.stdout.split("share\n")[1:]]
    assert shares == [["0", "3", "6"], ["1", "4"], ["2", "5"]]


def names_of(chosen: list[tuple[Piece, str]]) -> list[str]:
    return [piece.name for piece, _ in chosen]


def test_a_changed_package_runs_its_pieces_and_then_those_of_its_importers() -> None:
    """At most three, beside the one in turn."""
    chosen = choose(TWELVE, ["jtrain/step/zero.py", "README.md"], USERS, day=0)
    assert len(chosen) == 4
    assert {reason for _, reason in chosen[:3]} == {"step changed"}
    assert set(names_of(chosen[:3])) < {piece.name for piece in TWELVE if piece.name.startswith("step")}

    few = [piece for piece in TWELVE if piece.name in ("data-0", "step-0", "train-0", "train-1", "train-2")]
    chosen = choose(few, ["jtrain/step/zero.py"], USERS, day=0)
    assert names_of(chosen[:1]) == ["step-0"]
    assert [reason for _, reason in chosen[1:3]] == ["train imports what changed: step"] * 2
    assert chosen[3][1] == "in turn today"

    chosen = choose(few, ["jtrain/data/order.py", "tests/train/test_2.py"], USERS, day=0)
    assert names_of(chosen[:2]) == ["train-2", "data-0"], "a changed test runs first"
    assert chosen[0][1] == "tests/train/test_2.py changed"


def test_a_changed_page_or_notebook_runs_the_tutorials_and_the_notebooks() -> None:
    """The real pieces; the piece `docs` is part of every run of CI, by its name."""
    for changed in ("docs/tutorials/data.md", "colabs/tiny.ipynb", "docs/fields.md"):
        chosen = choose(PIECES, [changed], importers(ROOT), day=0)
        assert set(names_of(chosen[:3])) == {"colabs", "tutorials-1", "tutorials-2"}
        assert {reason for _, reason in chosen[:3]} == {"docs changed"}


def test_what_concerns_no_piece_runs_the_one_in_turn_alone() -> None:
    for changed in ([], ["README.md", "docs/index.md"], ["jtrain/hf/mapping.py"]):
        assert choose(TWELVE, changed, USERS, day=3) == [(TWELVE[3], "in turn today")]
    every_time = Piece(slow_pieces.EVERY_TIME, 4, True, ("tests/bench/test_layouts.py",))
    assert choose([every_time], ["jtrain/bench/layouts.py"], USERS, day=0) == [], "it runs anyway"


def test_every_piece_comes_its_turn_and_none_twice_in_a_run() -> None:
    days = [choose(TWELVE, ["jtrain/step/zero.py"], USERS, day) for day in range(12)]
    assert all(len(set(names_of(chosen))) == 4 for chosen in days)
    assert {chosen[-1][0].name for chosen in days} >= {
        p.name for p in TWELVE if not p.name.startswith("step")
    }
    assert {name for chosen in days for name in names_of(chosen)} == {piece.name for piece in TWELVE}


@pytest.mark.parametrize("changed", (None, ["constraints.txt"]), ids=("unknown", "versions"))
def test_what_may_concern_all_runs_other_pieces_every_day(changed: list[str] | None) -> None:
    """Within the same limit; twelve pieces have run after four days."""
    days = [choose(TWELVE, changed, USERS, day) for day in range(4)]
    reason = "what has changed is unknown" if changed is None else "constraints.txt changed"
    assert {reason for chosen in days for _, reason in chosen} == {reason, "in turn today"}
    assert [len(chosen) for chosen in days] == [4] * 4
    assert {piece.name for chosen in days for piece, _ in chosen[:3]} == {piece.name for piece in TWELVE}


def test_importers_are_read_from_the_sources() -> None:
    users = importers(ROOT)
    assert {"train", "plan", "config"} <= users["step"]
    assert "model" in users["kernels"]
    assert "data" not in users["step"], "a row below"
    assert all(package not in names for package, names in users.items())


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    command = ["git", *identity, "-c", "commit.gpgsign=false", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.smoke
def test_changes_count_from_the_commit_that_passed_last(tmp_path: Path) -> None:
    """Real clones: one with history, and a shallow one, which lacks that commit and says so."""
    tree = tmp_path / "tree"
    (tree / ".ci").mkdir(parents=True)
    git(tree, "init", "-q")
    for name in ("one", "two", "three"):
        (tree / name).write_text("1")
        git(tree, "add", name)
        git(tree, "commit", "-q", "-m", name)
    assert changed_files(tree) == (None, f"{LAST_PASSED} has no commit but '': what has changed is unknown")
    passed = git(tree, "rev-parse", "HEAD~1")
    (tree / LAST_PASSED).write_text(f"{passed}\n")
    git(tree, "mv", "two", "four")
    git(tree, "add", ".ci")
    git(tree, "commit", "-q", "-m", "four")
    files, sentence = changed_files(tree)
    assert files == [LAST_PASSED, "four", "three", "two"]
    assert sentence == f"4 files changed since {passed[:12]}, the commit of {LAST_PASSED}"

    git(tmp_path, "clone", "-q", "--depth", "1", tree.as_uri(), "shallow")
    files, sentence = changed_files(tmp_path / "shallow")
    assert files is None
    assert sentence.startswith(
        f"{passed[:12]} of {LAST_PASSED} is not in this clone: what has changed is unknown"
    )
    assert sentence.endswith("git fetch --unshallow")


def test_the_commit_that_passed_is_committed() -> None:
    assert re.fullmatch("[0-9a-f]{40}\n", (ROOT / LAST_PASSED).read_text())


def test_a_piece_fails_that_fails_has_no_tests_or_does_not_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with its reason, and the pieces after it run."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    # Other plugins are half of the seconds of a process.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist")
    mark = "import pytest\n\n\n@pytest.mark.slow\n"
    sources = {"good": f"{mark}def test(): pass\n", "bad": f"{mark}def test(): assert False\n", "none": ""}
    for name, source in sources.items():
        (tmp_path / f"test_{name}.py").write_text(source)
    chosen = [
        (Piece(name, 1, True, (str(tmp_path / f"test_{name}.py"),)), f"reason {name}")
        for name in ("bad", "none", "good")
    ]
    assert not slow_pieces.run(chosen[:2], limit_s=600)
    *_, bad, none = capfd.readouterr().out.splitlines()
    assert re.fullmatch(r"bad: FAILED: exit code 1 in .* \(reason bad\)", bad)
    assert re.fullmatch(r"none: FAILED: exit code 5 in .* \(reason none\)", none), "no test was collected"
    assert slow_pieces.run(chosen[2:], limit_s=600)
    *_, good = capfd.readouterr().out.splitlines()
    assert re.fullmatch(r"good: passed in .* minutes of 1\.0 \(reason good\)", good)
    assert not slow_pieces.run(chosen[2:], limit_s=0)
    assert "good: FAILED: ended at the limit of the run, which had 0.0 minutes left" in capfd.readouterr().out


def test_an_unknown_piece_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert slow_pieces.main(["stepp", "step"]) == 2
    assert capsys.readouterr().err.startswith(
        "no piece is called stepp; slow_pieces.txt has random-layouts, "
    )
