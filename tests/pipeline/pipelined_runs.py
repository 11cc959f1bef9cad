"""Training a small model for some steps, with and without stages, for comparison."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jtrain.data.constructor.context_order import context_order
from jtrain.layout.dims import ParamInfo
from jtrain.layout.layout import OffloadSpec
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.param import map_params
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Muon, build
from jtrain.pipeline.spec import PipelineSpec
from jtrain.step.pipeline_ticks import ticks_of
from jtrain.step.state import TrainState, abstract_state, init_state, shardings_of
from jtrain.step.train_step import BATCH_SPEC, make_eval_step, make_train_step
from jtrain.telemetry.recompiles import count_programs
from tests.batches import adversarial_batch
from tests.layouts import layout_from
from tests.step.state_checks import assert_a_rejected_step_changes_nothing, assert_copies_agree

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

OPTIONS: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "alone": ({}, {}, {}),
    "data": (dict(data=2), {}, {}),
    "replica": (dict(replica=2), {}, {}),
    "tensor": (dict(tensor=2), {}, {}),
    "overlap": (dict(tensor=2), {}, dict(tensor_overlap=True)),
    "ring": (dict(context=2), {}, {}),
    "ulysses": (dict(context=2), {}, dict(context_attention="ulysses")),
    "expert": (dict(expert=2), EXPERTS, {}),
    "zero 1": (dict(data=2), {}, dict(zero_stage=1)),
    "zero 2": (dict(data=2), {}, dict(zero_stage=2)),
    "zero 3": (dict(data=2), {}, dict(zero_stage=3)),
    "zero 3 over context": (dict(context=2), {}, dict(zero_stage=3)),
    "remat full": ({}, {}, dict(remat="full")),
    "remat named": ({}, {}, dict(remat="named", remat_save=("attention_out", "mlp_up"))),
    "tied": ({}, SIZES | dict(tie_embeddings=True), {}),
    "fp8 delayed": (dict(data=2), {}, dict(matmul_dtype="fp8_delayed")),
    "fp8 current": ({}, {}, dict(matmul_dtype="fp8_current")),
    "offload": (
        dict(data=2),
        {},
        dict(zero_stage=3, remat="full", offload=OffloadSpec(params=1.0, optimizer=1.0)),
    ),
}
"""Axes beside `stage`, sizes of the model (SIZES if empty), and layout."""

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


_begun: dict[Any, tuple[TrainState, np.ndarray]] = {}
"""First states, on the host, and their evaluations; schedules that place layers and evaluate alike share
both."""


def _fields(of: dict[str, Any]) -> Fields:
    return tuple(sorted(of.items()))


def trained(
    axes: dict[str, int],
    *,
    sizes: dict[str, Any] = SIZES,
    pipeline: dict[str, Any] | None = None,
    optimizer: AdamW | Muon = ADAMW,
    **layout: Any,
) -> Run:
    """Trains on one repeated batch; `layout` has fields of LayoutSpec and PrecisionSpec."""
    mesh_spec = MeshSpec(**axes)
    mesh = make_mesh(mesh_spec, jax.devices()[: mesh_spec.size])
    model = Transformer(**sizes)
    infos = model.param_infos()
    fields = dict(compute_dtype="float32") | layout
    lay = layout_from(fields, mesh_spec, infos, pipeline=PipelineSpec(**(pipeline or {})))
    opt = build(optimizer, num_steps=20, params=map_params(lambda info: info, infos))
    step = make_train_step(model, opt, lay, mesh)
    columns = context_order(adversarial_batch().token_BL.shape[1], mesh_spec.context, lay.context_order)
    batch = jax.tree.map(
        lambda x: jax.device_put(x[:, columns], NamedSharding(mesh, BATCH_SPEC)), adversarial_batch()
    )
    evaluates = lay.pipeline and (lay.pipeline.virtual, ticks_of(lay, trains=False).table.tobytes())
    key = (*map(_fields, (axes, sizes, layout)), optimizer, evaluates)
    if key not in _begun:
        first_state = init_state(lay, opt, mesh, seed=0)
        nats_BL = np.asarray(make_eval_step(model, lay, mesh)(first_state.params, batch))
        _begun[key] = jax.device_get(first_state), nats_BL[:, np.argsort(columns)]
    state, nats_BL = _begun[key]
    state = jax.device_put(state, shardings_of(abstract_state(lay, opt, mesh)))

    order = lay.pipeline.order if lay.pipeline else tuple(range(model.num_layers))

    def in_order(info: ParamInfo, value: Any) -> np.ndarray:
        value = np.asarray(value)
        if not info.is_stacked:
            return value
        identity = value[[place for place, layer in enumerate(order) if layer < 0]]
        assert not identity.any(), f"{info.path}: identity layers stay zero"
        return value[[order.index(layer) for layer in range(model.num_layers)]]

    def logical(tree: Any) -> Any:
        return map_params(in_order, infos, jax.device_get(tree))

    first = logical(state.params)
    losses, hashes, gradient, metrics = [], [], None, None
    for _ in range(NUM_STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss_nats"]))
        hashes.append(str(np.asarray(metrics["batch_hash"])))
        if gradient is None:
            gradient = logical(state.opt_state.mu)
    jax.tree.map(in_order, opt.state_map(lambda info, _: info), jax.device_get(state.opt_state))
    scaling = jax.tree.map(
        lambda x: np.asarray(x)[[order.index(layer) for layer in range(model.num_layers)]], state.scaling
    )
    assert_copies_agree((state, metrics))
    last = logical(state.params)
    assert_a_rejected_step_changes_nothing(step, state, batch)
    num_traces = count_programs(step)
    return Run(np.array(losses), first, last, gradient, scaling, hashes, nats_BL, num_traces)


@functools.cache
def _unpipelined(sizes: Fields, axes: Fields, more: Fields) -> Run:
    want = trained(dict(axes), sizes=dict(sizes), **dict(more))
    assert want.losses[-1] < want.losses[0] - 0.1, "the loss must move, or equality below proves nothing"
    return want


def unpipelined(sizes: dict[str, Any] = SIZES, axes: dict[str, int] | None = None, **more: Any) -> Run:
    """The same run without stages, on one device in one piece unless `axes` and `more` say otherwise."""
    return _unpipelined(*map(_fields, (sizes, axes or {}, more)))


def settings(schedule: str, **more: Any) -> dict[str, Any]:
    """Fields of PipelineSpec for a schedule by name."""
    return dict(schedule=schedule) | (dict(chunks=2) if schedule == "interleaved" else {}) | more


def assert_composes(stages: int, schedule: str, option: str) -> None:
    """A schedule with one of `OPTIONS` trains as the model does without stages.

    There are as many microbatches as DualPipeV needs, and at least eight layers, so that options share
    references.

    A difference in the last bit of float32 may round to another 8-bit number, and in eight layers it does:
    runs without stages then differ by 5 % of a gradient from one number of microbatches to another, and by 19
    % if a norm's epsilon is 2 % larger. So 8-bit cases have few layers, and the axes and microbatches of
    their reference are those of the run; where two chunks on four stages need eight layers, the reference is
    GPipe over the same stages.
    """
    axes, sizes, layout = OPTIONS[option]
    chunks = PipelineSpec(**settings(schedule)).chunks_per_worker
    in_8_bits = "matmul_dtype" in layout
    sizes = (sizes or SIZES) | dict(num_layers=max(0 if in_8_bits else 8, stages * chunks))
    got = trained(
        dict(stage=stages, **axes),
        sizes=sizes,
        pipeline=settings(schedule),
        microbatches=2 * stages,
        **layout,
    )
    if not in_8_bits:
        assert_same(got, unpipelined(sizes))
    elif stages * chunks < 8:
        assert_same(got, unpipelined(sizes, axes, microbatches=2 * stages, **layout))
    else:
        gpipe = trained(
            dict(stage=stages, **axes),
            sizes=sizes,
            pipeline=settings("gpipe"),
            microbatches=2 * stages,
            **layout,
        )
        assert_same(got, gpipe)


def assert_same(got: Run, want: Run) -> None:
    """First weights, batch hashes and traces are equal; losses to 1e-5, gradients to 1e-5, parameters to
    1e-4.
    """
    jax.tree.map(np.testing.assert_array_equal, got.first, want.first)
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)
    np.testing.assert_allclose(got.nats_BL, want.nats_BL, rtol=1e-4, atol=1e-4)
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(g, w, atol=1e-5 * np.abs(w).max()),
        got.gradient,
        want.gradient,
    )
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4), got.last, want.last)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4), got.scaling, want.scaling)
    assert got.hashes == want.hashes
    assert got.num_traces == 1
