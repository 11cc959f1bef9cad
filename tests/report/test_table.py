"""Tables in every medium, from one description."""

import io

import pytest
from rich.console import Console

from jtrain.report.number_formats import milliseconds, rate, seconds, short, size
from jtrain.report.page import Page, Picture, Section, Title, html
from jtrain.report.table import Bars, Cell, Column, Facts, Table, bars, draw_bar, numbers, words
from jtrain.report.terminal import print_blocks, print_page


def example() -> Table:
    """Two rows with a bar for pages, a number of the JSON, and a column for each medium alone."""
    facts = Facts({"rows": [{"took": 1.23456, "parts": {}}]})
    columns = words("name") + bars("of all") + numbers("took") + words("where", medium="terminal")
    table = Table("times", columns)
    bar = Bars.single(0.0, 0.5, "c0", "half")
    table.add(
        Cell("[red]<b>", key="c1", note="a note", title="a tip"),
        bar,
        facts.cell("rows.0.took", seconds),
        "here",
    )
    table.add("two", bar, "7", bold=True)
    return table


def printed(table: Table, width: int = 60) -> str:
    into = io.StringIO()
    print_blocks([table], Console(file=into, width=width))
    return into.getvalue()


def test_one_description_gives_every_medium_the_same_cells() -> None:
    """A terminal and plain lines have the columns of a terminal, a page has its bars, number and digits."""
    table = example()
    rows = [line.split() for line in printed(table).splitlines() if line.strip() and "─" not in line]
    assert rows == [["times"], ["name", "took", "where"], ["[red]<b>", "1.235", "s", "here"], ["two", "7"]]
    assert [line.split() for line in table.lines()] == rows[1:]
    assert table.lines()[1:] == ["[red]<b>  1.235 s  here", "two             7"]

    page = html(Page("a page", [Section("s", "A section", [table])], content={"x": "</script>"}))
    assert '<data data-path="rows.0.took" value="1.23456">1.235 s</data>' in page
    assert '<rect x="0.00" y="0" width="500.00" height="10" class="c0">' in page
    assert (
        '<th scope="row"><i class="key c1"></i><span title="a tip">[red]&lt;b&gt;</span><br><small>a note'
        in page
    )
    assert '<tr class="whole">' in page
    assert "here" not in page.partition("<main>")[2]
    assert r'{"x":"\u003c/script>"}' in page


def test_milliseconds_have_four_digits_and_nothing_is_0() -> None:
    assert [milliseconds(us) for us in (6691, 38_710_000, 0, 0.0)] == ["6.691", "38,710", "0", "0"]


def test_a_terminal_folds_texts_and_never_cuts_a_number() -> None:
    """In 24 columns every letter of a long name and every digit is there, and no line is wider."""
    table = Table("", words("name") + numbers("bytes"))
    table.add("abcdefghij" * 4, "1,234,567,890")
    text = printed(table, 24)
    assert max(map(len, text.splitlines())) <= 24
    assert "1,234,567,890" in text
    assert sum(text.count(letter) for letter in "cdfghij") == 4 * 7


def test_a_page_on_a_terminal_has_the_titles_of_its_sections_and_rows_of_its_pictures() -> None:
    """Sections of a page alone are left out, and a table's rows past the limit."""
    table = example()
    table.terminal_rows = 1
    sections = [Section("a", "First", [table]), Section("b", "Second", ["words"], "page")]
    into = io.StringIO()
    print_page(
        Page("title", sections, introduction=[Title("more"), Picture("<svg>")]), Console(file=into, width=60)
    )
    text = into.getvalue()
    assert [line for line in text.splitlines() if line and line[0] != " "] == ["title", "more", "First"]
    assert "two" not in text


def test_a_column_of_another_medium_is_left_out() -> None:
    """Rows are as long as the columns that are shown; missing cells are empty."""
    table = Table("", (Column("a"), Column("b", medium="page"), Column("c")))
    table.add("1")
    assert [row.cells for row in table.for_medium("terminal")[1]] == [("1", "")]
    assert [row.cells for row in table.for_medium("page")[1]] == [("1", "", "")]


def test_a_waterfalls_bars_follow_each_other() -> None:
    """Each of ten bars of a tenth starts in the column where the previous one ends; a tiny part is still
    visible.
    """
    bars = [draw_bar(i / 10, 0.1) for i in range(10)]
    assert [len(bar) for bar in bars] == [3 * (i + 1) for i in range(10)]
    assert [bar.count("█") for bar in bars] == [3] * 10
    assert draw_bar(0.5, 1e-4) == " " * 15 + "▏"
    assert draw_bar(0.5, 0.0).strip() == ""


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1.5, "1.500 s"),
        (0.1586, "158.6 ms"),
        (2.5e-6, "2.500 µs"),
        (0.0, "0 s"),
        (12345.0, "12,345 s"),
        (None, "unknown"),
    ],
)
def test_seconds_keep_four_digits(value: float | None, shown: str) -> None:
    """The unit is the largest in which the value is at least 1."""
    assert seconds(value) == shown


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (size(1.5 * 2**30), "1.50 GiB"),
        (size(900), "900 B"),
        (rate(42.1e9), "42.1 GB/s"),
        (rate(3.0), "3 B/s"),
        (rate(None), "unknown"),
        (short(1_060_000), "1.06M"),
        (short(71.6), "71.6"),
        (short(999_960), "1M"),
    ],
)
def test_numbers_have_three_or_four_digits_and_a_unit(shown: str, text: str) -> None:
    """Bytes in powers of two, rates and counts in powers of ten."""
    assert shown == text
