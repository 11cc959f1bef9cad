"""Prepares docstrings for the API reference, which shows them as Markdown.

A class's fields become a list: our docstrings describe them as lines `name: text` or `name, name: text`. An
index written in a sentence, such as [rank][turn], is no link.
"""

import re
from typing import Any

import griffe

_FIELDS = re.compile(r"(\w+(?:, \w+)*): ")
_INDEX = re.compile(r"(`[^`]*`)|(?<=\])\[")


def with_list(text: str, names: set[str]) -> str:
    """`text` with each paragraph that describes fields of `names` as a Markdown list; the rest is as it
    was.
    """
    paragraphs = []
    for paragraph in text.split("\n\n"):
        first = _FIELDS.match(paragraph)
        if first and set(first[1].split(", ")) <= names:
            lines = [_FIELDS.sub(r"- **\1**: ", line, count=1) for line in paragraph.split("\n")]
            paragraph = "\n".join(lines)
        paragraphs.append(paragraph)
    return "\n\n".join(paragraphs)


class Docstrings(griffe.Extension):
    """Rewrites docstrings once all objects are known."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called by griffe for every module, class, function and attribute."""
        if obj.docstring is None:
            return
        text = obj.docstring.value
        if obj.is_class:
            text = with_list(text, set(obj.members))
        obj.docstring.value = _INDEX.sub(lambda found: found[1] or r"\[", text)
