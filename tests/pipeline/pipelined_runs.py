"""Training a small model for some steps, with and without stages, for comparison."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jtrain.data.constructor.context_order import context_order
from jtrain.dims import ParamInfo
from jtrain.mesh import MeshSpec, make_mesh
from jtrain.model.param import map_params
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, build
from jtrain.pipeline.spec import PipelineSpec
from jtrain.step.state import init_state
from jtrain.step.train_step import BATCH_SPEC, make_eval_step, make_train_step
from tests.layouts import layout_from
from tests.step.test_train_step import packed_batch

NUM_STEPS = 3
SIZES: dict[str, Any] = dict(
    num_layers=4, d_model=32, num_heads=4, num_kv_heads=4, head_dim=8, d_ff=64, vocab_size=64, z_loss=1e-4
)
EXPERTS: dict[str, Any] = SIZES | dict(
    d_model=16,
    d_ff=16,
    moe=MoESpec(num_experts=8, top_k=2, shared_experts=1, balance_loss=1e-2, router_z_loss=1e-3),
)
ADAMW = AdamW(peak_lr=3e-3, warmup_steps=4)

type Fields = tuple[tuple[str, Any], ...]
"""Keywords, sorted, so that results can be kept by them."""


@dataclasses.dataclass
class Run:
    """What a run gives, with layers in the model's order.

    gradient: of the first step, from Adam's first moment.
    scaling: histories of 8-bit matmuls.
    nats_BL: of the evaluation with the first parameters.
    """

    losses: np.ndarray
    first: Any
    last: Any
    gradient: Any
    scaling: Any
    hashes: list[str]
    nats_BL: np.ndarray
    num_traces: int


def trained(
    axes: dict[str, int], *, sizes: dict[str, Any] = SIZES, pipeline: dict[str, Any] | None = None, **layout: Any
) -> Run:
    """Trains on one repeated batch; `layout` has fields of LayoutSpec and PrecisionSpec."""
    mesh_spec = MeshSpec(**axes)
    mesh = make_mesh(mesh_spec, jax.devices()[: mesh_spec.size])
    model = Transformer(**sizes)
    infos = model.param_infos()
    fields = dict(compute_dtype="float32") | layout
    lay = layout_from(fields, mesh_spec, infos, pipeline=PipelineSpec(**(pipeline or {})))
    optimizer = build(ADAMW, num_steps=20, params=map_params(lambda info: info, infos))
    state = init_state(lay, optimizer, mesh, seed=0)
    step = make_train_step(model, optimizer, lay, mesh)
    columns = context_order(packed_batch().token_BL.shape[1], mesh_spec.context, lay.context_order)
    batch = jax.tree.map(lambda x: jax.device_put(x[:, columns], NamedSharding(mesh, BATCH_SPEC)), packed_batch())
    nats_BL = np.asarray(make_eval_step(model, lay, mesh)(state.params, batch))[:, np.argsort(columns)]

    order = lay.pipeline.order if lay.pipeline else tuple(range(model.num_layers))

    def in_order(info: ParamInfo, value: Any) -> np.ndarray:
        value = np.asarray(value)
        if not info.is_stacked:
            return value
        assert not value[[place for place, layer in enumerate(order) if layer < 0]].any(), "identity layers stay zero"
        return value[[order.index(layer) for layer in range(model.num_layers)]]

    def logical(tree: Any) -> Any:
        return map_params(in_order, infos, jax.device_get(tree))

    first = logical(state.params)
    losses, hashes, gradient = [], [], None
    for _ in range(NUM_STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss_nats"]))
        hashes.append(str(np.asarray(metrics["batch_hash"])))
        if gradient is None:
            gradient = logical(state.opt_state.mu)
    scaling = jax.tree.map(
        lambda x: np.asarray(x)[[order.index(layer) for layer in range(model.num_layers)]], state.scaling
    )
    num_traces = step._cache_size()  # pyright: ignore[reportFunctionMemberAccess]: of jit
    return Run(np.array(losses), first, logical(state.params), gradient, scaling, hashes, nats_BL, num_traces)


@functools.cache
def _unpipelined(sizes: Fields, axes: Fields, layout: Fields) -> Run:
    want = trained(dict(axes), sizes=dict(sizes), **dict(layout))
    assert want.losses[-1] < want.losses[0] - 0.1, "the loss must move, or equality below proves nothing"
    return want


def unpipelined(sizes: dict[str, Any] = SIZES, axes: dict[str, int] | None = None, **layout: Any) -> Run:
    """The same run without stages, on one device in one piece unless `axes` and `layout` say otherwise."""
    return _unpipelined(*(tuple(sorted(fields.items())) for fields in (sizes, axes or {}, layout)))


def assert_same(got: Run, want: Run) -> None:
    """First weights, batch hashes and traces are equal; losses to 1e-5, gradients to 1e-5, parameters to 1e-4."""
    jax.tree.map(np.testing.assert_array_equal, got.first, want.first)
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)
    np.testing.assert_allclose(got.nats_BL, want.nats_BL, rtol=1e-4, atol=1e-4)
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(g, w, atol=1e-5 * np.abs(w).max()), got.gradient, want.gradient
    )
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4), got.last, want.last)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4), got.scaling, want.scaling)
    assert got.hashes == want.hashes
    assert got.num_traces == 1
