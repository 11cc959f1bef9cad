"""Matmul of groups of rows, each with a matrix of its own: the experts of a mixture-of-experts layer.

Letters here: T rows of all groups, I inputs and O outputs of a matrix, X groups.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels import cost, registry
from jtrain_kernels.device import DeviceSpec
from jtrain_kernels.errors import UserError
from jtrain_kernels.grouped_matmul import blocked, tokamax
from jtrain_kernels.platforms import by_platform

# Contraction over the rows, which are the ragged dimension: one matrix per group.
_KERNEL_GRADIENT = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def grouped_matmul(
    x_TI: Float[Array, "T _"], kernel_XIO: Float[Array, "_ _ O"], group_size_X: Int[Array, " _"]
) -> Float[Array, "T O"]:
    """Multiplies each row of group x with `kernel_XIO[x]`; groups are contiguous and in order.

    Accumulates in float32. The gradient of x has x's dtype, and the gradient of the kernel has the kernel's
    dtype.

    Args:
      group_size_X: rows of each group; their sum may be less than T. Rows after the last group are undefined,
        in the result and in the gradient of x, and their contents have no effect.

    Returns:
      The products, in x's dtype.

    Raises:
      UserError: the shapes do not fit each other.
    """
    if x_TI.shape[1] != kernel_XIO.shape[1] or group_size_X.shape[0] != kernel_XIO.shape[0]:
        raise UserError(
            f"grouped_matmul: x {x_TI.shape} and {group_size_X.shape[0]} groups do not fit kernel "
            f"{kernel_XIO.shape}, which is [groups, columns of x, columns of the result]."
        )
    return registry.call(GROUPED_MATMUL, x=x_TI, kernel=kernel_XIO, group_size=group_size_X)


def _plain(x: Array, kernel: Array, group_size: Array, *, block_rows: int) -> Array:
    """Implementation in plain JAX: `ragged_dot` on TPUs, a loop over blocks elsewhere."""

    @jax.custom_vjp
    def matmul(x_TI: Array, kernel_XIO: Array, group_size_X: Array) -> Array:
        return _product(x_TI, kernel_XIO, group_size_X, transposed=False, block_rows=block_rows)

    def forward(x_TI: Array, kernel_XIO: Array, group_size_X: Array) -> tuple[Array, Any]:
        return matmul(x_TI, kernel_XIO, group_size_X), (x_TI, kernel_XIO, group_size_X)

    def backward(saved: Any, dy_TO: Array) -> tuple[Array, Array, None]:
        x_TI, kernel_XIO, group_size_X = saved
        # The kernel is stored once; the transposed product reads it by its other dimension.
        dx_TI = _product(dy_TO, kernel_XIO, group_size_X, transposed=True, block_rows=block_rows)
        dkernel_XIO = _kernel_gradient(x_TI, dy_TO, group_size_X, block_rows=block_rows)
        # None: sizes of groups are integers.
        return dx_TI, dkernel_XIO.astype(kernel_XIO.dtype), None

    matmul.defvjp(forward, backward)
    return matmul(x, kernel, group_size)


def _product(x: Array, kernel: Array, group_size: Array, *, transposed: bool, block_rows: int) -> Array:
    """Product in x's dtype, by `ragged_dot` where the compiler has a kernel for it; undefined in rows of no
    group.
    """

    def ragged(x: Array, kernel: Array) -> Array:
        matrix = kernel.swapaxes(1, 2) if transposed else kernel
        return jax.lax.ragged_dot(x, matrix, group_size, preferred_element_type=x.dtype)

    def in_blocks(x: Array, kernel: Array) -> Array:
        return blocked.matmul(x, kernel, group_size, transposed=transposed, block_rows=block_rows)

    # One platform is kept when the program is lowered, so only one of the two forms is compiled. XLA:TPU
    # alone has a kernel for `ragged_dot`.
    return by_platform(x, kernel.astype(x.dtype), read="tpu", tpu=ragged, default=in_blocks)


def _kernel_gradient(x_TI: Array, dy_TO: Array, group_size_X: Array, *, block_rows: int) -> Array:
    """`x^T dy` for each group, float32."""

    def ragged(x: Array, dy: Array) -> Array:
        return jax.lax.ragged_dot_general(
            x, dy, group_size_X, _KERNEL_GRADIENT, preferred_element_type=jnp.dtype(jnp.float32)
        )

    def in_blocks(x: Array, dy: Array) -> Array:
        return blocked.kernel_gradient(x, dy, group_size_X, block_rows=block_rows)

    return by_platform(x_TI, dy_TO, read="tpu", tpu=ragged, default=in_blocks)


def _plain_configs(device: DeviceSpec, avals: registry.Avals) -> list[dict[str, int]]:
    del avals
    # CPU: blocks fit the caches and waste little at a group's end. GPU: enough tiles for all multiprocessors.
    sizes = (128, 64, 256) if device.platform == "cpu" else (_GPU_BLOCK_ROWS, 512, 2048)
    return [{"block_rows": rows} for rows in sizes]


def _plain_cost(device: DeviceSpec, avals: registry.Avals) -> float | None:
    """Seconds: on a GPU of blocks that run one after another, on a TPU of one `ragged_dot`."""
    if device.platform == "tpu":
        return cost.grouped_matmul_s(device, avals)
    return cost.grouped_matmul_s(device, avals, block_rows=_GPU_BLOCK_ROWS, step_s=_STEP_S)


_GPU_BLOCK_ROWS = 1024

_STEP_S = 2e-5
"""Overhead per step of a loop of unknown length: the host launches each step's kernels, and reads the loop
condition. An estimate that is not measured yet."""

_BF16 = jnp.dtype("bfloat16")

GROUPED_MATMUL = registry.Op(
    "grouped_matmul",
    (
        registry.Implementation(
            "tokamax",
            tokamax.matmul,
            supports=tokamax.supports,
            cost_s=cost.grouped_matmul_s,
            configs=tokamax.configs,
            modules=("tokamax",),
        ),
        registry.Implementation("xla", _plain, cost_s=_plain_cost, configs=_plain_configs),
    ),
    cases={
        "qwen3_30b_a3b up": {  # 4096 tokens, 8 experts each, on a device that has all 128
            "x": jax.ShapeDtypeStruct((32768, 2048), _BF16),
            "kernel": jax.ShapeDtypeStruct((128, 2048, 768), _BF16),
            "group_size": jax.ShapeDtypeStruct((128,), jnp.dtype("int32")),
        },
        "qwen3_30b_a3b down": {
            "x": jax.ShapeDtypeStruct((32768, 768), _BF16),
            "kernel": jax.ShapeDtypeStruct((128, 768, 2048), _BF16),
            "group_size": jax.ShapeDtypeStruct((128,), jnp.dtype("int32")),
        },
    },
)

OPS = (GROUPED_MATMUL,)
