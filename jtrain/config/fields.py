"""Every field of a config with its meaning, unit, default and place, read off the dataclasses and their
docstrings.
"""

import ast
import collections.abc
import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from jtrain.config import tree
from jtrain.config.components import kinds_of, load_subclasses
from jtrain.config.field_types import resolve_alias, type_name
from jtrain.config.other_names import OTHER_NAMES, known_elsewhere
from jtrain.config.resume import CHANGEABLE, MAY_CHANGE_ON_RESUME
from jtrain.config.run import Run
from jtrain.errors import UserError, did_you_mean, first_few
from jtrain.runtime.docstring_entries import ENTRY, entries, unit_of

ROOT = Path(__file__).parents[2]

_PLACES = {dict: "NAME", tuple: "0"}
"""Kind of container -> the word that stands in a path for the key or the place of one of its components."""


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of a component.

    path: its path in a config, with NAME and 0 where a component is one of many.
    component: class that has it.
    needs: settings that put its component there, if it is not the default one: `optimizer=Muon`.
    default: repr of the default; `tree.NOT_SET` if each config sets it.
    """

    path: str
    component: type
    needs: tuple[str, ...]
    annotation: Any
    default: str

    @property
    def name(self) -> str:
        """Last word of the path."""
        return self.path.rpartition(".")[2]

    @property
    def kinds(self) -> list[type]:
        """Classes of components that it takes; none for a value."""
        return [kind for kind in _components_in(self.annotation) if dataclasses.is_dataclass(kind)]

    @property
    def meaning(self) -> str:
        """Entry of the class's docstring, or the first sentence of each component that the field takes."""
        for owner in self.component.__mro__:
            if (entry := entries(owner).get(self.name)) is not None:
                return entry.text
        return " ".join(f"{kind.__name__}: {summary(kind)}" for kind in self.kinds)

    @property
    def unit(self) -> str:
        """Unit, from the end of the name; "" for none."""
        return unit_of(self.name)

    @property
    def allowed(self) -> str:
        """Values that the annotation takes."""
        if typing.get_origin(self.annotation) is Literal:
            return "one of " + ", ".join(map(repr, typing.get_args(self.annotation)))
        return type_name(self.annotation)

    @property
    def owner(self) -> type:
        """Class that defines it: the component, or one that the component inherits from."""
        return next(kind for kind in self.component.__mro__ if self.name in inspect.get_annotations(kind))

    @property
    def place(self) -> str:
        """File and line of its definition."""
        lines, first = inspect.getsourcelines(self.owner)
        # The last one: entries of the docstring before it are indented alike.
        number = max(i for i, line in enumerate(lines) if line.startswith(f"    {self.name}: "))
        return f"{_relative(Path(inspect.getfile(self.owner)))}:{first + number}"

    @property
    def on_resume(self) -> str:
        """What a change of it means to a run that goes on."""
        for prefix, reason in MAY_CHANGE_ON_RESUME.items():
            if self.path.startswith(prefix):
                return f"may change: {reason}"
        for name in CHANGEABLE:
            if self.path == name or self.path.startswith(f"{name}."):
                return f"changes with --allow-change {name}: losses differ from that step on"
        return "another value is another run, in a workdir of its own"

    @property
    def other_names(self) -> list[str]:
        """Names that other trainers give it."""
        texts = [names for path, names in OTHER_NAMES.items() if path.partition("=")[0] == self.path]
        return " ".join(texts).split()

    def example(self) -> str:
        """Command that sets it, or the line of a config file where it belongs to one of many components."""
        value = self._example_value()
        if {"NAME", "0"} & {*self.path.split(".")}:
            return "run." + self.path.replace(".NAME", "['web']").replace(".0", "[0]") + f" = {value}"
        sets = "".join(f" --set {need}" for need in self.needs)
        text = f"{self.path}={value}"
        quoted = f'"{text}"' if re.search(r"[ '()*]", text) else text
        return f"jtrain launch --config=tiny{sets} --set {quoted}"

    def _example_value(self) -> str:
        """A value of the right type, another one than the default where few are possible."""
        if typing.get_origin(self.annotation) is Literal:
            options = map(repr, typing.get_args(self.annotation))
            return next(option for option in options if option != self.default).strip("'")
        if self.annotation is bool:
            return str(self.default != "True")
        if self.kinds and typing.get_origin(self.annotation) not in _PLACES:
            alternatives = [kind.__name__ for kind in self.kinds if kind.__name__ not in self.default]
            return alternatives[-1] if alternatives else self.kinds[0].__name__
        if self.default not in (tree.NOT_SET, "None"):
            return self.default
        if self.kinds:
            return f"({self.kinds[0].__name__}(),)"
        sample = _sample(self.annotation)
        return sample if isinstance(sample, str) else repr(sample)

    def readers(self) -> list[str]:
        """Places of the code that read it: file and line."""
        owners = {*self.path.split(".")[-2:-1], self.component.__name__.removesuffix("Spec").lower()}
        # One word, such as `steps`, is an attribute of many things that are no config.
        same_name_owners = {field.owner for field in all_fields() if field.name == self.name}
        is_unique = len(same_name_owners) == 1 and "_" in self.name

        def is_read(node: ast.AST, file: Path) -> bool:
            if not (
                isinstance(node, ast.Attribute) and node.attr == self.name and isinstance(node.ctx, ast.Load)
            ):
                return False
            owner = ast.unparse(node.value).rpartition(".")[2].lstrip("_")
            is_own = owner == "self" and str(file) == inspect.getfile(self.component)
            return owner in owners or is_own or (is_unique and owner != "args")

        locations = []
        for file in sorted((ROOT / "jtrain").rglob("*.py")):
            text = file.read_text()
            # Benchmarks and proofs make configs of their own.
            if f".{self.name}" in text and file.relative_to(ROOT).parts[1] not in ("bench", "check"):
                nodes = [node for node in ast.walk(ast.parse(text)) if is_read(node, file)]
                locations += [
                    f"{_relative(file)}:{node.lineno}" for node in nodes if isinstance(node, ast.Attribute)
                ]
        return list(dict.fromkeys(locations))

    def related(self) -> list[str]:
        """Paths of fields whose meaning names this one."""
        paths = [
            field.path
            for field in all_fields()
            if field.path != self.path
            and (
                re.search(rf"(?<![\w.]){re.escape(self.path)}(?![\w.]*\w)", field.meaning)
                or (field.component is self.component and re.search(rf"`{self.name}`", field.meaning))
            )
        ]
        return list(dict.fromkeys(paths))


def _sample(annotation: Any, number: int = 20) -> Any:
    """A value of a type; numbers of a tuple grow."""
    annotation = resolve_alias(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple:
        kinds = [kind for kind in arguments if kind is not Ellipsis]
        return tuple(_sample(kind, number + 5 * index) for index, kind in enumerate(kinds))
    if origin in (dict, collections.abc.Mapping):
        return {"NAME": _sample(arguments[1])}
    if arguments:
        return arguments[0] if origin is Literal else _sample(arguments[0], number)
    return {int: number, float: 0.003, str: "NAME"}[annotation]


@functools.cache
def all_fields() -> tuple[Field, ...]:
    """Fields of every component that a config may have, depth first; in order of the classes."""
    return tuple(_fields_of(Run, "", (), above=()))


def _fields_of(
    component: type, prefix: str, needs: tuple[str, ...], *, above: tuple[type, ...]
) -> Iterator[Field]:
    hints = typing.get_type_hints(component)
    for spec in dataclasses.fields(component):
        annotation = resolve_alias(hints[spec.name])
        if spec.default_factory is not dataclasses.MISSING:
            default = repr(spec.default_factory())
        else:
            default = tree.NOT_SET if spec.default is dataclasses.MISSING else repr(spec.default)
        field = Field(prefix + spec.name, component, needs, annotation, default)
        yield field
        index = _PLACES.get(typing.get_origin(annotation) or object)
        # A mixer may hold a mixer: each class is listed once on a way down.
        for kind in (kind for kind in field.kinds if kind not in (*above, component)):
            # Where the annotation leaves no choice, the component is there.
            is_chosen = index is None and annotation is not kind and kind.__name__ not in default
            settings = (f"{field.path}={kind.__name__}",) if is_chosen and not _is_first(kind, field) else ()
            kind_prefix = f"{field.path}.{index}." if index else f"{field.path}."
            yield from _fields_of(kind, kind_prefix, (*needs, *settings), above=(*above, component))


def _is_first(kind: type, field: Field) -> bool:
    """True for the component that configs have where the class gives no default: `optimizer` is AdamW in
    most.
    """
    return field.default == tree.NOT_SET and kind is field.kinds[0]


def _components_in(annotation: Any) -> Iterator[type]:
    """Classes of components in an annotation, those of an abstract one with its subclasses."""
    container = typing.get_origin(annotation)
    if container in _PLACES:
        annotation = resolve_alias(typing.get_args(annotation)[container is dict])
    for kind in kinds_of(annotation):
        if not inspect.isabstract(kind):
            yield kind
            continue
        yield from load_subclasses(kind)


def summary(component: type) -> str:
    """First sentence of a class's docstring."""
    return re.split(r"(?<=\.)\s", " ".join(_paragraphs(component)[0].split()))[0]


def description(component: type) -> str:
    """Docstring of a class without the entries of its fields."""
    return "\n\n".join(
        part
        for part in _paragraphs(component)
        if not re.match(r"(Args|Raises):", part) and not ENTRY.match(part)
    )


def _paragraphs(component: type) -> list[str]:
    return [part for part in (inspect.getdoc(component) or "").split("\n\n") if part.strip()]


def _relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else str(file)


@dataclasses.dataclass(frozen=True)
class FieldMatch:
    """Fields that a word names: one field, the fields of one component, or several of one name.

    title: the path as the config has it, with a class where one was asked for.
    component: class whose fields these are; None for a field.
    """

    title: str
    component: type | None
    fields: list[Field]


def find(word: str) -> FieldMatch:
    """Looks a path, a name, `path=Class` or another trainer's name up.

    Raises:
      UserError: no field has that name, and the message names the nearest ones; it is an option of a verb; or
        the field takes no such class.
    """
    path, _, class_name = word.partition("=")
    fields = [field for field in all_fields() if _is_path(path, field.path) or _is_one_of(path, field)]
    alias = known_elsewhere(path)
    if not fields:
        fields = [field for field in all_fields() if field.name == path]
        if alias is not None and not alias.startswith("--"):
            if not fields:
                return find(alias)
            # `steps` is a field of the profile, and what others call `num_steps`.
            fields = [*find(alias).fields, *fields]
    if not fields and alias is not None:
        raise UserError(f"{word}: no field of a config. It is what jtrain launch has as its option {alias}.")
    if not fields:
        names = {field.path for field in all_fields()} | {field.name for field in all_fields()}
        raise UserError(
            f"{word}: no field of a config. {did_you_mean(path, names)}There are: "
            f"{first_few([field.name for field in dataclasses.fields(Run)], 30)}."
        )
    classes = {kind.__name__: kind for field in fields for kind in field.kinds}
    title = path if "." in path else fields[0].path
    if class_name in classes:
        return FieldMatch(
            f"{title}={class_name}", classes[class_name], _component_fields(classes[class_name], fields[0])
        )
    if classes and class_name not in ("", "None"):
        raise UserError(
            f"{word}: {path} takes no {class_name}. {did_you_mean(class_name, classes)}There are: "
            f"{', '.join(classes)}."
        )
    if len(fields) == 1 and len(classes) == 1:
        (kind,) = classes.values()
        return FieldMatch(title, kind, _component_fields(kind, fields[0]))
    return FieldMatch(path, None, fields)


def _component_fields(kind: type, field: Field) -> list[Field]:
    """Fields of a component that `field` takes."""
    return [f for f in all_fields() if f.component is kind and f.path.startswith(f"{field.path}.")]


def _is_one_of(path: str, field: Field) -> bool:
    """True if a path is that of one of the components that a field holds: `data.sources.web`."""
    index = _PLACES.get(typing.get_origin(field.annotation) or object)
    return index is not None and bool(field.kinds) and _is_path(path, f"{field.path}.{index}")


def _is_path(path: str, pattern: str) -> bool:
    """True if a path is that of a field, whatever the names and numbers of its components."""
    words, parts = path.split("."), pattern.split(".")
    return len(words) == len(parts) and all(
        word == part or part in _PLACES.values() for word, part in zip(words, parts, strict=True)
    )
