"""Triton kernels in JAX, by jax-triton 0.3.1 or 0.4: the only caller of it.

0.4 calls results `out_type` that 0.3 called `out_shape`; 0.4 needs triton >= 3.7, 0.3.1 is what works with 3.6. Neither
has derivatives, batching or an interpreter on CPUs: an op brings its own `custom_vjp`.
"""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from typing import Any

import jax

from jtrain_kernels import compat
from jtrain_kernels.device import DeviceSpec

INSTALL = "pip install 'jtrain[cuda]'"
OPTIONS = {
    # As every Triton before 3.10 does unasked: a product and a sum are one instruction.
    "enable_fp_fusion": True,
    # 9.0, which CUDA 13.0 reads. Unasked, Triton writes for the assembler that it brings, and JAX's may be older.
    "ptx_version": 90,
}
"""Of Triton's compiler, so that neither its version nor CUDA's decides; for AMD it passes over what is not for it."""


def refusal(device: DeviceSpec) -> str | None:
    """Why no Triton kernel can run on a device, None if it can. Imports nothing."""
    if device.platform != "gpu":
        return f"it is for GPUs, not for a {device.name}"
    if device.compute_capability is not None and device.compute_capability < (8, 0):
        major, minor = device.compute_capability
        return f"Triton needs compute capability 8.0, and a {device.name} has {major}.{minor}"
    missing = [name for name in ("jax_triton", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} ({INSTALL})"
    return None


def capability(device: DeviceSpec) -> int:
    """90 for compute capability 9.0; 0 for what has none, as an AMD GPU."""
    major, minor = device.compute_capability or (0, 0)
    return 10 * major + minor


def triton_call(
    kernel: Any,
    *arrays: jax.Array,
    results: Sequence[jax.ShapeDtypeStruct],
    programs: int,
    warps: int,
    capability: int,
    **constants: int | float,
) -> list[jax.Array]:
    """Runs a `triton.jit` kernel: pointers to arrays, pointers to results, and constants by name.

    Args:
      programs: of the one-dimensional grid.
      capability: of the device to compile for, which need not be here; 0 asks the one that is.
    """
    jax_triton: Any = importlib.import_module("jax_triton")
    compat.mend_jax_triton()
    version = tuple(int(part) for part in importlib.metadata.version("jax-triton").split(".")[:2])
    of_version = (
        {"out_type": list(results), "backend_options": OPTIONS} if version >= (0, 4) else {"out_shape": list(results)}
    )
    called = jax_triton.triton_call(
        *arrays,
        kernel=kernel,
        grid=(programs,),
        num_warps=warps,
        compute_capability=capability or None,
        **of_version,
        **constants,
    )
    return list(called)
