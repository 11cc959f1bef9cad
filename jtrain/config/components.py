"""Classes of components in a flat config: jtrain's own by their names, a user's as `module:Name` or
`path/to/file.py:Name`, with a hash of the source beside.
"""

import importlib
import inspect
import pkgutil
import sys
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from jtrain.errors import UserError
from jtrain.runtime.user_code import class_name, load_class, source_hash

CODE = "code."
"""Start of the lines about sources of the user, which are no fields."""


def kinds_of(annotation: Any) -> list[type]:
    """Classes of components that an annotation allows: the members of a union, or the one that it is."""
    kinds = typing.get_args(annotation) or (annotation,)
    # Values and None are no components.
    return [kind for kind in kinds if isinstance(kind, type) and kind.__module__ not in ("builtins", "types")]


def name_of(kind: type, annotation: Any) -> str:
    """Name of a component's class in a flat config."""
    is_ours = kind.__module__.partition(".")[0] == "jtrain"
    return kind.__name__ if is_ours or kind in kinds_of(annotation) else class_name(kind)


def find_class(path: str, name: str, annotation: Any) -> type | None:
    """Class by its name in a flat config; None if the text is no name of a component.

    Raises:
      UserError: it names a class that the field does not take, or that cannot be loaded.
    """
    kinds = kinds_of(annotation)
    for kind in kinds:
        if named := [subclass for subclass in _with_subclasses(kind) if subclass.__name__ == name]:
            return named[0]
    # An abstract component's classes are in modules that nothing may have imported yet.
    for kind in kinds:
        subclasses = load_subclasses(kind) if inspect.isabstract(kind) and name.isidentifier() else []
        if named := [subclass for subclass in subclasses if subclass.__name__ == name]:
            return named[0]
    if not is_user_name(name) or not kinds:
        return None
    component_class = load_class(path, name)
    if not issubclass(component_class, tuple(kinds)):
        kind_names = " or ".join(kind.__name__ for kind in kinds)
        raise UserError(f"{path}={name}: {component_class.__name__} is no {kind_names}. Make it a subclass.")
    return component_class


def load_subclasses(kind: type) -> list[type]:
    """jtrain's own subclasses of an abstract component by name, after an import of all modules beside it."""
    package = sys.modules[kind.__module__.rpartition(".")[0]]
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    # A user's own come and go, and Python lists classes in the order in which they were imported.
    subclasses = [
        c for c in _with_subclasses(kind) if c is not kind and c.__module__.startswith(f"{package.__name__}.")
    ]
    return sorted(subclasses, key=lambda subclass: subclass.__name__)


def is_user_name(text: str) -> bool:
    """True for `module:Name` and `path/to/file.py:Name`."""
    source, _, name = text.rpartition(":")
    # A literal may hold a colon as well, as a dict does.
    return bool(source) and name.isidentifier() and not source.startswith(("{", "[", "(", "'", '"'))


def code_lines(names: Iterator[str]) -> dict[str, str]:
    """Path and hash of each source of these names of classes."""
    sources = sorted({name.rpartition(":")[0] for name in names if is_user_name(name)})
    return {f"{CODE}{source}": source_hash(source) for source in sources}


def check_code(values: Mapping[str, str]) -> None:
    """Warns where a source is another than the one that a flat config was written with."""
    for path, text in values.items():
        source = path.removeprefix(CODE)
        # Equal for a field, whose line does not begin with CODE.
        if source != path and repr(source_hash(source)) != text:
            print(
                f"WARNING: {source} has changed since this config was written with it: what it computes now "
                "may be another model.",
                file=sys.stderr,
            )


def _with_subclasses(kind: type) -> Iterator[type]:
    """The class, and jtrain's own subclasses of it."""
    yield kind
    for subclass in kind.__subclasses__():
        # A user's class is named with its file or module, never by its bare name.
        if subclass.__module__.partition(".")[0] == "jtrain":
            yield from _with_subclasses(subclass)
