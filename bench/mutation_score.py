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
"""Seconds of tests in a trial's first process, and in its second, which runs if the first noticed nothing."""
START_S = 90
"""Longest start of such a process on a busy machine; tests that take much longer hang, and so notice."""

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


class Mutation(NamedTuple):
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


# The smallest change of each: only a case at the edge tells it apart.
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
# Calls whose arguments are text or types, which no test has to pin down.
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
    """Collects the possible changes of one file, without messages, types, refusals and module-level code."""

    def __init__(self, file: str, source: bytes) -> None:
        """Reads the file's source."""
        self.file = file
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            # In bytes, as ast counts columns in bytes.
            self.starts.append(self.starts[-1] + len(line))
        self.changes: list[Mutation] = []
        self.assigned: set[str] = set()

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.source[start:end].decode()

    def _span(self, node: Any) -> tuple[int, int]:
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _add(self, kind: str, node: Any, new: str) -> None:
        self.changes.append(Mutation(self.file, node.lineno, *self._span(node), new, kind))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Only bodies: no decorators, types or docstring."""
        # Parameters count as bound: assigning to one again makes a stale value possible.
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
            # The refusal itself is left alone; what follows in `else` is not.
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
        # A first binding left out is a NameError, which any test notices.
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
        if len(node.ops) == 1 and (opposite := COMPARISONS.get(type(node.ops[0]))):
            self._add(
                "comparison", node, f"{self._text(node.left)} {opposite} {self._text(node.comparators[0])}"
            )
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Another sign."""
        # Formatting, repeating a list or scaling a constant: mostly no arithmetic of the model.
        if (other_sign := SIGNS.get(type(node.op))) and not isinstance(
            node.left, ast.Constant | ast.JoinedStr | ast.List
        ):
            self._add("sign", node, f"({self._text(node.left)} {other_sign} {self._text(node.right)})")
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
        """Swaps `and` and `or`."""
        other_word = " or " if isinstance(node.op, ast.And) else " and "
        self._add(
            "condition", node, "(" + other_word.join(f"({self._text(value)})" for value in node.values) + ")"
        )
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """An integer and one."""
        # Not True and False, which are ints as well.
        if type(node.value) is int:
            self._add("off by one", node, str(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        """A reduction left out, or over another axis."""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in MESSAGES:
            return
        operands = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
        if name in REDUCTIONS and operands and len(operands) == len(node.args):
            # np.sum(x): the first argument; x.sum(): the array itself, below.
            operand = operands[0]
            if isinstance(node.func, ast.Attribute) and self._text(node.func.value) not in (
                "jnp",
                "jax",
                "lax",
                "jax.lax",
                "np",
                "jax.numpy",
            ):
                operand = node.func.value
            # where(condition, x, y) becomes x.
            if name == "where" and len(operands) == 3:
                operand = operands[1]
            self._add("reduction", node, f"({self._text(operand)})")
        for keyword in node.keywords:
            if keyword.arg in ("axis", "axes", "dimension") and isinstance(
                keyword.value, ast.Constant | ast.UnaryOp
            ):
                self._add("axis", keyword.value, "-1" if self._text(keyword.value) == "0" else "0")
        self.generic_visit(node)


def possible_changes(package: str) -> list[Mutation]:
    """Every change of a package, in the order of files and lines."""
    changes = []
    for path in sorted((ROOT / "jtrain" / package).rglob("*.py")):
        source = path.read_bytes()
        finder = Finder(str(path.relative_to(ROOT)), source)
        for statement in ast.parse(source).body:
            # Module-level code runs at import, where any change breaks every test.
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                finder.visit(statement)
        changes += finder.changes
    return changes


def sample(trials: int, seed: int) -> list[Mutation]:
    """Returns as many changes of each package, in turn; within a package its kinds take turns."""
    rng = random.Random(seed)
    by_package = []
    for package in PACKAGES:
        by_kind: dict[str, list[Mutation]] = {}
        for change in possible_changes(package):
            by_kind.setdefault(change.kind, []).append(change)
        for changes in by_kind.values():
            # One generator for all packages: the sample depends on the seed and the tree alone.
            rng.shuffle(changes)
        # One of each kind in turn, so that frequent kinds do not fill the sample.
        rounds = itertools.zip_longest(*by_kind.values())
        by_package.append([change for turn in rounds for change in turn if change is not None])
    # Trial K is in package K modulo their number: any share of the trials is spread over all packages.
    return [by_package[trial % len(PACKAGES)][trial // len(PACKAGES)] for trial in range(trials)]


def run(args: Options) -> Iterator[Row]:
    """Runs the trials; prints a line for each."""
    # The whole sample is drawn even for one trial, so that trial K is always the same change.
    chosen = choose_trials(args.only, args.trials)
    changes = sample(args.trials, args.seed)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("jtrain", "kernels", "tests", "configs", "bench"):
            # A copy: the checkout stays as it is, also if a trial is killed.
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, tree / name)
        # Of the unchanged copy, so before the first trial.
        lines = lines_of_tests(tree, args.reached)
        noticed = 0
        for number in chosen:
            change = changes[number]
            source = (ROOT / change.file).read_bytes()
            start_s = time.monotonic()
            (tree / change.file).write_bytes(change.apply(source))
            failed_test = first_failure(tree, *tests_of(change, lines))
            # Put back before the next trial: each has one change.
            (tree / change.file).write_bytes(source)
            noticed += failed_test is not None
            verdict = failed_test or "SURVIVED"
            print(
                f"{number} {change.describe(source)}  {verdict} {time.monotonic() - start_s:.0f} s",
                flush=True,
            )
    yield row("changes that were tried", len(chosen), "changes")
    yield row("changes that the quick tests notice", 100 * noticed / len(chosen), "%")


def lines_of_tests(tree: Path, lines_file: Path | None) -> dict[str, Any]:
    """Seconds and lines of each quick test of the packages: `{test: {seconds, lines: {file: [line]}}}`."""
    lines_file = lines_file or tree / "lines.json"
    if not lines_file.exists():
        pytest(
            tree,
            "-p",
            "tests.lines_of_tests",
            "--lines-of-tests",
            str(lines_file.absolute()),
            *(f"tests/{name}" for name in PACKAGES),
        )
    return json.loads(lines_file.read_text())


def tests_of(change: Mutation, lines: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Tests that reach the changed line: a cheap choice from every file of tests, and more of them.

    Where none does (the line runs in a process of its own), those of the folder that mirrors the package's.
    """
    reached = [name for name, test in lines.items() if change.line in test["lines"].get(change.file, ())]
    if not reached:
        # jtrain/data/x.py is tested in tests/data.
        mirror = change.file.replace("jtrain/", "tests/", 1).rpartition("/")[0]
        reached = [name for name in lines if name.startswith(mirror)]
    stem = "/test_" + change.file.rpartition("/")[2]

    # The file of tests named like the changed file before all others; cheapest first.
    def order(name: str) -> tuple[bool, float]:
        return stem not in name, lines[name]["seconds"]

    # A test of every file first, as tests of one file tend to notice the same.
    by_file: dict[str, list[str]] = {}
    for name in sorted(reached, key=order):
        by_file.setdefault(name.partition("::")[0], []).append(name)
    rounds = max(map(len, by_file.values()), default=0)
    in_turn = [names[turn] for turn in range(rounds) for names in by_file.values() if turn < len(names)]
    cheap, further, cheap_s, further_s = [], [], 0.0, 0.0
    for name in in_turn:
        seconds = lines[name]["seconds"]
        if cheap_s + seconds <= CHEAP_S:
            cheap.append(name)
            cheap_s += seconds
        # At least one, however slow: it may be the only test that reaches the line.
        elif further_s + seconds <= ALL_S or not further:
            further.append(name)
            further_s += seconds
    return cheap, further


def first_failure(tree: Path, *stages: list[str]) -> str | None:
    """Name of the first test that fails, or how the tests ended otherwise; None if all pass."""
    # Not an empty stage: pytest without arguments runs every test.
    for tests in filter(None, stages):
        try:
            process = pytest(tree, "-x", *tests)
        except subprocess.TimeoutExpired:
            return "does not end"
        if process.returncode != 0:
            failures = [line for line in process.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            # An interpreter that crashed leaves no line about a test.
            return failures[0].split(" - ")[0] if failures else f"pytest ended with {process.returncode}"
    return None


def pytest(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs quick tests of the copy."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), str(tree / "kernels")])}
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    # The measuring run (-p) has no limit: it runs every test.
    limit_s = None if "-p" in arguments else 3 * ALL_S + START_S
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False, timeout=limit_s
    )
