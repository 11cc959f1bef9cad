"""Steps of a model with an adapter: a plain loop's numbers on every layout, and nothing for the frozen base."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jtrain.layout.dims import IGNORE
from jtrain.layout.layout import OffloadSpec
from jtrain.model.adapters.lora import LoRA
from jtrain.model.adapters.merge import merge
from jtrain.model.param import at_path, map_params
from jtrain.model.router import MoESpec
from jtrain.pipeline.spec import PipelineSpec
from jtrain.plan.estimate.memory import memory
from jtrain.plan.job import Job
from jtrain.step.state import abstract_state
from jtrain.step.train_step import make_train_step
from tests.adapters import ADAMW, LORA, Adapted, adapted, trained
from tests.losses import SIZES

STEPS = 5
MIXTURE: dict[str, Any] = SIZES | dict(moe=MoESpec(num_experts=4, top_k=2, d_ff=32, shared_experts=1))


@functools.cache
def one_device(mixture: bool = False) -> tuple[Any, Any, Any, str]:
    return trained(adapted({}, sizes=MIXTURE if mixture else SIZES), STEPS)


def plain_losses(run: Adapted, params: Any) -> list[float]:
    """Losses of a loop in plain JAX and optax on `base + scale A B`, whose gradient is by the small matrices."""
    trained_infos = tuple(info for info in run.infos if not info.frozen)

    def loss(own: Any) -> jax.Array:
        everything = map_params(
            lambda info: jnp.asarray(at_path(params if info.frozen else own, info.path)), run.infos
        )
        plain = merge(run.infos, everything, LORA.scale, lambda _: "float32")
        logits_BLV = run.model.logits(plain, run.batch)
        nats_BL = optax.softmax_cross_entropy_with_integer_labels(
            logits_BLV, jnp.maximum(run.batch.target_BL, 0)
        )
        return jnp.mean(nats_BL, where=run.batch.target_BL != IGNORE)

    decayed = map_params(lambda info: info.is_matrix, trained_infos)
    adam = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(1e-2, b1=ADAMW.b1, b2=ADAMW.b2, eps=ADAMW.eps, weight_decay=0.1, mask=decayed),
    )

    @jax.jit
    def step(own: Any, state: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(own)
        updates, state = adam.update(grads, state, own)
        return optax.apply_updates(own, updates), state, value

    own = map_params(lambda _, value: jnp.asarray(value), trained_infos, params)
    state, losses = adam.init(own), []
    for _ in range(STEPS):
        own, state, value = step(own, state)
        losses.append(float(value))
    return losses


def test_it_trains_as_a_plain_loop_does() -> None:
    losses, before, *_ = one_device()
    np.testing.assert_allclose(losses, plain_losses(adapted({}), before), rtol=1e-6)


def test_the_first_loss_is_that_of_the_base_and_the_base_stays_as_it_is() -> None:
    losses, before, after, _ = one_device()
    run = adapted({})
    base = merge(run.infos, jax.tree.map(jnp.asarray, before), LORA.scale, lambda _: "float32")
    for info in run.infos:
        if not info.is_adapter:
            np.testing.assert_array_equal(at_path(base, info.path), at_path(before, info.path))
        assert np.array_equal(at_path(before, info.path), at_path(after, info.path)) == info.frozen, info.path
    nats = optax.softmax_cross_entropy_with_integer_labels(
        jax.jit(run.model.logits)(base, run.batch), jnp.maximum(run.batch.target_BL, 0)
    )
    want = float(jnp.mean(nats, where=run.batch.target_BL != IGNORE))
    np.testing.assert_allclose(losses[0], want, rtol=1e-6)


LAYOUTS = [
    *((dict(data=4), dict(zero_stage=stage)) for stage in (1, 2, 3)),
    (dict(data=2), dict(zero_stage=2, microbatches=4)),
    (dict(replica=2, data=4), dict(zero_stage=3)),
    (dict(data=8), dict(zero_stage=3)),  # 8 devices do not divide rank 4, so that B is whole on each
    (dict(tensor=2), dict()),
    (dict(context=2), dict()),
    (dict(stage=2), dict(microbatches=4, remat="full")),
    (dict(stage=2, data=2), dict(zero_stage=3, microbatches=4)),
    (dict(stage=2), dict(microbatches=4, pipeline=PipelineSpec("zb-h1"))),
    (dict(data=2), dict(zero_stage=3, offload=OffloadSpec(params=1.0, optimizer=1.0))),
]


@pytest.mark.parametrize(
    ("axes", "layout"),
    [
        (
            dict(data=2, context=2, tensor=2),
            dict(zero_stage=3, microbatches=2, remat="full", mlp_chunk=3),
        ),
        *(pytest.param(*layout, marks=pytest.mark.slow) for layout in LAYOUTS),
    ],
    ids=str,
)
def test_a_layout_is_not_a_model(axes: dict[str, int], layout: dict[str, Any]) -> None:
    """Losses and parameters of one device, with other documents in every row, and the base bit for bit."""
    losses, before, after, base_hash = trained(adapted(axes, **layout), STEPS)
    want_losses, want_before, want_after, want_hash = one_device()
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    assert base_hash == want_hash
    for info in adapted({}).infos:
        np.testing.assert_array_equal(at_path(before, info.path), at_path(want_before, info.path))
        if info.frozen:
            np.testing.assert_array_equal(at_path(after, info.path), at_path(before, info.path))
        else:
            np.testing.assert_allclose(at_path(after, info.path), at_path(want_after, info.path), atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "layout"),
    [
        (dict(data=2, expert=2), dict(zero_stage=3)),
        (dict(expert=2, tensor=2), dict(microbatches=2)),
    ],
    ids=str,
)
def test_experts_have_adapters_of_their_own(axes: dict[str, int], layout: dict[str, Any]) -> None:
    run = adapted({}, sizes=MIXTURE)
    shapes = {info.path: info.shape for info in run.infos if info.is_adapter}
    assert shapes["layers.mlp.gate_XDF_lora.A_XDR"] == (2, 4, 32, 4)
    assert shapes["layers.mlp.down_XFD_lora.B_XRD"] == (2, 4, 4, 32)
    losses, *_ = trained(adapted(axes, sizes=MIXTURE, **layout), STEPS)
    np.testing.assert_allclose(losses, one_device(mixture=True)[0], rtol=1e-5)


ONLY = LoRA(rank=4, alpha=8.0)


@pytest.mark.parametrize("zero_stage", (pytest.param(0, marks=pytest.mark.slow), 3))
def test_the_base_has_no_gradient_moment_or_reduction(zero_stage: int) -> None:
    """As compiled: arguments and results are the bytes of the plan, and only A and B are reduced."""
    run = adapted(dict(data=4), lora=ONLY, zero_stage=zero_stage)
    step = make_train_step(run.model, run.optimizer, run.layout, run.mesh)
    state = abstract_state(run.layout, run.optimizer, run.mesh)
    parts = [info for info in run.infos if info.is_adapter]
    assert len(jax.tree.leaves(state.opt_state)) == 2 * len(parts) == 2 * 14
    lowered = step.lower(state, run.batch)  # pyright: ignore[reportFunctionMemberAccess]: of jit
    text = lowered.as_text()
    reduced = text.count("stablehlo.reduce_scatter") + text.count("stablehlo.all_reduce")
    # Beside the matrices: tokens, loss, hash of the batch.
    assert reduced == len(parts) + 3
    job = Job(run.model, run.layout, ADAMW, *run.batch.token_BL.shape)
    plan = memory(job)
    sizes = lowered.compile().memory_analysis()
    assert sizes.argument_size_in_bytes == plan.parameters + plan.optimizer + plan.batch + 8 * 4
    # Nothing of the base is copied from step to step.
    assert sizes.alias_size_in_bytes >= plan.parameters + plan.optimizer
    by_weight = [product for product in job.step.products if product.when == "by_weight"]
    assert by_weight
    assert all(ONLY.rank in (product.depth, product.columns) for product in by_weight)
