"""Pieces of the slow tests, and which of them a run of CI takes.

    python tests/slow_pieces.py           those of this commit and day
    python tests/slow_pieces.py NAME...   these

`tests/slow_pieces.txt` has a line per piece. Without names a run takes the random layouts, at most three pieces
of packages that changed since the commit in `.ci/last_passed`, and the piece whose turn it is today: without the
last, the tests of a package that nobody changes would rot. Imports nothing but the standard library.
"""

import datetime
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PIECES = ROOT / "tests" / "slow_pieces.txt"
LAST_PASSED = ".ci/last_passed"
PIECE_MINUTES = 10
"""Longest piece, in minutes on two idle cores."""
MOST_CHANGED = 3
"""Pieces that a run takes because of a change."""
LIMIT_S = 50 * 60
"""Seconds after which a run of CI ends its pieces: the layouts and four pieces at 10 minutes each, on a machine that
is as fast as the one that measured them. The whole of CI has 90 minutes, and the quick tests take 30."""
EVERY_TIME = "random-layouts"
"""Piece of every run."""
CONCERN_ALL = ("pyproject.toml", "constraints.txt", "tests/conftest.py")
PACKAGES = {
    "configs": "config",
    "kernels": "kernels",
    "bench": "bench",
    "launch": "launch",
    "docs": "docs",
    "colabs": "docs",
}
"""Top folder beside `jtrain` and `tests` -> package whose tests it concerns."""


class Piece(NamedTuple):
    """Slow tests that run together.

    Attributes:
      name: the name, as on the command line.
      minutes: minutes on two idle cores.
      is_measured: False if `minutes` is an estimate ("~4"): nobody has run the whole piece yet.
      tests: files or `file::function`.
      share: "2/3" for the 2nd, 5th, 8th ... of their slow tests (`--share` in tests/conftest.py), "1/1" for all.
      needs: environment variable without which its tests are skipped, or "".
    """

    name: str
    minutes: float
    is_measured: bool
    tests: tuple[str, ...]
    share: str = "1/1"
    needs: str = ""

    @property
    def files(self) -> set[str]:
        """Files of its tests."""
        return {test.partition("::")[0] for test in self.tests}

    @property
    def packages(self) -> set[str]:
        """Packages that its files test."""
        return {package for file in self.files if (package := package_of(file))}

    @property
    def arguments(self) -> list[str]:
        """Arguments of pytest."""
        return [*self.tests, *([] if self.share == "1/1" else [f"--share={self.share}"])]

    def has(self, test: str) -> bool:
        """True if the test of this node id is among the piece's tests, of which it may run a share."""
        return any(test == path or test.startswith((f"{path}::", f"{path}[")) for path in self.tests)


def read_pieces(text: str) -> list[Piece]:
    """Pieces of `tests/slow_pieces.txt`, in its order. An indented line continues the one before."""
    pieces = []
    for line in re.sub(r"\n[ \t]+(?=\S)", " ", text).splitlines():
        if not line or line.startswith("#"):
            continue
        name, minutes, *arguments = line.split()
        tests = tuple(argument for argument in arguments if argument.startswith("tests/"))
        shares = [argument for argument in arguments if re.fullmatch(r"\d+/\d+", argument)]
        needs = [argument for argument in arguments if re.fullmatch("[A-Z_]+", argument)]
        if len(tests) + len(shares) + len(needs) != len(arguments) or len(shares) > 1 or len(needs) > 1:
            raise ValueError(
                f"{PIECES.name}, {name}: not tests, a share and a variable: {' '.join(arguments)}"
            )
        is_measured, share = not minutes.startswith("~"), "".join(shares) or "1/1"
        pieces.append(Piece(name, float(minutes.strip("~")), is_measured, tests, share, needs="".join(needs)))
    return pieces


def package_of(path: str) -> str:
    """Package that a file belongs to or tests, or "": `jtrain/step/zero.py` and `tests/step/test_zero.py` -> step."""
    top, _, rest = path.partition("/")
    if top in PACKAGES:
        return PACKAGES[top]
    if top == "jtrain":
        return rest.partition("/")[0].removesuffix(".py")
    return rest.partition("/")[0] if top == "tests" and "/" in rest else ""


def importers(root: Path) -> dict[str, set[str]]:
    """Packages that import a package, by its name; also those that do so inside of functions."""
    users: defaultdict[str, set[str]] = defaultdict(set)
    for file in [*root.glob("jtrain/**/*.py"), *root.glob("bench/**/*.py")]:
        user = package_of(file.relative_to(root).as_posix())
        names = re.findall(
            r"^\s*(?:from|import) (?:jtrain\.(\w+)|(jtrain_kernels))", file.read_text(), re.MULTILINE
        )
        for package in {package or "kernels" for package, _ in names} - {user}:
            users[package].add(user)
    return users


def changed_files(root: Path) -> tuple[list[str] | None, str]:
    """Files that differ from the commit whose CI passed last, and a sentence that says which commit that is.

    None where that is unknown: the file was not written, or the clone lacks the commit, as a shallow one does.
    """

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)

    file = root / LAST_PASSED
    commit = file.read_text().strip() if file.exists() else ""
    if not re.fullmatch("[0-9a-f]{40}", commit):
        return None, f"{LAST_PASSED} has no commit but {commit!r}: what has changed is unknown"
    if git("cat-file", "-e", f"{commit}^{{commit}}").returncode:
        return None, (
            f"{commit[:12]} of {LAST_PASSED} is not in this clone: what has changed is unknown. "
            "If the clone is shallow: git fetch --unshallow"
        )
    done = git("diff", "--name-only", "--no-renames", commit, "--")
    if done.returncode:
        return None, f"what has changed is unknown: {done.stderr.strip()}"
    files = done.stdout.splitlines()
    return files, f"{len(files)} files changed since {commit[:12]}, the commit of {LAST_PASSED}"


def reason_to_run(
    piece: Piece, changed: Sequence[str] | None, users: Mapping[str, set[str]]
) -> tuple[int, str]:
    """Why a change concerns a piece, after the rank of the reason: 0 first, 4 not at all."""
    if changed is None:
        return 3, "what has changed is unknown"
    if files := sorted(piece.files.intersection(changed)):
        return 0, f"{files[0]} changed"
    packages = {package for path in changed if (package := package_of(path))}
    if own := sorted(piece.packages & packages):
        return 1, f"{', '.join(own)} changed"
    used = sorted(package for package in packages if piece.packages & users.get(package, set()))
    if used:
        return 2, f"{', '.join(sorted(piece.packages))} imports what changed: {', '.join(used)}"
    if everywhere := sorted(set(CONCERN_ALL).intersection(changed)):
        return 3, f"{everywhere[0]} changed"
    return 4, ""


def choose(
    pieces: Sequence[Piece], changed: Sequence[str] | None, users: Mapping[str, set[str]], day: int
) -> list[tuple[Piece, str]]:
    """Pieces that a run takes, each with the reason.

    Of pieces with equally good reasons, other ones come first every day, so that all of them have run after a few
    runs. `day` counts days.
    """
    candidates = [piece for piece in pieces if piece.name != EVERY_TIME]
    ranked = []
    for number, piece in enumerate(candidates):
        rank, reason = reason_to_run(piece, changed, users)
        ranked.append((rank, (number - MOST_CHANGED * day) % len(candidates), piece, reason))
    chosen = [(piece, reason) for rank, _, piece, reason in sorted(ranked) if rank < 4][:MOST_CHANGED]
    names = {piece.name for piece, _ in chosen}
    for number in range(len(candidates)):
        piece = candidates[(day + number) % len(candidates)]
        if piece.name not in names:
            return [*chosen, (piece, "in turn today")]
    return chosen


def run_piece(piece: Piece, limit_s: float) -> str:
    """Runs a piece with two processes; returns "passed", or how it ended."""
    command = [sys.executable, "-m", "pytest", "-n", "2", "-m", "slow", "--durations=5", *piece.arguments]
    # In a session of its own, all processes that its tests have started can be ended as well.
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        code = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"FAILED: ended at the limit of the run, which had {limit_s / 60:.1f} minutes left for it,"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return "passed" if code == 0 else f"FAILED: exit code {code}"


def run(chosen: Sequence[tuple[Piece, str]], limit_s: float) -> bool:
    """Runs pieces one after another, prints how each ended, and returns True if all passed."""
    start_s = time.monotonic()
    lines = []
    for piece, reason in chosen:
        print(f"+ slow tests {piece.name}: {shlex.join(piece.arguments)}", flush=True)
        piece_start_s = time.monotonic()
        outcome = run_piece(piece, max(0.0, start_s + limit_s - piece_start_s))
        minutes = (time.monotonic() - piece_start_s) / 60
        lines.append(f"{piece.name}: {outcome} in {minutes:.1f} minutes of {piece.minutes:.1f} ({reason})")
    print(*lines, sep="\n", flush=True)
    return all(": passed in" in line for line in lines)


def main(names: Sequence[str]) -> int:
    """Runs the pieces of these names, or those of this commit and day; returns an exit code."""
    pieces = read_pieces(PIECES.read_text())
    by_name = {piece.name: piece for piece in pieces}
    if unknown := sorted(set(names) - set(by_name)):
        print(
            f"no piece is called {', '.join(unknown)}; {PIECES.name} has {', '.join(by_name)}",
            file=sys.stderr,
        )
        return 2
    if names:
        return 0 if run([(by_name[name], "asked for") for name in names], limit_s=24 * 3600) else 1
    today = datetime.datetime.now(datetime.UTC).date()
    changed, sentence = changed_files(ROOT)
    lacking = {piece.name: piece.needs for piece in pieces if piece.needs and not os.environ.get(piece.needs)}
    runnable = [piece for piece in pieces if piece.name not in lacking]
    chosen = choose(runnable, changed, importers(ROOT), today.toordinal())
    chosen.insert(0, (by_name[EVERY_TIME], "in every run"))
    print(f"slow tests of {today}: {sentence}")
    for name, variable in lacking.items():
        print(f"  {name}: left out, it needs {variable}")
    for piece, reason in chosen:
        print(f"  {piece.name}: {piece.minutes:.1f} minutes, {reason}")
    return 0 if run(chosen, LIMIT_S) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
