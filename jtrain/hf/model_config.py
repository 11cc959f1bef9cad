"""Conversion between config.json and `Transformer`, by the families of `jtrain.model.families`."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jtrain.errors import UserError, first_few
from jtrain.model.families import FAMILIES
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.family import Family
from jtrain.model.rope import Llama3Scaling, YarnScaling
from jtrain.model.transformer import Transformer

_WHOLE = (
    "num_layers",
    "d_model",
    "vocab_size",
    "norm_eps",
    "norm",
    "tie_embeddings",
    "embedding_scale",
    "embedding_norm",
    "logit_scale",
    "logit_soft_cap",
)
"""Fields of a model that change what it computes, beside its blocks."""

_ALIKE = ("num_heads", "num_kv_heads", "head_dim", "d_ff", "rope", "qk_norm", "moe")
"""Fields that describe the blocks of a model without a pattern."""

_NOT_COMPUTED = ("balance_loss", "router_z_loss", "bias_update_rate")
"""Coefficients that change how a model trains, not what it computes."""


def family_in(config: Mapping[str, Any]) -> Family:
    """Family of a config.json.

    Raises:
      UserError: an unknown model_type, or a class that is no causal language model.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UserError(f"config.json: model_type={model_type!r} is not one of {', '.join(FAMILIES)}.")
    family = FAMILIES[model_type]
    # LlamaForSequenceClassification has model_type llama, too.
    if list(classes := config.get("architectures") or [family.architecture]) != [family.architecture]:
        raise UserError(
            f"config.json: architectures={classes} is not [{family.architecture!r}]: only causal language "
            "models can be imported."
        )
    return family


def model_from_config(config: Mapping[str, Any]) -> Transformer:
    """Builds the model that a config.json describes, in the form of transformers 4 or 5.

    Raises:
      UserError: an unsupported architecture or feature; names the field and its value.
    """
    return _read(family_in(config), config)


def _read(family: Family, config: Mapping[str, Any]) -> Transformer:
    fields = Fields(config)
    model = read_fields(family, fields)
    fields.check_all_read()
    return model


def read_fields(family: Family, fields: Fields) -> Transformer:
    """The model of a config.json, of which some fields may stay unread.

    Raises:
      UserError: as `model_from_config`.
    """
    assert family.read is not None, f"{family.model_type} only exports"
    try:
        return family.read(fields)
    except UserError:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise UserError(
            f"config.json: a field has a value of another type or size than transformers writes ({error}). "
            "Download or export it again."
        ) from error


def config_from_model(
    model: Transformer,
    *,
    dtype: str,
    max_seq_len: int,
    begin_id: int | None,
    end_id: int | None,
    family: Family | None = None,
) -> dict[str, Any]:
    """Contents of config.json for a model, in the form of transformers 4, which transformers 5 also reads.

    Args:
      dtype: dtype of the tensors, `float32` or `bfloat16`.
      max_seq_len: length of the longest sequence in training. With scaled rotary frequencies, config.json has
        the length that they are scaled to, if it is larger.
      begin_id, end_id: token ids that begin and end a document.
      family: whose fields are written; None for the one that describes the model.

    Raises:
      UserError: no family describes the model, or transformers refuses its shape.
    """
    family = family or family_of(model)
    # The length that scaled frequencies were made for, if the run trained on shorter sequences.
    rotations = [block.mixer.rotation(model.sizes) for block in model.blocks if block.mixer is not None]
    scalings = [rotation[0].scaling for rotation in rotations if rotation is not None]
    scaled = [scaling for scaling in scalings if isinstance(scaling, Llama3Scaling | YarnScaling)]
    lengths = [int(scaling.factor * scaling.original_seq_len) for scaling in scaled]
    return _identity(family) | {
        **family.write(model),
        "max_position_embeddings": max([max_seq_len, *lengths]),
        "bos_token_id": begin_id,
        "eos_token_id": end_id,
        "torch_dtype": dtype,
    }


def _identity(family: Family) -> dict[str, Any]:
    return {"architectures": [family.architecture], "model_type": family.model_type}


def family_of(model: Transformer) -> Family:
    """Family whose config.json describes a model: reading what it writes gives the same model.

    Raises:
      UserError: none does; says why for each.
    """
    if type(model) is not Transformer:
        raise UserError(
            f"{type(model).__name__} is a model of your own, and no family of transformers is known to "
            "compute the same. Give --family: one of them if it does, or path/to/file.py:function for names "
            "of your own."
        )
    reasons: list[tuple[int, str]] = []
    for family in FAMILIES.values():
        try:
            fields = family.write(model)
        except StopIteration:  # it has no attention, which the family looks for
            continue
        except UserError as error:
            # What transformers refuses although the family has it, before everything else.
            reasons += [(0, f"{family.model_type}: {error}")] if str(error).startswith("model.") else []
            continue
        try:
            differences = model_differences(_read(family, _identity(family) | fields), model)
        except UserError:
            continue
        if not differences:
            return family
        reasons.append((len(differences), f"{family.model_type}: {differences[0]}"))
    nearest = [text for _, text in sorted(reasons, key=lambda reason: reason[0])][:4]
    raise UserError(
        f"no family of transformers has this model, so no config.json describes it: {'; '.join(nearest)}. "
        "Keep the checkpoint, change the model, or give --family with names of your own."
    )


def model_differences(theirs: Transformer, ours: Transformer) -> list[str]:
    """Differences between two models: one line per field that changes the function they compute."""
    alike = not (theirs.pattern or ours.pattern)
    lines = [
        f"{path}: {their_value} there, {our_value} here"
        for field in _WHOLE + _ALIKE * alike
        for path, their_value, our_value in _unequal(
            getattr(theirs, field), getattr(ours, field), f"model.{field}"
        )
    ]
    if alike or theirs.num_layers != ours.num_layers:
        return lines
    blocks = zip(theirs.blocks, ours.blocks, strict=True)
    pairs = (
        (_with_sizes(their_block, theirs), _with_sizes(our_block, ours)) for their_block, our_block in blocks
    )
    of_blocks = (
        (f"{path}: {their_value} there, {our_value} here", y)
        for y, pair in enumerate(pairs)
        for path, their_value, our_value in _unequal(*pair)
    )
    layers: dict[str, list[int]] = {}
    for text, y in of_blocks:
        layers.setdefault(text, []).append(y)
    # Once for all layers that differ in the same way.
    return lines + [f"layer {first_few([str(y) for y in ys], 4)}: {text}" for text, ys in layers.items()]


def _with_sizes(block: Any, model: Transformer) -> Any:
    """The block with the sizes that it takes from the model, so that blocks of two models compare."""
    mixer, feed_forward = block.mixer, block.feed_forward
    if mixer is not None:
        mixer = mixer.with_sizes(model.sizes)
    if feed_forward is not None:
        feed_forward = dataclasses.replace(feed_forward, d_ff=feed_forward.d_ff or model.d_ff)
    return dataclasses.replace(block, mixer=mixer, feed_forward=feed_forward)


def _unequal(theirs: Any, ours: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Fields below a description that differ: (path, theirs, ours)."""
    if theirs == ours:
        return
    if type(theirs) is not type(ours) or not dataclasses.is_dataclass(theirs):
        yield path, theirs, ours
        return
    for field in dataclasses.fields(theirs):
        if field.name not in _NOT_COMPUTED:
            below = f"{path}.{field.name}" if path else field.name
            yield from _unequal(getattr(theirs, field.name), getattr(ours, field.name), below)
