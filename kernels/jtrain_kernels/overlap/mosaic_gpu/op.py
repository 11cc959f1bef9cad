"""The fused Hopper kernels as implementations of the overlapped collectives, with gradients.

Pallas is imported when a kernel is traced, because it is slow to import.

| op | gradient of x | gradient of the kernel |
|---|---|---|
| all_gather_matmul | matmul_reduce_scatter of dy and the transposed kernel | x is gathered again by XLA |
| matmul_reduce_scatter | all_gather_matmul of dy and the transposed kernel | dy as that kernel gathered it |

No GPUs have run these kernels yet, so a predicted cost never chooses them: force them, or tune.

A block of these kernels fills a core, the grid fills all cores, and blocks wait for other ranks. A collective
that XLA starts before such a kernel and ends after it could deadlock with it: one rank runs the kernel, which
leaves no core for the collective, while another rank runs the collective, and the two wait for each other.
`IN_ORDER` rules that out.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels.device import DeviceSpec
from jtrain_kernels.overlap.mosaic_gpu.tables import (
    GpuProgram,
    OverlapConfig,
    default_config,
    gpu_program,
    op_does_not_fit,
)
from jtrain_kernels.overlap.mosaic_gpu.tile_shapes import CANDIDATES, does_not_fit, unsupported
from jtrain_kernels.overlap.overlap_cost import OpWork, fused_s
from jtrain_kernels.overlap.schedule import OpName, make_schedule
from jtrain_kernels.overlap.swizzle import SWIZZLES, Swizzle
from jtrain_kernels.registry import Avals, Implementation

IN_ORDER: Mapping[str, Any] = MappingProxyType(
    {
        "xla_gpu_disable_async_collectives": "ALLCOLLECTIVES",
        "xla_gpu_command_buffer_scheduling_mode": "SERIALIZE",
    }
)
"""Compiler options of programs with these kernels: all collectives run on the kernels' own stream, in the
order of the program, which is the same on all ranks. Reserving cores for NCCL instead would depend on its
number of channels, which environment variables and other programs of the process set."""


class FusedPlan(NamedTuple):
    """Parameters of a fused kernel over a mesh axis."""

    axis_name: str
    axis_size: int
    swizzle: Swizzle
    sending_blocks: int
    num_cores: int


# Cached: `supports` and the kernel ask for the same program, and building one walks all ranks.
@functools.cache
def program_of(op: OpName, swizzle: Swizzle, axis_size: int) -> GpuProgram:
    """GPU program of an op: its streams of jobs and moves."""
    return gpu_program(make_schedule(op, swizzle, axis_size))


def _cut(op: OpName, plan: FusedPlan, m: int, n: int, k: int) -> tuple[GpuProgram, OverlapConfig]:
    program = program_of(op, plan.swizzle, plan.axis_size)
    return program, default_config(program, m, n, k, plan.sending_blocks)


def _fused(
    op: OpName, x_BRK: Array, kernel_KN: Array, plan: FusedPlan, *, keep: bool = False
) -> tuple[Array, Array]:
    from jtrain_kernels.overlap.mosaic_gpu.kernel import fused
    from jtrain_kernels.overlap.mosaic_gpu.peer_access import PeerDevices

    # Parameters may be float32; wgmma takes operands of one 16-bit dtype.
    kernel_KN = kernel_KN.astype(x_BRK.dtype)
    if plan.axis_size == 1:  # symmetric memory on a single device aborts the process
        return _alone(x_BRK, kernel_KN, plan), x_BRK
    # x is the shard when gathering and has all rows when scattering.
    rows = x_BRK.shape[1] * (plan.axis_size if op == "all_gather_matmul" else 1)
    program, config = _cut(op, plan, rows, kernel_KN.shape[1], x_BRK.shape[2])
    peers = PeerDevices(plan.axis_size, plan.axis_name)
    return fused(
        program, peers, x_BRK, kernel_KN, num_cores=plan.num_cores, config=config, keep_gathered=keep
    )


def _alone(x_BRK: Array, kernel_KN: Array, plan: FusedPlan) -> Array:
    from jtrain_kernels.overlap.mosaic_gpu.wgmma_tile import matmul

    rows = x_BRK.reshape(-1, x_BRK.shape[2])
    sizes = (rows.shape[0], kernel_KN.shape[1], rows.shape[1], str(rows.dtype))
    # If no tiling fits, the first is taken, and `matmul` raises with the reason.
    tiles = next((tiles for tiles in CANDIDATES if does_not_fit(*sizes, tiles) is None), CANDIDATES[0])
    return matmul(rows, kernel_KN, num_cores=plan.num_cores, config=tiles).reshape(*x_BRK.shape[:2], -1)


def _kernel_gradient(x_BRK: Array, dy_BRN: Array) -> Float[Array, "K N"]:
    dims = (((0, 1), (0, 1)), ((), ()))
    return jax.lax.dot_general(x_BRK, dy_BRN, dims, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def all_gather_matmul(x_BRK: Float[Array, "B _ K"], kernel_KN: Float[Array, "K N"], plan: FusedPlan) -> Array:
    """`gathered x @ kernel`, [B, ranks * R, N]."""
    return _fused("all_gather_matmul", x_BRK, kernel_KN, plan)[0]


def _gather_forward(x_BRK: Array, kernel_KN: Array, plan: FusedPlan) -> tuple[Array, tuple[Array, Array]]:
    return all_gather_matmul(x_BRK, kernel_KN, plan), (x_BRK, kernel_KN)


def _gather_backward(plan: FusedPlan, saved: tuple[Array, Array], dy_BRN: Array) -> tuple[Array, Array]:
    x_BRK, kernel_KN = saved
    # The transposed kernel is copied by XLA first: the fused kernel reads [k, n] only.
    dx_BRK = _fused("matmul_reduce_scatter", dy_BRN, kernel_KN.T, plan)[0]
    # No fused gather for this product: it contracts over the gathered rows, all of which it needs.
    x_gathered = jax.lax.all_gather(x_BRK, plan.axis_name, axis=1, tiled=True)
    return dx_BRK, _kernel_gradient(x_gathered, dy_BRN).astype(kernel_KN.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul_reduce_scatter(
    x_BRK: Float[Array, "B _ K"], kernel_KN: Float[Array, "K N"], plan: FusedPlan
) -> Array:
    """This rank's rows of `x @ kernel` summed over ranks, [B, R / ranks, N]."""
    return _fused("matmul_reduce_scatter", x_BRK, kernel_KN, plan)[0]


def _scatter_forward(x_BRK: Array, kernel_KN: Array, plan: FusedPlan) -> tuple[Array, tuple[Array, Array]]:
    return matmul_reduce_scatter(x_BRK, kernel_KN, plan), (x_BRK, kernel_KN)


def _scatter_backward(plan: FusedPlan, saved: tuple[Array, Array], dy_BRN: Array) -> tuple[Array, Array]:
    x_BRK, kernel_KN = saved
    # keep: the gathered dy is the second result, so the kernel's gradient gathers nothing again.
    dx_BRK, dy = _fused("all_gather_matmul", dy_BRN, kernel_KN.T, plan, keep=True)
    return dx_BRK, _kernel_gradient(x_BRK, dy).astype(kernel_KN.dtype)


all_gather_matmul.defvjp(_gather_forward, _gather_backward)
matmul_reduce_scatter.defvjp(_scatter_forward, _scatter_backward)


def _gather(
    x: Array,
    axis_name: str,
    axis_size: int,
    swizzle: int,
    sending_blocks: int,
    num_cores: int,
    **kernels: Array,
) -> tuple[Array, ...]:
    """One fused kernel over the concatenated columns of all kernels, so x is sent once."""
    plan = FusedPlan(axis_name, axis_size, SWIZZLES[swizzle], sending_blocks, num_cores)
    # Sorted by name, the order in which the caller gets the results back.
    kernel_list = [kernels[name] for name in sorted(kernels)]
    y = all_gather_matmul(
        x, jnp.concatenate(kernel_list, axis=1) if len(kernel_list) > 1 else kernel_list[0], plan
    )
    # Ends of all kernels but the last: the split points of the concatenated columns.
    ends = [sum(kernel.shape[1] for kernel in kernel_list[: i + 1]) for i in range(len(kernel_list) - 1)]
    return tuple(jnp.split(y, ends, axis=2))


def _scatter(
    x: Array, kernel: Array, axis_name: str, axis_size: int, swizzle: int, sending_blocks: int, num_cores: int
) -> Array:
    return matmul_reduce_scatter(
        x, kernel, FusedPlan(axis_name, axis_size, SWIZZLES[swizzle], sending_blocks, num_cores)
    )


def _configs(device: DeviceSpec, avals: Avals) -> Sequence[Mapping[str, int]]:
    """Candidates: a full mesh, as a switch joins all GPUs; tuning picks the number of sending blocks."""
    del avals
    full_mesh = SWIZZLES.index("full_mesh")
    return [
        {"swizzle": full_mesh, "sending_blocks": blocks, "num_cores": device.num_cores or 0}
        # 8 of 132 cores first; more senders leave fewer cores to multiply.
        for blocks in (8, 4, 16, 24)
    ]


def _supports(op: OpName) -> Callable[[DeviceSpec, Avals], str | None]:
    def supports(device: DeviceSpec, avals: Avals) -> str | None:
        x, size = avals["x"], avals["axis_size"]
        kernels = [kernel for name, kernel in avals.items() if name.startswith("kernel")]
        assert isinstance(x, jax.ShapeDtypeStruct)
        assert isinstance(size, int)
        if reason := unsupported(device):
            return reason
        # Symmetric memory reaches only devices that links join.
        if size > device.linked:
            return (
                f"{size} ranks write into each other's memory, but links join {device.linked} {device.name}"
            )
        n = sum(kernel.shape[1] for kernel in kernels if isinstance(kernel, jax.ShapeDtypeStruct))
        gathers = op == "all_gather_matmul"
        rows, k = x.shape[1] * (size if gathers else 1), x.shape[2]
        # A kernel is useless if its backward pass cannot run, so both directions must fit.
        backward: OpName = "matmul_reduce_scatter" if gathers else "all_gather_matmul"
        passes: tuple[tuple[OpName, int, int], ...] = ((op, n, k), (backward, k, n))
        for name, columns, depth in passes:
            # The axis name does not matter for the fit.
            plan = FusedPlan(
                "", size, "full_mesh", _configs(device, avals)[0]["sending_blocks"], device.num_cores or 0
            )
            program, config = _cut(name, plan, rows, columns, depth)
            if reason := op_does_not_fit(program, rows, columns, depth, str(x.dtype), plan.num_cores, config):
                return reason if name == op else f"in the backward pass, {reason}"
        return None

    return supports


def implementation(op: OpName, work: Callable[[OpName, Avals], OpWork]) -> Implementation:
    """Implementation of an op, for `overlap/api.py`, which counts its work."""

    def cost_s(device: DeviceSpec, avals: Avals) -> float | None:
        # A reduce-scatter has no blocks that only send: partial sums leave from the blocks that compute them.
        sending = _configs(device, avals)[0]["sending_blocks"] if op == "all_gather_matmul" else 0
        return fused_s(device, work(op, avals), sending_cores=sending)

    return Implementation(
        "mosaic_gpu",
        _gather if op == "all_gather_matmul" else _scatter,
        _supports(op),
        cost_s,
        _configs,
        only_forced="no GPUs have run the kernel yet, and no other collective can overlap with it",
        compiler_options=IN_ORDER,
    )
