"""Meaning of a field of a config: `python -m jtrain.explain optimizer.peak_lr`."""

import inspect
import os
import shlex
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from jtrain.cli.run import Args, Command, Parser, Verb
from jtrain.errors import first_few
from jtrain.runtime.platform import start_jax

if TYPE_CHECKING:
    from jtrain.config.fields import Field, FieldMatch

WIDTH = 100
MOST = 6
"""Places and names that a line has at most."""


def add_options(parser: Parser) -> None:
    """Declares the options."""
    parser.add_argument(
        "--field",
        required=True,
        metavar="FIELD",
        help="a path (optimizer.peak_lr), a name (peak_lr), a component (optimizer, objective=DPO), or what another "
        "trainer calls it (lr)",
    )


def explain(args: Args) -> int:
    """Prints what a field means; returns the exit code."""
    start_jax(os.environ, device="cpu")
    from jtrain.config.fields import find  # lazy: imports every component

    match = find(args.field)
    by_class: dict[str, Field] = {}
    for field in match.fields:
        by_class.setdefault(f"{field.place}", field)
    if match.component is not None:
        print("\n".join(_component_lines(match)))
    elif len(by_class) > 1:
        print(f"{len(by_class)} fields have that name, here or in other trainers:")
        print("\n".join(f"  {field.path}: {_first_sentence(field)}" for field in by_class.values()))
    else:
        print("\n".join(_field_lines(match.fields[0])))
    args.example = match.fields[0].example() if match.fields else ""
    args.title = match.title
    return 0


def _field_lines(field: "Field") -> list[str]:
    """The field's name, type and meaning, and a line for each fact that is known of it."""
    from jtrain.config import tree

    default = field.default if field.default != tree.NOT_SET else "none: each config sets it"
    facts = {
        "unit": field.unit,
        "default": default,
        "allowed": field.allowed,
        "defined": f"{field.place}, {field.component.__name__}",
        "read in": first_few(field.readers(), MOST),
        "on resume": field.on_resume,
        "see also": first_few(field.related(), MOST),
        "others say": first_few(field.other_names, MOST),
        "example": field.example(),
    }
    return [field.path, *_wrap(field.meaning, "  "), *_fact_lines(facts)]


def _component_lines(match: "FieldMatch") -> list[str]:
    """A component's class, and its fields with the first sentence about each."""
    from jtrain.config.fields import ROOT, description

    assert match.component is not None
    file, (_, line) = Path(inspect.getfile(match.component)), inspect.getsourcelines(match.component)
    path = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
    paragraphs = description(match.component).split("\n\n")
    lines = [f"{match.title}: {match.component.__name__}, {path}:{line}"]
    for paragraph in paragraphs:
        # Formulas stand further in, and stay as they are.
        lines += (
            textwrap.indent(paragraph, "  ").splitlines()
            if paragraph.startswith(" ")
            else _wrap(paragraph, "  ")
        )
    return [
        *lines,
        "",
        *(f"  {field.path} = {field.default}: {_first_sentence(field)}" for field in match.fields),
    ]


def _fact_lines(facts: dict[str, str]) -> list[str]:
    lines = []
    for name, text in facts.items():
        if text:
            # An example is copied, so it stays in one line.
            texts = [text] if name == "example" else textwrap.wrap(text, WIDTH - 14)
            lines += [f"  {name if index == 0 else '':11} {part}" for index, part in enumerate(texts)]
    return lines


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)


def _first_sentence(field: "Field") -> str:
    return field.meaning.partition(". ")[0].rstrip(".")


def _next_command(args: Args) -> str:
    """Command to suggest after this one: the example, whose config is printed without training; the fields that a
    component has, one by one.
    """
    if args.example.startswith("jtrain"):
        return f"{args.example} --print-config"
    return shlex.join(["jtrain", "explain", args.title.partition("=")[0].partition(".")[0]])


VERB = Verb(
    "explain",
    Command(
        "tell what a field of a config means, and how it is set",
        explain,
        add_options,
        description="Tells the meaning, unit, default, place and example of a field, from the code's own docstrings.",
        subject="field",
        next_command=_next_command,
    ),
)
main = VERB.main
