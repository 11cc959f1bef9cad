"""Every field of metrics.jsonl with its title, unit and meaning, read off the docstrings of its lines."""

import dataclasses
import functools
import typing
from typing import Any

from jtrain.runtime.docstring_entries import entries, unit_of
from jtrain.telemetry.metrics import MESSAGE, EvalLine, EvalResult, TrainLine


@dataclasses.dataclass(frozen=True)
class MetricField:
    """A field of a line of metrics.jsonl.

    name: its key, as in `tokens_per_s`.
    kind: type of its values in JSON.
    meaning: sentence without a capital; says when it is null.
    when: what the value is taken over, as in "Mean since the last line"; "" for lines of evaluations.
    labels: the name of what its values are by, as `source`, for an object; "" for one value.
    """

    name: str
    kind: str
    meaning: str
    when: str
    labels: str = ""

    @property
    def unit(self) -> str:
        """Unit, from the end of the name; "" for none."""
        return unit_of(self.name)

    @property
    def title(self) -> str:
        """Name as words, with the unit: `step time p50, milliseconds`."""
        words = self.name.replace("_", " ")
        # A rate is a word by itself: tokens per second.
        if "_per_" in self.name or not self.unit:
            return words.removesuffix(" per s") + " per second" * words.endswith(" per s")
        return f"{words.rpartition(' ')[0]}, {self.unit}" if self.name != self.unit else words


_LABELS = {
    "data_tokens": "source",
    "data_planned": "source",
    "data_queue": "loader",
    "data_memory_mib": "loader",
    "straggler_score": "part",
    "eval_sets": "set",
    "eval_exact": "set",
}
"""Field whose value is an object -> what its keys are."""

_OR_NULL = " or null"
_KINDS = {int: "integer", float: "number", str: "text"}


@functools.cache
def train_fields() -> dict[str, MetricField]:
    """Fields of a line of a train step, by name and in their order."""
    return {field.name: field for field in _fields(TrainLine)}


@functools.cache
def eval_fields() -> dict[str, MetricField]:
    """Fields of a line of an evaluation, by name and in their order."""
    by_name: dict[str, MetricField] = {}
    for field in _fields(EvalLine):
        # The split has its fields in the line itself, all null without a split.
        parts = (
            [
                dataclasses.replace(
                    part, name=f"eval_{part.name}", kind=f"{part.kind.removesuffix(_OR_NULL)}{_OR_NULL}"
                )
                for part in _fields(EvalResult)
            ]
            if field.name == "eval"
            else [field]
        )
        by_name |= {part.name: part for part in parts}
    return by_name


def result_fields() -> dict[str, MetricField]:
    """Fields of each result in `eval_sets`, by name and in their order."""
    return {field.name: field for field in _fields(EvalResult)}


MESSAGE_FIELD = MetricField(
    MESSAGE, "text", "names each value that is NaN or infinite, which JSON writes as null", ""
)
"""Field of those lines alone that have such a value."""


def _fields(line_class: Any) -> list[MetricField]:
    described, hints = entries(line_class), typing.get_type_hints(line_class)
    return [
        MetricField(
            field.name,
            _kind(hints[field.name]),
            described[field.name].text.rstrip("."),
            described[field.name].heading,
            _LABELS.get(field.name, ""),
        )
        for field in dataclasses.fields(line_class)
    ]


def _kind(hint: Any) -> str:
    if typing.get_origin(hint) is dict:
        return f"object of {_KINDS.get(typing.get_args(hint)[1], 'object')}s"
    options = typing.get_args(hint) or (hint,)
    return _KINDS.get(options[0], "object") + _OR_NULL * (type(None) in options)
