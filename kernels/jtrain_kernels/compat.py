"""What differs between versions of JAX, and what is private in it: the only door to both.

Works with 0.11.2 and 0.12.0. Pallas itself is imported inside functions: 0.9 s that only kernels need.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractDevice, AbstractMesh, Mesh

from jtrain_kernels.device import DeviceSpec


def _known(cls: type, options: dict[str, Any]) -> dict[str, Any]:
    """Those of `options` that this version's dataclass has."""
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in options.items() if name in names}


def tpu_interpret(dma_mode: Literal["eager", "on_wait"], **options: Any) -> Any:
    """For `pallas_call(interpret=...)`: emulates TPUs on CPU devices, looking for races; `tpu_races_found` tells.

    Run each kernel with remote copies in both modes: of a wait that is missing, `eager` finds the race and `on_wait`
    gives NaN, and neither does the other's.
    """
    from jax.experimental.pallas import tpu as pltpu

    # From 0.12 a race raises unless told otherwise; a raise leaves the emulated memory behind.
    warn = _known(pltpu.InterpretParams, {"on_race": "warn"})
    return pltpu.InterpretParams(**({"detect_races": True, "dma_execution_mode": dma_mode} | warn | options))


def tpu_races_found() -> bool:
    """Whether the last emulated TPU kernel raced; false where none ran."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    return interpreter.races is not None and interpreter.races.races_found


def gpu_interpret(**options: Any) -> Any:
    """For `plgpu.kernel(interpret=...)`: emulates one NVIDIA GPU, looking for races; `gpu_races_found` tells.

    It has no semaphores between devices, no remote references and no multimem.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    warn = _known(plgpu.InterpretGPUParams, {"on_race": "warn"})
    return plgpu.InterpretGPUParams(**({"detect_races": True} | warn | options))


def gpu_races_found() -> bool:
    """Whether the last emulated GPU kernel raced; false where none ran."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return gpu_callbacks._races is not None and gpu_callbacks._races.races_found


def reset_interpreters() -> None:
    """Forgets emulated memory and races: due after an exception within an emulated kernel."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    interpret_pallas_call.reset_tpu_interpret_mode_state()
    gpu_callbacks.reset_gpu_interpret_mode_state()


def lowering_for(mesh: Mesh | AbstractMesh, device: DeviceSpec) -> AbstractContextManager[Any]:
    """Around lowering for GPUs that are not here: Pallas and jax-triton read the device's kind and cores from it."""
    if device.platform != "gpu":
        return contextlib.nullcontext()
    abstract = AbstractDevice(device_kind=f"NVIDIA {device.kind}", num_cores=device.num_cores, platform="gpu")
    return jax.sharding.use_abstract_mesh(
        AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types, abstract_device=abstract)
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
