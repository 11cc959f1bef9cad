"""Every message of a refusal, as its source has it: the places that raise a `UserError` or one of its kinds."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "jtrain").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])
KINDS = ("UserError", "FileError", "AwayError", "TakenWorkdir")
HOLE = "\0"
"""Stands for a value that a message puts in."""

_SET = re.compile(
    r"\b(?:[Ss]et|[Rr]aise|[Ll]ower|[Ll]eave|[Rr]emove|[Uu]se|or|and|take) [a-z_]+(?:\.[\w\0*]+)+"
)
_OPTION = re.compile(r"--[a-z][a-z-]+")
_COMMAND = re.compile(r"`(?:jtrain|python|kill|pip) |(?:python -m jtrain|pip install)")


class Message(NamedTuple):
    """One message, with HOLE for each value in it.

    path: file that raises it.
    """

    path: str
    text: str

    @property
    def names_a_way_out(self) -> bool:
        """True if the message tells a command, an option or a setting to use."""
        advice = re.split(r"(?<=[.:;]) (?=[A-Z\0a-z(])", self.text, maxsplit=1)[-1]
        return any(pattern.search(advice) for pattern in (_SET, _OPTION, _COMMAND))

    @property
    def listing(self) -> str:
        """The message in one line, without its values and its number of line: how a list names it."""
        return f"{self.path}: {' '.join(self.text.replace(HOLE, '_').split())[:100].rstrip()}"


def messages() -> list[Message]:
    """The messages whose text stands where they are raised; a few are made elsewhere."""
    found = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _name(node.func) in KINDS and node.args:
                found.append(Message(path.relative_to(ROOT).as_posix(), _text(node.args[0])))
    # Without any word of its own a message fits everything.
    return [message for message in found if len(message.text.replace(HOLE, "").split()) > 2]


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return HOLE
