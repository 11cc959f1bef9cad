"""Excerpts of a text for a line of a table."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jtrain.data.tokenizer import Tokenizer

_MARKED_SPANS = 3
"""Learned spans of a piece that are shown; more are counted."""


def mark_learned(
    ids: list[int], learned: list[tuple[int, int]], tokenizer: "Tokenizer", *, specials: bool = False
) -> str:
    """Returns the text of a piece, shortened, with its learned spans between [[ and ]].

    Args:
      specials: True to spell special tokens, which are a part of a chat template's text.
    """
    excerpts, position = [], 0

    def decode(start: int, end: int) -> str:
        return excerpt(tokenizer.decode(ids[start:end], specials=specials))

    # Between two learned spans lies text that is read and not learned: shown without brackets.
    for start, end in learned[:_MARKED_SPANS]:
        if position < start:
            excerpts.append(decode(position, start))
        excerpts.append(f"[[{decode(start, end)}]]")
        position = end
    if len(learned) > _MARKED_SPANS:
        excerpts.append(f"... and {len(learned) - _MARKED_SPANS} more learned spans")
    elif position < len(ids):
        excerpts.append(decode(position, len(ids)))
    return " ".join(excerpts)


def excerpt(text: str, length: int = 60) -> str:
    """Shortens a text to one line with its start and its end; repr keeps line breaks visible."""
    if len(text) <= length:
        return repr(text)
    return f"{text[: length // 2]!r} ... {text[-length // 2 :]!r}"
