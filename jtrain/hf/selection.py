"""Choice of the part of a config.json that is read, and of the family that reads it: the one that it names,
or one that the user names.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from jtrain.errors import UserError, first_few
from jtrain.hf.model_config import family_in, read_fields
from jtrain.model.families import FAMILIES, LACKING
from jtrain.model.families.config_fields import Fields, named
from jtrain.model.families.family import Family

TEXT = "text_config"
"""Field of the part that reads and writes text, in a model that also sees or hears."""


def select(
    config: Mapping[str, Any], *, family_name: str | None = None, part: str | None = None
) -> dict[str, Any]:
    """The config.json, or its part, as that of the family which is to read it.

    Args:
      family_name: `model_type` of a family that is to read another model_type; None for its own.
      part: field that holds the config; None for the config itself.

    Raises:
      UserError: the part is not there, or is to be chosen; no family has the model_type, or the one that is
        named does not read every field.
    """
    chosen = _part(config, part)
    model_type = chosen.get("model_type")
    if family_name is None:
        if model_type not in FAMILIES:
            raise _unknown(chosen)
        return chosen
    if family_name not in FAMILIES:
        nearest = difflib.get_close_matches(family_name, FAMILIES, n=1)
        hint = f"Did you mean {nearest[0]}? " if nearest else ""
        raise UserError(f"--as {family_name}: no such family. {hint}There are: {', '.join(FAMILIES)}.")
    if model_type in FAMILIES and model_type != family_name:
        raise UserError(
            f"--as {family_name}: model_type={model_type!r} has a family of its own, which may have layers "
            "that config.json has no field for. Leave --as out."
        )
    family = FAMILIES[family_name]
    trial = _Trial.of(chosen, family)
    if not trial.fits:
        raise UserError(f"--as {family_name}: {trial.reason}.")
    return trial.config


def absent_fields(config: Mapping[str, Any]) -> list[str]:
    """Fields that the family looks for and does not find: what it takes for them is its own."""
    fields = Fields(config)
    read_fields(family_in(config), fields)
    return fields.absent


def text_tensors[T](tensors: Mapping[str, T]) -> tuple[dict[str, T], int]:
    """Tensors of the text part by the names of a model of text alone, and the number of the others."""
    texts = {name.replace("language_model.", "", 1): name for name in tensors if "language_model." in name}
    texts |= {name: name for name in tensors if name.startswith("lm_head.")}
    return {text: tensors[name] for text, name in texts.items()}, len(tensors) - len(texts)


@dataclasses.dataclass(frozen=True)
class _Trial:
    """One family's reading of a config.json that names another."""

    family: Family
    config: dict[str, Any]
    error: str
    unread: dict[str, Any]

    @classmethod
    def of(cls, config: Mapping[str, Any], family: Family) -> "_Trial":
        renamed = dict(config) | {"model_type": family.model_type, "architectures": [family.architecture]}
        fields, error = Fields(renamed), ""
        try:
            read_fields(family, fields)
        except UserError as refusal:
            error = str(refusal).removeprefix("config.json: ").rstrip(".")
        return cls(family, renamed, error, fields.unread)

    @property
    def fits(self) -> bool:
        return not self.error and not self.unread

    @property
    def reason(self) -> str:
        """Why it does not fit: the fields by name, with the primitive that each asks for."""
        return self.error or f"it has no field {first_few(named(self.unread), 8)}"


def _part(config: Mapping[str, Any], part: str | None) -> dict[str, Any]:
    if part is None:
        if isinstance(text := config.get(TEXT), Mapping):
            raise UserError(
                f"config.json: model_type={config.get('model_type')!r} is more than a model of text. Its "
                f"text part is {TEXT}, of model_type={text.get('model_type')!r}: add `--part {TEXT}` to the "
                "command."
            )
        return dict(config)
    parts = [key for key, value in config.items() if key == TEXT and isinstance(value, Mapping)]
    if part not in parts:
        way_out = f"Only {TEXT} can be read." if parts else "Leave --part out: this config has no parts."
        raise UserError(f"--part {part}: no such part of config.json. {way_out}")
    chosen = dict(config[part])
    for key in ("tie_word_embeddings", "quantization_config"):
        # Where both are given, the head of the whole model is tied as the whole config says.
        if (value := config.get(key)) is None:
            continue
        if chosen.get(key, value) != value:
            raise UserError(
                f"config.json: {key}={value!r}, but {part}.{key}={chosen[key]!r}. Delete the wrong one."
            )
        chosen[key] = value
    # The class of the text part is that of its family.
    return {key: value for key, value in chosen.items() if key != "architectures"}


def _unknown(config: dict[str, Any]) -> UserError:
    """The refusal of a model_type without a family: the nearest one, or what is missing for it."""
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in LACKING:
        return UserError(
            f"config.json: model_type={model_type!r} needs {LACKING[model_type]}, which jtrain does not "
            f"have. Families that it has: {', '.join(FAMILIES)}."
        )
    trials = [_Trial.of(config, family) for family in FAMILIES.values()]
    # A similar name tells more than the order of the families, of which the first are the plainest.
    similar = difflib.get_close_matches(str(model_type), FAMILIES, n=len(FAMILIES))
    order = [*similar, *FAMILIES]
    trials.sort(
        key=lambda trial: (bool(trial.error), len(trial.unread), order.index(trial.family.model_type))
    )
    if fitting := [trial.family.model_type for trial in trials if trial.fits]:
        runners_up = f" (then {first_few(fitting[1:], 4)})" if fitting[1:] else ""
        return UserError(
            f"config.json: no family of model_type={model_type!r}. All its fields are known, and "
            f"{fitting[0]} is nearest{runners_up}: `--as {fitting[0]}` reads it so. A layer that has no "
            "field shows only in the names of the weights, which an import compares, and in `jtrain hf "
            "prove`."
        )
    nearest = trials[0]
    return UserError(
        f"config.json: no family of model_type={model_type!r}, and none has all its fields. Nearest is "
        f"{nearest.family.model_type}: {nearest.reason}."
    )
