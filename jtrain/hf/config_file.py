"""Writes the config file of a model that a config.json describes: Python that people read and change."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from jtrain.model.transformer import Transformer

FUNCTION = "run"
"""Name of the function that a written file has."""

_WIDTH = 110


def config_source(model: Transformer, *, base: str, model_from: str) -> str:
    """Returns a file whose function `run` is the config `base` with a model of `model_from`.

    Fields at their default are left out, so that the file says what the model has.
    """
    classes = {("jtrain.config.load", "load_config"), ("jtrain.config.run", "Run"), *_kinds(model)}
    imports = [f"from {module} import {name}" for module, name in sorted(classes)]
    return "\n".join(
        [
            f'"""{model_from}, with the data, optimizer and layout of `{base}`."""',
            "",
            "import fiddle as fdl",
            "",
            *imports,
            "",
            "",
            f"def {FUNCTION}() -> fdl.Config[Run]:",
            f'    """The config `{base}` with this model."""',
            f"    run = load_config({json.dumps(base)})",
            f"    run.model = {_written(model, indent=4, used=len('    run.model = '))}",
            "    return run",
            "",
        ]
    )


def _kinds(value: Any) -> Iterator[tuple[str, str]]:
    """Yields module and name of the class of every component."""
    if isinstance(value, tuple):
        for item in value:
            yield from _kinds(item)
    elif dataclasses.is_dataclass(value):
        yield type(value).__module__, type(value).__name__
        for field in _changed(value).values():
            yield from _kinds(field)


def _changed(component: Any) -> dict[str, Any]:
    """Fields that have no default, or another value."""

    def default(field: dataclasses.Field[Any]) -> Any:
        return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()

    values = {field: getattr(component, field.name) for field in dataclasses.fields(component) if field.init}
    return {field.name: value for field, value in values.items() if value != default(field)}


def _written(value: Any, *, indent: int, used: int = 0) -> str:
    """Returns Python for a value: on one line if that fits behind `used` columns, else an item a line."""
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, tuple):
        opening, closing, items = "(", ")", [("", item) for item in value]
    elif dataclasses.is_dataclass(value):
        opening, closing = "fdl.Config(", ")"
        items = [("", type(value)), *((f"{name}=", field) for name, field in _changed(value).items())]
    else:
        return json.dumps(value) if isinstance(value, str) else repr(value)
    inner = indent + 4
    written = [f"{name}{_written(item, indent=inner, used=inner + len(name))}" for name, item in items]
    comma = "," * (opening == "(" and len(items) == 1)
    line = f"{opening}{', '.join(written)}{comma}{closing}"
    # One more column for the comma behind it.
    if "\n" not in line and max(used, indent) + len(line) < _WIDTH:
        return line
    lines = [f"{' ' * inner}{item}," for item in written]
    return "\n".join([opening, *lines, f"{' ' * indent}{closing}"])
