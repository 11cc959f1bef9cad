"""Pages described as plain data, and the HTML of one: a single file that loads nothing over the network.

A page embeds the JSON that it shows. A number of it is a `<data>` element with its path and all its digits.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jtrain.report.charts import bars_svg
from jtrain.report.table import Cell, Medium, Table

_FOLDER = Path(__file__).parent

if TYPE_CHECKING:
    # Only for types: a page needs no rich.
    from rich.text import Text


@dataclasses.dataclass(frozen=True)
class Title:
    """A title between the blocks that a terminal shows."""

    text: str


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """A paragraph in one medium, or with a style: `soft` is smaller."""

    text: str
    css: str = ""
    medium: Medium = "both"


@dataclasses.dataclass(frozen=True)
class Items:
    """A list of sentences; `empty_text` stands for an empty one."""

    lines: Sequence[str]
    empty_text: str


@dataclasses.dataclass(frozen=True)
class Folded:
    """A long text that a page shows once its summary is clicked."""

    summary: str
    text: str
    medium: Medium = "page"


@dataclasses.dataclass(frozen=True)
class Verbatim:
    """A text whose lines stay as they are."""

    text: str
    medium: Medium = "page"


@dataclasses.dataclass(frozen=True)
class Links:
    """Links to other pages, by their text."""

    urls_by_text: Mapping[str, str]
    medium: Medium = "page"
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture as markup for a page; `rows` are its lines on a terminal of a width."""

    html: str
    rows: "Callable[[int], Sequence[Text]] | None" = None


@dataclasses.dataclass(frozen=True)
class Panels:
    """Blocks by name, of which a page shows those that are chosen, and a terminal the first."""

    id: str
    label: str
    panels: Mapping[str, "Sequence[PageBlock]"]


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart over steps, which `chart.js` draws from the data of its id; hidden without any.

    kind: lines through points, or parts that are stacked on each other.
    group: charts of one group have one range of values; empty for the chart alone.
    """

    id: str
    title: str
    kind: Literal["line", "stack"] = "line"
    group: str = ""
    meaning: str = ""


type PageBlock = (
    str | Title | Paragraph | Items | Folded | Verbatim | Links | Picture | Panels | Chart | Table
)
"""Part of a page; a string is a paragraph of text."""


@dataclasses.dataclass(frozen=True)
class Section:
    """Blocks with a heading."""

    id: str
    title: str
    blocks: Sequence[PageBlock]
    medium: Medium = "both"


@dataclasses.dataclass(frozen=True)
class Page:
    """A page, for a browser and for a terminal.

    heading: above the page; empty for the title. tiles: key figures by name.
    content: the JSON that it embeds; kind: the id of the element that holds it.
    script: more JavaScript.
    is_live: the script may ask the server that the page came from.
    """

    title: str
    sections: Sequence[Section]
    heading: str = ""
    introduction: Sequence[PageBlock] = ()
    tiles: Sequence[tuple[str, str | Cell]] = ()
    kind: str = "content"
    content: Any = None
    script: str = ""
    is_live: bool = False


def _with_code(text: str) -> str:
    """Markup of a sentence: what stands between backticks is code."""
    import markupsafe  # beside jinja2

    return markupsafe.Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", markupsafe.escape(text)))


@functools.cache  # a live page makes its tables again at each change
def _environment() -> Any:
    import jinja2  # imported here because only pages need it

    environment = jinja2.Environment(
        # autoescape covers every text; markup of our own passes with `| safe`.
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # The templates call these by name.
    environment.filters |= {"bars": bars_svg, "json": json.dumps, "prose": _with_code}
    return environment


def html(page: Page) -> str:
    """The page as HTML. Texts are escaped; `</script>` in one of the JSON's does not end its element."""
    return (
        _environment()
        .get_template("page.html")
        .render(
            page=page,
            # Style and script are inlined: a page is one file, which may be mailed or opened from a disk.
            css=(_FOLDER / "page.css").read_text(),
            js=(_FOLDER / "page.js").read_text(),
            # "<" is escaped in JSON's own way, so that a string with </script> does not end the element.
            content=json.dumps(page.content, separators=(",", ":")).replace("<", "\\u003c"),
        )
    )


def blocks_html(blocks: Sequence[PageBlock]) -> str:
    """Blocks as HTML, to replace those of a section of a live page."""
    return str(_environment().get_template("blocks.html").module.listed(blocks))
