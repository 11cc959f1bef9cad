"""Descriptions of models by chance: blocks of every kind in any pattern, from one table of choices.

A new mixer, or a field of an old one, is an entry of `CHOICES`; `tests/bench/test_descriptions.py` names what
the table lacks.
"""

import dataclasses
import functools
import random
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_type_hints

from jtrain.errors import UserError
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.latent_attention import LatentAttentionSpec
from jtrain.model.mixer import MixerSpec
from jtrain.model.mlp import ClampedSwiGLU, MLPSpec
from jtrain.model.norm import NormSpec
from jtrain.model.recurrent.conv_mixer import ShortConvSpec
from jtrain.model.recurrent.delta_net import DeltaNetSpec
from jtrain.model.recurrent.mamba2 import Mamba2Spec
from jtrain.model.recurrent.parallel import ParallelSpec
from jtrain.model.rope import (
    LinearScaling,
    Llama3Scaling,
    ProportionalScaling,
    QueryTemperature,
    RopeSpec,
    YarnScaling,
)
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer

# Small, and divisible by 2 and 4: heads, widths and the vocabulary split on every axis.
SIZES: dict[str, Any] = dict(
    d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=64, vocab_size=64, norm_eps=1e-5, num_layers=8
)
ROUTER_LOSSES = ("balance_loss", "router_z_loss")

type Description = tuple[tuple[str, Any], ...]
"""Fields of a `Transformer` and their values."""

CHOICES: dict[type, dict[str, tuple[Any, ...]]] = {
    AttentionSpec: dict(
        num_heads=(None, 8),
        num_kv_heads=(None, 1, 4),
        head_dim=(None, 4, 16),
        rope=(RopeSpec, None),
        bias=("none", "qkv", "all"),
        qk_norm=("none", "head", "all", "unscaled"),
        norm_after_rope=(False, True),
        value_norm=(False, True),
        # Shorter than most documents, and longer than half a row.
        window=(None, 3, 9),
        scale=(None, 0.2),
        soft_cap=(None, 2.0),
        chunk_size=(None, 5),
        temperature=(None, QueryTemperature),
        sink=(False, True),
        value_head_dim=(None, 4),
        value_scale=(1.0, 0.5),
        gate=(False, True),
        gate_activation=("sigmoid", "softplus"),
        gate_per_head=(False, True),
        gate_bias=(False, True),
        output_norm=(False, True),
    ),
    QueryTemperature: dict(beta=(0.5, 0.1), scale=(4, 8), offset=(0, 1), is_power=(False, True)),
    ShortConvSpec: dict(taps=(3, 2), bias=(False, True)),
    DeltaNetSpec: dict(
        num_heads=(4, 8),
        num_key_heads=(4, 2),
        key_dim=(8, 4),
        value_dim=(8, 4),
        taps=(4, 2),
        decay=("head", "channel"),
        rank=(None, 8),
        decay_floor=(None, -3.0),
        gate=("silu", "sigmoid"),
        max_step=(1.0, 2.0),
        norm_eps=(None, 1e-3),
    ),
    Mamba2Spec: dict(
        num_heads=(4, 8),
        head_dim=(8, 4),
        state_size=(8, 4),
        num_groups=(1, 2),
        taps=(4, 2),
        conv_bias=(True, False),
        bias=(False, True),
        norm=("gated", "before_gate", "none"),
        norm_groups=(1, 2),
        min_step=(0.0, 0.01),
        scales=((1.0, 1.0, 1.0, 1.0, 1.0), (0.5, 2.0, 1.0, 1.5, 0.5)),
    ),
    ParallelSpec: dict(
        mixers=((AttentionSpec(), ShortConvSpec()), (Mamba2Spec(4, 8, 8), AttentionSpec(window=3))),
        scales=((1.0, 1.0), (0.5, 2.0)),
    ),
    LatentAttentionSpec: dict(
        kv_rank=(8, 16),
        q_rank=(None, 16),
        nope_head_dim=(8, 4),
        rope_head_dim=(4, 8),
        value_head_dim=(8, 4),
        num_heads=(None, 8),
        rope=(RopeSpec, None),
        mscale=(0.0, 1.0),
        bias=(False, True),
        latent_eps=(1e-6, 1e-3),
        temperature=(None, QueryTemperature),
        gate=(False, True),
    ),
    RopeSpec: dict(
        theta=(10_000.0, 300.0),
        scaling=(None, Llama3Scaling, LinearScaling, ProportionalScaling, YarnScaling),
        rotated_share=(1.0, 0.5),
        backwards=(False, True),
    ),
    # Wavelengths of heads of 8 dims over 16 positions: the scalings must have some to change and some to
    # keep.
    Llama3Scaling: dict(
        factor=(8.0, 2.0),
        low_freq_factor=(1.0, 0.5),
        high_freq_factor=(4.0, 2.0),
        original_seq_len=(64, 8192),
    ),
    LinearScaling: dict(factor=(4.0, 1.5)),
    ProportionalScaling: dict(share=(0.5, 0.75)),
    YarnScaling: dict(
        factor=(4.0, 2.0),
        original_seq_len=(16, 4096),
        attention_factor=(1.0, 1.2),
        beta_fast=(32.0, 2.0),
        beta_slow=(1.0, 0.2),
        truncate=(True, False),
    ),
    MLPSpec: dict(
        d_ff=(None, 48),
        activation=("silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu", ClampedSwiGLU),
        gated=(True, False),
        bias=(False, True),
        gate_scale=(1.0, 0.5),
        out_scale=(1.0, 2.0),
        inner_norm=(False, True),
    ),
    ClampedSwiGLU: dict(alpha=(1.702, 1.0), limit=(7.0, 0.7)),
    MoESpec: dict(
        num_experts=(4, 8),
        top_k=(2, 1, 3),
        d_ff=(None, 16),
        activation=("silu", "gelu_tanh", "relu2", ClampedSwiGLU),
        gated=(True, False),
        normalize_top_k=(True, False),
        shared_experts=(0, 1, 2),
        shared_d_ff=(None, 24),
        shared_gate=(False, True),
        shared_scale=(1.0, 0.5),
        score=("softmax", "sigmoid"),
        correction_bias=(False, True),
        chosen_by=("score", "logits"),
        num_groups=(1, 2, 4),
        top_groups=(1, 2),
        group_score=("best_two", "best"),
        weight_scale=(1.0, 2.5),
        weight_input=(False, True),
        balance_loss=(1e-2, 0.0),
        router_z_loss=(0.0, 1e-3),
    ),
    NormSpec: dict(kind=("rms", "layer"), scale=("ones", "one_plus", "none"), bias=(False, True)),
    BlockSpec: dict(
        norms=("before", "after", "sandwich", "sandwich_mlp", "parallel", "parallel_shared"),
        residual_scale=(1.0, 0.5),
        stream_scale=(False, True),
    ),
    Transformer: dict(
        num_kv_heads=(2, 1, 4),
        norm=(NormSpec,),
        norm_eps=(1e-5, 1e-3),
        embedding_scale=(1.0, 3.0),
        embedding_norm=(False, True),
        logit_scale=(1.0, 0.5),
        logit_soft_cap=(None, 5.0),
        tie_embeddings=(False, True),
        z_loss=(0.0, 1e-4),
    ),
}
"""Values of each field of each component, the default first; a component stands for one that is drawn."""

MAX_LAYERS = 8


@functools.cache
def choices_of(kind: type) -> dict[str, tuple[Any, ...]]:
    """Fields of a component and their values; a block may have any mixer and feed-forward layer, or none."""
    if kind is not BlockSpec:
        return CHOICES[kind]
    mixers = (mixer for mixer in CHOICES if issubclass(mixer, MixerSpec))
    layers = (layer for layer in get_args(get_type_hints(BlockSpec)["feed_forward"]) if layer in CHOICES)
    return {"mixer": (*mixers, None), "feed_forward": (*layers, None)} | CHOICES[BlockSpec]


def draw_description(rng: random.Random) -> Description:
    """Draws fields that a model takes: the component checks itself, and what it refuses is drawn again."""
    while True:
        fields = {name: _value(rng, rng.choice(values)) for name, values in choices_of(Transformer).items()}
        # Short ones more often: each block that is not in the loop compiles on its own.
        pattern = tuple(_component(rng, BlockSpec) for _ in range(rng.choice((1, 1, 2, 2, 3, 4))))
        # Mostly none, for the same reason.
        first = tuple(_component(rng, BlockSpec) for _ in range(rng.choice((0, 0, 0, 1, 2))))
        # Layers behind the last whole period: the first blocks of the pattern once more.
        last = rng.randrange(len(pattern)) if rng.random() < 0.5 else 0
        periods = rng.randint(1, max((MAX_LAYERS - len(first) - last) // len(pattern), 1))
        layers = dict(first=first, pattern=pattern, num_layers=len(first) + periods * len(pattern) + last)
        description = with_one_router_loss(tuple((fields | layers).items()))
        # The parts were taken one by one; together they may still not be.
        if is_taken(description):
            return description


def is_taken(description: Description) -> bool:
    """True if a model has these fields, every block computes something, and every gradient is determined."""
    model = dict(description)
    for block in (*model["first"], *model["pattern"]):
        if block.mixer is None and block.feed_forward is None:
            return False
        # A weight of 1 whatever the router says: its gradient is what rounding makes of 0.
        router = block.feed_forward
        is_single = isinstance(router, MoESpec) and router.top_k == 1 and router.normalize_top_k
        if is_single and router.balance_loss == router.router_z_loss == 0:
            return False
    try:
        Transformer(**SIZES | model)
    except UserError:
        return False
    return True


def with_one_router_loss(description: Description) -> Description:
    """The same with the coefficients of the first mixture in all of them, as a model has one of each."""
    model = dict(description)
    routers = [
        b.feed_forward for b in (*model["first"], *model["pattern"]) if isinstance(b.feed_forward, MoESpec)
    ]
    # Empty without a mixture: then nothing is replaced below.
    coefficients = {name: getattr(router, name) for router in routers[:1] for name in ROUTER_LOSSES}

    def changed(block: BlockSpec) -> BlockSpec:
        if not isinstance(block.feed_forward, MoESpec):
            return block
        return dataclasses.replace(
            block, feed_forward=dataclasses.replace(block.feed_forward, **coefficients)
        )

    return tuple((model | {name: tuple(map(changed, model[name])) for name in ("first", "pattern")}).items())


def _component(rng: random.Random, kind: type) -> Any:
    while True:
        try:
            return kind(
                **{name: _value(rng, rng.choice(values)) for name, values in choices_of(kind).items()}
            )
        except UserError:
            # Some values do not go together.
            continue


def _value(rng: random.Random, choice: Any) -> Any:
    return _component(rng, choice) if isinstance(choice, type) else choice


def traits(description: Description) -> set[tuple[str, str]]:
    """Fields of all components with their values, such as (`AttentionSpec.window`, `3`)."""

    def of(kind: type, fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        for name in choices_of(kind):
            value = fields[name]
            is_component = type(value) in CHOICES
            yield f"{kind.__name__}.{name}", type(value).__name__ if is_component else str(value)
            if is_component:
                yield from of(type(value), vars(value))

    model = dict(description)
    blocks = (*model["first"], *model["pattern"])
    return set(of(Transformer, model)).union(*(of(BlockSpec, vars(block)) for block in blocks))


def all_traits() -> set[tuple[str, str]]:
    """Every value of the table, as `traits` has it."""
    return {
        (f"{kind.__name__}.{name}", value.__name__ if isinstance(value, type) else str(value))
        for kind in CHOICES
        for name, values in choices_of(kind).items()
        for value in values
    }


def simpler(description: Description) -> Iterator[Description]:
    """Descriptions with one thing less: a block, a repetition, or a field that is not at its default."""
    model = dict(description)

    def with_blocks(**blocks: Any) -> Description:
        changed = model | blocks
        layers = {"num_layers": len(changed["first"]) + len(changed["pattern"])}
        return tuple((changed | layers).items())

    for name in ("first", "pattern"):
        for index in range(len(model[name])):
            blocks = model[name][:index] + model[name][index + 1 :]
            if blocks or name == "first":
                yield with_blocks(**{name: blocks})
    # Without repetitions: one period of the pattern and no layers behind it.
    if dict(with_blocks())["num_layers"] < model["num_layers"]:
        yield with_blocks()
    for name in ("first", "pattern"):
        for index, block in enumerate(model[name]):
            for simple in _simpler_component(block):
                blocks = (*model[name][:index], simple, *model[name][index + 1 :])
                yield tuple((model | {name: blocks}).items())
    for changed in _simpler_fields(Transformer, model):
        yield tuple((model | changed).items())


def _simpler_component(component: Any) -> Iterator[Any]:
    for changed in _simpler_fields(type(component), vars(component)):
        try:
            yield dataclasses.replace(component, **changed)
        except UserError:
            continue


def _simpler_fields(kind: type, fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, values in choices_of(kind).items():
        # The table has the default first; a component stands for itself with its own defaults.
        default = values[0]() if isinstance(values[0], type) else values[0]
        if fields[name] != default:
            yield {name: default}
        if type(fields[name]) in CHOICES:
            yield from ({name: simple} for simple in _simpler_component(fields[name]))


def as_text(description: Description) -> str:
    """The fields that are not at their default, in one line."""
    model = Transformer(**SIZES | dict(description))
    names = (field.name for field in dataclasses.fields(Transformer) if field.name in dict(description))
    fields = {name: getattr(model, name) for name in names}
    return ", ".join(f"{name}={_compact(value)}" for name, value in fields.items())


def _compact(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_compact, value)) + ")"
    if not dataclasses.is_dataclass(value):
        return repr(value)
    default = {f.name: f.default for f in dataclasses.fields(value)}
    changed = {name: x for name, x in vars(value).items() if x != default[name]}
    return f"{type(value).__name__}({', '.join(f'{name}={_compact(x)}' for name, x in changed.items())})"
