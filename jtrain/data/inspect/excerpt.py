"""Excerpts of a text for a line of a table."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jtrain.data.tokenizer import Tokenizer

_MARKED_SPANS = 3
"""Learned spans of a piece that are shown; more are counted."""


def mark_learned(ids: list[int], learned: list[tuple[int, int]], tokenizer: "Tokenizer") -> str:
    """Returns the text of a piece, shortened, with its learned spans between [[ and ]]."""
    excerpts, position = [], 0
    # Between two learned spans lies text that is read and not learned: shown without brackets.
    for start, end in learned[:_MARKED_SPANS]:
        if position < start:
            excerpts.append(excerpt(tokenizer.decode(ids[position:start])))
        excerpts.append(f"[[{excerpt(tokenizer.decode(ids[start:end]))}]]")
        position = end
    if len(learned) > _MARKED_SPANS:
        excerpts.append(f"... and {len(learned) - _MARKED_SPANS} more learned spans")
    elif position < len(ids):
        excerpts.append(excerpt(tokenizer.decode(ids[position:])))
    return " ".join(excerpts)


def excerpt(text: str, length: int = 60) -> str:
    """Shortens a text to one line with its start and its end; repr keeps line breaks visible."""
    if len(text) <= length:
        return repr(text)
    return f"{text[: length // 2]!r} ... {text[-length // 2 :]!r}"
