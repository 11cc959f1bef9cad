"""Gradients of microbatches are added to their sums layer by layer, in float32 or in bfloat16 rounded by
chance.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jtrain.layout.layout import Layout
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.layer_scan import Summed, scan_layers
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, build
from jtrain.plan.compile.compiled_step import compile_step, topology_devices
from jtrain.plan.estimate.machine import machine_of
from jtrain.plan.estimate.memory import memory
from jtrain.plan.job import Job
from jtrain.step.gradient_sums import GradientSums, zero_sums
from jtrain.step.state import init_state
from jtrain.step.train_step import make_train_step
from tests.batches import ONE_DOCUMENT, adversarial_batch
from tests.layouts import layout_from
from tests.step.reference import loss_and_gradients, relative_errors
from tests.step.test_host_offload_compiled import WIDE
from tests.step.test_train_step import SIZES, on_one_device, trained

LAYERS, WIDTH = 32, 64


def loss_of(x: Any, weights: Any, unroll: int) -> Any:
    def layer(x: Any, weights: Any, shared: Any) -> Any:
        return jnp.tanh((x * weights["scale"][None]) @ weights["w"] + shared)

    return jnp.sum(scan_layers(layer, x, weights, jnp.float32(0.1), unroll=unroll) ** 2)


def plain(weights: Any, totals: Any, x: Any, unroll: int) -> Any:
    grads = jax.grad(lambda w: loss_of(x, w, unroll))(weights)
    return jax.tree.map(lambda total, grad: total + grad, totals, grads)


def in_place(weights: Any, totals: Any, x: Any, unroll: int) -> Any:
    def loss(totals: Any) -> Any:
        return loss_of(
            x, jax.tree.map(lambda w, t: Summed(w, t, lambda a, g, _: a + g), weights, totals), unroll
        )

    return jax.grad(loss)(totals)


def drawn(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    sizes = {"w": (LAYERS, WIDTH, WIDTH), "scale": (LAYERS, WIDTH)}
    return {name: rng.normal(0, WIDTH**-0.5, size).astype(np.float32) for name, size in sizes.items()}


@pytest.mark.parametrize("unroll", (1, 2))
def test_the_backward_pass_adds_what_is_otherwise_added_after_it(unroll: int) -> None:
    """Bit for bit, one layer or two in an iteration; a loop never holds all gradients beside their sums."""
    x = np.random.default_rng(2).normal(size=(4, WIDTH)).astype(np.float32)
    programs = [jax.jit(fn, static_argnums=3, donate_argnums=1) for fn in (plain, in_place)]
    want, got = (program(drawn(0), drawn(1), x, unroll) for program in programs)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert np.abs(np.asarray(got["w"]) - drawn(1)["w"]).min(axis=(1, 2)).max() > 0, (
        "every layer has a gradient"
    )
    if unroll == 1:
        compiled: list[Any] = [p.lower(drawn(0), drawn(1), x, unroll).compile() for p in programs]
        whole, layered = (program.memory_analysis().temp_size_in_bytes for program in compiled)
        stack = LAYERS * WIDTH * WIDTH * 4
        assert whole > stack > 2 * layered


def laid_out(axes: dict[str, int], **fields: Any) -> Layout:
    return layout_from(dict(grad_accum_dtype="bfloat16", microbatches=2) | fields, MeshSpec(**axes), infos())


@functools.cache
def infos() -> Any:
    return Transformer(**SIZES).param_infos()


def test_bfloat16_sums_keep_what_rounding_to_nearest_loses() -> None:
    """256 gradients of an eighth of a unit in the last place add up to 32 units, in every layer by other
    chances.
    """
    layout = laid_out({})
    params = map_params(lambda info: jnp.ones(info.shape), infos())
    zeros = zero_sums(layout, params)
    assert {x.dtype.name for x in jax.tree.leaves(zeros)} == {"bfloat16"}
    ones = jnp.ones(params["layers"]["mlp"]["up_DF"].shape[1:], jnp.bfloat16)
    small = jnp.full(ones.shape, 2.0**-10, jnp.float32)

    def sum_of(layer: int) -> np.ndarray:
        def one(total: jax.Array, seed: jax.Array) -> tuple[jax.Array, None]:
            weights = GradientSums(layout, params, seed, jnp.int32(0)).weights(
                {**params, "layers": zeros["layers"]}, params
            )
            return weights["layers"]["mlp"]["up_DF"].add(total, small, jnp.int32(layer)), None

        def sums() -> jax.Array:
            return jax.lax.scan(one, ones, jnp.arange(256))[0]

        mesh = make_mesh(layout.mesh, jax.devices()[:1])
        found = jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False))()
        return np.asarray(found.astype(jnp.float32))

    first, second = sum_of(0), sum_of(1)
    np.testing.assert_allclose((first.mean(), second.mean()), 1.25, rtol=2e-3)
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.1
    assert float((ones + small.astype(jnp.bfloat16))[0, 0]) == 1.0, (
        "rounded to nearest, nothing would be left"
    )


def test_each_microbatch_has_noise_of_its_own() -> None:
    """32 equal gradients: the errors of 32 roundings cancel, to 0.8 % of the sum.

    With the same noise an element would be rounded the same way each time, and sums would be several percent
    off.
    """
    one = jax.tree.map(lambda x: x[[ONE_DOCUMENT]], adversarial_batch())
    model, mesh = Transformer(**SIZES), make_mesh(MeshSpec(), jax.devices()[:1])
    layout = laid_out({}, microbatches=32, compute_dtype="float32")
    adam = AdamW(peak_lr=1e-3, clip_norm=None)
    optimizer = build(adam, num_steps=10, params=map_params(lambda info: info, infos()))
    state = init_state(layout, optimizer, mesh, seed=0)
    _, want = loss_and_gradients(state.params, one, z_loss=SIZES["z_loss"])
    step = make_train_step(model, optimizer, layout, mesh)
    batch = jax.device_put(jax.tree.map(lambda x: np.tile(x, (32, 1)), one), jax.devices()[0])
    state, _ = step(state, batch)
    got = jax.tree.map(lambda mu: np.asarray(mu) / (1 - adam.b1), state.opt_state.mu)
    errors = relative_errors(got, want)
    assert max(errors.values()) < 1.2e-2, errors
    assert min(errors.values()) > 1e-3, "sums are rounded"


def test_stages_sum_in_float32() -> None:
    """They refuse another format, and say what to set."""
    with pytest.raises(
        ValueError, match=r"grad_accum_dtype=bfloat16 with mesh\.stage=2: .*Set precision\.grad_accum"
    ):
        laid_out(dict(stage=2))
    laid_out(dict(stage=2), grad_accum_dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "layout"),
    [({}, dict(microbatches=8)), (dict(data=2, tensor=2), dict(zero_stage=3, microbatches=4, remat="full"))],
    ids=str,
)
def test_losses_of_bfloat16_sums_are_those_of_float32(axes: dict[str, int], layout: dict[str, Any]) -> None:
    """To a thousandth, and not exactly: gradients are those of bfloat16."""
    want, got = on_one_device(), trained(axes, grad_accum_dtype="bfloat16", **layout)
    np.testing.assert_allclose(got.losses, want.losses, rtol=2e-3)
    error = [
        np.linalg.norm(g - w) / np.linalg.norm(w)
        for g, w in zip(jax.tree.leaves(got.gradient), jax.tree.leaves(want.gradient), strict=True)
    ]
    assert 1e-4 < max(error) < 2e-2


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("topology", ("h200:1", "v5p:2x2x1"))
def test_compilers_hold_one_set_of_gradients(topology: str, dtype: str) -> None:
    """With all state in bfloat16: temporaries are those of the formula, within a tenth, and no moment is
    copied.
    """
    devices = topology_devices(topology)
    sizes: dict[str, Any] = WIDE | dict(num_layers=12)
    model = Transformer(**sizes)
    fields: dict[str, Any] = dict(zero_stage=3, remat="full", microbatches=4, param_dtype="bfloat16")
    fields |= dict(grad_accum_dtype=dtype, kernels=(("attention", "xla"),))
    lay = layout_from(fields, MeshSpec(data=len(devices)), model.param_infos())
    adam = AdamW(peak_lr=1e-3, moment_dtype="bfloat16_sr", param_rounding="stochastic")
    built = build(adam, num_steps=20, params=map_params(lambda info: info, model.param_infos()))
    job = Job(model, lay, adam, 4 * len(devices), 256, machine_of(devices))
    program, plan = compile_step(job, built, devices=devices), memory(job)
    assert program.argument_bytes == plan.argument_bytes
    assert plan.total_bytes / program.peak_bytes == pytest.approx(1, abs=0.1)
    sums = (4 if dtype == "float32" else 2) * plan.parameters // 2
    assert sums <= program.temp_bytes < 2 * sums
