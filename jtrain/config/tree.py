"""Config tree with flat paths: prints all fields, sets one, checks types.

A path joins the names from the root by dots, as in `model.rope.theta`. In a field of type `dict[str,
Component]` the component's key is part of the path, as in `data.sources.web.weight`; in one of type
`tuple[Component, ...]` its place is, as in `model.pattern.0.norms`. This module is independent of `Run`.
"""

import ast
import dataclasses
import difflib
import inspect
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import fiddle as fdl

from jtrain.config.components import (
    CODE,
    check_code,
    code_lines,
    find_class,
    kinds_of,
    name_of,
)
from jtrain.config.field_types import NO_VALUE, convert, convert_field, resolve_alias, type_name
from jtrain.config.other_names import known_elsewhere, other_unit
from jtrain.errors import UserError
from jtrain.runtime.secrets import redact_assignment, redact_value, without_secrets


def flat(config: fdl.Config[Any]) -> str:
    """Returns one `path: type = value` line per leaf, defaults included; a chosen component gets its own
    line.

    Secrets are shown as `***` (jtrain/runtime/secrets.py), because runs print, keep and compare this text.
    """
    lines = [
        f"{leaf.path}: {type_name(leaf.annotation)} = {redact_value(leaf.path, leaf.text)}\n"
        for leaf in leaves(config)
    ]
    sources = code_lines(leaf.text for leaf in leaves(config) if leaf.is_class)
    return "".join([*lines, *(f"{path}: str = {digest!r}\n" for path, digest in sources.items())])


def parse(text: str) -> dict[str, str]:
    """Parses the text that `flat` wrote into path -> value as text; lines that begin with # are remarks."""
    paths: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        # The first ` = ` and the first `: ` divide a line: its value may hold both.
        head, _, value = line.partition(" = ")
        paths[head.partition(": ")[0]] = value
    return paths


def read(component: type, text: str) -> fdl.Config[Any]:
    """Reads back the config that `flat` printed; fields added to the code since then take their defaults.

    Raises:
      UserError: a line names an unknown field, or a component that its field does not accept.
    """
    values = parse(text)
    check_code(values)
    config = _read(component, values, "")
    # Fields that this version does not have: they would be dropped in silence.
    fields = {path for path in values if not path.startswith(CODE)}
    if unknown := fields - {leaf.path for leaf in leaves(config)}:
        raise UserError(
            f"this version of jtrain has no field {', '.join(sorted(unknown))}. Use the one that wrote the "
            "config."
        )
    return config


def expand(config: fdl.Config[Any]) -> None:
    """Replaces every nested dataclass value by a config, so that each of its fields has a path to set."""
    for name, (annotation, value) in _fields(config).items():
        if _named_component(annotation) is not None and isinstance(value, dict):
            # A dict of components expands each of them; a plain dict of values stays a value.
            setattr(config, name, {key: _expand_value(item) for key, item in value.items()})
        elif _component_kinds(annotation) and isinstance(value, tuple):
            setattr(config, name, tuple(_expand_value(item) for item in value))
        elif isinstance(value, fdl.Config) or (
            dataclasses.is_dataclass(value) and not isinstance(value, type)
        ):
            setattr(config, name, _expand_value(value))


def _expand_value(value: Any) -> Any:
    """Returns a component as an expanded config."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        value = fdl.Config(type(value), **values)
    if isinstance(value, fdl.Config):
        expand(value)
    return value


def convert_types(config: fdl.Config[Any], prefix: str = "") -> None:
    """Converts every value to the type of its field, in place: int to float, list to tuple; refuses all other
    types.

    Raises:
      UserError: a value has the wrong type; names the path, the value and the type.
    """
    for name, (annotation, value) in _fields(config).items():
        if isinstance(value, fdl.Config):
            convert_types(value, f"{prefix}{name}.")
        elif (named := _named_components(annotation, value)) is not None:
            for key, item in named.items():
                convert_types(item, f"{prefix}{name}.{key}.")
        # Defaults are the class's own, which its author has checked; only what was set is checked here.
        elif name in config.__arguments__:
            setattr(config, name, convert_field(prefix + name, value, annotation))


def set_path(config: fdl.Config[Any], text: str) -> None:
    """Applies one `path=literal`; text that is not a literal, or is meant for a string field, is taken as a
    string.

    Raises:
      UserError: the path does not exist (the message suggests similar ones), the value has the wrong type, or
        the path is that of a component.
    """
    # The first `=`: a value may hold more, as a URL does.
    path, equals, raw = (part.strip() for part in text.partition("="))
    text = redact_assignment(text)  # for messages
    if not equals or not path:
        raise UserError(f"--set {text}: expected PATH=VALUE, as in --set num_steps=100.")
    owner, annotation = config, Any
    # From the root down, one component at a time, so that an error names the deepest name that exists.
    *parents, last = path.split(".")
    for depth, name in enumerate([*parents, last]):
        if isinstance(owner, tuple):
            # Components of a tuple are named by their number, as in `model.pattern.0.mixer`.
            owner = {str(index): item for index, item in enumerate(owner)}
        if isinstance(owner, dict):
            above = ".".join(parents[:depth])
            if depth == len(parents):
                raise UserError(f"--set {text}: {path} is a component, not a value. Set one of its fields.")
            if name not in owner:
                similar_names = difflib.get_close_matches(name, owner)
                hint = f"Did you mean {similar_names[0]}? " if similar_names else ""
                raise UserError(
                    f"--set {text}: {above} has no {name}. {hint}It has: {', '.join(owner) or 'none'}."
                )
            owner = owner[name]
            continue
        if not isinstance(owner, fdl.Config):
            above = ".".join(parents[:depth])
            kinds = [kind.__name__ for kind in kinds_of(annotation)]
            way_out = (
                f"Put one there first (--set {above}=NAME, of {', '.join(kinds)})."
                if owner is None and kinds
                else f"Set {above} itself."
            )
            raise UserError(f"--set {text}: {above} is {owner!r}, which has no fields. {way_out}")
        if name not in _fields(owner):
            raise UserError(f"--set {text}: {_unknown_path(config, owner, path, depth)}")
        if depth < len(parents):
            annotation, owner = _fields(owner)[name]
    annotation, value = _fields(owner)[last]
    try:
        # Quotes may be left out on the command line: `--set data.path=web/*.jsonl` is a string.
        literal = ast.literal_eval(raw)
    except (ValueError, SyntaxError):
        literal = raw
    # Places of a tuple are filled by fiddlers; a name alone would say neither where nor with what.
    is_class_name = isinstance(literal, str) and not _component_kinds(annotation)
    chosen = find_class(path, literal, annotation) if is_class_name else None
    if chosen is not None:
        setattr(owner, last, _replaced(value, chosen))
        return
    if isinstance(value, fdl.Config) and literal is not None:
        kinds = [kind.__name__ for kind in kinds_of(annotation)]
        way_out = f"by its class (--set {path}=NAME, of {', '.join(kinds)})"
        way_out = way_out if len(kinds) > 1 else "with a fiddler (--with)"
        raise UserError(
            f"--set {text}: {path} is a component ({fdl.get_callable(value).__name__}), not a value. Set "
            f"one of its fields ({', '.join(f'{path}.{name}' for name in _fields(value))}), or replace it "
            f"{way_out}."
        )
    if (kind := _named_component(annotation)) is not None:
        setattr(owner, last, _components(path, literal, kind))
        return
    # In a string field, `--set name=1` means the text "1".
    if convert(literal, annotation) is NO_VALUE and convert(raw, annotation) is not NO_VALUE:
        literal = raw
    setattr(owner, last, convert_field(path, literal, annotation))


def _replaced(value: Any, kind: type) -> fdl.Config[Any]:
    """A component of another class, with the fields that both have."""
    config = fdl.Config(kind)
    if isinstance(value, fdl.Config):
        for name, argument in value.__arguments__.items():
            if name in _fields(config):
                setattr(config, name, argument)
    return config


def _components(path: str, value: Any, kind: type) -> dict[str, fdl.Config[Any]]:
    """Returns the components in a literal such as {'web': {'path': 'web/*.jsonl'}}, for a `dict[str,
    Component]`.
    """
    names = list(_fields(fdl.Config(kind)))
    if not isinstance(value, dict) or not all(isinstance(fields, dict) for fields in value.values()):
        raise UserError(
            f"{path}={without_secrets(repr(value))} must be a dict of names and, for each, a dict of fields "
            f"of {kind.__name__}, such as {{'web': {{{names[0]!r}: ...}}}}."
        )
    components = {}
    for key, fields in value.items():
        if unknown := [name for name in fields if name not in names]:
            raise UserError(f"{path}.{key} has no field {unknown[0]}. It has: {', '.join(names)}.")
        component = components[key] = fdl.Config(kind, **fields)
        convert_types(component, f"{path}.{key}.")
    return components


NOT_SET = "(not set)"
"""Text of a leaf that has neither value nor default."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One value of a config: `text` is its repr, a component's class name, or `NOT_SET`."""

    path: str
    annotation: Any
    text: str
    is_class: bool = False


def leaves(config: fdl.Config[Any], prefix: str = "") -> Iterator[Leaf]:
    """Yields every leaf, depth first, in the order of the components' signatures."""
    for name, (annotation, value) in _fields(config).items():
        path = prefix + name
        if isinstance(value, fdl.Config):
            # The line names the chosen component only where the annotation leaves a choice.
            if annotation is not fdl.get_callable(value):
                kind: Any = fdl.get_callable(value)
                yield Leaf(path, annotation, name_of(kind, annotation), is_class=True)
            yield from leaves(value, path + ".")
        elif (named := _named_components(annotation, value)) is not None and named:
            for key, item in named.items():
                yield from leaves(item, f"{path}.{key}.")
        else:
            yield Leaf(path, annotation, NOT_SET if value is inspect.Parameter.empty else repr(value))


def _fields(config: fdl.Config[Any]) -> dict[str, tuple[Any, Any]]:
    """Returns name -> (annotation, value or default) of a component's fields, in the order of its
    signature.
    """
    component: Any = fdl.get_callable(config)
    # Not the class: flax's metaclass shows its signature as (*args, **kwargs).
    constructor = component.__init__
    hints = typing.get_type_hints(component if dataclasses.is_dataclass(component) else constructor)
    factories = {
        # Factories, since a default that is mutable must be made anew for each config.
        field.name: field.default_factory
        for field in (dataclasses.fields(component) if dataclasses.is_dataclass(component) else ())
        if field.default_factory is not dataclasses.MISSING
    }
    fields: dict[str, tuple[Any, Any]] = {}
    for name, parameter in list(inspect.signature(constructor).parameters.items())[1:]:  # without self
        default = factories[name]() if name in factories else parameter.default
        fields[name] = (resolve_alias(hints.get(name, Any)), config.__arguments__.get(name, default))
    return fields


def _read(component: type, values: Mapping[str, str], prefix: str) -> fdl.Config[Any]:
    """Makes the config of one component from the printed text, and of the components in it.

    Example: values {"optimizer": "AdamW", "optimizer.peak_lr": "0.001", "model.num_layers": "2"} and prefix
    "". The field `optimizer` may be one of two classes, so a line names it: it becomes `_read(AdamW, values,
    "optimizer.")`. `model` has only one class and no line of its own.

    Args:
      values: path -> text, of the whole config, as `parse` returns it. A text is a literal, a class name or
        `NOT_SET`.
      prefix: path of the component with a dot at its end; empty for the root.
    """
    config = fdl.Config(component)
    for name, (annotation, _) in _fields(config).items():
        path = prefix + name
        if (component_kind := _named_component(annotation)) is not None and path not in values:
            # Keys of the components, in the order of the text.
            keys = dict.fromkeys(
                p[len(path) + 1 :].partition(".")[0] for p in values if p.startswith(f"{path}.")
            )
            if keys:
                setattr(config, name, {key: _read(component_kind, values, f"{path}.{key}.") for key in keys})
        elif _component_kinds(annotation) and path not in values:
            (kind,) = _component_kinds(annotation)
            # Counted and not sorted: as text, "10" would come before "2".
            indices = {p[len(path) + 1 :].partition(".")[0] for p in values if p.startswith(f"{path}.")}
            items = (_read(kind, values, f"{path}.{index}.") for index in range(len(indices)))
            setattr(config, name, tuple(items))
        elif path not in values:
            # A component whose class name was not printed, because its annotation says it.
            if any(other_path.startswith(f"{path}.") for other_path in values):
                setattr(config, name, _read(annotation, values, f"{path}."))
        # The name of a class that the annotation allows; anything else is a value.
        elif (chosen := find_class(path, values[path], annotation)) is not None:
            setattr(config, name, _read(chosen, values, f"{path}."))
        elif values[path] != NOT_SET:
            try:
                value = ast.literal_eval(values[path])
            except (ValueError, SyntaxError) as error:
                raise UserError(
                    f"{path} = {values[path]}: neither a value nor one of its components."
                ) from error
            setattr(config, name, convert_field(path, value, annotation))
    return config


def _named_component(annotation: Any) -> type | None:
    """Returns the component type in `dict[str, Component]`; None for every other type."""
    arguments = typing.get_args(annotation)
    if (
        typing.get_origin(annotation) is not dict
        or len(arguments) != 2
        or not dataclasses.is_dataclass(arguments[1])
    ):
        return None
    return arguments[1] if isinstance(arguments[1], type) else None


def _component_kinds(annotation: Any) -> tuple[type, ...]:
    """Returns the component types in `tuple[Component, ...]`; none for every other type."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is not tuple or len(arguments) != 2 or arguments[1] is not Ellipsis:
        return ()
    kinds = typing.get_args(resolve_alias(arguments[0])) or (arguments[0],)
    return kinds if all(isinstance(kind, type) and dataclasses.is_dataclass(kind) for kind in kinds) else ()


def _named_components(annotation: Any, value: Any) -> dict[str, Any] | None:
    """Returns the components of a `dict[str, Component]` field, and those of a `tuple[Component, ...]` by
    their places in it; None for every other field.
    """
    if _component_kinds(annotation) and isinstance(value, tuple):
        return {str(index): item for index, item in enumerate(value)}
    return value if _named_component(annotation) is not None and isinstance(value, dict) else None


def _unknown_path(config: fdl.Config[Any], owner: fdl.Config[Any], path: str, depth: int) -> str:
    parts = path.split(".")
    above = ".".join(parts[:depth])
    everywhere = [leaf.path for leaf in leaves(config)]
    siblings = [".".join([*parts[:depth], field]) for field in _fields(owner)]
    same_name = [other_path for other_path in everywhere if other_path.split(".")[-1] == parts[-1]]
    similar_siblings = difflib.get_close_matches(".".join(parts[: depth + 1]), siblings)
    # What other trainers call it says more than its letters: `lr` is near `b2`.
    if (alias := known_elsewhere(parts[-1])) is not None and not alias.startswith("--"):
        unit = other_unit(parts[-1])
        # A field of another component comes after those of the one that was named.
        is_own = not above or alias.startswith(f"{above}.")
        alias_text = alias + (unit and f" ({unit})")
        similar_paths = [*same_name, *([] if is_own else similar_siblings), alias_text]
    else:
        similar_paths = [*difflib.get_close_matches(path, everywhere), *same_name, *similar_siblings]
    hint = f"Did you mean {', '.join(list(dict.fromkeys(similar_paths))[:3])}? " if similar_paths else ""
    owner_name = above or "the config"
    return (
        f"{owner_name} has no field {parts[depth]}. {hint}Fields of {owner_name}: "
        f"{', '.join(_fields(owner))}."
    )
