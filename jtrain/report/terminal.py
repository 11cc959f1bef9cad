"""Tables and pages printed on a terminal, by rich."""

from collections.abc import Iterable

from rich import box, table
from rich.console import Console
from rich.text import Text

from jtrain.report.page import Chart, Items, Page, PageBlock, Panels, Picture, Title
from jtrain.report.table import Table, text_of


def new_console() -> Console:
    """A console as wide as the terminal, or of 110 columns without one."""
    # Without a terminal rich assumes 80 columns, too few for tables in a log.
    return Console(width=None if Console().is_terminal else 110)


def print_blocks(blocks: Iterable[PageBlock], console: Console | None = None, *, titles: bool = True) -> None:
    """Prints blocks one below the other, without what only a page shows.

    Args:
      titles: print the titles of tables.
    """
    console = console or new_console()
    for block in blocks:
        if isinstance(block, str):
            # Text, not str: rich would read square brackets in a string as markup.
            console.print(Text(block))
        elif isinstance(block, Title):
            console.print(Text(block.text, style="bold"))
        elif isinstance(block, Table):
            if titles and block.title:
                console.print(Text(block.title, style="bold"))
            console.print(rich_table(block))
        elif isinstance(block, Items):
            print_blocks([f"- {line}" for line in block.lines] or [block.empty_text], console)
        elif isinstance(block, Panels):
            # Nobody can choose here: the first panel is the mean, or what matters most.
            print_blocks(next(iter(block.panels.values())), console, titles=titles)
        elif isinstance(block, Picture):
            for row in () if block.rows is None else block.rows(console.width):
                # A picture that is wider than the terminal is cut; wrapped lines would destroy it.
                console.print(row, no_wrap=True, crop=True)
        elif isinstance(block, Chart):
            continue  # a browser draws it
        # What is left has a text: a paragraph, folded text or links.
        elif block.medium != "page":
            print_blocks([block.text], console)


def print_page(page: Page, console: Console) -> None:
    """Prints a page: its title, introduction, key figures and sections."""
    print_blocks([Title(page.heading or page.title), *page.introduction], console)
    if page.tiles:
        print_blocks(["; ".join(f"{name} {text_of(cell)}" for name, cell in page.tiles)], console)
    for section in page.sections:
        # The section's title replaces those of its tables.
        if section.medium != "page":
            print_blocks([Title(section.title), *section.blocks], console, titles=False)


def rich_table(table_block: Table) -> table.Table:
    """A plain table: texts are folded where there is no room, numbers never."""
    columns, rows = table_block.for_medium("terminal")
    printed_table = table.Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, collapse_padding=True)
    for column in columns:
        is_number = column.kind == "number"
        printed_table.add_column(
            Text(column.name), justify="right" if is_number else "left", overflow="fold", no_wrap=is_number
        )
    for row in rows:
        printed_table.add_row(
            *(Text(text_of(cell)) for cell in row.cells), style="bold" if row.bold else None
        )
    return printed_table
