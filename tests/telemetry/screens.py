"""Screen of a terminal: what is left to read after text with control sequences."""

import re

_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")


def screen(text: str, width: int, *, styles: bool = False) -> list[str]:
    """Lines of a screen so many columns wide, without blanks at their ends.

    Args:
      styles: shows changes of style, as `<1;36>`.
    """
    rows: list[list[tuple[str, str]]] = [[]]
    row = column = 0
    style = ""
    for match in _TOKEN.finditer(text):
        parameter, command, carriage_return, newline, words = match.groups()
        if command == "m":
            style = "" if parameter in ("", "0") else parameter
        elif command == "A":
            row -= int(parameter or 1)
        elif command == "K" and row < len(rows):
            rows[row] = []
        elif carriage_return:
            column = 0
        elif newline:
            row, column = row + 1, 0
        for character in words or "":
            if column == width:
                row, column = row + 1, 0
            rows += [[] for _ in range(row + 1 - len(rows))]
            rows[row] += [(" ", "")] * (column + 1 - len(rows[row]))
            rows[row][column] = (character, style)
            column += 1
    lines = [_line(cells, styles=styles) for cells in rows]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _line(cells: list[tuple[str, str]], *, styles: bool) -> str:
    if not styles:
        return "".join(character for character, _ in cells).rstrip()
    text, before = "", ""
    for character, style in cells:
        text += (f"<{style}>" if style != before else "") + character
        before = style
    return text.rstrip() + ("<>" if before else "")
