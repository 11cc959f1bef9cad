"""The loss is a mean over the global batch, however it is packed and split: loss and gradients of answers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding

from jtrain.data.constructor.context_order import context_order
from jtrain.layout.dims import IGNORE, Batch
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.forward_placement import single_device
from jtrain.model.param import map_params
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, build
from jtrain.step.objective import ObjectiveSpec, scale_of
from jtrain.step.state import init_state
from jtrain.step.train_step import BATCH_SPEC, make_train_step
from tests.layouts import layout_from

VOCAB, COLS = 64, 16
SIZES: dict[str, Any] = dict(
    num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=64, vocab_size=VOCAB, z_loss=1e-3
)
# The balance loss is a matter of rows, not of documents: packing changes it by its definition.
EXPERTS: dict[str, Any] = SIZES | dict(
    d_ff=16, moe=MoESpec(num_experts=4, top_k=2, d_ff=16, balance_loss=0.0, router_z_loss=0.1)
)

LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "packed": ({}, {}),
    "accumulated": ({}, dict(microbatches=4)),
    "context": (dict(context=2), {}),
    "zero 3": (dict(data=4), dict(zero_stage=3)),
    "stages": (dict(stage=2), dict(microbatches=4)),
    "all": (dict(data=2, context=2, tensor=2), dict(zero_stage=3, microbatches=2)),
    "stages, all": (dict(stage=2, data=2, tensor=2), dict(zero_stage=1, microbatches=2)),
}
ADAMW = AdamW(peak_lr=1e-3, warmup_steps=0, clip_norm=None)


def documents() -> list[tuple[np.ndarray, int]]:
    """Ids and length of the prompt of 16 documents of 2 to 16 tokens, one without a target."""
    rng = np.random.default_rng(3)
    lengths = [16, 13, 3, 9, 7, 2, 14, 5, 11, 8, 4, 12, 6, 10, 15, 2]
    prompts = [int(rng.integers(1, length)) for length in lengths]
    prompts[4] = lengths[4]
    return [
        (rng.integers(0, VOCAB, length).astype(np.int32), prompt)
        for length, prompt in zip(lengths, prompts, strict=True)
    ]


WEIGHTS = (0.25, 1.0, 3.0)
"""Weights of the targets of a document, by its length."""


def pack(rows: int, *, packed: bool, weighted: bool = False) -> Batch:
    """One document a row, or as many as fit, from the longest on; the targets of some weigh more than others."""
    shape, placed = (rows, COLS), [0] * rows
    token, target, position, segment = (np.zeros(shape, np.int32) for _ in range(4))
    target[:] = IGNORE
    numbers, weight = [0] * rows, np.zeros(shape, np.float32)
    order = sorted(documents(), key=lambda document: -len(document[0])) if packed else documents()
    for number, (ids, prompt) in enumerate(order):
        row = next(r for r in range(rows) if placed[r] + len(ids) <= COLS) if packed else number
        first, last = placed[row], placed[row] + len(ids)
        numbers[row] += 1
        token[row, first:last], position[row, first:last] = ids, np.arange(len(ids))
        segment[row, first:last] = numbers[row]
        target[row, first + prompt - 1 : last - 1] = ids[prompt:]
        # The second half of an answer is another message.
        middle = (first + prompt - 1 + last) // 2
        weight[row, first + prompt - 1 : middle] = WEIGHTS[len(ids) % 3]
        weight[row, middle : last - 1] = WEIGHTS[(len(ids) + 1) % 3]
        placed[row] = last
    assert (max(numbers) > 1) == packed
    return Batch(token, target, position, segment, weight if weighted else None)


@functools.cache
def first_step(
    layout: str, mean: Any = "tokens", *, experts: bool = False, weighted: bool = False
) -> tuple[float, int, dict[str, np.ndarray]]:
    """Loss, targets and gradient (times 1 - b1) of the first step; `alone` has one document a row."""
    axes, fields = LAYOUTS.get(layout, ({}, {}))
    spec, model = MeshSpec(**axes), Transformer(**(EXPERTS if experts else SIZES))
    mesh, infos = make_mesh(spec, jax.devices()[: spec.size]), model.param_infos()
    lay = layout_from(dict(compute_dtype="float32", **fields), spec, infos)
    optimizer = build(ADAMW, num_steps=2, params=map_params(lambda info: info, infos))
    step = make_train_step(model, optimizer, lay, mesh, objective=ObjectiveSpec(mean))
    alone = layout == "alone"
    batch = pack(16 if alone else 12, packed=not alone, weighted=weighted)
    columns = context_order(COLS, spec.context, lay.context_order)
    batch = jax.tree.map(lambda x: jax.device_put(x[:, columns], NamedSharding(mesh, BATCH_SPEC)), batch)
    state, metrics = step(init_state(lay, optimizer, mesh, seed=0), batch)
    order = np.argsort(lay.pipeline.order) if lay.pipeline else slice(None)
    moments: Any = map_params(
        lambda info, x: np.asarray(x)[order] if info.is_stacked else np.asarray(x), infos, state.opt_state.mu
    )
    gradient: Any = flatten_dict(moments, sep=".")
    return float(metrics["loss_nats"]), int(metrics["tokens"]), gradient


def assert_same_step(layout: str, mean: str, **options: bool) -> None:
    loss, tokens, gradient = first_step(layout, mean, **options)
    want_loss, want_tokens, want = first_step("alone", mean, **options)
    assert tokens == want_tokens
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    total = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in want.values()))
    for path, expected in want.items():
        difference = np.linalg.norm((gradient[path] - expected).ravel().astype(np.float64))
        assert difference < 1e-6 * total, (path, difference / total)
        assert np.linalg.norm(expected) > 1e-4 * total, path


def on_layouts(*quick: tuple[str, str]) -> pytest.MarkDecorator:
    """Every layout with both means, of which all but `quick` are slow: each has a program of its own."""
    cases = [(layout, mean) for layout in LAYOUTS for mean in ("tokens", "per_sample")]
    return pytest.mark.parametrize(
        ("layout", "mean"),
        [case if case in quick else pytest.param(*case, marks=pytest.mark.slow) for case in cases],
    )


@on_layouts(("packed", "tokens"))
def test_packed_answers_have_the_loss_and_gradients_of_answers_one_by_one(layout: str, mean: str) -> None:
    """In float32 to 1e-6, wherever the documents of a row end up; the two means differ."""
    assert_same_step(layout, mean)
    assert abs(first_step("alone", "tokens")[0] - first_step("alone", "per_sample")[0]) > 1e-3


@on_layouts(("all", "tokens"), ("all", "per_sample"))
def test_weights_of_messages_are_the_same_loss_on_every_layout(layout: str, mean: str) -> None:
    """In float32 to 1e-6, as without weights."""
    assert_same_step(layout, mean, weighted=True)


@pytest.mark.parametrize("mean", ("tokens", "per_sample"))
def test_a_weight_is_a_factor_of_its_targets_and_of_what_they_are_divided_by(mean: str) -> None:
    """Against the nats of each document alone, by hand."""
    nats, weights = nats_by_hand(pack(16, packed=False, weighted=True))
    if mean == "tokens":
        want = sum(w @ n for w, n in zip(weights, nats, strict=True)) / sum(map(np.sum, weights))
    else:
        want = np.mean([w @ n / w.sum() for w, n in zip(weights, nats, strict=True)])
    loss = first_step("alone", mean, weighted=True)[0]
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    assert abs(loss - first_step("alone", mean)[0]) > 1e-3


def test_the_mean_per_sample_is_that_of_each_answers_mean() -> None:
    """Against the nats of each document alone, by hand."""
    nats, _ = nats_by_hand(pack(16, packed=False))
    np.testing.assert_allclose(
        first_step("alone", "per_sample")[0], np.mean([n.mean() for n in nats]), rtol=1e-6
    )


@functools.cache
def first_logits() -> Callable[[Batch], jax.Array]:
    """Logits of a batch by the weights that every first step has."""
    model = Transformer(**SIZES)
    infos = model.param_infos()
    lay = layout_from(dict(compute_dtype="float32"), MeshSpec(), infos)
    optimizer = build(ADAMW, num_steps=2, params=map_params(lambda info: info, infos))
    params = init_state(lay, optimizer, make_mesh(MeshSpec(), jax.devices()[:1]), seed=0).params
    return jax.jit(lambda batch: model.logits(params, batch))


def nats_by_hand(batch: Batch) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Nats and weights of the targets of each document that has some."""
    weight_BL = np.ones(batch.target_BL.shape) if batch.weight_BL is None else batch.weight_BL
    batch = jax.tree.map(jnp.asarray, dataclasses.replace(batch, weight_BL=None))
    logits_BLV = np.asarray(first_logits()(batch), np.float64)
    log_p = logits_BLV - np.log(np.exp(logits_BLV).sum(-1, keepdims=True))
    nats, weights = [], []
    for row, target in enumerate(np.asarray(batch.target_BL)):
        (places,) = np.nonzero(target != IGNORE)
        if len(places):
            nats.append(-log_p[row, places, target[places]])
            weights.append(weight_BL[row, places].astype(np.float64))
    assert len(nats) == 15, "one document has no target"
    return nats, weights


@pytest.mark.slow
@pytest.mark.parametrize("layout", ("all", "stages, all"))
def test_router_losses_do_not_depend_on_packing_or_layout(layout: str) -> None:
    assert_same_step(layout, "tokens", experts=True)


def test_router_losses_are_means_over_all_tokens_that_are_read() -> None:
    """Masked prompts or not, the router's part of the objective is the same; padding has no part in it."""
    sizes: Any = EXPERTS | dict(z_loss=0.0)
    model = Transformer(**sizes)
    infos = model.param_infos()
    lay, mesh = layout_from({}, MeshSpec(), infos), make_mesh(MeshSpec(), jax.devices()[:1])
    optimizer = build(ADAMW, num_steps=2, params=map_params(lambda info: info, infos))
    params = init_state(lay, optimizer, mesh, seed=0).params
    masked = jax.tree.map(jnp.asarray, pack(12, packed=True))
    is_read = masked.segment_BL != 0
    learned = dataclasses.replace(masked, target_BL=jnp.where(is_read, masked.token_BL, IGNORE))

    @jax.jit
    def router_part(batch: Batch) -> jax.Array:
        scale, batch = scale_of(lay, batch, has_router=True)
        total, nats = model.loss(params, batch, single_device("float32"), scale.targets_per_token)
        return jnp.stack([(total - nats) * scale.unit, scale.num_tokens.astype(jnp.float32)])

    (part, targets), (want, tokens) = router_part(masked), router_part(learned)
    assert tokens == is_read.sum() > 1.5 * targets
    np.testing.assert_allclose(part, want, rtol=1e-5)
    assert want > 1e-3
