"""Conversations made from text that comes with every Python: questions about the names in its library.

Each name is in one conversation alone, so a held-out conversation asks about a name that was never trained
on.

    user       How is `read_all_lines` written?
    assistant  in snake case
    user       How many words?
    assistant  three
"""

import json
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jtrain.runtime.atomic_io import replacing

_NAME = re.compile(r"^[ \t]*(?:def|class)[ \t]+(\w+)|^([A-Z][A-Z0-9_]+)[ \t]*=", re.MULTILINE | re.ASCII)
_CAPITALISED = re.compile(r"[A-Z][a-z]+")

_LEAST, _MOST = 4, 20
"""Letters of a name."""

_PER_STYLE = 1500
"""Names of a style at most: the library has ten times as many in snake case as in camel case."""

_NUMBERS = ("one", "two", "three", "four", "five")

_STYLES = ("in capitals", "in snake case", "as one word", "in camel case")


def write_stdlib_chats(files: Iterable[Path], out: Path, record_of: Callable[[str], dict[str, Any]]) -> None:
    """Writes the conversations as JSON lines, in the same order for the same files.

    Args:
      record_of: returns the record about a name, as `chat_about` does.
    """
    names = {name for file in files for name in _names_in(file)}
    styles: dict[str, list[str]] = {}
    # Shuffled, so that the beginning of the alphabet is not all that a style has.
    for name in random.Random(0).sample(sorted(names), len(names)):
        styles.setdefault(style_of(name), []).append(name)
    chats = [record_of(name) for names in styles.values() for name in names[:_PER_STYLE]]
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as part:
        part.write_text("".join(f"{json.dumps(chat)}\n" for chat in chats), "utf-8")


def chat_about(name: str) -> dict[str, Any]:
    """Returns a record with a field `messages`: two questions about a name, and their answers."""
    second, answer = random.Random(name).choice(
        (
            ("How many words?", _NUMBERS[min(len(words_of(name)), len(_NUMBERS)) - 1]),
            ("Does it begin with an underscore?", "yes" if name.startswith("_") else "no"),
            ("Is a digit in it?", "yes" if re.search(r"\d", name) else "no"),
        )
    )
    turns = ((f"How is `{name}` written?", style_of(name)), (second, answer))
    texts = [text for turn in turns for text in turn]
    roles = ("user", "assistant") * len(turns)
    return {
        "messages": [{"role": role, "content": content} for role, content in zip(roles, texts, strict=True)]
    }


def pair_about(name: str) -> dict[str, Any]:
    """Returns a record with fields `chosen` and `rejected`: one question about a name with its answer, and
    with one that is wrong.
    """
    messages, drawn = chat_about(name)["messages"], random.Random(f"pair {name}")
    question, answer = messages[:2] if drawn.random() < 0.5 else messages[2:]
    if answer["content"] in _STYLES:
        question, answers = question["content"], _STYLES
    else:
        # The second question does not name what it is about.
        question = f"{question['content'].removesuffix('?')} in `{name}`?"
        answers = ("yes", "no") if answer["content"] in ("yes", "no") else _NUMBERS
    wrong = drawn.choice([candidate for candidate in answers if candidate != answer["content"]])
    prompt = {"role": "user", "content": question}
    return {
        "chosen": [prompt, answer],
        "rejected": [prompt, {"role": "assistant", "content": wrong}],
    }


def style_of(name: str) -> str:
    """Returns how a name is written."""
    bare = name.strip("_")
    if bare.isupper():
        return "in capitals"
    if "_" in bare:
        return "in snake case"
    return "as one word" if bare.islower() else "in camel case"


def words_of(name: str) -> list[str]:
    """Returns the words of a name."""
    bare = name.strip("_")
    if style_of(name) == "in camel case":
        return _CAPITALISED.findall(bare)
    return [word for word in bare.split("_") if word]


def _names_in(file: Path) -> Iterable[str]:
    try:
        text = file.read_text("utf-8")
    except UnicodeDecodeError:  # a module in another encoding
        return
    for name in (first or second for first, second in _NAME.findall(text)):
        bare = name.strip("_")
        is_camel = style_of(name) == "in camel case"
        # `HTTPServer` and `x86Name` have no words that everybody would count alike.
        is_clear = bare.isascii() and (not is_camel or "".join(_CAPITALISED.findall(bare)) == bare)
        if _LEAST <= len(bare) <= _MOST and is_clear and (is_camel or bare.islower() or bare.isupper()):
            yield name
