"""Descriptions by chance: every field of every component is drawn, and what no formula knows is one device's."""

import dataclasses
import importlib
import inspect
import pkgutil
import random
import typing
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrain.model
from jtrain.bench.layout_trials import descriptions, float64_model
from jtrain.bench.layout_trials.adversarial_batch import draw_batch
from jtrain.bench.layout_trials.descriptions import CHOICES, SIZES, draw_description, simpler, traits
from jtrain.bench.layout_trials.settings import DESCRIBED, DESCRIPTION, defaults, model_of, reference_of
from jtrain.errors import UserError
from jtrain.layout.dims import Batch
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.forward_placement import single_device
from jtrain.model.mixer import MixerSpec
from jtrain.model.mlp import MLPSpec
from jtrain.model.norm import NormSpec
from jtrain.model.rope import RopeSpec, YarnScaling
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from tests.weights import draw_weights

ELSEWHERE = {
    # Of flat models, which are drawn as they are.
    *("moe", "rope", "qk_norm"),
    # Drawn with the number of their blocks.
    *("pattern", "first", "num_layers"),
    # Factors of a setting.
    *("scan_layers", "loss_chunk_tokens", "attention_chunk"),
    # Sizes of the whole model; blocks have their own.
    *("d_model", "num_heads", "head_dim", "d_ff", "vocab_size"),
}
"""Fields of a `Transformer` that are no choice of the table."""

WITHOUT_FORMULA = {"bias", "bias_update_rate"}
"""Fields of a mixture that the float64 reference does not know; one device cannot stand for a router."""


def components() -> set[type]:
    """All mixers, and all components that a field of a component may hold."""
    for module in pkgutil.iter_modules(jtrain.model.__path__, "jtrain.model."):
        importlib.import_module(module.name)

    def mixers(kind: type) -> Iterator[type]:
        for subclass in kind.__subclasses__():
            if not inspect.isabstract(subclass) and subclass.__module__.startswith("jtrain."):
                yield subclass
            yield from mixers(subclass)

    found, unseen = set[type](), {Transformer, *mixers(MixerSpec)}
    while unseen:
        kind = unseen.pop()
        found.add(kind)
        held = {part for hint in typing.get_type_hints(kind).values() for part in _parts(hint)}
        unseen |= {
            part for part in held if part.__module__.startswith("jtrain.model") and part is not MixerSpec
        }
        unseen -= found
    return found


def _parts(hint: Any) -> Iterator[type]:
    if (
        isinstance(hint, type)
        and dataclasses.is_dataclass(hint)
        and hint.__module__.startswith("jtrain.model")
    ):
        yield hint
    for argument in typing.get_args(hint):
        yield from _parts(argument)


def test_every_field_of_every_component_is_drawn() -> None:
    """A new mixer, feed-forward layer or field is missing here until it is an entry of the table."""
    assert {AttentionSpec, BlockSpec, Transformer} <= components()
    assert components() == set(CHOICES)
    for kind, choices in CHOICES.items():
        fields = {field.name for field in dataclasses.fields(kind)}
        drawn = set(descriptions.choices_of(kind)) | (ELSEWHERE if kind is Transformer else set())
        drawn |= WITHOUT_FORMULA if kind is MoESpec else set()
        assert drawn == fields, kind
        for name, values in choices.items():
            assert len(values) > 1 or all(isinstance(value, type) for value in values), (
                f"{kind.__name__}.{name} is always {values}"
            )


def test_every_value_of_the_table_comes_soon() -> None:
    """Within 150 descriptions, of which none is like another; each is a model."""
    rng = random.Random(0)
    drawn = [draw_description(rng) for _ in range(150)]
    assert set().union(*map(traits, drawn)) == descriptions.all_traits()
    assert len(set(drawn)) == len(drawn)
    models = [Transformer(**SIZES | dict(description)) for description in drawn]
    assert {len(model.pattern) for model in models} == {1, 2, 3, 4}
    assert {bool(model.first) for model in models} == {bool(model.last) for model in models} == {True, False}


def test_a_description_becomes_simpler_one_thing_at_a_time() -> None:
    """Where everything fails, a layer of one attention and one dense feed-forward layer stays."""
    description = draw_description(random.Random(3))
    for _ in range(200):
        smaller = next(filter(descriptions.is_taken, simpler(description)), None)
        if smaller is None:
            break
        description = smaller
    model = Transformer(**SIZES | dict(description))
    assert (model.num_layers, model.pattern, model.first) == (1, (BlockSpec(),), ())


WINDOWED = BlockSpec(
    AttentionSpec(window=3, bias="all", qk_norm="head", rope=RopeSpec(rotated_share=0.5)),
    MLPSpec(activation="gelu_tanh", gated=False, bias=True),
    norms="sandwich",
)
MIXTURE = MoESpec(
    num_experts=8,
    top_k=2,
    d_ff=16,
    shared_experts=1,
    shared_gate=True,
    score="sigmoid",
    correction_bias=True,
    num_groups=4,
    top_groups=2,
    weight_scale=2.5,
    balance_loss=1e-2,
    router_z_loss=1e-3,
)
SCALED = BlockSpec(
    AttentionSpec(
        num_kv_heads=1, gate=True, scale=0.2, qk_norm="all", rope=RopeSpec(scaling=YarnScaling(4.0, 16, 1.2))
    ),
    MIXTURE,
    norms="parallel",
    residual_scale=0.5,
)


def described(*pattern: BlockSpec, **fields: Any) -> dict[str, Any]:
    """The setting of a description with three layers."""
    description = tuple((fields | dict(pattern=pattern, num_layers=3)).items())
    return defaults() | {"model": DESCRIBED, DESCRIPTION: description}


def by_reference(
    reference: float64_model.Model, params: Any, batch: Any
) -> tuple[float, dict[str, np.ndarray]]:
    """Objective and gradients by path, in float64."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    flat = {jax.tree_util.keystr(k, simple=True, separator="."): np.asarray(x, np.float64) for k, x in leaves}
    with jax.enable_x64(True), jax.transfer_guard("allow"):
        (objective, _), gradients = float64_model.differentiate(reference)(flat, batch)
        return float(objective), {path: np.asarray(gradient) for path, gradient in gradients.items()}


def agree(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """Gradients in float32 are those of float64."""
    assert set(got) == set(want)
    whole = np.sqrt(sum(float((gradient**2).sum()) for gradient in want.values()))
    for path, gradient in got.items():
        # Sums that cancel keep the rounding of their terms.
        size = max(np.abs(want[path]).max(), 1e-3 * whole)
        np.testing.assert_allclose(gradient, want[path], rtol=0, atol=1e-5 * size, err_msg=path)


def test_one_device_computes_what_the_papers_say() -> None:
    """Packed rows with padding: objective and every gradient against float64, without code of the model."""
    setting = described(WINDOWED, SCALED, norm=NormSpec(scale="one_plus"))
    model, params = model_of(setting), draw_weights(model_of(setting).param_infos())
    batch = draw_batch(0, SIZES["vocab_size"])
    count = (batch["target_BL"] >= 0).sum()

    def objective(params: Any) -> Any:
        arrays = Batch(**{name: jnp.asarray(array) for name, array in batch.items()})
        share = jnp.float32(count / (batch["segment_BL"] != 0).sum())
        return model.loss(params, arrays, single_device("float32"), share)[0] / float(count)

    got, gradients = jax.jit(jax.value_and_grad(objective))(params)
    want, want_gradients = by_reference(reference_of(setting), params, batch)
    np.testing.assert_allclose(got, want, rtol=2e-6)
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    agree(
        {jax.tree_util.keystr(k, simple=True, separator="."): np.asarray(x) for k, x in leaves},
        want_gradients,
    )


@pytest.mark.slow
def test_one_device_stands_for_a_mixer_without_a_formula() -> None:
    """Attention through its own module has the loss and gradients of the formula, to float32."""
    block = BlockSpec(AttentionSpec(window=3, bias="all", qk_norm="head"))
    setting, batch = described(block), draw_batch(0, SIZES["vocab_size"])
    formula, params = reference_of(setting), draw_weights(model_of(setting).param_infos())
    unknown = dataclasses.replace(block, mixer=_Unknown(window=3, bias="all", qk_norm="head", flavour=1))
    want, want_gradients = by_reference(formula, params, batch)
    got, gradients = by_reference(dataclasses.replace(formula, pattern=(unknown,)), params, batch)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert got != want, "one is float32"
    agree(gradients, want_gradients)


@dataclasses.dataclass(frozen=True)
class _Unknown(AttentionSpec):
    """Attention with a field that no formula knows."""

    flavour: int | None = None


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: NormSpec(bias=True),
            "model.norm.bias=True with model.norm.kind=rms, which has no bias. Set",
        ),
        (
            lambda: BlockSpec(None, norms="parallel"),
            "norms=parallel in model.pattern with mixer=None: .* Set norms",
        ),
        (
            lambda: model(BlockSpec(AttentionSpec(qk_norm="all")), norm=NormSpec("layer")),
            "qk_norm=all in model.pattern with model.norm.kind=layer: .* Set model.norm.kind=rms, or qk_norm=head",
        ),
        (
            lambda: model(BlockSpec(None, MoESpec(4, 2)), BlockSpec(None, MoESpec(4, 2, balance_loss=0.5))),
            "balance_loss=0.001, 0.5 in the mixtures of model.pattern and model.first: .* Set one balance_loss",
        ),
    ],
    ids=["bias of a root mean square", "one branch", "all heads", "two coefficients"],
)
def test_fields_that_would_do_nothing_are_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build()


def model(*pattern: BlockSpec, **fields: Any) -> Transformer:
    """A small model of one repetition."""
    return Transformer(**SIZES | fields | {"pattern": pattern, "num_layers": len(pattern)})
