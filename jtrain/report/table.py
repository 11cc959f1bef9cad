"""Tables as plain data: `terminal.py` prints them, `page.py` makes HTML, `lines` needs no library."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jtrain.report.number_formats import Number

type Medium = Literal["both", "page", "terminal"]
"""Places that show a column."""


@dataclasses.dataclass(frozen=True)
class Bar:
    """A part of a bar: start and length as shares of its width, class on a page (`css`), tooltip."""

    start: Number
    length: Number
    css: str
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Bars:
    """A bar of one or more parts; `name` is read to those who do not see it."""

    parts: tuple[Bar, ...]
    name: str

    @classmethod
    def single(cls, start: Number, length: Number, css: str, name: str) -> "Bars":
        """A bar of one part."""
        return cls((Bar(start, length, css),), name)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A text of a table, with what a page shows or keeps beside it.

    value, path: the number behind the text and its place in the page's JSON; path is "" where it has none.
    sort: key when the table is sorted by this column.
    key: class of the colour in which charts draw it. note: a second, smaller line. title: tooltip.
    """

    text: str
    value: Number | None = None
    path: str = ""
    sort: Number | str | None = None
    key: str = ""
    note: str = ""
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of texts, numbers or bars, in every medium or in one."""

    name: str
    kind: Literal["", "number", "bar"] = ""
    medium: Medium = "both"


def words(*names: str, medium: Medium = "both") -> tuple[Column, ...]:
    """Columns of text."""
    return tuple(Column(name, medium=medium) for name in names)


def numbers(*names: str, medium: Medium = "both") -> tuple[Column, ...]:
    """Columns of numbers, aligned to the right."""
    return tuple(Column(name, "number", medium) for name in names)


def bars(name: str, medium: Medium = "page") -> tuple[Column, ...]:
    """A column of bars; a terminal draws only those of one part."""
    return (Column(name, "bar", medium),)


type CellLike = str | Cell | Bars
"""Content of a cell; a string is text."""


@dataclasses.dataclass(frozen=True)
class TableRow:
    """Cells of a row; missing ones at its end are empty."""

    cells: tuple[CellLike, ...]
    bold: bool = False


@dataclasses.dataclass
class Table:
    """A table, to which `add` adds rows.

    title: a line above it on a terminal, its name on a page.
    id, css: of the element on a page.
    first_rows: a page shows so many rows until it is asked for more, and sorts by the heading that is
      clicked.
    terminal_rows: rows that a terminal shows.
    """

    title: str
    columns: tuple[Column, ...]
    rows: list[TableRow] = dataclasses.field(default_factory=list[TableRow])
    id: str = ""
    css: str = ""
    first_rows: int | None = None
    terminal_rows: int | None = None

    def add(self, *cells: CellLike, bold: bool = False) -> None:
        """Adds a row."""
        self.rows.append(TableRow(cells, bold))

    def for_medium(self, medium: Medium) -> "tuple[list[Column], list[TableRow]]":
        """Columns of a medium, and the rows with a cell for each of them."""
        column_indices = [
            index for index, column in enumerate(self.columns) if column.medium in ("both", medium)
        ]
        row_limit = self.terminal_rows if medium == "terminal" else None
        rows = [
            # Rows may end early: the cells that they lack are empty.
            TableRow(tuple(row.cells[i] if i < len(row.cells) else "" for i in column_indices), row.bold)
            for row in self.rows[:row_limit]
        ]
        return [self.columns[i] for i in column_indices], rows

    def lines(self) -> list[str]:
        """The table without its title as aligned lines, for logs and for machines with nothing but JAX."""
        columns, rows = self.for_medium("terminal")
        cells = [
            [column.name for column in columns],
            *([text_of(cell) for cell in row.cells] for row in rows),
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return [
            # rstrip, because padding of a last column of text would end in spaces.
            "  ".join(
                text.rjust(width) if column.kind == "number" else text.ljust(width)
                for text, width, column in zip(row_texts, widths, columns, strict=True)
            ).rstrip()
            for row_texts in cells
        ]


def text_of(cell: CellLike) -> str:
    """Text of a cell; a bar is drawn with block characters."""
    if isinstance(cell, Bars):
        # Only the first part: a terminal has no colours to tell parts apart.
        return draw_bar(cell.parts[0].start, cell.parts[0].length)
    return cell.text if isinstance(cell, Cell) else cell


def draw_bar(start: Number, length: Number, width: int = 30) -> str:
    """A bar in block characters; the smallest one is a thin line."""
    # Both ends are rounded, not the length, so that stacked bars meet.
    first, last = round(start * width), round((start + length) * width)
    # A length that rounds to nothing still gets a thin line, a length of 0 none.
    return " " * first + ("█" * (last - first) or "▏" * (length > 0))


@dataclasses.dataclass(frozen=True)
class Facts:
    """The JSON of a report; cells take numbers from it by their path, so that page and JSON agree."""

    content: Mapping[str, Any]

    def value(self, path: str) -> Any:
        """Value at a path such as `steps.0.parts.idle`; None if the last name is missing."""
        value: Any = self.content
        for key in path.split("."):
            # A list by its index, a dict by its name.
            value = value[int(key)] if isinstance(value, Sequence) else value.get(key)
        return value

    def cell(self, path: str, format_value: Callable[[Any], str] = str, **options: Any) -> Cell:
        """The number at a path, as `format_value` formats it."""
        value = self.value(path)
        return Cell(format_value(value), value, path, **options)
