"""The real train step compiled for a machine that is not here, by that machine's own compiler.

The environment must hold `jtrain.plan.AOT_ENVIRONMENT` before JAX is imported. Nothing here tells speed: without the
hardware no compiler tunes.
"""

import contextlib
import dataclasses
import importlib.util
import re
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding

from jtrain.dims import Batch
from jtrain.gather import along_torus
from jtrain.layout import Layout, check_batch
from jtrain.mesh import make_mesh
from jtrain.model.transformer import Transformer
from jtrain.optim import Optimizer
from jtrain.plan.hlo import HostCopies, Traffic, host_copies, traffic
from jtrain.step import BATCH_SPEC, abstract_state, make_train_step
from jtrain_kernels.targets import TARGETS, target_config

TPUS = {
    "v4": ("v4:2x2x1", "v4:4x4x4"),
    "v5e": ("v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:8x8", "v5e:16x16"),
    "v5p": ("v5p:2x2x1", "v5p:2x2x2", "v5p:4x4x4", "v5p:4x4x8", "v5p:8x8x8"),
    "v6e": ("v6e:2x2", "v6e:2x4", "v6e:4x4", "v6e:16x16"),
    "tpu7x": ("tpu7x:2x2x1", "tpu7x:4x4x4"),
}
"""TPU generation -> topologies of it that libtpu knows, the usual ones."""

GPUS_PER_HOST = 8

INSTALL = "pip install 'jtrain[aot]'"


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


def topology_devices(topology: str) -> list[jax.Device]:
    """Devices to compile for but not to run on.

    Args:
      topology: `v5p:4x4x8` for a slice of TPUs, `h200:8` for GPUs, in hosts of eight.

    Raises:
      ValueError: no such topology, with those that there are; or its compiler is not installed.
    """
    from jax.experimental import topologies  # lazy: only a plan for another machine needs it

    kind, _, shape = topology.partition(":")
    if kind in TARGETS and re.fullmatch(r"[1-9]\d*", shape):
        _require("jax_plugins.xla_cuda13", topology)
        per_host = min(int(shape), GPUS_PER_HOST)
        if int(shape) % per_host:
            raise ValueError(f"--topology {topology}: hosts have {per_host} GPUs each. Use a multiple of {per_host}.")
        grid = f"1x{int(shape) // per_host}x{per_host}"
        return list(
            topologies.get_topology_desc(platform="cuda", target_config=target_config(kind), topology=grid).devices
        )
    if kind not in TPUS or not re.fullmatch(r"\d+x\d+(x\d+)?", shape):
        raise _unknown(topology)
    _require("libtpu", topology)
    try:
        # As JAX sees a live v4: the two cores of a chip are one device. Later chips are listed as they are seen.
        chips = {"chip_config_name": "megacore"} if kind == "v4" else {}
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **chips).devices)
    except Exception as error:  # libtpu raises whatever its C++ raised
        raise _unknown(topology, reason=str(error).partition("\n")[0][:200]) from error


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


@contextlib.contextmanager
def no_compile_cache() -> Iterator[None]:
    """What was compiled for a machine that is not here can be written to the compile cache, but not read back."""
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # whether it is enabled is asked only once otherwise
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def _require(module: str, topology: str) -> None:
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None or importlib.util.find_spec(module) is None:
        raise ValueError(f"--topology {topology} needs the compiler {module}, which is not installed: {INSTALL}")


def _unknown(topology: str, reason: str = "") -> ValueError:
    names = [name for names in TPUS.values() for name in names] + [f"{name}:8" for name in TARGETS]
    said = f" ({reason})" if reason else ""
    return ValueError(
        f"--topology {topology}: there is no such machine{said}. There are, among other sizes: {', '.join(names)}."
    )
