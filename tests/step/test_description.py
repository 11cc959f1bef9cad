"""A step's own description: traces that scale, that follow the step's code, and that a damaged cache does not
hurt.

`test_collectives.py` compiles whole steps and finds in the programs what the description says.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jtrain.layout.dims import Batch
from jtrain.layout.mesh import AXES, MeshSpec, local_shape
from jtrain.layout.offload_spec import OffloadSpec
from jtrain.model.block import Block
from jtrain.model.forward_placement import SAVEABLE
from jtrain.model.layer_scan import LAYER_INPUT
from jtrain.model.router import MoESpec
from jtrain.model.saved_activations import kept_names, named_bytes, offloaded_names
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW
from jtrain.plan.estimate.collectives import collectives
from jtrain.plan.estimate.flops import flops_per_token
from jtrain.plan.estimate.memory import memory
from jtrain.plan.job import Job
from jtrain.step import zero
from jtrain.step.description import saved_arrays, trace_cache
from jtrain.step.description.jaxpr_places import equations
from jtrain.step.description.labelled_sizes import label_sizes, label_values
from jtrain.step.description.layout_class import class_of, input_keeping_class
from jtrain.step.description.monomials import evaluate
from jtrain.step.description.part_jaxprs import METRICS, UPDATE, jaxpr_of
from jtrain.step.description.saved_arrays import saving_class, trace_saved
from jtrain.step.description.traced_parts import describe_jaxpr, forget_traces, trace_class
from jtrain.step.description.traced_work import traced_work
from jtrain.step.train_step import BATCH_SPEC, local_gradients
from jtrain.step.zero import param_tree
from tests.layouts import layout_from

SIZES: dict[str, Any] = dict(
    num_layers=3, d_model=64, num_heads=8, num_kv_heads=4, head_dim=16, d_ff=96, vocab_size=128
)
ROWS, LENGTH = 2, 64


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No traces from memory or disk, and none left behind."""
    monkeypatch.setattr(trace_cache, "folder", lambda: None)
    forget_traces()
    yield
    forget_traces()


def job_of(axes: dict[str, int], **layout: Any) -> Job:
    model, mesh = Transformer(**SIZES), MeshSpec(**axes)
    batch = ROWS * mesh.batch_shards * layout.get("microbatches", 1)
    return Job(model, layout_from(layout, mesh, model.param_infos()), AdamW(peak_lr=1e-3), batch, LENGTH)


def gradients_of(job: Job) -> collections.Counter[tuple[Any, ...]]:
    """Arrays and elements of each kind, axes and dtype in the jaxpr of the whole step before its update."""
    model, layout = job.model, job.layout
    mesh = AbstractMesh(tuple(layout.mesh.shape.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    shapes = param_tree(layout, lambda p: jax.ShapeDtypeStruct(p.info.shape, layout.precision.param_dtype))
    ids = jax.ShapeDtypeStruct((job.global_batch, job.seq_len), jnp.int32)
    step = jax.shard_map(
        lambda params, batch, step: local_gradients(model, layout, params, {}, batch, step),
        mesh=mesh,
        in_specs=(param_tree(layout, lambda p: p.param_partition), BATCH_SPEC, P()),
        out_specs=(param_tree(layout, lambda p: p.optimizer_partition), P(), P(), P(AXES)),
        check_vma=False,
    )
    jaxpr = jax.make_jaxpr(step)(shapes, Batch(ids, ids, ids, ids), jax.ShapeDtypeStruct((), jnp.int32))
    found: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for one in traced_work(jaxpr).collectives:
        axes = tuple(axis for axis in AXES if axis in one.axes and layout.mesh.shape[axis] > 1)
        if axes:
            count = math.prod(one.trips)
            found[one.kind, axes, one.dtype, "arrays"] += count
            found[one.kind, axes, one.dtype, "elements"] += count * math.prod(one.dims)
    return found


@pytest.mark.parametrize(
    ("axes", "layout"),
    [
        (dict(replica=2, data=4, tensor=2), dict(zero_stage=3, microbatches=2, remat="full")),
        (dict(data=2, tensor=4), dict(zero_stage=2, remat="named", remat_save=("attention", "mlp_gate"))),
        (dict(data=2, context=4), dict(zero_stage=1)),
    ],
    ids=str,
)
def test_the_parts_are_the_whole_step(axes: dict[str, int], layout: dict[str, Any]) -> None:
    """The jaxpr of one device's gradients has what the scaled traces say, array by array and element by
    element.
    """
    job = job_of(axes, **layout)
    want: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for one in job.step.collectives:
        if one.part != "partitioner" and not {METRICS, UPDATE} & set(one.scope):
            want[one.kind, one.axes, one.dtype, "arrays"] += one.count
            want[one.kind, one.axes, one.dtype, "elements"] += one.elements
    assert gradients_of(job) == want
    assert len(want) > 8


def test_a_collective_more_in_a_layer_is_in_the_plan(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum over `tensor` in every layer's feed-forward part: of as many bytes more, forward and backward."""
    job = job_of(dict(data=2, tensor=4), zero_stage=3, microbatches=2)

    def bytes_of_sums() -> int:
        fresh_job = dataclasses.replace(job)  # a job keeps what it was told about its step
        return sum(
            c.array_bytes for c in collectives(fresh_job) if c.kind == "all-reduce" and c.axes == ("tensor",)
        )

    before, original = bytes_of_sums(), Block.feed_forward

    def summed(self: Block, *args: Any, **settings: Any) -> Any:
        y_BLD, losses = original(self, *args, **settings)
        return jax.lax.psum(y_BLD, "tensor"), losses

    monkeypatch.setattr(Block, "feed_forward", summed)
    forget_traces()
    passes, elements = 2 * SIZES["num_layers"] * 2, ROWS * LENGTH // 4 * SIZES["d_model"]
    assert bytes_of_sums() - before == passes * elements * 2


def _multiplied(job: Job) -> int:
    return sum(2 * one.count * one.rows * one.depth * one.columns for one in job.step.products)


@pytest.mark.parametrize(
    "moe", [None, MoESpec(num_experts=4, top_k=2, shared_experts=1)], ids=["dense", "experts"]
)
def test_products_are_the_models_flops(moe: MoESpec | None) -> None:
    """With everything saved, a device multiplies what the FLOPs of its tokens are by definition."""
    model, mesh = Transformer(**SIZES, moe=moe), MeshSpec(data=2, context=2, expert=1 if moe is None else 2)
    layout = layout_from(dict(zero_stage=1), mesh, model.param_infos())
    job = Job(model, layout, AdamW(peak_lr=1e-3), ROWS * mesh.batch_shards, LENGTH)
    flops = flops_per_token(model, seq_len=LENGTH).matmul_flops
    assert _multiplied(job) == flops * job.tokens // mesh.size


def test_a_product_more_in_a_layer_is_in_the_plan(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product with a constant in every layer's feed-forward part: once forward, and once for its input's
    gradient.
    """
    job = job_of(dict(data=2, tensor=4), zero_stage=3, microbatches=2)
    before, original = _multiplied(job), Block.feed_forward

    def widened(self: Block, x_BLD: Any, *args: Any, **settings: Any) -> Any:
        y_BLD, losses = original(self, x_BLD, *args, **settings)
        width = y_BLD.shape[-1]
        return y_BLD @ jnp.ones((width, width), y_BLD.dtype), losses

    monkeypatch.setattr(Block, "feed_forward", widened)
    forget_traces()
    passes, width = 2 * SIZES["num_layers"] * 2, SIZES["d_model"]
    assert _multiplied(dataclasses.replace(job)) - before == passes * 2 * ROWS * LENGTH // 4 * width * width


def test_another_dtype_of_gathers_is_in_the_plan(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights gathered in float32 take twice the bytes of bfloat16 in both passes."""
    job = job_of(dict(data=8), zero_stage=3, remat="full")

    def gathered() -> dict[str, int]:
        found = collectives(dataclasses.replace(job))  # a job keeps what it was told about its step
        return {c.purpose: c.array_bytes for c in found if c.purpose.startswith("parameters")}

    before, original = gathered(), zero.gather_shards

    def wide(layout: Any, shard: Any, dim: int) -> Any:
        return original(layout, shard.astype(jnp.float32), dim).astype(shard.dtype)

    monkeypatch.setattr(zero, "gather_shards", wide)
    forget_traces()
    assert gathered() == {purpose: 2 * size for purpose, size in before.items()}
    assert len(before) == 2


@pytest.mark.parametrize(
    ("zero_stage", "kept", "again"),
    [
        (0, None, ()),
        (3, None, ()),
        (
            0,
            ("attention", "mlp_gate"),
            ("attention_k", "attention_out", "attention_q", "attention_v", "mlp_up"),
        ),
    ],
)
def test_activations_that_no_layer_keeps_are_computed_again(
    zero_stage: int, kept: tuple[str, ...] | None, again: tuple[str, ...]
) -> None:
    """Those of the names that a layer may keep; the last product of a layer has no name, and nobody needs it
    again.
    """
    remat: dict[str, Any] = {} if kept is None else dict(remat="named", remat_save=kept)
    job = job_of(dict(data=8), zero_stage=zero_stage, **remat)
    assert job.step.recomputed_names & set(SAVEABLE) == set(again)


@pytest.mark.parametrize(
    ("kept", "experts"),
    [
        pytest.param(kept, experts, marks=[pytest.mark.slow] * ((kept is None) != (experts == 4)))
        for kept in (None, ("attention", "mlp_gate"))
        for experts in (0, 4, 8)
    ],
)
def test_kept_values_are_those_of_a_trace_of_their_own(kept: tuple[str, ...] | None, experts: int) -> None:
    """Layers that keep values send and multiply what a trace with `jax.checkpoint`'s own policy says."""
    moe = MoESpec(num_experts=experts, top_k=3) if experts else None
    model, mesh = Transformer(**SIZES, moe=moe), MeshSpec(data=2, tensor=2, expert=2 if moe else 1)
    remat = "none" if kept is None else "named"
    spec = dict(zero_stage=2, remat=remat, remat_save=kept or ())
    layout = layout_from(spec, mesh, model.param_infos())
    of = class_of("layers", model, layout, rows=ROWS, seq_len=LENGTH)
    assert of.few == (experts == 4)
    found = trace_class(of)
    want = describe_jaxpr(of, jaxpr_of(of), unread=0 if kept is None else 2 * bool(experts))
    assert dataclasses.replace(found, memory=want.memory) == want
    assert found != trace_class(input_keeping_class(of))
    # Of masks and of losses that nobody reads some are in one trace alone.
    values = label_values(of, model, layout, rows=ROWS, seq_len=LENGTH)
    passed, wanted = (
        sum(evaluate([one.bytes for one in trace.memory.passes], values)) for trace in (found, want)
    )
    assert passed == pytest.approx(wanted, rel=0.01)
    widest, wanted = (
        max(sum(evaluate(moment.bytes, values)) for moment in trace.memory.moments) for trace in (found, want)
    )
    assert widest == wanted
    assert found.memory.weight_inputs == want.memory.weight_inputs
    assert found.memory.attention == want.memory.attention


def _stacked(jaxpr: Any) -> list[Any]:
    """What the first loop of a jaxpr stacks: arrays of each layer that wait for its backward pass."""
    scan = next(eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan")
    carried, _ = scan.params["ft_out"].unpack()
    return [var.aval for var in scan.params["jaxpr"].jaxpr.outvars[len(carried) :]]


@pytest.mark.parametrize(
    ("axes", "moe", "layout"),
    [
        (dict(data=4, tensor=2), None, dict(zero_stage=1)),
        (dict(data=8), None, dict(zero_stage=3)),
        (dict(data=2, tensor=4), None, dict(remat="named", remat_save=("attention", "mlp_gate"))),
        (dict(data=4, tensor=2), MoESpec(num_experts=4, top_k=2, shared_experts=1), dict(zero_stage=2)),
        pytest.param(
            dict(data=2, tensor=2, expert=2),
            MoESpec(num_experts=4, top_k=3),
            dict(),
            marks=pytest.mark.slow,
        ),
        (
            dict(data=4, expert=2),
            MoESpec(num_experts=8, top_k=2),
            dict(remat="named", remat_save=("mlp_up",)),
        ),
    ],
    ids=str,
)
def test_saved_arrays_are_those_that_a_loop_over_layers_stacks(
    axes: dict[str, int], moe: MoESpec | None, layout: dict[str, Any]
) -> None:
    """Those of a trace of its own, by dtype and size; masks aside."""
    model, mesh = Transformer(**SIZES, moe=moe, qk_norm=True), MeshSpec(**axes)
    lay = layout_from(layout, mesh, model.param_infos())
    of = class_of("layers", model, lay, rows=ROWS, seq_len=LENGTH)
    sizes, want = label_sizes(of), collections.Counter[tuple[str, Any]]()
    for aval in _stacked(jaxpr_of(of)):
        factor, powers = sizes.monomial(math.prod(aval.shape))
        want[str(aval.dtype), powers] += factor * aval.dtype.itemsize
    trace, names = trace_saved(saving_class(of)), kept_names(lay)
    found = collections.Counter[tuple[str, Any]]()
    for one in trace.every if names is None else trace.named:
        if names is None or one.name in (LAYER_INPUT, *names):
            found[one.dtype, one.bytes[1]] += one.bytes[0]
    assert saving_class(of) == input_keeping_class(of)
    assert {key: n for key, n in found.items() if key[0] != "bool"} == {
        key: n for key, n in want.items() if key[0] != "bool" and n
    }
    assert len(found) >= 2


@pytest.mark.parametrize(
    ("axes", "moe"),
    [
        pytest.param(
            axes, moe, marks=[pytest.mark.slow] * ((axes == dict(data=2, tensor=4)) != (moe is None))
        )
        for axes in (dict(data=8), dict(data=2, tensor=4), dict(data=1, tensor=8))
        for moe in (None, MoESpec(num_experts=4, top_k=2, shared_experts=1))
    ],
    ids=str,
)
def test_named_arrays_have_the_bytes_by_which_the_step_chooses_them(
    axes: dict[str, int], moe: MoESpec | None
) -> None:
    """Activations go to the host by `named_bytes`, per token and over all devices along `tensor`."""
    model, mesh = Transformer(**SIZES, moe=moe), MeshSpec(**axes)
    offload = OffloadSpec(activations=0.5)
    lay = layout_from(dict(remat="named", remat_save=SAVEABLE, offload=offload), mesh, model.param_infos())
    step = Job(model, lay, AdamW(peak_lr=1e-3), ROWS * mesh.batch_shards, LENGTH).step
    tokens = ROWS * LENGTH // mesh.tensor
    assert step.named_bytes == {name: tokens * size for name, size in named_bytes(lay).items()}
    on_host = {array.name for array in step.saved if array.memory == "pinned_host"}
    assert on_host == set(offloaded_names(lay)) > set()
    assert {array.name for array in step.saved} - on_host


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_gathered_array_is_saved_once_where_one_device_gathers(tensor: int) -> None:
    """Shared experts save their wide arrays, and the gathered stream beside the router's part of it; on one
    device along `tensor` the two are one array.
    """
    saved_bytes: list[int] = []
    for shared_experts in (0, 1):
        moe = MoESpec(num_experts=4, top_k=2, shared_experts=shared_experts)
        model, mesh = Transformer(**SIZES, moe=moe), MeshSpec(data=2, tensor=tensor)
        layout = layout_from(dict(zero_stage=1), mesh, model.param_infos())
        step = Job(model, layout, AdamW(peak_lr=1e-3), ROWS * mesh.batch_shards, LENGTH).step
        saved_bytes.append(sum(array.bytes for array in step.saved if not array.of_weights))
    wide, stream = 3 * SIZES["d_ff"] // tensor, SIZES["d_model"] if tensor > 1 else 0
    assert saved_bytes[1] - saved_bytes[0] == ROWS * LENGTH * (wide + stream) * 2


def test_an_array_more_that_a_layer_saves_is_in_the_plan(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sine of the feed-forward part's result, whose backward pass needs the cosine; and the same with a name
    that layers may save.
    """
    job = job_of(dict(data=2, tensor=4), zero_stage=1)
    named_job = job_of(dict(data=2, tensor=4), zero_stage=1, remat="named", remat_save=("attention", "wave"))

    def activations(job: Job) -> int:
        return memory(dataclasses.replace(job)).activations  # a job keeps what it was told about its step

    before, named_before, original = activations(job), activations(named_job), Block.feed_forward

    def waving(self: Block, *args: Any, **settings: Any) -> Any:
        y_BLD, losses = original(self, *args, **settings)
        return jnp.sin(checkpoint_name(y_BLD, "wave")), losses

    monkeypatch.setattr(Block, "feed_forward", waving)
    monkeypatch.setattr(saved_arrays, "SAVEABLE", (*SAVEABLE, "wave"))
    forget_traces()
    array_bytes = SIZES["num_layers"] * ROWS * LENGTH // 4 * SIZES["d_model"] * 2
    assert activations(job) - before == array_bytes
    assert activations(named_job) - named_before == array_bytes


def test_labels_are_the_sizes_of_the_layout() -> None:
    """The blocks of all parameters and of the batch, from the primes of a trace, for sizes that share
    factors.
    """
    job = job_of(dict(replica=2, data=2, context=2, tensor=4), zero_stage=3, microbatches=2)
    of = class_of("end", job.model, job.layout, rows=job.rows(), seq_len=job.seq_len)
    trace, values = (
        label_sizes(of),
        label_values(of, job.model, job.layout, rows=job.rows(), seq_len=job.seq_len),
    )
    for p, real in zip(trace.layout.params, job.layout.params, strict=True):
        block = math.prod(local_shape(p.optimizer_partition, p.info.shape, trace.layout.mesh.shape))
        number, powers = trace.monomial(block)
        for letter, power in powers:
            over, under = values[letter]
            number = number * over**power / under**power
        assert number == job.layout.local_size(real.optimizer_partition, real.info.shape)
    assert len(set(trace.labels.values())) == len(trace.labels)


@pytest.mark.parametrize("context", [8, 64])
def test_turns_of_a_ring_are_taken_for_no_label(context: int) -> None:
    """Calls of attention off the diagonal are one a layer and turn; of 64 devices the 62 were once taken for twice
    a prime that is a label.
    """
    job = dataclasses.replace(job_of(dict(context=2), zero_stage=3), seq_len=256)
    job = job.relaid(job.layout.spec, dataclasses.replace(job.layout.mesh, context=context))
    forward = [(call.causal, call.count) for call in job.step.attention if call.when == "forward"]
    layers = SIZES["num_layers"]
    assert forward == [(True, layers), (False, layers * (context - 2)), (False, layers)]
