"""Description of the model of a config.json: family, layers, sizes, parameters and bytes."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jtrain.errors import first_few
from jtrain.hf.model_config import family_in, model_from_config
from jtrain.hf.selection import absent_fields
from jtrain.model.transformer import Transformer

_SIZES = ("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff", "vocab_size")


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The model of a config.json.

    active: parameters that serve one token; fewer than all where experts are chosen.
    absent: fields that the family looks for and config.json lacks, whose values are the family's own.
    layers: description of a kind of layer -> numbers of the layers of this kind.
    """

    model_type: str
    architecture: str
    model: Transformer
    parameters: int
    active: int
    absent: list[str]
    layers: dict[str, list[int]]

    def lines(self) -> Iterator[str]:
        """The inspection as lines of text."""
        yield f"{self.model_type} ({self.architecture})"
        yield ", ".join(f"{name} {getattr(self.model, name):,}" for name in _SIZES)
        for text, numbers in self.layers.items():
            yield f"layers {_ranges(numbers)}: {text}"
        active = f", {self.active:,} of them active for a token" if self.active != self.parameters else ""
        yield f"{self.parameters:,} parameters{active}"
        if self.absent:
            yield f"not in config.json, so as {self.model_type} has it: {first_few(self.absent, 12)}"

    def to_json(self) -> dict[str, Any]:
        """The inspection as `--json` writes it."""
        return {
            "model_type": self.model_type,
            "architecture": self.architecture,
            "sizes": {name: getattr(self.model, name) for name in _SIZES},
            "layers": self.layers,
            "parameters": self.parameters,
            "active_parameters": self.active,
            "bytes": {"bfloat16": 2 * self.parameters, "float32": 4 * self.parameters},
            "absent": self.absent,
        }


def inspect(config: Mapping[str, Any]) -> Inspection:
    """Inspects a config.json that `select` returned.

    Raises:
      UserError: as `model_from_config`.
    """
    model, family = model_from_config(config), family_in(config)
    layers: dict[str, list[int]] = {}
    for y, block in enumerate(model.blocks):
        layers.setdefault(_described(block), []).append(y)
    infos = model.param_infos()
    return Inspection(
        family.model_type,
        family.architecture,
        model,
        sum(info.size for info in infos),
        sum(info.active_size for info in infos),
        absent_fields(config),
        layers,
    )


def _described(spec: Any) -> str:
    """A description with the fields that differ from their defaults: `AttentionSpec(window=4096)`."""
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return repr(spec)
    fields = (
        f"{field.name}={_described(value)}"
        for field in dataclasses.fields(spec)
        if dataclasses.is_dataclass(value := getattr(spec, field.name)) or value != field.default
    )
    return f"{type(spec).__name__}({', '.join(fields)})"


def _ranges(numbers: list[int]) -> str:
    """Sorted numbers as ranges: `0-2, 4`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return first_few([f"{a}-{b}" if b > a else f"{a}" for a, b in ranges], 6)
