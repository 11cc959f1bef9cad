"""Fields of a config.json, read so that none which changes the model is overlooked."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jtrain.errors import UserError
from jtrain.model.families.missing_fields import MISSING
from jtrain.model.rope import (
    LinearScaling,
    Llama3Scaling,
    ProportionalScaling,
    RopeSpec,
    YarnScaling,
    yarn_mscale,
)

# fmt: off
NEUTRAL = frozenset({
    "_attn_implementation", "_experts_implementation", "_name_or_path", "add_cross_attention",
    "architectures", "attn_implementation", "auto_map", "bos_token_id", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "dtype", "eos_token_id", "finetuning_task",
    "gradient_checkpointing", "head_dim", "id2label", "initializer_range", "is_decoder",
    "is_encoder_decoder", "keys_to_ignore_at_inference", "label2id", "max_length",
    "max_position_embeddings", "model_max_length", "model_type", "num_labels", "output_attentions",
    "output_hidden_states", "output_router_logits", "pad_token_id", "prefix",
    "problem_type", "return_dict", "sep_token_id", "task_specific_params", "tokenizer_class", "torch_dtype",
    "torchscript", "transformers_version", "trust_remote_code", "unsloth_fixed", "unsloth_version", "use_cache",
    "use_return_dict",
})
# fmt: on
"""Fields that do not change the function of a model in any family; `head_dim` is read by all."""


_PRIMITIVES = {
    r"(q|kv)_lora_rank|qk_(rope|nope)_head_dim|v_head_dim": "multi-head latent attention",
    r"index_.+": "a sparse indexer",
    r"linear_.+|full_attention_interval": "a linear mixer with a state",
    r"mamba.*|ssm_.+|.*state_size|hybrid_override_pattern|time_step_.+": "Mamba",
    r"conv_.+|short_conv.*|.*_conv_kernel.*": "a short convolution",
    r".*softcap.*|logit_cap.*": "soft-capped scores or logits",
    r"num_nextn_predict_layers|.*mtp.*": "prediction of several tokens",
    r"swiglu_.+|.*clamp.*": "clamped SwiGLU",
    r".*sink.*": "attention sinks",
    r"quantization_config": "quantised weights; convert them to bfloat16 first",
    r".+_multipliers?": "multipliers",
    r".*per_layer_input": "embeddings of each layer",
    r"num_kv_shared_layers": "keys and values shared by layers",
    r"hc_.+": "hyper-connections",
    r"(vision|audio)_.+": "a part that sees or hears",
}
"""What jtrain lacks, by the name of a field that no family reads."""


def named(fields: Mapping[str, Any]) -> list[str]:
    """`field=value`, with what jtrain lacks for it where the field's name tells."""
    lines: list[str] = []
    for key, value in fields.items():
        primitives = [name for pattern, name in _PRIMITIVES.items() if re.fullmatch(pattern, key)]
        lines.append(f"{key}={value!r}" + (f" ({primitives[0]})" if primitives else ""))
    return lines


class Fields:
    """A config.json that knows which of its fields were read.

    A field that is null counts as missing, except where transformers' class has a value for a missing one.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._missing = MISSING.get(str(config.get("model_type")), {})
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a field."""
        self._read.add(key)
        value = self._config[key] if key in self._config else self._missing.get(key)
        return default if value is None else value

    def nullable(self, key: str, default: float | None) -> float | None:
        """Value of a field that is a number, or null for none; `default` where it is missing."""
        self._read.add(key)
        value = self._config.get(key, default)
        return None if value is None else float(value)

    def whole(self, key: str, default: int | None = None) -> int:
        """Value of a field that is a whole number.

        Raises:
          UserError: it is missing without a default, or something else.
        """
        value = self.get(key, default)
        # bool is a subclass of int.
        if isinstance(value, bool) or not isinstance(value, int):
            raise UserError(f"config.json: {key}={value!r} must be a whole number.")
        return value

    def number(self, key: str, default: float) -> float:
        """Value of a field that is a number."""
        return float(self.get(key, default))

    def numbers(self, key: str, default: Iterable[float]) -> tuple[float, ...]:
        """Value of a field that is a list of numbers; transformers writes infinity as an object."""
        given = self.get(key, tuple(default))
        return tuple(float(x["__float__"] if isinstance(x, Mapping) else x) for x in given)

    def flag(self, key: str, default: bool = False) -> bool:
        """Value of a field that is true or false."""
        return bool(self.get(key, default))

    def only(self, **supported: Any) -> None:
        """Checks fields of which one value is supported, which is also that of a missing field.

        Raises:
          UserError: a field has another value.
        """
        for key, value in supported.items():
            if (field_value := self.get(key, value)) != value:
                raise UserError(f"config.json: {key}={field_value!r} is not supported, only {value!r}.")

    def ignore(self, *keys: str) -> None:
        """Counts fields as read that change nothing in this family."""
        self._read.update(keys)

    @property
    def unread(self) -> dict[str, Any]:
        """Fields that nothing has read: they may change the model."""
        return {
            key: value
            for key, value in self._config.items()
            if key not in self._read | NEUTRAL and value is not None
        }

    @property
    def absent(self) -> list[str]:
        """Fields that were looked for and are not there, or null: their values are the family's own."""
        return sorted(key for key in self._read - NEUTRAL if self._config.get(key) is None)

    def check_all_read(self) -> None:
        """Refuses a field that nothing has read.

        Raises:
          UserError: there are such fields.
        """
        if unread := self.unread:
            field_names = ", ".join(named(unread))
            raise UserError(
                f"config.json: {field_names}: model_type={self._config.get('model_type')!r} is not known to "
                "have such a field, which may change what the model computes. Delete it from config.json if "
                "it does not."
            )

    def layer_types(
        self, num_layers: int, default: Iterable[str], *, key: str = "layer_types"
    ) -> tuple[str, ...]:
        """Kind of each layer.

        Raises:
          UserError: the list has another length than the model has layers.
        """
        kinds = tuple(self.get(key, tuple(default)))
        if len(kinds) != num_layers:
            raise UserError(
                f"config.json: {key} has {len(kinds)} entries, but num_hidden_layers={num_layers}."
            )
        return kinds

    def sparse_layers(self, num_layers: int, *, dense: int) -> tuple[bool, ...]:
        """True for each layer with a mixture of experts, by `mlp_layer_types`; else all but the first
        `dense`.
        """
        default = ["dense"] * dense + ["sparse"] * (num_layers - dense)
        return tuple(
            kind == "sparse" for kind in self.layer_types(num_layers, default, key="mlp_layer_types")
        )

    def rope(
        self,
        *,
        theta: float = 10_000.0,
        kind: str | None = None,
        share: float | None = None,
        unscaled: bool = False,
        theta_field: str | None = "rope_theta",
        beside: tuple[str, ...] = (),
    ) -> RopeSpec:
        """Rotary settings, from `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4).

        Args:
          theta, share: base and rotated share of each head where config.json names none; without a `share`
            this family rotates whole heads.
          kind: kind of layer, where each has rotations of its own.
          theta_field: field of the base beside those of scaling; None for none.
          beside: numbers of scaling that this family reads by itself.
          unscaled: True if scaling that is not given for this kind of layer is not meant for it.

        Raises:
          UserError: a kind of scaling that is not supported, or one without its numbers.
        """
        # transformers 5 looks in the same order, so a config.json describes the same model there.
        source = "rope_scaling" if self.get("rope_scaling") else "rope_parameters"
        given: Mapping[str, Any] = self.get(source) or {}
        if kind is not None and isinstance(given.get(kind), Mapping):
            given, unscaled = given[kind], False
        values = {key: value for key, value in given.items() if value is not None and key not in beside}
        self.ignore("rope_scaling", "rope_parameters")
        base = float(values.pop("rope_theta", self.number(theta_field, theta) if theta_field else theta))
        if share is None:
            self.only(partial_rotary_factor=1)
            if (given_share := values.pop("partial_rotary_factor", 1)) != 1:
                raise UserError(
                    f"config.json: {source}.partial_rotary_factor={given_share} is not supported, only 1."
                )
        share = self.number("partial_rotary_factor", share or 1.0)
        rotated_share = float(values.pop("partial_rotary_factor", share))
        rope_type = values.pop("rope_type", None) or values.pop("type", "default")
        values.pop("type", None)
        original = values.pop("original_max_position_embeddings", None) or self.get("max_position_embeddings")
        if rope_type == "proportional" and not unscaled:
            return RopeSpec(base, ProportionalScaling(rotated_share))
        scaling = None if unscaled else self._scaling(source, rope_type, values, original)
        return RopeSpec(base, scaling, rotated_share)

    def _scaling(self, source: str, rope_type: str, values: dict[str, Any], original: Any) -> Any:
        readers = {"default": _no_scaling, "llama3": _llama3, "linear": _linear, "yarn": _yarn}
        if rope_type not in readers:
            raise UserError(
                f"config.json: {source}.rope_type={rope_type!r} is not supported, only "
                f"{', '.join(map(repr, readers))}."
            )
        try:
            scaling = readers[rope_type](values, original)
        except KeyError as missing:
            raise UserError(f"config.json: {source} of type {rope_type} has no {missing.args[0]}.") from None
        # What is left was not read; zeros and empty lists say nothing.
        if left := {key: value for key, value in values.items() if key not in _READ_WITH and value}:
            raise UserError(
                f"config.json: {source} of type {rope_type} has {left}, which is not supported. Delete it "
                "from config.json if it changes nothing."
            )
        return scaling


_READ_WITH = frozenset({"mscale", "mscale_all_dim"})
"""Numbers that only attention's own scale reads, where there is one."""


def _no_scaling(values: dict[str, Any], original: Any) -> None:
    del original
    # A factor without a type changes nothing.
    values.pop("factor", None)


def _llama3(values: dict[str, Any], original: Any) -> Llama3Scaling:
    keys = ("factor", "low_freq_factor", "high_freq_factor")
    if missing := [key for key in keys if key not in values]:
        raise KeyError(", ".join(missing))
    factor, low, high = (float(values.pop(key)) for key in keys)
    if original is None:
        raise KeyError("original_max_position_embeddings")
    return Llama3Scaling(factor, low, high, int(original))


def _linear(values: dict[str, Any], original: Any) -> LinearScaling:
    del original
    return LinearScaling(float(values.pop("factor")))


def _yarn(values: dict[str, Any], original: Any) -> YarnScaling:
    if original is None:
        raise KeyError("original_max_position_embeddings")
    factor = float(values.pop("factor"))
    attention_factor = values.pop("attention_factor", None)
    if attention_factor is None:
        # Not popped, as other keys are: the scale of attention reads these two as well (`_READ_WITH`).
        mscale, mscale_all_dim = (float(values.get(key, 0.0)) for key in ("mscale", "mscale_all_dim"))
        has_both = mscale and mscale_all_dim
        attention_factor = (
            yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
            if has_both
            else yarn_mscale(factor)
        )
    return YarnScaling(
        factor,
        int(original),
        float(attention_factor),
        beta_fast=float(values.pop("beta_fast", 32.0)),
        beta_slow=float(values.pop("beta_slow", 1.0)),
        truncate=bool(values.pop("truncate", True)),
    )
