"""A layout is not a model: the same weights, losses and gradients on any mesh, stage, accumulation and
remat.
"""

import dataclasses
import functools
import itertools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jtrain.data.constructor.context_order import context_order
from jtrain.layout.dims import IGNORE, Batch
from jtrain.layout.layout import LayoutSpec, make_layout
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Muon, build
from jtrain.step.state import init_state
from jtrain.step.train_step import BATCH_SPEC, make_eval_step, make_train_step
from jtrain.telemetry.recompiles import count_programs
from tests.batches import adversarial_batch
from tests.layouts import layout_from
from tests.step.reference import loss_and_gradients, relative_errors
from tests.step.state_checks import assert_a_rejected_step_changes_nothing, assert_copies_agree

NUM_STEPS = 20
MESHES = (dict(data=8), dict(replica=2, data=4), dict(data=2, tensor=4))
SIZES: dict[str, Any] = dict(
    num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=64, vocab_size=64, z_loss=1e-4
)
"""Two key heads, so that with tensor=4 two devices share each of them."""
ADAMW = AdamW(peak_lr=3e-3, warmup_steps=4)


@dataclasses.dataclass
class Trained:
    losses: np.ndarray
    first: Any  # parameters before and after
    last: Any
    gradient: Any  # the first step's gradient, read back from Adam's first moment
    hashes: list[str]
    eval_nats_BL: np.ndarray  # with the first parameters, in the columns of adversarial_batch
    num_traces: int


def trained(
    axes: dict[str, int],
    *,
    sizes: dict[str, Any] = SIZES,
    optimizer: AdamW | Muon = ADAMW,
    order: Literal["contiguous", "zigzag"] = "zigzag",
    **layout: Any,
) -> Trained:
    mesh_spec = MeshSpec(**axes)
    mesh = make_mesh(mesh_spec, jax.devices()[: mesh_spec.size])
    model = Transformer(**sizes)
    infos = model.param_infos()
    lay = layout_from(dict(compute_dtype="float32", **layout), mesh_spec, infos, context_order=order)
    opt = build(optimizer, num_steps=NUM_STEPS, params=map_params(lambda info: info, infos))
    state = init_state(lay, opt, mesh, seed=0)
    step = make_train_step(model, opt, lay, mesh)
    evaluate = make_eval_step(model, lay, mesh)
    columns = context_order(adversarial_batch().token_BL.shape[1], mesh_spec.context, lay.context_order)
    batch = jax.tree.map(
        lambda x: jax.device_put(x[:, columns], NamedSharding(mesh, BATCH_SPEC)), adversarial_batch()
    )
    eval_nats_BL = np.asarray(evaluate(state.params, batch))[:, np.argsort(columns)]
    first = jax.device_get(state.params)
    losses, hashes, gradient, metrics = [], [], None, None
    with jax.transfer_guard("disallow"):
        for _ in range(NUM_STEPS):
            state, metrics = step(state, batch)
            with jax.transfer_guard("allow"):
                losses.append(float(metrics["loss_nats"]))
                hashes.append(str(np.asarray(metrics["batch_hash"])))
                if gradient is None:
                    gradient = jax.device_get(state.opt_state.mu)
    last = jax.device_get(state.params)
    assert_copies_agree((state, metrics))
    assert_a_rejected_step_changes_nothing(step, state, batch)
    num_traces = count_programs(step)
    return Trained(np.array(losses), first, last, gradient, hashes, eval_nats_BL, num_traces)


@functools.cache
def on_one_device() -> Trained:
    want = trained({})
    assert want.losses[-1] < want.losses[0] - 0.1, "the loss must move, or equality below proves nothing"
    return want


def assert_same(got: Trained, want: Trained) -> None:
    jax.tree.map(np.testing.assert_array_equal, got.first, want.first)
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)
    num_targets = (adversarial_batch().target_BL != IGNORE).sum()
    np.testing.assert_allclose(got.eval_nats_BL.sum() / num_targets, want.losses[0], rtol=1e-5)
    np.testing.assert_allclose(got.eval_nats_BL, want.eval_nats_BL, rtol=1e-4, atol=1e-4)
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(g, w, atol=1e-5 * np.abs(w).max()),
        got.gradient,
        want.gradient,
    )
    pairs = zip(jax.tree.leaves(got.last), jax.tree.leaves(want.last), strict=True)
    apart = np.concatenate([np.ravel(np.abs(g - w) - 1e-4 * np.abs(w)) for g, w in pairs])
    # Adam divides by the gradient's size: where that is nearly zero, the order of sums decides how far a weight moves.
    # One weight in 1,024 of one array was 1.24e-4 apart on some processors, none on others.
    assert np.mean(apart > 1e-4) < 1e-4
    assert apart.max() < 3e-4
    assert got.hashes == want.hashes
    assert got.num_traces == 1


def test_evaluation_gives_the_cross_entropy_of_each_token() -> None:
    """It is log-partition minus the target's logit, in numpy from all logits, and 0 without a target."""
    want, batch = on_one_device(), adversarial_batch()
    params = jax.tree.map(jnp.asarray, want.first)
    logits_BLV = np.asarray(Transformer(**SIZES).logits(params, jax.tree.map(jnp.asarray, batch)), np.float64)
    picked_BL = np.take_along_axis(logits_BLV, np.maximum(batch.target_BL, 0)[..., None], axis=-1)[..., 0]
    nats_BL = np.where(batch.target_BL == IGNORE, 0, np.log(np.exp(logits_BLV).sum(axis=-1)) - picked_BL)
    np.testing.assert_allclose(want.eval_nats_BL, nats_BL, rtol=1e-4, atol=1e-4)
    assert nats_BL.std() > 0.1, "tokens differ, or their order would not be tested"


def test_one_device_computes_the_published_formulas() -> None:
    """The run that all layouts are compared with has the loss and, in Adam's first moment, the gradient of
    float64.
    """
    want = on_one_device()
    nats, grads = loss_and_gradients(want.first, adversarial_batch(), z_loss=SIZES["z_loss"])
    np.testing.assert_allclose(want.losses[0], nats, rtol=1e-6)
    norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(grads)))
    first_moment = jax.tree.map(lambda g: (1 - ADAMW.b1) * min(1.0, ADAMW.clip_norm / norm) * g, grads)
    errors = relative_errors(want.gradient, first_moment)
    assert max(errors.values()) < 1e-5, errors


QUICK_STAGES = ((), (), (2,))
"""ZeRO stages of each mesh in the quick tests."""


@pytest.mark.parametrize(
    ("axes", "zero_stage"),
    [
        pytest.param(axes, stage, marks=[pytest.mark.slow] * (stage not in quick))
        for axes, quick in zip(MESHES, QUICK_STAGES, strict=True)
        for stage in (0, 1, 2, 3)
    ],
    ids=str,
)
def test_the_layout_is_not_a_model(axes: dict[str, int], zero_stage: int) -> None:
    """Twenty steps give one device's losses, gradients and weights on any mesh and ZeRO stage.

    Accumulation, scan and remat alternate: the twelve cases hold every pair of values of any two of the five
    settings. `bench layouts` draws others than the quick one in every run of CI. The full product is the slow
    test below.
    """
    mesh, half = MESHES.index(axes), zero_stage // 2
    sizes = SIZES | {"scan_layers": (mesh + half) % 2 == 0}
    microbatches = (1, 4)[(mesh + zero_stage) % 2]
    remat = ("none", "full")[(mesh + zero_stage + half) % 2]
    got = trained(axes, sizes=sizes, zero_stage=zero_stage, microbatches=microbatches, remat=remat)
    assert_same(got, on_one_device())


PRODUCT = list(itertools.product(MESHES, (0, 1, 2, 3), (1, 4), (True, False), ("none", "full")))


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "zero_stage", "microbatches", "scan", "remat"), PRODUCT, ids=str)
def test_the_layout_is_not_a_model_in_every_combination(
    axes: dict[str, int], zero_stage: int, microbatches: int, scan: bool, remat: str
) -> None:
    """The whole product of mesh, ZeRO stage, accumulation, scan and remat."""
    sizes = SIZES | {"scan_layers": scan}
    assert_same(
        trained(axes, sizes=sizes, zero_stage=zero_stage, microbatches=microbatches, remat=remat),
        on_one_device(),
    )


@pytest.mark.slow
def test_named_remat_qk_norm_and_tied_embeddings_keep_the_model() -> None:
    """The other shapes of a model are layouts' business as little."""
    sizes = SIZES | {"qk_norm": True, "tie_embeddings": True}
    want = trained({}, sizes=sizes)
    assert want.losses[-1] < want.losses[0] - 0.1
    axes = dict(replica=2, data=2, tensor=2)
    got = trained(axes, sizes=sizes, zero_stage=3, remat="named", remat_save=("attention",), microbatches=2)
    assert_same(got, want)


WIDE: dict[str, Any] = SIZES | {"num_heads": 8}


@pytest.mark.slow
@pytest.mark.parametrize("axes", (dict(tensor=8), dict(data=2, tensor=4)), ids=str)
def test_devices_that_share_a_key_head_sum_its_gradient(axes: dict[str, int]) -> None:
    """Four, or two, devices a head: losses, gradients and weights of one device, also with overlapped
    collectives.
    """
    want = trained({}, sizes=WIDE)
    assert want.losses[-1] < want.losses[0] - 0.1
    assert_same(trained(axes, sizes=WIDE, zero_stage=1, remat="full", microbatches=2), want)
    permutes = (("all_gather_matmul", "permute"), ("matmul_reduce_scatter", "permute"))
    assert_same(trained(axes, sizes=WIDE, zero_stage=2, tensor_overlap=True, kernels=permutes), want)


@pytest.mark.slow
def test_shared_key_heads_with_8_bit_moments() -> None:
    """Blocks of moments lie along H, which is never split, so the update is that of one device to
    rounding.
    """
    sizes = WIDE | {"d_ff": 512}  # so that a shard holds whole blocks
    adam = dataclasses.replace(ADAMW, moment_dtype="int8", b2=0.95)
    want = trained({}, sizes=sizes, optimizer=adam)
    got = trained(dict(data=2, tensor=4), sizes=sizes, optimizer=adam, zero_stage=3)
    assert want.losses[-1] < want.losses[0] - 0.1
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-2)


NAMED: dict[str, Any] = dict(remat="named", remat_save=("attention",))
SPLIT_SEQUENCES = [
    (dict(data=2, context=2), "zigzag", dict(zero_stage=3, mlp_chunk=5) | NAMED),
    (dict(data=2, context=4), "zigzag", dict(zero_stage=3, microbatches=2) | NAMED),
    (dict(context=2, tensor=2), "zigzag", dict(remat="full")),
    (dict(data=2, context=2, tensor=2), "zigzag", dict(zero_stage=2, context_attention="ulysses")),
    (dict(replica=2, context=4), "contiguous", dict(context_attention="ulysses", microbatches=2)),
    (dict(context=2, tensor=4), "zigzag", dict(zero_stage=3, remat="full")),
    (dict(context=4), "zigzag", dict(zero_stage=1, microbatches=2)),
    (dict(data=2, context=4), "contiguous", dict(zero_stage=2, context_attention="ulysses", microbatches=2)),
]
"""The first is the cheapest that has a ring, a gather of weights, remat and feed-forward layers in chunks; the
others take a minute each."""


@pytest.mark.parametrize(
    ("axes", "order", "layout"),
    [SPLIT_SEQUENCES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in SPLIT_SEQUENCES[1:])],
    ids=str,
)
def test_split_sequences_are_whole_ones(axes: dict[str, int], order: Any, layout: dict[str, Any]) -> None:
    """By a ring or by heads: losses, gradients, weights and the batches' hashes are those of one device."""
    assert_same(trained(axes, order=order, **layout), on_one_device())


@pytest.mark.slow
def test_muon_is_the_same_on_any_layout() -> None:
    """Newton-Schulz runs on whole matrices whatever their shards; `tests/optim/test_optimizer.py` has one
    update.
    """
    muon = Muon(peak_lr=3e-3, warmup_steps=4)
    want = trained({}, optimizer=muon)
    assert want.losses[-1] < want.losses[0] - 0.1
    got = trained(dict(data=2, tensor=4), optimizer=muon, zero_stage=3)
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-4)


@pytest.mark.smoke
def test_a_moved_token_changes_the_batch_hash() -> None:
    """Swapping two rows, or two tokens of a row, is another batch."""
    mesh = make_mesh(MeshSpec(), jax.devices()[:1])
    model = Transformer(**SIZES)
    infos = model.param_infos()
    lay = make_layout(LayoutSpec(), MeshSpec(), infos)
    opt = build(ADAMW, num_steps=NUM_STEPS, params=map_params(lambda info: info, infos))
    step = make_train_step(model, opt, lay, mesh)
    state = init_state(lay, opt, mesh, seed=0)

    def hash_of(batch: Batch) -> str:
        nonlocal state
        state, metrics = step(state, batch)
        return str(metrics["batch_hash"])

    batch = adversarial_batch()
    order = np.array([1, 0, *range(2, 32)])
    swapped_rows = jax.tree.map(lambda x: x[order], batch)
    tokens = np.array(batch.token_BL)
    tokens[0, [0, 1]] = tokens[0, [1, 0]]
    swapped_tokens = dataclasses.replace(batch, token_BL=tokens)
    hashes = {hash_of(batch), hash_of(swapped_rows), hash_of(swapped_tokens)}
    assert len(hashes) == 3
    assert hash_of(batch) in hashes
