"""Optimizer state in host memory, by the compilers of machines that are not here: where it is, and what is
copied.
"""

import dataclasses
import functools
from typing import Any

import pytest

from jtrain.hlo.traffic import Traffic
from jtrain.layout.layout import LayoutSpec, OffloadSpec, make_layout
from jtrain.layout.mesh import MeshSpec
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import build
from jtrain.plan.compile.compiled_step import CompiledStep, compile_step, topology_devices
from jtrain.plan.estimate.machine import machine_of
from jtrain.plan.estimate.memory import MemoryPlan, memory
from jtrain.plan.job import Job
from tests.step.test_host_offload import ADAMW, SIZES

WIDE: dict[str, Any] = SIZES | dict(
    num_layers=4, d_model=512, num_heads=4, num_kv_heads=1, head_dim=128, d_ff=1792, vocab_size=4096
)

MORE_TOPOLOGIES = ("h200:8", "v5p:2x2x1")
"""A minute each."""


@functools.cache
def compiled(topology: str, spec: LayoutSpec) -> tuple[CompiledStep, MemoryPlan]:
    """The compiler's word on a step for a machine that is not here, and the formula's."""
    devices = topology_devices(topology)
    model = Transformer(**WIDE)
    lay = make_layout(spec, MeshSpec(data=len(devices)), model.param_infos(), kernels=(("attention", "xla"),))
    opt = build(ADAMW, num_steps=20, params=map_params(lambda info: info, model.param_infos()))
    job = Job(model, lay, ADAMW, len(devices), 256, machine_of(devices))
    return compile_step(job, opt, devices=devices), memory(job)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("topology", ("h200:1", *MORE_TOPOLOGIES))
def test_compilers_put_the_state_on_the_host_and_copy_beside_each_other(topology: str) -> None:
    """What moves is gone from the device but for slices of one array; the network carries what it did.

    Both directions of the bus carry every byte once, beside each other but for each leaf's ends.
    """
    stage: Any = 0 if topology == "h200:1" else 3
    spec = LayoutSpec(zero_stage=stage, remat="full")
    plain, _ = compiled(topology, spec)
    program, plan = compiled(topology, dataclasses.replace(spec, offload=OffloadSpec(optimizer=1.0)))
    host = program.host_argument_bytes
    assert host == plan.host_optimizer > 0
    assert plain.host_argument_bytes == 0
    assert plain.argument_bytes - program.argument_bytes == host
    assert program.host_temp_bytes == 0, "no copy of a stack"
    devices = 8 if topology == "h200:8" else 4 if topology.startswith("v5p") else 1
    slices = 4 * 4 * 4096 * 512 // devices  # fetched and new, of both moments of the embedding, float32
    assert plain.peak_bytes - program.peak_bytes >= host - slices
    copies = {c.direction: c for c in program.host_copies}
    assert set(copies) == {"to host", "to device"}
    for c in copies.values():
        assert c.bytes == c.async_bytes == host
        assert c.duplex_bytes / c.bytes > 0.6, "four layers; all but the ends of each leaf"
    assert [_sent(t) for t in program.traffic] == [_sent(t) for t in plain.traffic]


def _sent(t: Traffic) -> tuple[Any, ...]:
    return t.kind, t.axes, t.group, t.dtype, t.count, t.array_bytes


@pytest.mark.slow
@pytest.mark.aot
def test_the_hosts_cores_compile_too() -> None:
    """For an H200, one parameter after another; the moments never leave the host."""
    program, plan = compiled(
        "h200:1", LayoutSpec(remat="full", offload=OffloadSpec(optimizer=1.0, update="host"))
    )
    assert program.host_argument_bytes == plan.host_optimizer > 0
    gradients = plan.host_optimizer // 2
    to_host = sum(c.bytes for c in program.host_copies if c.direction == "to host")
    assert gradients <= to_host < 2.1 * gradients, "gradients and parameters, float32"
