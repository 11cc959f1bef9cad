"""Triton kernels in JAX through jax-triton 0.4; the only module that calls it.

It has no derivatives, batching or interpreter on CPUs, so an op brings its own `custom_vjp`.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import jax

from jtrain_kernels import compat
from jtrain_kernels.device import DeviceSpec

MODULES = "jax_triton", "triton"
"""Optional modules that a Triton kernel needs."""

OPTIONS = {
    # Fuses a product and a sum into one instruction, the default of every Triton before 3.10.
    "enable_fp_fusion": True,
    # PTX 9.0, which CUDA 13.0 reads. By default Triton targets its own assembler, and JAX's may be older.
    "ptx_version": 90,
}
"""Options of Triton's compiler, the same for all versions of Triton and CUDA; for AMD it ignores those of
NVIDIA."""


def refusal(device: DeviceSpec) -> str | None:
    """Reason why no Triton kernel can run on a device; None if one can."""
    if device.platform != "gpu":
        return f"it is for GPUs, not for a {device.name}"
    if device.compute_capability is not None and device.compute_capability < (8, 0):
        major, minor = device.compute_capability
        return f"Triton needs compute capability 8.0, and a {device.name} has {major}.{minor}"
    return None


def capability(device: DeviceSpec) -> int:
    """Compute capability as a number: 90 for 9.0, 0 for a device without one, such as an AMD GPU."""
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
      results: shapes and dtypes of the results.
      programs: size of the one-dimensional grid.
      warps: warps per program.
      capability: compute capability to compile for; no such device is needed. 0 queries the live device.
    """
    jax_triton: Any = importlib.import_module("jax_triton")
    # Before the first call, since differentiating a traced call would already fail.
    compat.mend_jax_triton()
    called = jax_triton.triton_call(
        *arrays,
        kernel=kernel,
        grid=(programs,),
        num_warps=warps,
        # None makes jax-triton ask the live device; AMD's has no compute capability.
        compute_capability=capability or None,
        out_type=list(results),
        backend_options=OPTIONS,
        **constants,
    )
    return list(called)
