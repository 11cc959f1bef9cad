"""Ahead-of-time compilation for a chip that is not present, with a report: kernels, spills, memory.

Needs the extra [aot], and its environment variables before JAX starts. The report says nothing about speed,
because compilers do not autotune without the hardware.
"""

import collections
import contextlib
import dataclasses
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jtrain_kernels import compat, registry
from jtrain_kernels.compile_only.cubin import KernelResources, kernels
from jtrain_kernels.compile_only.targets import TPUS, topology_devices
from jtrain_kernels.device import DeviceSpec, from_name, live
from jtrain_kernels.errors import UserError
from jtrain_kernels.installed import is_installed

# One per custom call of the scheduled program: the instruction's name and its target.
_CALL = re.compile(r'^\s*(?:ROOT )?%([\w.-]+) = .* custom-call\(.*custom_call_target="([^"]+)"', re.MULTILINE)
# Memory space 1 is VMEM; XLA writes its use into the backend config of each instruction.
_VMEM = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"')
_SHARED = re.compile(r"^Resources\(smem_scratch_bytes=(\d+).*\n?", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of compiling a function; bytes are per device.

    calls: target of custom calls (`mosaic_gpu_v2`, `__cublas$lt$matmul$f8`, ...) -> number of calls; for
      Pallas on TPUs (`tpu_custom_call`) also name of the kernel -> number of calls.
    kernels: kernels of NVIDIA GPUs, XLA's own included, those of jax-triton excluded.
    scratch_bytes: largest known use of `DeviceSpec.scratch_bytes` by one kernel: static shared memory,
      Mosaic's shared memory, VMEM of instructions on TPUs.
    temp_bytes: memory that is neither argument nor output.
    hlo: the scheduled program.
    """

    device: DeviceSpec
    calls: Mapping[str, int]
    kernels: tuple[KernelResources, ...]
    scratch_bytes: int
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    hlo: str

    @property
    def spilled(self) -> tuple[KernelResources, ...]:
        """Kernels that spill registers."""
        return tuple(kernel for kernel in self.kernels if kernel.stack_bytes)


def virtual_mesh(topology: str, axes: Mapping[str, int]) -> Mesh:
    """Mesh of devices to compile for: the first devices of a topology such as `h200:8` or `v5p:2x2x1`.

    Raises:
      UserError: the topology does not exist, or has fewer devices than the axes need.
    """
    devices, count = topology_devices(topology), int(np.prod(list(axes.values())))
    if count > len(devices):
        sizes = ", ".join(f"{name}={size}" for name, size in axes.items())
        raise UserError(
            f"{topology} has {len(devices)} devices, but {sizes} needs {count}. Take a larger topology."
        )
    return Mesh(np.array(devices[:count]).reshape(tuple(axes.values())), tuple(axes))


def virtual_device(name: str) -> Mesh:
    """Mesh of one device called `name`."""
    return virtual_axis(name, "x", 1)


def virtual_axis(name: str, axis: str, size: int) -> Mesh:
    """Mesh of `size` devices called `name` along `axis`, of the smallest common topology with enough devices.

    Raises:
      UserError: the device is unknown, or no common topology has enough devices.
    """
    spec = from_name(name)
    topologies = TPUS[spec.name] if spec.platform == "tpu" else (f"{spec.name}:{size}",)
    # Topologies are listed by size; if none is enough, the largest one goes on to the error of virtual_mesh.
    enough = (topology for topology in topologies if len(topology_devices(topology)) >= size)
    return virtual_mesh(next(enough, topologies[-1]), {axis: size})


def compile_for(
    machine: str | Mesh,
    function: Callable[..., Any],
    *args: Any,
    forced: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Compiles `function(*args)` for a machine without allocating anything.

    Args:
      machine: a device's name, or a mesh of `virtual_mesh`.
      args: trees of `jax.ShapeDtypeStruct`; an array without a sharding is replicated.
      forced: implementations of ops, as in `registry.on`.
      options: compiler options, beside those that the implementations need.

    Raises:
      UserError: the machine is unknown, its compiler is not installed, or a forced implementation cannot run.
    """
    mesh = virtual_device(machine) if isinstance(machine, str) else machine
    spec = live(mesh.devices.flat[0])
    replicated = NamedSharding(mesh, PartitionSpec())

    def with_sharding(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return x if x.sharding is not None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated)

    args = jax.tree.map(with_sharding, args)
    # Without the compile cache: a program for an absent machine can be written to it but not read back.
    with registry.on(spec, forced=forced), compat.lowering_for(mesh, spec), compat.no_compile_cache():
        # Mosaic prints its shared memory while it lowers; afterwards the number is in no report.
        with _shared_memory() as shared:
            lowered = jax.jit(function).lower(*args)
        required_options = registry.compiler_options(forced or {})
        # The caller's options win over those that the implementations need.
        program: Any = lowered.compile(compiler_options=required_options | dict(options or {}))
    memory, text = program.memory_analysis(), program.as_text()
    # Only a GPU's executable contains cubins; a TPU's has its kernels in another form.
    kernel_resources = kernels(program.runtime_executable().serialize()) if spec.platform == "gpu" else ()
    calls = collections.Counter[str]()
    for name, target in _CALL.findall(text):
        calls[target] += 1
        # Pallas kernels of a TPU share one target, so names are counted too, without XLA's `.3`.
        if target == "tpu_custom_call":
            calls[re.sub(r"\.\d+$", "", name)] += 1
    vmem = [int(size) for size in _VMEM.findall(text)]
    return Report(
        device=spec,
        calls=dict(calls),
        kernels=kernel_resources,
        scratch_bytes=max([*shared, *vmem, *(k.static_shared_bytes for k in kernel_resources)], default=0),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        hlo=text,
    )


@contextlib.contextmanager
def _shared_memory() -> Iterator[list[int]]:
    """Collects the bytes of shared memory that Mosaic prints for each kernel lowered within the context."""
    name, shared_bytes, printed = "MOSAIC_GPU_DUMP_RESOURCES", [], io.StringIO()
    # Mosaic reads the variable when it lowers a kernel, so it may be set this late.
    previous_value = os.environ.get(name)
    os.environ[name] = "1"
    try:
        with contextlib.redirect_stdout(printed):
            yield shared_bytes
    finally:
        if previous_value is None:
            del os.environ[name]
        else:
            os.environ[name] = previous_value
        shared_bytes += [int(size) for size in _SHARED.findall(printed.getvalue())]
        # Everything else that was printed goes on to the caller's stdout.
        print(_SHARED.sub("", printed.getvalue()).lstrip("\n"), end="")


def failures(
    report: Report, *, expect: tuple[str, ...] = (), temp_bytes: int | None = None
) -> tuple[str, ...]:
    """Checks that a compiled function fails, one sentence each; empty if it passes all.

    No kernel may spill registers or use more scratch memory than the device has.

    Args:
      expect: parts of the names of custom calls or kernels that the program must contain; a missing one means
        that another implementation ran.
      temp_bytes: budget of temporary memory.
    """
    messages: list[str] = []
    for kernel in report.spilled:
        # A spill costs memory traffic in the inner loop, so it fails even if the kernel fits.
        messages.append(
            f"{kernel.name} spills: {kernel.stack_bytes} bytes of stack per thread, {kernel.registers} "
            "registers"
        )
    limit = report.device.scratch_bytes
    if limit is not None and report.scratch_bytes > limit:
        messages.append(
            f"{report.scratch_bytes} bytes of scratch memory, but a {report.device.name} has {limit}"
        )
    for name in expect:
        called = [*report.calls, *(kernel.name for kernel in report.kernels)]
        # Part of a name suffices, because compilers append numbers and suffixes.
        if not any(name in called_name for called_name in called):
            messages.append(f"{name} is not in the program, which calls {', '.join(called) or 'no kernel'}")
    if temp_bytes is not None and report.temp_bytes > temp_bytes:
        messages.append(f"{report.temp_bytes} temporary bytes, over the budget of {temp_bytes}")
    return tuple(messages)


def compile_op(
    op: registry.Op, case: str, machine: str | Mesh, implementation: str, *, gradients: bool = True
) -> Report:
    """Compiles one implementation of an op for one case, by default with gradients of its float arrays.

    Args:
      machine: a device's name, or a mesh, which must have the case's axis if the op communicates.

    Raises:
      UserError: the implementation cannot run there, or `compile_for` raises it.
    """
    avals = op.cases[case]
    arrays = {name: x for name, x in avals.items() if isinstance(x, jax.ShapeDtypeStruct)}
    function = op_function(op, avals, gradients=gradients)
    if (axis := axis_of(avals)) is not None:
        # The named axis exists only under shard_map, so an op that communicates gets its mesh.
        machine = virtual_axis(machine, *axis) if isinstance(machine, str) else machine
        function = over(machine, function)
    return compile_for(machine, function, arrays, forced={op.name: implementation})


def axis_of(avals: registry.Avals) -> tuple[str, int] | None:
    """Name and size of the mesh axis over which a case's op communicates; None if it does not communicate."""
    name, size = avals.get("axis_name"), avals.get("axis_size")
    return (name, size) if isinstance(name, str) and isinstance(size, int) else None


def missing_library(implementation: str) -> str | None:
    """Library that must be installed to compile (not to lower) an implementation; None if none is."""
    if implementation != "cudnn":
        return None
    if is_installed("nvidia.cudnn"):
        return None
    return "its library, 0.7 GB, is not installed (pip install nvidia-cudnn-cu13)"


def over(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` on every device of a mesh, each with the same arrays: cases hold one device's blocks."""
    replicated = PartitionSpec()
    # check_vma=False: results differ between devices, though the specification calls them replicated.
    return jax.shard_map(function, mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=False)


def op_function(
    op: registry.Op, avals: registry.Avals, *, gradients: bool
) -> Callable[[dict[str, Any]], Any]:
    """Function of the case's arrays (by name) that calls the op, optionally with gradients.

    The cotangents are the results themselves, so that XLA cannot remove either pass.
    """
    statics = {name: x for name, x in avals.items() if not isinstance(x, jax.ShapeDtypeStruct)}

    def forward(arrays: dict[str, Any]) -> Any:
        return registry.call(op, **arrays, **statics)

    def backward(arrays: dict[str, Any]) -> Any:
        # Segment ids and tokens are integers and have no gradients.
        floats = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        result, pullback = jax.vjp(lambda floats: forward(arrays | floats), floats)
        return result, pullback(result)

    return backward if gradients else forward
