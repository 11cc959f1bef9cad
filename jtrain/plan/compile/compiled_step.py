"""Ahead-of-time compilation of the real train step for a machine that is not here, by that machine's own
compiler.

The environment must hold `jtrain.plan.AOT_ENVIRONMENT` before JAX is imported. The result says nothing about
speed: compilers tune only on the hardware.
"""

import dataclasses
import functools
import re
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jtrain.hlo.traffic import HostCopies, Traffic, host_copies, traffic
from jtrain.layout.layout import Layout
from jtrain.layout.mesh import make_mesh
from jtrain.optim import Optimizer
from jtrain.pipeline.ticks import SCOPES
from jtrain.plan.job import Job
from jtrain.step.objective import abstract_batch
from jtrain.step.pipeline_ticks import chunk_passes
from jtrain.step.state import abstract_state
from jtrain.step.torus_collectives import along_torus
from jtrain.step.train_step import BATCH_SPEC, make_train_step
from jtrain_kernels.compat import lowering_for, no_compile_cache
from jtrain_kernels.compile_only.targets import topology_devices
from jtrain_kernels.device import live

__all__ = ["CompiledStep", "compile_step", "no_compile_cache", "topology_devices"]

_OF_TICKS = re.compile(rf"^[^/]*/shard_map/while/body/(?:[^/]*/)?(layers/(?:{'|'.join(SCOPES)})/)?cond$")
"""Names of the conditionals in the loop over ticks, but not of those inside them."""


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """The compiler's figures of one train step; bytes are per device.

    argument_bytes: state and batch in device memory; host_argument_bytes: in host memory.
    temp_bytes: temporaries, which the compiler packs into one block that lives for the whole step.
    peak_bytes: everything that the program allocates on the device: arguments, temporaries, and outputs
      beyond the donated state.
    rings: `Layout.rings` of the machine.
    traffic, host_copies: every collective of a step, and every copy to or from host memory; those in loops
      count once per iteration, those in a pipeline's branches as often as its schedule takes them.
    lower_s, compile_s: seconds of lowering and of compilation.
    hlo: the optimized program, in schedule order.
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
    hlo: str = dataclasses.field(repr=False)


def compile_step(
    job: Job,
    optimizer: Optimizer,
    *,
    devices: list[jax.Device],
    compiler_options: Mapping[str, Any] = MappingProxyType({}),
) -> CompiledStep:
    """Compiles the train step for `devices`, which may be compile-only. Takes seconds to minutes; allocates
    nothing.

    Args:
      optimizer: `job.optimizer`, built.
      compiler_options: options beside those of the train step.

    Raises:
      UserError: the mesh is not of that many devices, or the batch does not split evenly.
    """
    job.rows()  # refuses a batch that does not split evenly
    layout = job.layout
    mesh = make_mesh(layout.mesh, devices)
    ids = jax.ShapeDtypeStruct(
        (job.global_batch, job.seq_len), jnp.int32, sharding=NamedSharding(mesh, BATCH_SPEC)
    )
    step: Any = make_train_step(job.model, optimizer, layout, mesh, objective=job.objective)
    start = time.perf_counter()
    with lowering_for(mesh, live(devices[0])):  # GPU kernels ask for the chip's number of cores
        lowered = step.lower(abstract_state(layout, optimizer, mesh), abstract_batch(ids, job.objective))
    lowered_at = time.perf_counter()
    with no_compile_cache():
        program = lowered.compile(compiler_options=dict(compiler_options))
    compiled_at = time.perf_counter()
    memory = program.memory_analysis()
    text, count_executions = program.as_text(), functools.partial(executions_of_branch, layout)
    return CompiledStep(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        # Arguments and outputs live for ever, as the compiler counts; the rest is temporary.
        temp_bytes=memory.total_allocation_bytes - memory.indefinite_allocations,
        host_argument_bytes=memory.host_argument_size_in_bytes,
        host_temp_bytes=memory.host_temp_size_in_bytes,
        peak_bytes=memory.total_allocation_bytes,
        rings=along_torus(layout, mesh).rings,
        traffic=tuple(traffic(text, layout.mesh.shape, count_executions)),
        host_copies=tuple(host_copies(text, count_executions)),
        lower_s=lowered_at - start,
        compile_s=compiled_at - lowered_at,
        hlo=text,
    )


def executions_of_branch(layout: Layout, op_name: str) -> int | None:
    """Executions per step of what a conditional of `jtrain.step.pipelined` computes; None for other
    conditionals.

    Args:
      op_name: the conditional's, of the compiled program.
    """
    tick_match = _OF_TICKS.search(op_name)
    if layout.pipeline is None or tick_match is None:
        return None
    # Embedding and loss have branches too: they run once per microbatch.
    return chunk_passes(layout) if tick_match[1] else layout.spec.microbatches
