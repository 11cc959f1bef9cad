"""Dropout of adapters: by place, so the same numbers on every layout, in every recomputation and after a resume."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jtrain.layout.dims import AdapterDropout
from jtrain.model.adapters.dropout import InputDropout, matrix_key, token_bits
from jtrain.model.adapters.lora import LoRA
from flax.traverse_util import flatten_dict
from jtrain.step.state import abstract_state, init_state
from jtrain.step.train_step import BATCH_SPEC, local_gradients, make_eval_step, make_train_step
from jtrain.step.zero import param_tree, trained_tree
from tests.adapters import Adapted, adapted, trained

DROPOUT = AdapterDropout(rate=0.25, seed=7)
LORA = LoRA(rank=4, alpha=8.0)


def dropping(axes: dict[str, int], dropout: AdapterDropout | None = DROPOUT, **layout: Any) -> Adapted:
    run = adapted(axes, lora=LORA, **layout)
    return dataclasses.replace(run, layout=dataclasses.replace(run.layout, adapter_dropout=dropout))


def loss_and_gradients(run: Adapted, step: int = 3) -> tuple[float, dict[str, np.ndarray]]:
    """Of weights whose B is not zero, so that what A reads matters."""
    infos = tuple(dataclasses.replace(p.info, std=max(p.info.std, 0.1)) for p in run.layout.params)
    layouts = tuple(dataclasses.replace(p, info=i) for p, i in zip(run.layout.params, infos, strict=True))
    drawn = dataclasses.replace(run.layout, params=layouts)
    params = init_state(drawn, run.optimizer, run.mesh, seed=0).params
    gradients = jax.shard_map(
        lambda params, batch, step: local_gradients(run.model, run.layout, params, {}, batch, step)[:3:2],
        mesh=run.mesh,
        in_specs=(param_tree(run.layout, lambda p: p.param), BATCH_SPEC, P()),
        out_specs=(trained_tree(run.layout, lambda p: p.optimizer), P()),
        check_vma=False,
    )
    grads, metrics = jax.device_get(jax.jit(gradients)(params, run.batch, jnp.int32(step)))
    return float(metrics["loss_nats"]), {
        path: in_model_order(run, path, grad)
        for path, grad in flatten_dict(grads, sep=".").items()
    }


def in_model_order(run: Adapted, path: str, grad: np.ndarray) -> np.ndarray:
    order = next(p.info.layer_order for p in run.layout.trained if p.info.path == path)
    return np.asarray(grad) if order is None else np.asarray(grad)[np.argsort(order)[sum(i < 0 for i in order) :]]


@functools.cache
def one_device(dropout: AdapterDropout | None = DROPOUT) -> tuple[float, dict[str, np.ndarray]]:
    return loss_and_gradients(dropping({}, dropout))


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
        (dict(stage=2, data=2, tensor=2), dict(zero_stage=3, microbatches=2)),
        *(pytest.param(*layout, marks=pytest.mark.slow) for layout in LAYOUTS),
    ],
    ids=str,
)
def test_a_layout_drops_the_same_numbers(axes: dict[str, int], layout: dict[str, Any]) -> None:
    """Loss and gradients of one device; without dropout they are others."""
    loss, grads = loss_and_gradients(dropping(axes, **layout))
    want_loss, want_grads = one_device()
    plain_loss, plain_grads = one_device(None)
    assert abs(plain_loss - want_loss) > 1e-3
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    assert grads.keys() == want_grads.keys()
    for path, want in want_grads.items():
        norm = np.linalg.norm(want)
        assert np.linalg.norm(grads[path] - want) < 1e-6 * norm, path
        assert np.linalg.norm(plain_grads[path] - want) > 1e-2 * norm, path
