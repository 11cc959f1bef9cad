"""The real train step compiled for a machine that is not here, by that machine's own compiler.

The environment must hold `jtrain.plan.AOT_ENVIRONMENT` before JAX is imported. Nothing here tells speed: without the
hardware no compiler tunes.
"""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jtrain.dims import Batch
from jtrain.gather import along_torus
from jtrain.layout import Layout, check_batch
from jtrain.mesh import make_mesh
from jtrain.model.transformer import Transformer
from jtrain.optim import Optimizer
from jtrain.plan.hlo import HostCopies, Traffic, host_copies, traffic
from jtrain.step import BATCH_SPEC, abstract_state, make_train_step
from jtrain_kernels.compat import lowering_for, no_compile_cache
from jtrain_kernels.device import live
from jtrain_kernels.targets import topology_devices

__all__ = ["CompiledStep", "compile_step", "no_compile_cache", "topology_devices"]


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """What the compiler says of one train step; bytes are per device.

    argument_bytes: the state and the batch, on the device; host_argument_bytes: in host memory.
    temp_bytes: everything else, as the compiler packed it into one block that is there for the whole step.
    peak_bytes: all that the program allocates on the device: both, and outputs beyond the donated state.
    rings: `Layout.rings` of the machine.
    traffic, host_copies: every collective of a step, and every copy to or from host memory, loops counted.
    lower_s, compile_s: seconds.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    host_argument_bytes: int
    host_temp_bytes: int
    peak_bytes: int
    rings: tuple[int, ...]
    traffic: tuple[Traffic, ...]
    host_copies: tuple[HostCopies, ...]
    lower_s: float
    compile_s: float


def compile_step(
    model: Transformer,
    layout: Layout,
    optimizer: Optimizer,
    *,
    global_batch: int,
    seq_len: int,
    devices: list[jax.Device],
) -> CompiledStep:
    """Compiles the train step for `devices`, which need not be able to run it. Seconds to minutes; allocates nothing.

    Raises:
      ValueError: the mesh is not of that many devices, or the batch does not split evenly.
    """
    check_batch(layout.spec, layout.mesh, global_batch=global_batch, seq_len=seq_len)
    mesh = make_mesh(layout.mesh, devices)
    ids = jax.ShapeDtypeStruct((global_batch, seq_len), jnp.int32, sharding=NamedSharding(mesh, BATCH_SPEC))
    step: Any = make_train_step(model, optimizer, layout, mesh)
    start = time.perf_counter()
    with lowering_for(mesh, live(devices[0])):  # kernels written for GPUs ask for the chip's cores
        lowered = step.lower(abstract_state(layout, optimizer, mesh), Batch(ids, ids, ids, ids))
    lowered_at = time.perf_counter()
    with no_compile_cache():
        program = lowered.compile()
    compiled_at = time.perf_counter()
    memory = program.memory_analysis()
    text = program.as_text()
    return CompiledStep(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.total_allocation_bytes - memory.indefinite_allocations,
        host_argument_bytes=memory.host_argument_size_in_bytes,
        host_temp_bytes=memory.host_temp_size_in_bytes,
        peak_bytes=memory.total_allocation_bytes,
        rings=along_torus(layout, mesh).rings,
        traffic=tuple(traffic(text, layout.mesh.shape)),
        host_copies=tuple(host_copies(text)),
        lower_s=lowered_at - start,
        compile_s=compiled_at - lowered_at,
    )
