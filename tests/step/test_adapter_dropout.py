"""Dropout of adapters: by place, so the same numbers on every layout, in every recomputation and after a resume."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import PartitionSpec as P

from jtrain.layout.dims import AdapterDropout
from jtrain.model.adapters.dropout import InputDropout, matrix_key, token_bits
from jtrain.model.adapters.lora import LoRA
from jtrain.step.state import abstract_state, init_state
from jtrain.step.train_step import BATCH_SPEC, local_gradients, make_eval_step, make_train_step
from jtrain.step.zero import param_tree, trained_tree
from tests.adapters import Adapted, adapted

DROPOUT = AdapterDropout(rate=0.25, seed=7)
LORA = LoRA(rank=4, alpha=8.0, targets=("q", "o", "down"))
"""Inputs that are whole, and such as `tensor` splits."""

type Gradients = tuple[float, dict[str, np.ndarray]]
"""Loss, and the gradient of each trained matrix, the layers in the model's order."""


def dropping(axes: dict[str, int], dropout: AdapterDropout | None = DROPOUT, **layout: Any) -> Adapted:
    run = adapted(axes, lora=LORA, **layout)
    return dataclasses.replace(run, layout=dataclasses.replace(run.layout, adapter_dropout=dropout))


def gradients_of(run: Adapted) -> Callable[[int], Gradients]:
    """Loss and gradients of a step, with weights whose B is not zero, so that what A reads matters."""
    infos = tuple(dataclasses.replace(p.info, std=max(p.info.std, 0.1)) for p in run.layout.params)
    layouts = tuple(dataclasses.replace(p, info=i) for p, i in zip(run.layout.params, infos, strict=True))
    drawn = dataclasses.replace(run.layout, params=layouts)
    params = init_state(drawn, run.optimizer, run.mesh, seed=0).params
    local = jax.shard_map(
        lambda params, batch, step: local_gradients(run.model, run.layout, params, {}, batch, step)[:3:2],
        mesh=run.mesh,
        in_specs=(param_tree(run.layout, lambda p: p.param_partition), BATCH_SPEC, P()),
        out_specs=(trained_tree(run.layout, lambda p: p.optimizer_partition), P()),
        check_vma=False,
    )
    program = jax.jit(local)

    def compute(step: int) -> Gradients:
        grads, metrics = jax.device_get(program(params, run.batch, jnp.int32(step)))
        return float(metrics["loss_nats"]), {
            path: in_model_order(run, path, grad) for path, grad in flatten_dict(grads, sep=".").items()
        }

    return compute


def in_model_order(run: Adapted, path: str, grad: Any) -> np.ndarray:
    order = next(p.info.layer_order for p in run.layout.trained if p.info.path == path)
    return (
        np.asarray(grad)
        if order is None
        else np.asarray(grad)[np.argsort(order)[sum(i < 0 for i in order) :]]
    )


@functools.cache
def one_device(step: int) -> Gradients:
    return one_device_program()(step)


@functools.cache
def one_device_program() -> Callable[[int], Gradients]:
    return gradients_of(dropping({}))


LAYOUTS = [
    (dict(data=4), dict(zero_stage=2)),
    (dict(context=2), dict()),
    (dict(replica=2, tensor=2), dict(zero_stage=1)),
    (dict(stage=2), dict(microbatches=4, remat="full")),
]


@pytest.mark.parametrize(
    ("axes", "layout"),
    [
        (dict(data=2, context=2, tensor=2), dict(zero_stage=3, microbatches=2)),
        pytest.param(
            dict(stage=2, data=2, tensor=2), dict(zero_stage=3, microbatches=2), marks=pytest.mark.slow
        ),
        *(pytest.param(*layout, marks=pytest.mark.slow) for layout in LAYOUTS),
    ],
    ids=str,
)
def test_a_layout_drops_the_same_numbers(axes: dict[str, int], layout: dict[str, Any]) -> None:
    """Loss and gradients of one device; those of another step, which drops others, are not these."""
    got, want, other = gradients_of(dropping(axes, **layout))(3), one_device(3), one_device(4)
    assert abs(other[0] - want[0]) > 1e-3
    check_equal(got, want)
    for path, grad in want[1].items():
        assert np.linalg.norm(other[1][path] - grad) > 1e-2 * np.linalg.norm(grad), path


def check_equal(got: Gradients, want: Gradients) -> None:
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    assert got[1].keys() == want[1].keys()
    for path, grad in want[1].items():
        assert np.linalg.norm(got[1][path] - grad) < 1e-6 * np.linalg.norm(grad), path


def test_the_kept_share_is_what_the_rate_leaves_and_each_draw_is_its_own() -> None:
    """Of 2 x 64 tokens with 512 inputs, from a fixed seed; masks of steps, layers and matrices are independent."""
    index_BL = jnp.arange(2 * 64).reshape(2, 64)
    x_BLD = jnp.ones((2, 64, 512))
    layers = jnp.arange(2, dtype=jnp.uint32)

    def drop(step: int = 0, path: str = "q", layer: int = 0, seed: int = 7, rate: float = 0.25) -> np.ndarray:
        key_2 = jnp.stack([matrix_key(path, layers)[layer], jnp.uint32(0)])
        return np.asarray(InputDropout(rate, token_bits(seed, jnp.int32(step), index_BL), key_2).apply(x_BLD))

    kept = drop()
    # 65536 numbers: a standard deviation of their mean is 0.0017.
    assert abs(np.mean(kept > 0) - 0.75) < 0.005
    assert set(np.unique(kept)) == {np.float32(0), np.float32(1.0 / 0.75)}
    for axis in ((0, 1), 2):
        shares = np.mean(kept > 0, axis=axis)
        assert shares.std() < 1.2 * np.sqrt(0.25 * 0.75 / (kept.size / shares.size))
    assert abs(np.mean(drop(rate=0.9) > 0) - 0.1) < 0.005
    for other in (drop(step=1), drop(path="k"), drop(layer=1), drop(seed=8)):
        assert abs(np.mean((kept > 0) == (other > 0)) - (0.75**2 + 0.25**2)) < 0.01


def test_what_is_computed_again_drops_the_same_numbers() -> None:
    """Gradients with every layer recomputed are those with nothing recomputed."""
    check_equal(gradients_of(dropping({}, remat="full"))(3), one_device(3))


def test_only_a_train_step_drops_anything() -> None:
    """An evaluation has the numbers of one without dropout, bit for bit, and a rate of 0 is the same program."""
    run, plain = dropping({}), dropping({}, None)
    params = init_state(run.layout, run.optimizer, run.mesh, seed=0).params
    nats_BL, plain_BL = (
        jax.device_get(make_eval_step(r.model, r.layout, r.mesh)(params, r.batch)) for r in (run, plain)
    )
    np.testing.assert_array_equal(nats_BL, plain_BL)

    def text(run: Adapted) -> str:
        step: Any = make_train_step(run.model, run.optimizer, run.layout, run.mesh)
        return step.lower(abstract_state(run.layout, run.optimizer, run.mesh), run.batch).as_text()

    assert text(plain) == text(adapted({}, lora=LORA))
    assert text(plain) != text(run)
