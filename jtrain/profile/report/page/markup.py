"""HTML and SVG markup as strings: texts are escaped, and numbers keep their full value beside the displayed one.

Charts are SVGs stretched over their column. Labels are HTML beside the SVG, so that they keep their size on a phone.
"""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

WIDTH = 1000
"""Width of every chart in SVG units."""


# Forbids scripts, styles, images and data from anywhere but the file itself.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def document(title: str, body: str, *, style: str = "") -> str:
    """Whole page as HTML, with page.css; it loads nothing over the network.

    Args:
      body: markup inside the body element.
      style: more style sheet.
    """
    css = (Path(__file__).parent / "page.css").read_text() + style
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">\n'
        f"<style>{css}</style></head>\n<body>{body}</body></html>\n"
    )


def embedded(name: str, content: str) -> str:
    """Element that holds JSON; `</script>` in one of its texts does not end it."""
    return f'<script type="application/json" id="{name}">{content.replace("<", "\\u003c")}</script>'


def text(words: object) -> str:
    """Escapes text for HTML."""
    return html.escape(str(words))


def data(path: str, value: int | float | None, shown: str) -> str:
    """Number of breakdown.json at `path` (`steps.0.parts.idle`): displayed as `shown`, with all digits in `value`."""
    full = "null" if value is None else repr(value)
    return f'<data data-path="{text(path)}" value="{full}">{text(shown)}</data>'


def rect(start: float, length: float, css: str, *, title: str = "", height: int = 10) -> str:
    """Bar of a chart; `start` and `length` are shares of its width."""
    inside = f"<title>{text(title)}</title>" if title else ""
    return (
        f'<rect x="{start * WIDTH:.2f}" y="0" width="{max(0.0, length) * WIDTH:.2f}" height="{height}" '
        f'class="{css}">{inside}</rect>'
    )


def svg(inside: str, name: str, *, css: str = "bar", height: int = 10) -> str:
    """Chart with an accessible name."""
    return (
        f'<svg class="{css}" viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none" role="img" '
        f'aria-label="{text(name)}">{inside}</svg>'
    )


def cell(inside: str, *, css: str = "", sort: int | float | str | None = None, header: bool = False) -> str:
    """Table cell; `sort` is its key when the table is sorted by its column."""
    tag = 'th scope="row"' if header else "td"
    attributes = f' class="{css}"' if css else ""
    if sort is not None:
        attributes += f' data-sort="{text(sort)}"'
    return f"<{tag}{attributes}>{inside}</{tag.split()[0]}>"


def table(columns: Sequence[tuple[str, str]], rows: Iterable[str], name: str, *, css: str = "", id: str = "") -> str:
    """Table that scrolls inside its own frame.

    Args:
      columns: (heading, CSS class) of each column; headings of class `sortable` are buttons.
    """
    heads = []
    for heading, style in columns:
        inside = f'<button type="button">{text(heading)}</button>' if "sortable" in style else text(heading)
        heads.append(f'<th scope="col" class="{style}">{inside}</th>' if style else f'<th scope="col">{inside}</th>')
    identity = f' id="{id}"' if id else ""
    return (
        f'<div class="frame" role="region" tabindex="0" aria-label="{text(name)}"><table class="{css}"{identity}>'
        f"<thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def row(*cells: str, css: str = "") -> str:
    """Table row."""
    return f'<tr class="{css}">{"".join(cells)}</tr>' if css else f"<tr>{''.join(cells)}</tr>"


def section(name: str, title: str, *inside: str) -> str:
    """Section of the page with a heading."""
    return f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{text(title)}</h2>' + (
        "\n".join(inside) + "</section>\n"
    )


def options(name: str, label: str, choices: Sequence[str]) -> str:
    """Drop-down list whose values are the indices of the choices."""
    listed = "".join(f'<option value="{index}">{text(choice)}</option>' for index, choice in enumerate(choices))
    return f'<label for="{name}">{text(label)}</label> <select id="{name}">{listed}</select>'
