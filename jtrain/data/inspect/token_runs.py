"""Tokens of a step, one by one, with those that are learned apart from those that are only read."""

import html
import itertools
import textwrap
from collections.abc import Sequence
from typing import Any

from jtrain.report.page import Page, Paragraph, Picture, Section

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
            # The label stands before the first line of a run alone.
            lines.append((" " * len(label) if number else label) + line)
    return lines


_STYLE = {
    True: "background:#2e7d3233;border-bottom:2px solid #2e7d32",
    False: "opacity:.75;border-bottom:1px dotted #888",
}
"""How a page shows a token that is learned, and one that is only read."""


def tokens_page(title: str, named_pieces: Sequence[tuple[str, dict[str, Any]]]) -> Page:
    """Returns the page of a step's pieces, each token in a mark of its own.

    Args:
      named_pieces: what each piece is called, and an entry of `pieces_of_step` with its tokens.
    """
    learned = sum(sum(piece["is_learned"]) for _, piece in named_pieces)
    total = sum(len(piece["tokens"]) for _, piece in named_pieces)
    sections = [
        Section(f"piece{number}", name, [Picture(_tokens_html(piece))])
        for number, (name, piece) in enumerate(named_pieces)
    ]
    legend = Paragraph(
        "Green tokens are learned; dotted ones are only read. A line ends at each line end of the text."
    )
    tiles = [("learned", f"{learned:,}"), ("only read", f"{total - learned:,}")]
    return Page(title=title, sections=sections, introduction=[legend], tiles=tiles, kind="tokens")


def _tokens_html(piece: dict[str, Any]) -> str:
    """Markup of a piece; tokens are escaped, since texts are not ours."""
    marks = []
    for token, is_learned in zip(piece["tokens"], piece["is_learned"], strict=True):
        escaped = html.escape(repr(token)[1:-1])
        ends_line = "<br>" if token.endswith("\n") else ""
        title = "learned" if is_learned else "read"
        marks.append(
            f'<span class="{title}" title="{title}" style="{_STYLE[is_learned]}">{escaped}</span>{ends_line}'
        )
    return f'<p style="font-family:monospace;line-height:2">{"".join(marks)}</p>'
