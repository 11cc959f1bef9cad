"""Tokens of a step, one by one, with those that are learned apart from those that are only read."""

import itertools
import textwrap
from typing import Any

_WIDTH = 100
_BETWEEN = "\u00b7"
"""Mark between two tokens of a line, which tokens themselves rarely hold."""


def token_lines(piece: dict[str, Any]) -> list[str]:
    """Returns the lines of a piece of `pieces_of_step`: a run of tokens that are read, one of those that are
    learned, and so on, with a mark between tokens.
    """
    lines = []
    tokens = zip(piece["tokens"], piece["is_learned"], strict=True)
    for is_learned, run in itertools.groupby(tokens, key=lambda token: token[1]):
        # Line ends and other control characters as escapes, since a token is one place of a line.
        text = _BETWEEN.join(repr(token)[1:-1] for token, _ in run)
        label = "learned  " if is_learned else "read     "
        wrapped = textwrap.wrap(
            text, _WIDTH, drop_whitespace=False, break_on_hyphens=False, replace_whitespace=False
        )
        for number, line in enumerate(wrapped):
            lines.append((" " * len(label) if number else label) + line)
    return lines
