"""Share of small wrong changes of step, pipeline, model, optim and data that the quick tests notice.

    python -m jtrain.bench mutation_score --trials 200 --seed 0
    python -m jtrain.bench mutation_score --trials 200 --seed 0 --only 17

Each trial changes one expression of a copy of the packages (a comparison, a sign, a number by one, an axis, a
reduction, an assignment that is left out ...) and runs the quick tests that reach its line, cheapest first,
until one fails. Which do is measured first, by one run of those tests (`tests/lines_of_tests.py`; --reached
keeps it). A survivor is a hole of the tests, or it changes no number: `bench/NOTES.md` says which were which.
"""

import ast
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jtrain.bench import Options, Row, option, row
from jtrain.bench.layouts import choose_trials

ROOT = Path(__file__).parents[1]
PACKAGES = ("step", "pipeline", "model", "optim", "data")
CHEAP_S, ALL_S = 20, 60
"""Seconds of tests in the first process of a trial, and in the second, which runs if nothing failed in the
first."""
START_S = 90
"""Longest start of such a process on a busy machine; tests that take ALL_S longer than they should hang, and
notice."""

OPTIONS = (
    option("--trials", type=int, default=200, help="changes to try (default: %(default)s)"),
    option("--seed", type=int, default=0, help="of the sample (default: %(default)s)"),
    option("--only", metavar="K[:L]", help="only trial K, or those from K to L - 1"),
    option(
        "--reached",
        type=Path,
        metavar="FILE",
        help="lines that each test runs; measured and written if not there",
    ),
)
PRINTS = True


class Change(NamedTuple):
    """Replacement of the bytes `start` to `end` of a file of the checkout by `new`."""

    file: str
    line: int
    start: int
    end: int
    new: str
    kind: str

    def apply(self, source: bytes) -> bytes:
        """The changed source."""
        return source[: self.start] + self.new.encode() + source[self.end :]

    def describe(self, source: bytes) -> str:
        """`FILE:LINE kind: old -> new`."""
        old = " ".join(source[self.start : self.end].decode().split())
        return (
            f"{self.file}:{self.line} {self.kind}: {old[:70]} -> "
            f"{' '.join(self.new.split())[:70] or 'nothing'}"
        )


COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
SIGNS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "//", ast.Div: "*"}
REDUCTIONS = {
    "sum",
    "psum",
    "pmean",
    "mean",
    "pmax",
    "max",
    "min",
    "cumsum",
    "maximum",
    "minimum",
    "abs",
    "where",
    "roll",
}
MESSAGES = {
    "UserError",
    "ValueError",
    "TypeError",
    "AssertionError",
    "print",
    "warn",
    "warning",
    "info",
    "did_you_mean",
    "cast",
}


class Finder(ast.NodeVisitor):
    """Collects the possible changes of one file; leaves out messages, types, refusals and what runs at import
    only.
    """

    def __init__(self, file: str, source: bytes) -> None:
        """Reads the file's source."""
        self.file = file
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.changes: list[Change] = []
        self.assigned: set[str] = set()

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.source[start:end].decode()

    def _span(self, node: Any) -> tuple[int, int]:
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _add(self, kind: str, node: Any, new: str) -> None:
        self.changes.append(Change(self.file, node.lineno, *self._span(node), new, kind))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Only bodies: no decorators, types or docstring."""
        outer, self.assigned = (
            self.assigned,
            {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)},
        )
        for statement in node.body:
            self.visit(statement)
        self.assigned = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit(self, node: ast.AST) -> None:
        """Everything but messages, what only tests assert, and types."""
        if not isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.TypeAlias):
            super().visit(node)

    def visit_If(self, node: ast.If) -> None:
        """The condition turned round, unless it only refuses."""
        if any(isinstance(part, ast.Raise) for part in node.body) or "TYPE_CHECKING" in self._text(node.test):
            for statement in node.orelse:
                self.visit(statement)
            return
        self._add("condition", node.test, f"not ({self._text(node.test)})")
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """The value, not the type."""
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        """A name that is bound anew keeps what it had."""
        names = {
            name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)
        }
        if names and names <= self.assigned:
            self._add("stale", node, "pass")
        self.assigned |= names
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Nothing is added."""
        self._add("stale", node, "pass")
        self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        """A comparison's other side of equality."""
        if len(node.ops) == 1 and (other := COMPARISONS.get(type(node.ops[0]))):
            self._add(
                "comparison", node, f"{self._text(node.left)} {other} {self._text(node.comparators[0])}"
            )
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Another sign."""
        if (other := SIGNS.get(type(node.op))) and not isinstance(
            node.left, ast.Constant | ast.JoinedStr | ast.List
        ):
            self._add("sign", node, f"({self._text(node.left)} {other} {self._text(node.right)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Without the sign or the `not`."""
        if isinstance(node.op, ast.USub | ast.Not):
            self._add(
                "sign" if isinstance(node.op, ast.USub) else "condition",
                node,
                f"({self._text(node.operand)})",
            )
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """`and` for `or`."""
        other = " or " if isinstance(node.op, ast.And) else " and "
        self._add(
            "condition", node, "(" + other.join(f"({self._text(value)})" for value in node.values) + ")"
        )
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """An integer and one."""
        if type(node.value) is int:
            self._add("off by one", node, str(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        """A reduction left out, or over another axis."""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in MESSAGES:
            return
        plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
        if name in REDUCTIONS and plain and len(plain) == len(node.args):
            operand = plain[0]
            if isinstance(node.func, ast.Attribute) and self._text(node.func.value) not in (
                "jnp",
                "jax",
                "lax",
                "jax.lax",
                "np",
                "jax.numpy",
            ):
                operand = node.func.value
            if name == "where" and len(plain) == 3:
                operand = plain[1]
            self._add("reduction", node, f"({self._text(operand)})")
        for keyword in node.keywords:
            if keyword.arg in ("axis", "axes", "dimension") and isinstance(
                keyword.value, ast.Constant | ast.UnaryOp
            ):
                self._add("axis", keyword.value, "-1" if self._text(keyword.value) == "0" else "0")
        self.generic_visit(node)


def possible_changes(package: str) -> list[Change]:
    """Every change of a package, in the order of files and lines."""
    changes = []
    for path in sorted((ROOT / "jtrain" / package).rglob("*.py")):
        source = path.read_bytes()
        finder = Finder(str(path.relative_to(ROOT)), source)
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                finder.visit(statement)
        changes += finder.changes
    return changes


def sample(trials: int, seed: int) -> list[Change]:
    """As many changes of each package, in turn, and within a package as many of each kind as there are."""
    drawn = random.Random(seed)
    by_package = []
    for package in PACKAGES:
        by_kind: dict[str, list[Change]] = {}
        for change in possible_changes(package):
            by_kind.setdefault(change.kind, []).append(change)
        for changes in by_kind.values():
            drawn.shuffle(changes)
        turns = itertools.zip_longest(*by_kind.values())
        by_package.append([change for turn in turns for change in turn if change is not None])
    return [by_package[trial % len(PACKAGES)][trial // len(PACKAGES)] for trial in range(trials)]


def run(args: Options) -> Iterator[Row]:
    """Runs the trials; prints a line for each."""
    chosen = choose_trials(args.only, args.trials)
    changes = sample(args.trials, args.seed)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("jtrain", "kernels", "tests", "configs", "bench"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, tree / name)
        lines = lines_of_tests(tree, args.reached)
        noticed = 0
        for number in chosen:
            change = changes[number]
            source = (ROOT / change.file).read_bytes()
            begun = time.monotonic()
            (tree / change.file).write_bytes(change.apply(source))
            noticer = first_failure(tree, *tests_of(change, lines))
            (tree / change.file).write_bytes(source)
            noticed += noticer is not None
            verdict = noticer or "SURVIVED"
            print(
                f"{number} {change.describe(source)}  {verdict} {time.monotonic() - begun:.0f} s", flush=True
            )
    yield row("changes that were tried", len(chosen), "changes")
    yield row("changes that the quick tests notice", 100 * noticed / len(chosen), "%")


def lines_of_tests(tree: Path, kept: Path | None) -> dict[str, Any]:
    """Seconds and lines of each quick test of the packages: `{test: {seconds, lines: {file: [line]}}}`."""
    kept = kept or tree / "lines.json"
    if not kept.exists():
        pytest(
            tree,
            "-p",
            "tests.lines_of_tests",
            "--lines-of-tests",
            str(kept.absolute()),
            *(f"tests/{name}" for name in PACKAGES),
        )
    return json.loads(kept.read_text())


def tests_of(change: Change, lines: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Tests that reach the changed line: a cheap choice from every file of tests, and more of them.

    Where none does (the line runs in a process of its own), those of the folder that mirrors the package's.
    """
    reached = [name for name, test in lines.items() if change.line in test["lines"].get(change.file, ())]
    if not reached:
        mirror = change.file.replace("jtrain/", "tests/", 1).rpartition("/")[0]
        reached = [name for name in lines if name.startswith(mirror)]
    stem = "/test_" + change.file.rpartition("/")[2]

    def order(name: str) -> tuple[bool, float]:
        return stem not in name, lines[name]["seconds"]

    by_file: dict[str, list[str]] = {}
    for name in sorted(reached, key=order):
        by_file.setdefault(name.partition("::")[0], []).append(name)
    rounds = max(map(len, by_file.values()), default=0)
    in_turn = [names[turn] for turn in range(rounds) for names in by_file.values() if turn < len(names)]
    cheap, more, cheap_s, more_s = [], [], 0.0, 0.0
    for name in in_turn:
        seconds = lines[name]["seconds"]
        if cheap_s + seconds <= CHEAP_S:
            cheap.append(name)
            cheap_s += seconds
        elif more_s + seconds <= ALL_S or not more:
            more.append(name)
            more_s += seconds
    return cheap, more


def first_failure(tree: Path, *stages: list[str]) -> str | None:
    """Name of the first test that fails, or how the tests ended otherwise; None if all pass."""
    for tests in filter(None, stages):
        try:
            done = pytest(tree, "-x", *tests)
        except subprocess.TimeoutExpired:
            return "does not end"
        if done.returncode != 0:
            failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            return failed[0].split(" - ")[0] if failed else f"pytest ended with {done.returncode}"
    return None


def pytest(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs quick tests of the copy."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), str(tree / "kernels")])}
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    limit_s = None if "-p" in arguments else 3 * ALL_S + START_S
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False, timeout=limit_s
    )
