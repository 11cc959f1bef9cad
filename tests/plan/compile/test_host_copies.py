"""Copies of offloaded activations in the compiled step of an 8B model: what passes while the device computes."""

import dataclasses

import pytest

from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain.plan.compile.compiled_step import compile_step, topology_devices
from jtrain.plan.compile.stream_clock import hidden_share
from jtrain.plan.compile.two_streams import rates_of, two_streams
from jtrain.plan.estimate.machine import machine_of
from jtrain.plan.estimate.memory import memory
from jtrain.plan.estimate.step_time import Assumptions, step_time
from jtrain.plan.from_run import make_optimizer, plan_job
from jtrain_kernels.device import from_name

SETS = (
    "layout.microbatches=1",
    "layout.offload.activations=1.0",
    "data.global_batch=8",
    "data.seq_len=8192",
)
LAYERS, LAYER_INPUT = 32, 8192 * 4096 * 2
"""Layers of llama8b, and bytes of one layer's input on a device: 8192 tokens of 4096 in bfloat16."""


@pytest.mark.slow
@pytest.mark.aot
def test_fetches_of_activations_hide_behind_the_layers() -> None:
    """llama8b over 8 H200: of the fetches' seconds 90 % pass while the device computes, and the plan says the same.

    Attention's kernels, whose FLOPs the program does not state, take no time here, which only makes the share smaller.
    Before there was a fetch ahead it was 10 %, with one layer's input less on the device.
    """
    built = build_run(load_config("llama8b", sets=SETS))
    devices = topology_devices("h200:8")
    job = dataclasses.replace(plan_job(built), machine=machine_of(devices))
    program = compile_step(job, make_optimizer(built), devices=devices)
    plan = memory(job)

    rates = rates_of(from_name("h200"), 8)
    hops = two_streams(program.hlo, job.layout.mesh.shape, rates).hops
    fetches = [hop for hop in hops if hop.kind == "to device"]
    assert sum(hop.bytes for hop in fetches) == (LAYERS + 1) * LAYER_INPUT
    assert hidden_share(fetches) > 0.9
    [to_device] = [copies for copies in program.host_copies if copies.direction == "to device"]
    assert to_device.hidden_bytes == to_device.bytes, "a matmul stands between every start and its done"

    timed = step_time(job, plan, assume=Assumptions(host_link=1.0))
    copies = [hop for hop in hops if hop.kind in ("to device", "to host")]
    assert timed.host_copy_s == pytest.approx(sum(hop.seconds for hop in copies), rel=0.02)
    exposed_s = sum(hop.seconds - hop.hidden_s for hop in copies)
    assert timed.exposed_host_s == pytest.approx(exposed_s, abs=0.005 * timed.step_s)

    assert program.host_temp_bytes == plan.host_activations == LAYERS * LAYER_INPUT
    assert plan.temp_bytes == pytest.approx(program.temp_bytes, rel=0.1)
