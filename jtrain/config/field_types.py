"""Values of config fields and their annotations: conversion, and types as text."""

import collections.abc
import difflib
import inspect
import types
import typing
from typing import Any, Literal

from jtrain.errors import UserError
from jtrain.runtime.secrets import redact_value


def convert_field(path: str, value: Any, annotation: Any) -> Any:
    """Converts a value as `convert`.

    Raises:
      UserError: it has another type; names the path, the value and the type.
    """
    converted = convert(value, annotation)
    if converted is not NO_VALUE:
        return converted
    choices = typing.get_args(annotation) if typing.get_origin(annotation) is Literal else ()
    if not choices:
        raise UserError(
            f"{path}={redact_value(path, repr(value))} is a {type(value).__name__}, but must be "
            f"{type_name(annotation)}."
        )
    similar_choices = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    hint = f" Did you mean {similar_choices[0]}?" if similar_choices else ""
    raise UserError(f"{path}={value!r} must be one of {', '.join(map(repr, choices))}.{hint}")


NO_VALUE = object()
"""Result of `convert` for a value of the wrong type; None would be a valid value."""


def convert(value: Any, annotation: Any) -> Any:
    """Converts int to float and list to tuple as `annotation` needs; returns `NO_VALUE` for a value of
    another type.
    """
    annotation = resolve_alias(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return value
    if origin is Literal:
        # Same type, because 1 == True and a Literal may hold both.
        return (
            value
            if any(value == choice and type(value) is type(choice) for choice in arguments)
            else NO_VALUE
        )
    if origin in (types.UnionType, typing.Union):
        # The exact type first: an int in `float | int` must stay an int.
        exact = [choice for choice in arguments if type(value) is choice]
        return next(
            (
                converted
                for choice in exact or arguments
                if (converted := convert(value, choice)) is not NO_VALUE
            ),
            NO_VALUE,
        )
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return NO_VALUE
        # `tuple[int, ...]` takes any number; other tuples take exactly their arguments.
        is_homogeneous = len(arguments) == 2 and arguments[1] is Ellipsis
        kinds = [arguments[0]] * len(value) if is_homogeneous else list(arguments)
        items = [convert(item, kind) for item, kind in zip(value, kinds, strict=False)]
        return (
            NO_VALUE if len(kinds) != len(value) or any(item is NO_VALUE for item in items) else tuple(items)
        )
    if annotation is float and type(value) is int:
        return float(value)
    kind = origin or annotation
    # bool is a subclass of int, and `num_steps=True` is a mistake.
    if kind is int and isinstance(value, bool):
        return NO_VALUE
    return value if not isinstance(kind, type) or isinstance(value, kind) else NO_VALUE


def resolve_alias(annotation: Any) -> Any:
    """Returns the type behind a `type Name = ...` alias."""
    while isinstance(annotation, typing.TypeAliasType):
        annotation = annotation.__value__
    return annotation


def type_name(annotation: Any) -> str:
    """Returns a type as written in source, without module names: `int`, `float | None`, `Literal['none',
    'full']`.
    """
    annotation = resolve_alias(annotation)
    if annotation is types.NoneType:
        return "None"
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__name__
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return " | ".join(type_name(choice) for choice in typing.get_args(annotation))
    origin = typing.get_origin(annotation)
    if origin in (dict, tuple, collections.abc.Mapping) and isinstance(origin, type):
        parts = ("..." if part is Ellipsis else type_name(part) for part in typing.get_args(annotation))
        return f"{origin.__name__}[{', '.join(parts)}]"
    return inspect.formatannotation(annotation)
