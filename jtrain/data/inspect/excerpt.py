"""Excerpts of a text for a line of a table."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jtrain.data.tokenizer import Tokenizer

_MARKED_SPANS = 3
"""Learned spans of a piece that are shown; more are counted."""


def marked(ids: list[int], learned: list[tuple[int, int]], tokenizer: "Tokenizer") -> str:
    """Returns the text of a piece, shortened, with its learned spans between [[ and ]]."""
    shown, at = [], 0
    for start, end in learned[:_MARKED_SPANS]:
        if at < start:
            shown.append(excerpt(tokenizer.decode(ids[at:start])))
        shown.append(f"[[{excerpt(tokenizer.decode(ids[start:end]))}]]")
        at = end
    if len(learned) > _MARKED_SPANS:
        shown.append(f"... and {len(learned) - _MARKED_SPANS} more learned spans")
    elif at < len(ids):
        shown.append(excerpt(tokenizer.decode(ids[at:])))
    return " ".join(shown)


def excerpt(text: str, length: int = 60) -> str:
    """Shortens a text to one line with its start and its end."""
    if len(text) <= length:
        return repr(text)
    return f"{text[: length // 2]!r} ... {text[-length // 2 :]!r}"
