"""Parameters and activations in host memory: the same losses and gradients, with less device memory."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jtrain.hlo.traffic import HostCopies
from jtrain.layout.dims import Batch
from jtrain.layout.layout import Layout, OffloadSpec
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.layout.offload_spec import OFFLOADABLE
from jtrain.model.forward_placement import SAVEABLE
from jtrain.model.layer_scan import LAYER_INPUT
from jtrain.model.param import init_params, map_params
from jtrain.model.saved_activations import kept_names, named_bytes, offloaded_names
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, build
from jtrain.plan.compile.compiled_step import CompiledStep, compile_step, topology_devices
from jtrain.plan.job import Job
from jtrain.step.host_offload import sharding
from jtrain.step.train_step import BATCH_SPEC, local_gradients
from jtrain.step.zero import param_tree, placement_of
from tests.batches import adversarial_batch
from tests.layouts import layout_from
from tests.step.reference import loss_and_gradients, relative_errors
from tests.step.test_train_step import SIZES as STEP_SIZES

SIZES: dict[str, Any] = STEP_SIZES | dict(num_kv_heads=4)  # the shares below are of these bytes
ALL = OffloadSpec(params=1.0, activations=1.0)
NAMED = ("attention", "mlp_gate")
MESHES = (dict(data=8), dict(data=2, tensor=4))


def layout_of(axes: dict[str, int], offload: OffloadSpec = ALL, **fields: Any) -> tuple[Transformer, Layout]:
    model = Transformer(**SIZES, scan_layers=fields.pop("scan_layers", True))
    if fields.get("remat") == "named":
        fields["remat_save"] = NAMED
    return model, layout_from(dict(offload=offload, **fields), MeshSpec(**axes), model.param_infos())


@functools.cache
def first_params(dtype: Any) -> Any:
    return init_params(Transformer(**SIZES).param_infos(), seed=0, dtype=dtype)


def traced(axes: dict[str, int], offload: OffloadSpec, **fields: Any) -> tuple[Any, Layout, Any, Batch]:
    """The step's own function of loss and gradients, traced, and its layout, parameters and batch."""
    model, lay = layout_of(axes, offload, **fields)
    mesh = make_mesh(lay.mesh, jax.devices()[: lay.mesh.size])
    places = param_tree(lay, lambda p: sharding(mesh, p.param_partition, p.param_memory))
    params = jax.device_put(first_params(lay.precision.param_dtype), places)
    on_host = [p.info.path for p in lay.params if p.param_memory == "pinned_host"]
    assert bool(on_host) == (offload.params != "none")
    assert [x.sharding.memory_kind for x in jax.tree.leaves(params)].count("pinned_host") == len(on_host)
    batch = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, BATCH_SPEC)), adversarial_batch())
    run = jax.jit(
        jax.shard_map(
            lambda params, batch: local_gradients(model, lay, params, {}, batch, jnp.int32(0))[::2],
            mesh=mesh,
            in_specs=(param_tree(lay, lambda p: p.param_partition), BATCH_SPEC),
            out_specs=(param_tree(lay, lambda p: p.optimizer_partition), P()),
            check_vma=False,
        )
    ).trace(params, batch)
    return run, lay, params, batch


def gradients(axes: dict[str, int], offload: OffloadSpec, **fields: Any) -> tuple[float, Any, str]:
    """Loss, gradients as the optimizer gets them, and the traced program, from the step's own function."""
    run, _, params, batch = traced(axes, offload, **fields)
    # Kept at more than their precision in a fusion, bfloat16 values depend on what is fused; here they must
    # not.
    grads, metrics = run.lower().compile(compiler_options={"xla_allow_excess_precision": False})(
        params, batch
    )
    assert {x.sharding.memory_kind for x in jax.tree.leaves(grads)} == {"device"}
    return float(metrics["loss_nats"]), jax.device_get(grads), str(run.jaxpr)


@functools.cache
def on_the_device(axes: tuple[tuple[str, int], ...], **fields: Any) -> tuple[float, Any, str]:
    return gradients(dict(axes), OffloadSpec(), **fields)


ERROR = {"float32": 1e-5, "bfloat16": 2e-2}
"""Bound of each gradient's distance from float64's, as a share of its norm: some units of rounding per
product."""


def assert_right(loss: float, grads: Any, dtype: str) -> None:
    """Loss and gradients are those of float64, to the rounding of `dtype`."""
    nats, want = loss_and_gradients(first_params("float32"), adversarial_batch(), z_loss=SIZES["z_loss"])
    errors = relative_errors(grads, want)
    assert abs(loss - nats) < ERROR[dtype] * nats / 10
    assert max(errors.values()) < ERROR[dtype], errors


def assert_same(axes: dict[str, int], offload: OffloadSpec, **fields: Any) -> None:
    """Bit for bit, and one program has arrays in host memory where the other has none; both are right."""
    want_loss, want, plain = on_the_device(tuple(axes.items()), **fields)
    loss, got, program = gradients(axes, offload, **fields)
    assert 4 < loss < 5, "of 64 tokens, untrained: ln 64 is 4.16"
    assert loss == want_loss
    assert_right(loss, got, fields["compute_dtype"])
    assert min(float(np.abs(x).max()) for x in jax.tree.leaves(want)) > 0, "every parameter has a gradient"
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert plain.count("<host>") == 0
    assert program.count("<host>") > 0


CASES = [
    pytest.param(case, *pair, marks=[pytest.mark.slow] * (case != 4))
    for case, pair in enumerate(itertools.product(MESHES, (0, 1, 2, 3)))
]


@pytest.mark.parametrize(("case", "axes", "zero_stage"), CASES, ids=str)
def test_offload_is_a_layout_not_a_model(case: int, axes: dict[str, int], zero_stage: int) -> None:
    """Offloaded losses and gradients are bitwise equal to those of the same layout without offload.

    In bfloat16 this needs `xla_allow_excess_precision=False`, as in `gradients`; see
    test_host_offload_bfloat16.py.

    Remat, accumulation and dtype alternate through the cases. Two have both meshes and both numbers of
    microbatches; named remat and float32 are the next test's. The full product is the slow test below.
    """
    remat = ("none", "full", "named")[case % 3]
    dtype = ("float32", "bfloat16")[case // 3 % 2]
    fields = dict(remat=remat, microbatches=(1, 4)[case // 2 % 2], compute_dtype=dtype)
    assert_same(axes, ALL, zero_stage=zero_stage, **fields)


PRODUCT = list(itertools.product(MESHES, (0, 3), ("none", "full", "named"), (1, 4), ("both", "params")))


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "zero_stage", "remat", "microbatches", "what"), PRODUCT, ids=str)
def test_offload_is_a_layout_in_every_combination(
    axes: dict[str, int], zero_stage: int, remat: str, microbatches: int, what: str
) -> None:
    """The whole product, parameters with and without activations."""
    fields = dict(remat=remat, microbatches=microbatches, compute_dtype="float32")
    assert_same(axes, ALL if what == "both" else OffloadSpec(params=1.0), zero_stage=zero_stage, **fields)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offload", "remat"),
    [
        pytest.param(OffloadSpec(params=0.5), "full", marks=pytest.mark.slow),
        pytest.param(OffloadSpec(activations=1.0), "none", marks=pytest.mark.slow),
        pytest.param(OffloadSpec(activations=0.5), "named", marks=pytest.mark.slow),
        (OffloadSpec(params=0.3, activations=0.4), "none"),
    ],
    ids=str,
)
def test_a_part_may_stay_on_the_device(offload: OffloadSpec, remat: str) -> None:
    """Some leaves, some names; the rest is where it was; replicas change nothing."""
    assert_same(
        dict(replica=2, data=2, tensor=2), offload, zero_stage=2, remat=remat, compute_dtype="float32"
    )


def loops(jaxpr: Any) -> Iterator[Any]:
    """Yields every loop of a traced program, also those inside others."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from loops(getattr(inner, "jaxpr", inner))


def host_bytes(variables: Any) -> int:
    """Bytes of a program's variables in host memory."""
    avals = [x.aval for x in variables if x.aval.memory_space is jax.memory.Space.Host]
    return sum(aval.size * aval.dtype.itemsize for aval in avals)


@pytest.mark.parametrize(
    ("activations", "fields"),
    [
        (1.0, dict(remat="full")),
        (0.5, dict(remat="named", microbatches=4)),
        (1.0, dict(remat="none", zero_stage=3)),
    ],
    ids=str,
)
def test_the_backward_pass_fetches_activations_a_layer_ahead(
    activations: float, fields: dict[str, Any]
) -> None:
    """The forward loop stacks the bytes of the offloaded names in host memory, and reads nothing there.

    The backward loop fetches them and nothing else, and an iteration does not compute with what it fetches.
    """
    run, lay, _, batch = traced(dict(data=2), OffloadSpec(activations=activations), **fields)
    stacked, fetched = 0, 0
    for loop in loops(run.jaxpr.jaxpr):
        stacked += host_bytes(loop.outvars)
        body = loop.params["jaxpr"].jaxpr
        read = {id(var) for equation in body.eqns for var in equation.invars}
        for equation in body.eqns if loop.params["reverse"] else ():
            if equation.primitive.name == "device_put" and host_bytes(equation.invars):
                assert set(equation.outvars) <= set(body.outvars)
                assert not read & {id(var) for var in equation.outvars}
                fetched += host_bytes(equation.invars)
    tokens = batch.token_BL.size // 2 // lay.spec.microbatches
    per_layer = tokens * sum(named_bytes(lay)[name] for name in offloaded_names(lay))
    assert (stacked, fetched) == (SIZES["num_layers"] * per_layer, per_layer)


@pytest.mark.parametrize("name", OFFLOADABLE[1:])
def test_an_unrolled_loop_is_refused(name: str) -> None:
    """XLA would join all layers' arrays on the device: 1.8 GiB instead of 1.0 for 4 layers on an H200."""
    said = r"model.scan_layers=False with layout.offload.params, .activations or .gradients: only a loop"
    offload = dataclasses.replace(OffloadSpec(), **{name: 1.0})
    with pytest.raises(ValueError, match=said):
        gradients(dict(data=8), offload, zero_stage=3, scan_layers=False)


# --- what the real compilers make of it -------------------------------------------------------------------------

AOT_SIZES: dict[str, Any] = dict(
    num_layers=6, d_model=1024, num_heads=8, num_kv_heads=8, head_dim=128, d_ff=4096, vocab_size=2048
)
ROWS, SEQ_LEN = 8, 1024


@functools.cache
def compiled(topology: str, remat: str, offload: OffloadSpec) -> tuple[CompiledStep, Layout]:
    devices = topology_devices(topology)
    model = Transformer(**AOT_SIZES, attention_chunk=SEQ_LEN)
    fields = dict(remat=remat, remat_save=NAMED * (remat == "named"), param_dtype="bfloat16", offload=offload)
    lay = layout_from(fields, MeshSpec(data=len(devices)), model.param_infos())
    adam = AdamW(peak_lr=1e-3)
    optimizer = build(adam, num_steps=100, params=map_params(lambda info: info, model.param_infos()))
    job = Job(model, lay, adam, ROWS * len(devices), SEQ_LEN)
    return compile_step(job, optimizer, devices=devices), lay


def copied(step: CompiledStep, direction: str) -> HostCopies:
    return next(copies for copies in step.host_copies if copies.direction == direction)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "remat"),
    (("h200:1", "full"), ("h200:1", "named"), ("v5p:2x2x1", "full"), ("v5p:2x2x1", "named")),
)
def test_activations_really_leave_the_device(topology: str, remat: str) -> None:
    """Under scan XLA may drop such an offload without a word (openxla/xla#17541): bytes and copies say it did
    not.

    The device gives up what the host takes, but for three layers' worth: one computes, one is on its way, and
    the compilers hold a third. Every copy is asynchronous, and but for one layer's all run beside matmuls.
    The first layer's are fetched a second time at the end.
    """
    plain, _ = compiled(topology, remat, OffloadSpec())
    step, lay = compiled(topology, remat, OffloadSpec(activations=1.0))
    num_layers, tokens = AOT_SIZES["num_layers"], ROWS * SEQ_LEN
    per_layer = tokens * sum(named_bytes(lay)[name] for name in offloaded_names(lay))
    assert plain.host_temp_bytes == 0
    assert step.host_temp_bytes == num_layers * per_layer
    assert step.argument_bytes == plain.argument_bytes
    assert (num_layers - 3) * per_layer <= plain.temp_bytes - step.temp_bytes
    peeled = 2 * per_layer * topology.startswith("v5p")  # XLA:TPU pulls iterations out of the loop
    for layers, copies in (
        (num_layers, copied(step, "to host")),
        (num_layers + 1, copied(step, "to device")),
    ):
        assert layers * per_layer <= copies.bytes <= layers * per_layer + peeled
        assert copies.async_bytes == copies.bytes
        assert copies.hidden_bytes >= (layers - 1) * per_layer


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("topology", ("h200:1", "v5p:2x2x1"))
def test_parameters_stream_with_prefetch(topology: str) -> None:
    """Both passes fetch each layer once, and at each end of the loop one layer too many, while others
    compute.

    The device gives up their bytes and takes two layers instead; the optimizer's update fetches them once
    more.
    """
    plain, _ = compiled(topology, "full", OffloadSpec())
    step, lay = compiled(topology, "full", OffloadSpec(params=1.0))
    num_layers = AOT_SIZES["num_layers"]
    per_layer = sum(2 * p.info.size for p in lay.params if p.param_memory == "pinned_host") // num_layers
    assert per_layer == 2 * (4 * 1024 * 1024 + 3 * 1024 * 4096)
    assert step.host_argument_bytes == num_layers * per_layer
    assert plain.argument_bytes - step.argument_bytes == num_layers * per_layer
    assert step.temp_bytes - plain.temp_bytes <= 2 * per_layer
    to_device = copied(step, "to device")
    update = num_layers * per_layer
    assert to_device.bytes == (2 * num_layers + 1) * per_layer + update
    assert to_device.async_bytes == to_device.bytes
    assert to_device.hidden_bytes >= num_layers * per_layer, "most of what the two passes fetch"


# --- which activations ------------------------------------------------------------------------------------------


def test_the_bytes_of_names_are_those_of_the_closed_form() -> None:
    """D=32, N=K=4, H=8, F=64 in bfloat16: 2 bytes each; attention keeps a float32 per head besides."""
    _, lay = layout_of(dict(tensor=4), OffloadSpec())
    heads = 4 * 8 * 2
    assert named_bytes(lay) == {
        LAYER_INPUT: 64,
        "attention_q": heads,
        "attention_k": heads,
        "attention_v": heads,
        "attention": heads + 4 * 4,
        "attention_out": 64,
        "mlp_gate": 128,
        "mlp_up": 128,
    }


@pytest.mark.parametrize(
    ("share", "remat", "want"),
    [
        (1.0, "full", (LAYER_INPUT,)),
        (1.0, "named", (LAYER_INPUT, *NAMED)),
        (0.5, "named", ("mlp_gate",)),  # 128 of 272; the 80 of attention would be too much
        (0.6, "named", ("mlp_gate",)),
        (0.78, "named", ("attention", "mlp_gate")),
        (1.0, "none", (LAYER_INPUT, *SAVEABLE)),
        (
            0.5,
            "none",
            (LAYER_INPUT, "mlp_gate", "mlp_up"),
        ),  # 320 of 656; with attention instead 336, over half
    ],
)
def test_a_share_of_the_activations_is_the_largest_names_that_fit(
    share: float, remat: str, want: tuple[str, ...]
) -> None:
    """By bytes, and never more than was asked for."""
    _, lay = layout_of(dict(data=2), OffloadSpec(activations=share), remat=remat)
    assert offloaded_names(lay) == placement_of(lay).offload == want


def test_a_share_that_moves_nothing_is_refused() -> None:
    """Under full remat a layer keeps one array: all of it, or none."""
    _, lay = layout_of(dict(data=2), OffloadSpec(activations=0.5), remat="full")
    with pytest.raises(
        ValueError, match=r"activations=0.5 moves nothing: .* keeps layer_input, .* 100.0% of the byt"
    ):
        placement_of(lay)


@pytest.mark.parametrize(
    ("offload", "zero_stage", "remat", "want"),
    [
        (OffloadSpec(), 0, "none", None),
        (OffloadSpec(params=1.0), 0, "none", SAVEABLE),
        (OffloadSpec(activations=1.0), 0, "none", SAVEABLE),
        (OffloadSpec(), 3, "none", SAVEABLE),
        (OffloadSpec(params=1.0), 0, "full", ()),
        (ALL, 3, "named", NAMED),
    ],
    ids=str,
)
def test_what_a_layer_keeps_never_holds_copies_of_streamed_weights(
    offload: OffloadSpec, zero_stage: int, remat: str, want: tuple[str, ...] | None
) -> None:
    """Then only what has a name is kept, with remat=none too."""
    _, lay = layout_of(dict(data=2), offload, zero_stage=zero_stage, remat=remat)
    assert kept_names(lay) == want
