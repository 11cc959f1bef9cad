"""The fused Hopper kernels as implementations of the overlapped collectives, with gradients; Pallas is imported late.

| op | gradient of x | gradient of the kernel |
|---|---|---|
| all_gather_matmul | matmul_reduce_scatter of dy and the transposed kernel | x gathered again by XLA, beside that |
| matmul_reduce_scatter | all_gather_matmul of dy and the transposed kernel | with dy as that kernel gathered it |
| matmul_all_reduce | the same after a reduce-scatter of dy | the same |

What it costs is unknown until it was measured on several GPUs, so the cost model never chooses it: force it, or tune.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels.device import DeviceSpec
from jtrain_kernels.overlap.gpu_program import GpuProgram, OverlapConfig, default_config, gpu_program, op_does_not_fit
from jtrain_kernels.overlap.schedule import OpName, make_schedule
from jtrain_kernels.overlap.swizzle import SWIZZLES, Swizzle
from jtrain_kernels.overlap.tiles import CANDIDATES, does_not_fit, unsupported
from jtrain_kernels.registry import Avals, Implementation


class Plan(NamedTuple):
    """How an op is carried out over a mesh axis."""

    axis_name: str
    axis_size: int
    swizzle: Swizzle
    sending_blocks: int
    num_cores: int


@functools.cache
def program_of(op: OpName, swizzle: Swizzle, axis_size: int) -> GpuProgram:
    """The streams of an op. An all-reduce has two parts: while one is passed on, the other is summed."""
    return gpu_program(make_schedule(op, swizzle, axis_size, parts=2 if op == "matmul_all_reduce" else 1))


def _cut(op: OpName, plan: Plan, m: int, n: int, k: int) -> tuple[GpuProgram, OverlapConfig]:
    program = program_of(op, plan.swizzle, plan.axis_size)
    return program, default_config(program, m, n, k, plan.sending_blocks)


def _fused(op: OpName, x_BRK: Array, kernel_KN: Array, plan: Plan, *, keep: bool = False) -> tuple[Array, Array]:
    from jtrain_kernels.overlap.fabric import Devices
    from jtrain_kernels.overlap.mosaic_gpu import fused

    kernel_KN = kernel_KN.astype(x_BRK.dtype)
    if plan.axis_size == 1:  # no peers: symmetric memory of one device aborts the process
        return _alone(x_BRK, kernel_KN, plan), x_BRK
    rows = x_BRK.shape[1] * (plan.axis_size if op == "all_gather_matmul" else 1)
    program, config = _cut(op, plan, rows, kernel_KN.shape[1], x_BRK.shape[2])
    fabric = Devices(plan.axis_name, plan.axis_size)
    return fused(program, fabric, x_BRK, kernel_KN, num_cores=plan.num_cores, config=config, keep_gathered=keep)


def _alone(x_BRK: Array, kernel_KN: Array, plan: Plan) -> Array:
    from jtrain_kernels.overlap.hopper import matmul

    rows = x_BRK.reshape(-1, x_BRK.shape[2])
    sizes = (rows.shape[0], kernel_KN.shape[1], rows.shape[1], str(rows.dtype))
    tiles = next((tiles for tiles in CANDIDATES if does_not_fit(*sizes, tiles) is None), CANDIDATES[0])
    return matmul(rows, kernel_KN, num_cores=plan.num_cores, config=tiles).reshape(*x_BRK.shape[:2], -1)


def _kernel_gradient(x_BRK: Array, dy_BRN: Array) -> Float[Array, "K N"]:
    dims = (((0, 1), (0, 1)), ((), ()))
    return jax.lax.dot_general(x_BRK, dy_BRN, dims, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def all_gather_matmul(x_BRK: Float[Array, "B _ K"], kernel_KN: Float[Array, "K N"], plan: Plan) -> Array:
    """`gathered x @ kernel`, [B, ranks * R, N]."""
    return _fused("all_gather_matmul", x_BRK, kernel_KN, plan)[0]


def _gather_forward(x_BRK: Array, kernel_KN: Array, plan: Plan) -> tuple[Array, tuple[Array, Array]]:
    return all_gather_matmul(x_BRK, kernel_KN, plan), (x_BRK, kernel_KN)


def _gather_backward(plan: Plan, saved: tuple[Array, Array], dy_BRN: Array) -> tuple[Array, Array]:
    x_BRK, kernel_KN = saved
    dx_BRK = _fused("matmul_reduce_scatter", dy_BRN, kernel_KN.T, plan)[0]
    whole = jax.lax.all_gather(x_BRK, plan.axis_name, axis=1, tiled=True)
    return dx_BRK, _kernel_gradient(whole, dy_BRN).astype(kernel_KN.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul_reduce_scatter(x_BRK: Float[Array, "B _ K"], kernel_KN: Float[Array, "K N"], plan: Plan) -> Array:
    """This rank's rows of `x @ kernel` summed over ranks, [B, R / ranks, N]."""
    return _fused("matmul_reduce_scatter", x_BRK, kernel_KN, plan)[0]


def _scatter_forward(x_BRK: Array, kernel_KN: Array, plan: Plan) -> tuple[Array, tuple[Array, Array]]:
    return matmul_reduce_scatter(x_BRK, kernel_KN, plan), (x_BRK, kernel_KN)


def _scatter_backward(plan: Plan, saved: tuple[Array, Array], dy_BRN: Array) -> tuple[Array, Array]:
    x_BRK, kernel_KN = saved
    dx_BRK, dy = _fused("all_gather_matmul", dy_BRN, kernel_KN.T, plan, keep=True)
    return dx_BRK, _kernel_gradient(x_BRK, dy).astype(kernel_KN.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul_all_reduce(x_BRK: Float[Array, "B _ K"], kernel_KN: Float[Array, "K N"], plan: Plan) -> Array:
    """`x @ kernel` summed over ranks, [B, R, N]: the same bits on every rank."""
    return _fused("matmul_all_reduce", x_BRK, kernel_KN, plan)[0]


def _reduce_forward(x_BRK: Array, kernel_KN: Array, plan: Plan) -> tuple[Array, tuple[Array, Array]]:
    return matmul_all_reduce(x_BRK, kernel_KN, plan), (x_BRK, kernel_KN)


def _reduce_backward(plan: Plan, saved: tuple[Array, Array], dy_BRN: Array) -> tuple[Array, Array]:
    # As the transpose of `psum`: every rank's dy is its own share of the objective's gradient.
    shard = jax.lax.psum_scatter(dy_BRN, plan.axis_name, scatter_dimension=1, tiled=True)
    return _scatter_backward(plan, saved, shard)


all_gather_matmul.defvjp(_gather_forward, _gather_backward)
matmul_reduce_scatter.defvjp(_scatter_forward, _scatter_backward)
matmul_all_reduce.defvjp(_reduce_forward, _reduce_backward)


def _gather(
    x: Array, axis_name: str, axis_size: int, swizzle: int, sending_blocks: int, num_cores: int, **kernels: Array
) -> tuple[Array, ...]:
    """One kernel for all: x travels once, and their columns lie beside each other."""
    plan = Plan(axis_name, axis_size, SWIZZLES[swizzle], sending_blocks, num_cores)
    each = [kernels[name] for name in sorted(kernels)]
    y = all_gather_matmul(x, jnp.concatenate(each, axis=1) if len(each) > 1 else each[0], plan)
    ends = [sum(kernel.shape[1] for kernel in each[: i + 1]) for i in range(len(each) - 1)]
    return tuple(jnp.split(y, ends, axis=2))


def _scatter(
    x: Array, kernel: Array, axis_name: str, axis_size: int, swizzle: int, sending_blocks: int, num_cores: int
) -> Array:
    return matmul_reduce_scatter(x, kernel, Plan(axis_name, axis_size, SWIZZLES[swizzle], sending_blocks, num_cores))


def _reduce(
    x: Array, kernel: Array, axis_name: str, axis_size: int, swizzle: int, sending_blocks: int, num_cores: int
) -> Array:
    return matmul_all_reduce(x, kernel, Plan(axis_name, axis_size, SWIZZLES[swizzle], sending_blocks, num_cores))


def _configs(device: DeviceSpec, avals: Avals) -> Sequence[Mapping[str, int]]:
    """A switch joins all with all; how many blocks feed the links is for a GPU to say."""
    del avals
    at = SWIZZLES.index("full_mesh")
    return [{"swizzle": at, "sending_blocks": blocks, "num_cores": device.num_cores or 0} for blocks in (8, 4, 16, 24)]


def _supports(op: OpName) -> Callable[[DeviceSpec, Avals], str | None]:
    def supports(device: DeviceSpec, avals: Avals) -> str | None:
        x, size = avals["x"], avals["axis_size"]
        kernels = [kernel for name, kernel in avals.items() if name.startswith("kernel")]
        assert isinstance(x, jax.ShapeDtypeStruct)
        assert isinstance(size, int)
        if reason := unsupported(device):
            return reason
        if size > device.linked:
            return f"{size} ranks write into each other's memory, but links join {device.linked} {device.name}"
        n = sum(kernel.shape[1] for kernel in kernels if isinstance(kernel, jax.ShapeDtypeStruct))
        gathers = op == "all_gather_matmul"
        rows, k = x.shape[1] * (size if gathers else 1), x.shape[2]
        backward: OpName = "matmul_reduce_scatter" if gathers else "all_gather_matmul"
        passes: tuple[tuple[OpName, int, int], ...] = ((op, n, k), (backward, k, n))
        for name, columns, depth in passes:
            plan = Plan("", size, "full_mesh", _configs(device, avals)[0]["sending_blocks"], device.num_cores or 0)
            program, config = _cut(name, plan, rows, columns, depth)
            if reason := op_does_not_fit(program, rows, columns, depth, str(x.dtype), plan.num_cores, config):
                return reason if name == op else f"in the backward pass, {reason}"
        return None

    return supports


IMPLEMENTATIONS: dict[OpName, Implementation] = {
    "all_gather_matmul": Implementation("mosaic_gpu", _gather, _supports("all_gather_matmul"), configs=_configs),
    "matmul_reduce_scatter": Implementation(
        "mosaic_gpu", _scatter, _supports("matmul_reduce_scatter"), configs=_configs
    ),
    "matmul_all_reduce": Implementation("mosaic_gpu", _reduce, _supports("matmul_all_reduce"), configs=_configs),
}
"""One for each op, for `overlap/api.py`."""
