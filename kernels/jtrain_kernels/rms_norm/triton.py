"""RMSNorm's backward pass on NVIDIA and AMD GPUs in one pass over memory, where XLA makes three.

XLA:GPU compiles the forward pass to one kernel that reads and writes each element once, so it stays. It
compiles the backward pass to three kernels, which move 386 MiB at 8192 x 4096 in bfloat16 where 192 are
enough (compiled for an H200); one H100 ran that at half of a copy's bandwidth, and the kernel at nine tenths.
Here each program holds a row in registers, takes every `programs`-th row, and accumulates the gradient of the
scale on the way. The rows that a program takes next are copied to shared memory meanwhile, `stages - 1` at a
time.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels import triton_call
from jtrain_kernels.device import DeviceSpec
from jtrain_kernels.registry import Avals
from jtrain_kernels.rms_norm.triton_kernels import kernels

MAX_WIDTH = 16384
"""Maximum elements of a row in registers: 16 warps, with 32 elements per thread in four arrays."""

_PER_THREAD, _THREADS = 8, 512
"""Elements of a row per thread, and threads per core: one program of 16 warps per core for rows of 4096."""


def refusal(device: DeviceSpec, x: jax.ShapeDtypeStruct, *, residual: bool) -> str | None:
    """Reason why the kernel cannot run; None if it can."""
    del residual
    if (reason := triton_call.refusal(device)) is not None:
        return reason
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"x is {x.dtype}, not bfloat16, float16 or float32"
    if x.shape[-1] > MAX_WIDTH:
        return f"rows of {x.shape[-1]} do not fit into registers; up to {MAX_WIDTH} do"
    return None


def configs(device: DeviceSpec, avals: Avals) -> Sequence[dict[str, int]]:
    """Candidate programs, warps and stages; first 512 threads per core, 8 elements each, and four stages.

    At 8192 x 4096 in bfloat16 that was the fastest on one H100 (2026-11-22, JAX 0.11.2): 2647 GB/s, with a
    residual 2743, where a copy has 2894. Narrower rows, which were not measured, have more programs per core
    with fewer warps each. Stages whose rows do not fit into shared memory, three arrays for each program of a
    core, are left out.
    """
    x = avals["x"]
    assert isinstance(x, jax.ShapeDtypeStruct)
    width = x.shape[-1]
    # 108 cores, an A100's, for a device whose number of cores is not known.
    cores = device.num_cores or 108
    # AMD's wavefronts have 64 threads, NVIDIA's warps 32.
    threads = 64 if device.compute_capability is None else 32
    best = max(1, min(16, _power_of_two(width) // (threads * _PER_THREAD)))
    half, quarter = max(1, best // 2), max(1, best // 4)
    programs_per_core = max(1, _THREADS // (best * threads))
    rows = max(1, x.size // width)
    candidates = [
        (programs_per_core, best, 4),
        (programs_per_core, best, 3),
        (programs_per_core, best, 5),
        (programs_per_core, half, 4),
    ]
    candidates += [
        (2 * programs_per_core, half, 3),
        (2 * programs_per_core, quarter, 4),
        (2 * programs_per_core, best, 3),
    ]
    # dy, x and the residual's gradient: copies of each in all stages but the one in registers.
    row_bytes = 3 * _power_of_two(width) * x.dtype.itemsize
    fitting = [
        candidate
        for candidate in candidates
        if candidate[0] * (candidate[2] - 1) * row_bytes <= (device.scratch_bytes or 0)
    ]
    return [
        # No more programs than rows: a program without rows would write zeros.
        dict(programs=min(p * cores, rows), warps=w, stages=s, capability=triton_call.capability(device))
        # Without stages (1) nothing is copied ahead, so these two fit every device.
        for p, w, s in dict.fromkeys(
            [*fitting, (2 * programs_per_core, half, 1), (2 * programs_per_core, best, 1)]
        )
    ]


def _power_of_two(width: int) -> int:
    return 1 << (width - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class OnePassTriton:
    """Gradients of `x * inverse_rms(x) * scale` in one kernel."""

    programs: int
    warps: int
    stages: int
    capability: int

    def __call__(
        self,
        dy: Float[Array, "*rest C"],
        x: Float[Array, "*rest C"],
        inverse: Float[Array, "*rest 1"],
        scale_C: Float[Array, " C"],
        eps: float,
        residual: Float[Array, "*rest C"] | None = None,
    ) -> tuple[Float[Array, "*rest C"], Float[Array, " C"]]:
        """Returns dx (plus `residual`, added in float32, if given) and dscale. `inverse` is recomputed."""
        del inverse  # recomputing it is free with the row in registers, and after remat nothing else needs it
        width = x.shape[-1]
        rows = x.size // width
        arrays = [dy, x] if residual is None else [dy, x, residual]
        # Two kernels, not an option: Triton compiles the source as it is, with all its loads.
        kernel = kernels()[residual is not None]
        dx_TC, parts_PC = triton_call.triton_call(
            kernel,
            *(a.reshape(rows, width) for a in arrays),
            scale_C.astype(jnp.float32),
            results=[
                jax.ShapeDtypeStruct((rows, width), x.dtype),
                jax.ShapeDtypeStruct((self.programs, width), jnp.float32),
            ],
            programs=self.programs,
            warps=self.warps,
            capability=self.capability,
            rows=rows,
            width=width,
            # Triton's blocks are powers of two; lanes beyond the width are masked.
            block=_power_of_two(width),
            stride=self.programs,
            stages=self.stages,
            eps=eps,
        )
        return dx_TC.reshape(x.shape), jnp.sum(parts_PC, axis=0).astype(scale_C.dtype)
