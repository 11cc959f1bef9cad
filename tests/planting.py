"""Copies of the packages in which bugs are planted, one at a time."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Bug(NamedTuple):
    """Replacement of `old`, which occurs once in `file`, by `new`; `test` finds it."""

    file: str
    old: str
    new: str
    test: str


def copy_tree(tree: Path, *ignored: str) -> Path:
    """Copies the packages and their tests to `tree`, without files named `ignored`."""
    for name in ("jtrain", "kernels", "tests", "configs"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", *ignored))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree / name)
    return tree


@contextlib.contextmanager
def planted(tree: Path, file: str, old: str, new: str) -> Iterator[None]:
    """Replaces `old`, which occurs once in a file, while the context is open."""
    path = tree / file
    text = path.read_text()
    assert text.count(old) == 1, f"{file} has changed: plant the bug anew"
    path.write_text(text.replace(old, new))
    try:
        yield
    finally:
        path.write_text(text)


def plantable(file: str, old: str) -> bool:
    """True if the code that a bug replaces is there once."""
    return (ROOT / file).read_text().count(old) == 1
