"""Sums of gradients in host memory: the same training, with the sums of three layers on the device at a
time.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from jtrain.errors import UserError
from jtrain.layout.layout import Layout, OffloadSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Muon, build
from jtrain.optim.optimizer import check_offload
from jtrain.plan.compile.compiled_step import CompiledStep, compile_step, topology_devices
from jtrain.plan.estimate.machine import machine_of
from jtrain.plan.estimate.memory import MemoryPlan, memory
from jtrain.plan.estimate.step_time import step_time
from jtrain.plan.job import Job
from tests.layouts import layout_from
from tests.step.test_host_offload_compiled import WIDE
from tests.step.test_train_step import SIZES, trained

ALL = OffloadSpec(gradients=1.0)
EVERYTHING = OffloadSpec(optimizer=1.0, params=1.0, activations=1.0, gradients=1.0)
BY_CORES = OffloadSpec(optimizer=1.0, gradients=1.0, update="host")


def assert_same(axes: dict[str, int], offload: OffloadSpec, **layout: Any) -> None:
    """Twenty steps: the same to rounding, as the norm of the gradients is summed in another order."""
    plain = trained(axes, **layout)
    got = trained(axes, offload=offload, **layout)
    np.testing.assert_allclose(got.losses, plain.losses, rtol=1e-6)
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(g, w, atol=1e-6 * np.abs(w).max()),
        got.gradient,
        plain.gradient,
    )
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4), got.last, plain.last)
    assert got.hashes == plain.hashes
    assert got.num_traces == 1


@pytest.mark.slow
def test_sums_in_host_memory_are_not_a_model() -> None:
    """Two microbatches on one device."""
    assert_same({}, ALL, microbatches=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "offload", "layout"),
    [
        ({}, ALL, dict(microbatches=1)),
        ({}, OffloadSpec(gradients=0.4), dict(microbatches=2)),
        ({}, BY_CORES, dict(microbatches=2)),
        (dict(data=2), ALL, dict(microbatches=4, zero_stage=2)),
        (dict(data=2, tensor=2), EVERYTHING, dict(microbatches=4, zero_stage=3, remat="full")),
        (dict(data=2, context=2), ALL, dict(microbatches=2, zero_stage=3)),
        (dict(data=2), ALL, dict(microbatches=2, zero_stage=3, grad_accum_dtype="bfloat16")),
    ],
    ids=str,
)
def test_no_layout_with_sums_in_host_memory_is_a_model(
    axes: dict[str, int], offload: OffloadSpec, layout: dict[str, Any]
) -> None:
    """With each kind of layout whose layers finish their gradients, and with all else in host memory too."""
    assert_same(axes, offload, **layout)


def laid_out(axes: dict[str, int], offload: OffloadSpec = ALL, **fields: Any) -> Layout:
    infos = Transformer(**SIZES).param_infos()
    return layout_from(dict(offload=offload, microbatches=2) | fields, MeshSpec(**axes), infos)


@pytest.mark.parametrize(
    ("axes", "fields", "said"),
    [
        (
            dict(data=2),
            dict(zero_stage=1),
            r"offload\.gradients=1 with layout\.zero_stage=1, .*Set layout\.zero_stage=2",
        ),
        (
            dict(replica=2, data=2),
            dict(zero_stage=3),
            r"mesh\.replica=2 .* and mesh\.replica=1, or .*gradients=none",
        ),
        (
            dict(stage=2),
            {},
            r"offload\.gradients=1\.0 with mesh\.stage=2: .*gradients=none, or mesh\.stage=1",
        ),
        (
            {},
            dict(offload=OffloadSpec(gradients=0.01)),
            r"gradients=0\.01 moves nothing: the smallest array is",
        ),
    ],
    ids=str,
)
def test_sums_that_do_not_stream_are_refused(axes: dict[str, int], fields: dict[str, Any], said: str) -> None:
    """Each message names the fields, and the way out works."""
    with pytest.raises(UserError, match=said):
        laid_out(axes, **fields)
    laid_out(dict(data=2), zero_stage=2)


def test_muon_keeps_its_gradients_on_the_device() -> None:
    """It needs whole matrices."""
    with pytest.raises(UserError, match=r"offload\.gradients=1\.0 with Muon: .*gradients=none, or use AdamW"):
        check_offload(laid_out({}).spec, Muon(peak_lr=1e-3, warmup_steps=2))


@functools.cache
def compiled(topology: str, offload: OffloadSpec) -> tuple[CompiledStep, MemoryPlan, float]:
    """The compiler's word on a step for a machine that is not here, the formula's, and the formula's copy
    seconds.
    """
    devices = topology_devices(topology)
    sizes: dict[str, Any] = WIDE | dict(num_layers=12)
    model, optimizer = Transformer(**sizes), AdamW(peak_lr=1e-3, moment_dtype="bfloat16", warmup_steps=2)
    fields: dict[str, Any] = dict(
        zero_stage=3, remat="full", microbatches=4, param_dtype="bfloat16", offload=offload
    )
    fields |= dict(grad_accum_dtype="bfloat16", kernels=(("attention", "xla"),))
    lay = layout_from(fields, MeshSpec(data=len(devices)), model.param_infos())
    opt = build(optimizer, num_steps=20, params=map_params(lambda info: info, model.param_infos()))
    job = Job(model, lay, optimizer, 4 * len(devices), 256, machine_of(devices))
    plan = memory(job)
    return compile_step(job, opt, devices=devices), plan, step_time(job, plan).host_copy_s


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize("topology", ("h200:1", "v5p:2x2x1"))
def test_compilers_hold_the_sums_of_three_layers(topology: str) -> None:
    """The host holds the sums once, in one layout; each microbatch's backward pass copies them there and
    back.
    """
    plain, _, without_s = compiled(topology, OffloadSpec())
    program, plan, copy_s = compiled(topology, ALL)
    sums = plan.host_gradients
    assert program.host_temp_bytes == sums > 0, "no copy of a stack"
    assert program.argument_bytes == plain.argument_bytes
    assert plain.peak_bytes - program.peak_bytes > sums * (1 - 3 / 12)
    assert 0.87 < plan.total_bytes / program.peak_bytes < 1.15
    there = {c.direction: c.bytes for c in program.host_copies}
    # Once more than layers in every microbatch, of the last layer before the loop and of the first after it.
    assert there["to host"] == 4 * sums * 13 // 12
    assert there["to device"] == 5 * sums * 13 // 12 + sums, "also for the norm, and for the update"
    assert all(c.bytes == c.async_bytes for c in program.host_copies)
    assert all(c.hidden_bytes >= 4 * sums for c in program.host_copies), (
        "in the loop over layers beside matmuls"
    )
    assert copy_s > without_s == 0
    assert dataclasses.replace(plan, host_gradients=0).host_bytes == 0
