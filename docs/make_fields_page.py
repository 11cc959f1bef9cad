"""Makes docs/fields.md: every field of a config, from the dataclasses and their docstrings.

    python docs/make_fields_page.py

`tests/config/test_fields.py` asks that the page equals what this makes.
"""

import os
import re
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from jtrain.config import tree  # noqa: E402 - after JAX_PLATFORMS and the path
from jtrain.config.fields import Field, all_fields, description  # noqa: E402 - after JAX_PLATFORMS and the path
from jtrain.config.run import Run  # noqa: E402 - after JAX_PLATFORMS and the path

PAGE = ROOT / "docs" / "fields.md"
HEAD = """# Every field of a config

Each table has the fields of one component and the paths at which a config has it; `NAME` is a name and `0` a place of
one of many. `jtrain explain optimizer.peak_lr` tells more of a field: where it is read, what a resumed run does with
another value, and what other trainers call it.

`python docs/make_fields_page.py` writes this page from the code.
"""


def page() -> str:
    """The page: a section for each class of component, in the order of the paths."""
    by_class: dict[type, list[Field]] = {}
    for field in all_fields():
        by_class.setdefault(field.component, []).append(field)
    return "\n".join([HEAD, *(_section(component, fields) for component, fields in by_class.items())])


def _section(component: type, fields: list[Field]) -> str:
    prefixes = dict.fromkeys(field.path.rpartition(".")[0] for field in fields)
    title = "The run" if component is Run else component.__name__
    paths = "" if component is Run else f"At {', '.join(f'`{prefix}`' for prefix in prefixes)}.\n\n"
    # Formulas and lists keep their lines: a page shows indented lines as code.
    text = description(component)
    rows = [_row(field) for field in {field.name: field for field in reversed(fields)}.values()][::-1]
    head = "| field | type | default | meaning |\n|---|---|---|---|\n"
    return f"## {title}\n\n{paths}{text}\n\n{head}{''.join(rows)}"


def _row(field: Field) -> str:
    default = "set by each config" if field.default == tree.NOT_SET else f"`{_short(field.default)}`"
    meaning = field.meaning + (f" In {field.unit}." if field.unit else "")
    cells = (f"`{field.name}`", f"`{field.allowed.removeprefix('one of ')}`", default, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _short(default: str) -> str:
    """A component by its class alone: its fields have a table of their own."""
    return re.sub(r"\b([A-Z]\w+)\((?!\)).*\)$", r"\1(...)", default)


if __name__ == "__main__":
    PAGE.write_text(page())
