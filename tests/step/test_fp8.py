"""A model whose layers multiply in 8 bits: what a layout changes of it, what a checkpoint keeps, who refuses
it.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jtrain.bench import Options, fp8_speed
from jtrain.checkpoint import CheckpointError, Checkpoints, CheckpointSpec
from jtrain.data.constructor.context_order import context_order
from jtrain.hlo.memory_traffic import written_arrays
from jtrain.hlo.traffic import traffic
from jtrain.layout.dims import Batch
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.layout.precision import PrecisionSpec
from jtrain.model import ops
from jtrain.model.forward_placement import Placement, checkpoint_layer
from jtrain.model.fp8_scaling import first_scaling, fp8_weights
from jtrain.model.param import init_params, map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import build
from jtrain.plan.compile.compiled_step import no_compile_cache, topology_devices
from jtrain.step import zero
from jtrain.step.state import abstract_state, init_state
from jtrain.step.train_step import BATCH_SPEC, make_train_step
from jtrain.telemetry.recompiles import count_programs
from jtrain_kernels.compat import lowering_for
from jtrain_kernels.device import live
from tests.batches import COLS, ROWS, adversarial_batch
from tests.layouts import layout_from
from tests.step.state_checks import assert_a_rejected_step_changes_nothing, assert_copies_agree
from tests.step.test_train_step import ADAMW, SIZES

STEPS = 20
MODES: Any = ("compute", "fp8_current", "fp8_delayed")
PERMUTES = (("all_gather_matmul_fp8", "permute"), ("matmul_reduce_scatter_fp8", "permute"))


def parts(axes: dict[str, int], devices: list[jax.Device] | None = None, **fields: Any) -> Any:
    """Model, layout, optimizer, mesh and step, which is compiled once for all tests that use it."""
    return _parts(tuple(axes.items()), tuple(devices or jax.devices()), **fields)


@functools.cache
def _parts(axes: tuple[tuple[str, int], ...], devices: tuple[jax.Device, ...], **fields: Any) -> Any:
    spec = MeshSpec(**dict(axes))
    mesh = make_mesh(spec, devices[: spec.size])
    model = Transformer(**SIZES)
    infos = model.param_infos()
    layout = layout_from(fields, spec, infos)
    optimizer = build(ADAMW, num_steps=STEPS, params=map_params(lambda info: info, infos))
    return model, layout, optimizer, mesh, make_train_step(model, optimizer, layout, mesh)


class Trained(NamedTuple):
    """Losses of `STEPS` steps, the first one's gradient and histories, the last histories, and traces of the
    step.
    """

    losses: np.ndarray
    gradient: Any
    first_scaling: Any
    scaling: Any
    num_traces: int


@functools.cache
def trained(mode: Any, axes: tuple[tuple[str, int], ...] = (), **fields: Any) -> Trained:
    fields = {"compute_dtype": "float32", "matmul_dtype": mode} | fields
    _, layout, optimizer, mesh, step = parts(dict(axes), **fields)
    state = init_state(layout, optimizer, mesh, seed=0)
    batch = adversarial_batch()
    columns = context_order(batch.token_BL.shape[1], layout.mesh.context, layout.context_order)
    batch = jax.tree.map(lambda x: jax.device_put(x[:, columns], NamedSharding(mesh, BATCH_SPEC)), batch)
    losses, first = [], None
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss_nats"]))
        first = first or jax.device_get((state.opt_state.mu, state.scaling))
    assert first is not None
    assert_copies_agree(state)
    scaling = jax.device_get(state.scaling)
    assert_a_rejected_step_changes_nothing(step, state, batch)
    gradient, first_scaling = first
    return Trained(np.array(losses), gradient, first_scaling, scaling, count_programs(step))


def assert_same_first_histories(got: Trained, want: Trained) -> None:
    """The largest values of the first step are those of all devices, to a rounding of one of their terms."""
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-2), got.first_scaling, want.first_scaling
    )
    assert all((x[..., 0] > 0).all() for x in jax.tree.leaves(want.first_scaling)), "each has been seen"


def apart(got: Any, want: Any) -> float:
    """The largest difference of two gradients, each array's by its largest element."""
    errors = jax.tree.map(lambda g, w: float(np.abs(g - w).max() / np.abs(w).max()), got, want)
    return max(jax.tree.leaves(errors))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES[1:])
def test_8_bit_matmuls_train_as_float32_does(mode: Any) -> None:
    """Within 0.1 nats of 2.4 that were learnt; not the same numbers, or nothing would have been rounded."""
    want, got = trained("compute").losses, trained(mode).losses
    assert want[0] - want[-1] > 2, "the loss must move, or closeness below proves nothing"
    np.testing.assert_allclose(got, want, atol=0.1)
    assert np.abs(got - want).max() > 1e-3


def test_delayed_scaling_is_the_same_on_any_layout() -> None:
    """One factor for all devices and microbatches: the first loss agrees as float32 does.

    Gradients, and later steps, drift apart as any 8-bit run does whose sums are added in another order: what
    is 1e-7 off rounds to the other neighbour now and then, 6 % away (first gradients: JAX 0.12 to 1e-5, JAX
    0.11 to 0.014). 0.5 % of the loss is allowed; rounding itself moved it by 2.7 %, and gradients by over 10
    %.
    """
    want = trained("fp8_delayed")
    case: Any = dict(zero_stage=2, microbatches=4, remat="full", context_attention="ulysses")
    got = trained("fp8_delayed", (("data", 2), ("context", 2)), **case)
    assert got.num_traces == 1
    np.testing.assert_allclose(got.losses[0], want.losses[0], rtol=1e-6)
    assert apart(got.gradient, want.gradient) < (1e-5 if jax.__version_info__ >= (0, 12) else 0.05)
    assert_same_first_histories(got, want)
    np.testing.assert_allclose(got.losses, want.losses, rtol=5e-3)
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(g[..., -1], w[..., -1], rtol=0.5), got.scaling, want.scaling
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES[1:])
def test_what_travels_in_8_bits_is_what_would_be_rounded_anyway(mode: Any) -> None:
    """Overlapped over `tensor`, the losses, gradients and histories of the plain collectives, as closely as
    float32.
    """
    axes: Any = (("tensor", 2),)
    want = trained(mode, axes, zero_stage=0)
    got = trained(mode, axes, zero_stage=0, tensor_overlap=True, kernels=PERMUTES)
    np.testing.assert_allclose(got.losses[0], want.losses[0], rtol=1e-6)
    assert apart(got.gradient, want.gradient) < 1e-5
    if mode == "fp8_delayed":
        assert_same_first_histories(want, trained(mode))
    np.testing.assert_allclose(got.losses, want.losses, rtol=5e-3)
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(g[..., -1], w[..., -1], rtol=0.5), got.scaling, want.scaling
    )


@pytest.mark.slow
def test_weights_rounded_before_they_are_gathered_are_those_rounded_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ZeRO-3 with delayed scaling: the same losses, gradients and histories bit for bit, over data and
    tensor.
    """
    case: Any = ("fp8_delayed", (("data", 2), ("tensor", 2)))
    fields: Any = dict(zero_stage=3, microbatches=2, remat="full")
    before = trained(*case, **fields)
    monkeypatch.setattr(zero, "gathers_in_8_bits", lambda layout: False)
    after = trained.__wrapped__(*case, **fields)
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", (False, True))
def test_delayed_scaling_with_shared_key_heads(overlap: bool) -> None:
    """Four devices of two key heads: the first loss agrees, and later ones as on any other layout."""
    want = trained("fp8_delayed").losses
    case: Any = dict(zero_stage=2, tensor_overlap=overlap, kernels=PERMUTES if overlap else ())
    got = trained("fp8_delayed", (("data", 2), ("tensor", 4)), **case)
    assert got.num_traces == 1
    np.testing.assert_allclose(got.losses[0], want[0], rtol=1e-6)
    np.testing.assert_allclose(got.losses, want, rtol=5e-3)


@pytest.mark.slow
def test_current_scaling_differs_by_layout_only_below_the_formats_range() -> None:
    """Each device scales what it holds; the first loss agrees, and later ones to the 0.5 % of the test above.

    Gradients to 5 %: numbers below the range change which neighbour the next layers' numbers round to. That
    is a fifth of what the rounding itself does to them.
    """
    want = trained("fp8_current")
    got = trained("fp8_current", (("data", 4),), zero_stage=3)
    np.testing.assert_allclose(got.losses[0], want.losses[0], rtol=1e-5)
    assert apart(got.gradient, want.gradient) < 0.05
    np.testing.assert_allclose(got.losses, want.losses, rtol=5e-3)
    assert apart(want.gradient, trained("compute").gradient) > 0.1


def test_a_resumed_run_scales_by_the_same_history(tmp_path: Path) -> None:
    """Three steps, a save, two more: the bits of five. A run without histories refuses the checkpoint by
    name.
    """
    _, layout, optimizer, mesh, step = parts({}, compute_dtype="float32", matmul_dtype="fp8_delayed")
    like = abstract_state(layout, optimizer, mesh)
    # Of the shape of `adversarial_batch`, for which `trained` has compiled the step.
    token = np.random.default_rng(0).integers(0, 64, (5, ROWS, COLS), np.int32)
    position = np.tile(np.arange(COLS, dtype=np.int32), (ROWS, 1))

    def batch(index: int) -> Batch:
        t = token[index]
        arrays = Batch(t, np.roll(t, -1, axis=1), position, np.ones_like(t))
        return jax.device_put(arrays, NamedSharding(mesh, BATCH_SPEC))

    state = init_state(layout, optimizer, mesh, seed=0)
    with Checkpoints(tmp_path, CheckpointSpec()) as checkpoints:
        for index in range(5):
            state, _ = step(state, batch(index))
            if index == 2:
                checkpoints.save(3, state, {}, "")
        resumed, _ = checkpoints.restore(3, like)
        for index in (3, 4):
            resumed, _ = step(resumed, batch(index))
        assert [np.asarray(x).tobytes() for x in jax.tree.leaves(resumed)] == [
            np.asarray(x).tobytes() for x in jax.tree.leaves(state)
        ]
        _, other, _, _, _ = parts({}, matmul_dtype="fp8_current")
        with pytest.raises(
            CheckpointError, match=r"(?s)of another precision\.matmul_dtype: .*Set precision\.matmul_dtype as"
        ):
            checkpoints.restore(3, abstract_state(other, optimizer, mesh))


def test_first_histories_hold_what_is_known_of_the_weights() -> None:
    """A bound where they are drawn, their own maximum where they were brought along; nothing of x and the
    gradients.
    """
    infos = Transformer(**SIZES).param_infos()
    params = jax.jit(lambda: init_params(infos, seed=0, dtype="float32"))()
    drawn, brought = first_scaling(infos), first_scaling(infos, params)
    assert len(fp8_weights(infos)) == 7 == len(jax.tree.leaves(drawn))
    down = params["layers"]["mlp"]["down_FD"]
    np.testing.assert_array_equal(
        brought["layers"]["mlp"]["down_FD"][:, 1, 0], jnp.max(jnp.abs(down), axis=(1, 2))
    )
    for a, b in zip(jax.tree.leaves(brought), jax.tree.leaves(drawn), strict=True):
        assert (a[:, 1, 0] <= b[:, 1, 0]).all()
        assert (a[:, 1, 0] > 0.3 * b[:, 1, 0]).all()
        assert not a[:, jnp.array([0, 2])].any()
        assert not b[:, jnp.array([0, 2])].any()


def test_a_rematerialised_layer_keeps_what_the_forward_casts_saw() -> None:
    """With remat=full the backward pass gets x's largest number from the forward pass, where a cast reads x
    anyway.
    """
    x, w = jnp.arange(8.0).reshape(2, 4), jnp.ones((4, 3))
    kernel = ops.Fp8Kernel(w, jnp.ones(3), jnp.zeros(3))
    layer = checkpoint_layer(
        lambda x, w, _: ops.linear(jnp.sin(x), w["w"]),
        Placement(fetch=lambda _, w: w, remat="full"),
        scanned=True,
    )
    _, backward = jax.vjp(layer, x, {"w": kernel}, None)
    kept = [float(leaf) for leaf in jax.tree.leaves(backward) if jnp.shape(leaf) == ()]
    assert kept == [float(jnp.max(jnp.abs(jnp.sin(x))))]


def test_products_of_one_x_share_the_first_ones_scale_of_it() -> None:
    """The bits of products on their own where scales are equal; where they are not, as in no run, the first
    decides.
    """
    x = jax.random.normal(jax.random.key(0), (8, 4))
    kernels = [
        ops.Fp8Kernel(jnp.full((4, 3), i + 0.3), jnp.asarray([4.0, 2.0**i, 8.0]), jnp.zeros(3))
        for i in range(3)
    ]

    def run(product: Any) -> Any:
        y, backward = jax.vjp(product, x, kernels)
        return y, backward(jax.tree.map(jnp.ones_like, y))

    together = run(ops.linears)
    jax.tree.map(
        np.testing.assert_array_equal,
        together,
        run(lambda x, kernels: tuple(ops.linear(x, k) for k in kernels)),
    )
    fine = dataclasses.replace(kernels[1], scale_3=jnp.asarray([2.0**-20, 2.0, 8.0]))  # x would underflow
    np.testing.assert_array_equal(ops.linears(x, [kernels[0], fine])[1], together[0][1])
    assert not np.array_equal(ops.linear(x, fine), together[0][1])


def test_an_unknown_matmul_dtype_is_refused() -> None:
    """By the field, with what there is; here the types are checked first, so the spec's own check is
    called.
    """
    spec = PrecisionSpec()
    object.__setattr__(spec, "matmul_dtype", "fp4")
    with pytest.raises(ValueError, match=r"precision\.matmul_dtype='fp4' must be `compute`, `fp8_current`"):
        spec.__post_init__()


@pytest.mark.aot
def test_chips_without_8_bit_matmuls_refuse_before_compiling() -> None:
    """A v5p would convert back and forth."""
    with pytest.raises(ValueError, match=r"precision\.matmul_dtype=fp8_current: v5p has no 8-bit .*=compute"):
        parts(dict(data=4), topology_devices("v5p:2x2x1"), matmul_dtype="fp8_current")


@pytest.mark.aot
@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=[pytest.mark.slow] * (m != "fp8_current")) for m in MODES]
)
def test_the_step_for_an_h200_multiplies_its_weights_in_8_bits(mode: Any) -> None:
    """Seven weights, three products each, in the loop over layers: 21 of cuBLASLt's 8-bit matmuls; none
    without.

    With current scaling several products have the same 8-bit x, and XLA must not join them
    (`jtrain.step.xla_options`).
    """
    model, layout, optimizer, mesh, step = parts({}, topology_devices("h200:1"), matmul_dtype=mode)
    del model
    ids = jax.ShapeDtypeStruct((4, 16), jnp.int32, sharding=NamedSharding(mesh, BATCH_SPEC))
    lowered = step.lower(abstract_state(layout, optimizer, mesh), Batch(ids, ids, ids, ids))
    with no_compile_cache():
        text = lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False}).as_text()
    assert text is not None
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == (0 if mode == "compute" else 21)


@pytest.mark.aot
@pytest.mark.slow
def test_over_tensor_an_h200_sends_8_bits_and_multiplies_them_as_they_come() -> None:
    """Seven weights, three products each, by the halves of what is gathered or summed: 42 of cuBLASLt's 8-bit
    matmuls.

    A layer gathers four times, two of them again, and sums four times: bytes as 4 x 1 and 2 x 1 to 4 x 2.
    """
    fields: Any = dict(matmul_dtype="fp8_delayed", tensor_overlap=True, zero_stage=0, kernels=PERMUTES)
    _, layout, optimizer, mesh, step = parts(dict(tensor=2), topology_devices("h200:2"), **fields)
    ids = jax.ShapeDtypeStruct((4, 64), jnp.int32, sharding=NamedSharding(mesh, BATCH_SPEC))
    lowered = step.lower(abstract_state(layout, optimizer, mesh), Batch(ids, ids, ids, ids))
    with no_compile_cache():
        text = lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False}).as_text()
    sent = {
        t.dtype: t.array_bytes for t in traffic(text or "", {"tensor": 2}) if t.kind == "collective-permute"
    }
    assert text is not None
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == 42
    assert sent["bf16"] == 2 * sent["f8e4m3fn"] == 4 * sent["f8e5m2"] > 0


def test_the_speed_benchmark_refuses_a_cpu() -> None:
    """Its emulation's speed would say nothing."""
    with pytest.raises(
        ValueError, match="8-bit matmuls are timed on an H100, H200 or B200, but the device here is"
    ):
        list(fp8_speed.run(Options(calls=1, rehearse=False, only=None)))


@pytest.mark.aot
@pytest.mark.slow
def test_the_benchmarks_layers_cast_for_an_h200_without_float32_arrays() -> None:
    """Seven products forward, six again, fourteen backward; nothing as wide as the feed-forward layer is
    float32.

    XLA would otherwise keep an array of nans for each cast, and gradients of gate and up for their amax. Rows
    and d_ff differ from all other sizes.
    """
    mesh = make_mesh(MeshSpec(), topology_devices("h200:1"))
    step, arrays = fp8_speed.layers(
        "fp8_delayed", 256, fp8_speed.REHEARSED | {"d_ff": 384}, mesh.devices.flat[0]
    )
    whole = NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), jax.eval_shape(arrays)
    )
    with lowering_for(mesh, live(mesh.devices.flat[0])), no_compile_cache():
        text = step.lower(*shapes).compile(compiler_options={"xla_gpu_enable_triton_gemm": False}).as_text()
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == 27
    assert ("f32", (256, 384)) not in written_arrays(text)
    assert ("bf16", (256, 384)) in written_arrays(text)  # gate and up


@pytest.mark.aot
@pytest.mark.parametrize("mode", MODES)
def test_the_benchmarks_matmul_compiles_for_an_h200(mode: Any) -> None:
    """What it times is what it says: one 8-bit matmul of 8192^3, or none."""
    sharding = jax.sharding.SingleDeviceSharding(topology_devices("h200:1")[0])
    x = jax.ShapeDtypeStruct((fp8_speed.SIZE, fp8_speed.SIZE), jnp.bfloat16, sharding=sharding)
    with no_compile_cache():
        lowered = jax.jit(functools.partial(fp8_speed.matmul, mode)).lower(x, x)
        text = lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False}).as_text()
    assert text is not None
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == (mode != "compute")
