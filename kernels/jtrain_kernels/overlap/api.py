"""Collectives over a mesh axis that overlap with the matmul before or after them.

Call them inside a fully manual `shard_map`. Rows are the dimension that is gathered or scattered: the
sequence.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels import registry
from jtrain_kernels.device import DeviceSpec
from jtrain_kernels.fp8.api import Fp8Kernel, linear_fp8
from jtrain_kernels.fp8.formats import unsupported
from jtrain_kernels.linear.api import linear
from jtrain_kernels.overlap import fp8
from jtrain_kernels.overlap.mosaic_gpu import op as mosaic_op
from jtrain_kernels.overlap.overlap_cost import OpWork, overlapped_s, plain_s
from jtrain_kernels.overlap.schedule import OpName
from jtrain_kernels.overlap.swizzle import SWIZZLES, Swizzle
from jtrain_kernels.overlap.xla import op as xla
from jtrain_kernels.registry import Avals, Implementation, Op


def all_gather_matmul(
    x: Float[Array, "B _ K"], *kernels: Float[Array, "..."], axis_name: str, axis_size: int
) -> tuple[Float[Array, "B _ ..."], ...]:
    """Gathers x along its rows over the axis and multiplies it with each kernel; x is sent once for all.

    Args:
      x: this device's rows.
      kernels: this device's columns, [K, ...]; up to four.
      axis_size: devices along the axis.

    Returns:
      All rows for each kernel, [B, axis_size * R, ...], in x's dtype. Gradients of kernels have the kernels'
      dtypes.
    """
    # Kernels flat in two dimensions: the ops know [K, N] only, and the caller's shape returns below.
    flat = {f"kernel_{i}": k.reshape(x.shape[2], -1) for i, k in enumerate(kernels)}
    products = registry.call(ALL_GATHER_MATMUL, x=x, **flat, axis_name=axis_name, axis_size=axis_size)
    return tuple(
        y.reshape(*y.shape[:2], *kernel.shape[1:]) for y, kernel in zip(products, kernels, strict=True)
    )


def matmul_reduce_scatter(
    x: Float[Array, "B _ ..."], kernel: Float[Array, "..."], *, axis_name: str, axis_size: int
) -> Float[Array, "B _ N"]:
    """This device's rows of `x @ kernel`, summed over the axis.

    Args:
      x: all rows and this device's share of the contracted dimensions, [B, axis_size * R, ...].
      kernel: this device's share, [..., N]; contracted over all but its last dimension.
    """
    rows, columns = _flat(x, kernel)
    return registry.call(
        MATMUL_REDUCE_SCATTER, x=rows, kernel=columns, axis_name=axis_name, axis_size=axis_size
    )


def all_gather_matmul_fp8(
    x: Float[Array, "B _ K"], *kernels: Fp8Kernel, axis_name: str, axis_size: int
) -> tuple[Float[Array, "B _ ..."], ...]:
    """`all_gather_matmul` with FP8 matmuls; where it overlaps with them, x is sent in FP8 too."""
    flat = {f"kernel_{i}": k.value.reshape(x.shape[2], -1) for i, k in enumerate(kernels)}
    axis = dict(axis_name=axis_name, axis_size=axis_size)
    products = registry.call(ALL_GATHER_MATMUL_FP8, x=x, **flat, **_scaling(kernels), **axis)
    return tuple(y.reshape(*y.shape[:2], *k.value.shape[1:]) for y, k in zip(products, kernels, strict=True))


def matmul_reduce_scatter_fp8(
    x: Float[Array, "B _ ..."], kernel: Fp8Kernel, *, axis_name: str, axis_size: int
) -> Float[Array, "B _ N"]:
    """`matmul_reduce_scatter` with FP8 matmuls; where the backward pass overlaps, dy is sent in FP8 too."""
    rows, columns = _flat(x, kernel.value)
    axis = dict(axis_name=axis_name, axis_size=axis_size)
    return registry.call(MATMUL_REDUCE_SCATTER_FP8, x=rows, kernel=columns, **_scaling([kernel]), **axis)


def _scaling(kernels: Sequence[Fp8Kernel]) -> dict[str, Float[Array, "G 3"] | None]:
    if kernels[0].scale_3 is None:
        # None for both, so that the op has one signature for current and for delayed scaling.
        return {"scale": None, "seen": None}
    return {"scale": jnp.stack([k.scale_3 for k in kernels]), "seen": jnp.stack([k.seen_3 for k in kernels])}


def _flat(x: Array, kernel: Array) -> tuple[Float[Array, "B _ K"], Float[Array, "K N"]]:
    # Contracted dimensions lie next to each other in both, so they become one.
    return x.reshape(*x.shape[:2], -1), kernel.reshape(-1, kernel.shape[-1])


def _kernels(arguments: Mapping[str, Array]) -> tuple[Array, ...]:
    # Sorted by name, kernel_0 to kernel_3: keyword arguments may come in any order, results must not.
    return tuple(arguments[name] for name in sorted(arguments))


def _gather_permute(
    x: Array, axis_name: str, axis_size: int, swizzle: int, parts: int, **kernels: Array
) -> tuple[Array, ...]:
    plan = xla.OverlapPlan(axis_name, axis_size, SWIZZLES[swizzle], parts)
    return xla.all_gather_matmul(x, _kernels(kernels), plan)


def _gather_plain(x: Array, axis_name: str, axis_size: int, **kernels: Array) -> tuple[Array, ...]:
    # The registry passes the size to every implementation; XLA reads it from the mesh.
    del axis_size
    x_gathered = jax.lax.all_gather(x, axis_name, axis=1, tiled=True)
    return tuple(linear(x_gathered, kernel) for kernel in _kernels(kernels))


def _scatter_permute(
    x: Array, kernel: Array, axis_name: str, axis_size: int, swizzle: int, parts: int
) -> Array:
    return xla.matmul_reduce_scatter(
        x, kernel, xla.OverlapPlan(axis_name, axis_size, SWIZZLES[swizzle], parts)
    )


def _scatter_plain(x: Array, kernel: Array, axis_name: str, axis_size: int) -> Array:
    del axis_size
    return jax.lax.psum_scatter(linear(x, kernel), axis_name, scatter_dimension=1, tiled=True)


type _Scaling = Float[Array, "G 3"] | None


def _gather_fp8(
    x: Array,
    scale: _Scaling,
    seen: _Scaling,
    axis_name: str,
    axis_size: int,
    swizzle: int,
    parts: int,
    **kernels: Array,
) -> tuple[Array, ...]:
    plan = xla.OverlapPlan(axis_name, axis_size, SWIZZLES[swizzle], parts)
    return fp8.all_gather_matmul(x, _kernels(kernels), scale, seen, plan)


def _scatter_fp8(
    x: Array,
    kernel: Array,
    scale: _Scaling,
    seen: _Scaling,
    axis_name: str,
    axis_size: int,
    swizzle: int,
    parts: int,
) -> Array:
    plan = xla.OverlapPlan(axis_name, axis_size, SWIZZLES[swizzle], parts)
    return fp8.matmul_reduce_scatter(x, kernel, scale, seen, plan)


def _gather_fp8_plain(
    x: Array, scale: _Scaling, seen: _Scaling, axis_name: str, axis_size: int, **kernels: Array
) -> tuple[Array, ...]:
    del axis_size
    x_gathered = jax.lax.all_gather(x, axis_name, axis=1, tiled=True)
    return tuple(linear_fp8(x_gathered, _scaled(k, scale, seen, i)) for i, k in enumerate(_kernels(kernels)))


def _scatter_fp8_plain(
    x: Array, kernel: Array, scale: _Scaling, seen: _Scaling, axis_name: str, axis_size: int
) -> Array:
    del axis_size
    y = linear_fp8(x, _scaled(kernel, scale, seen, 0))
    return jax.lax.psum_scatter(y, axis_name, scatter_dimension=1, tiled=True)


def _scaled(kernel: Array, scale: _Scaling, seen: _Scaling, index: int) -> Fp8Kernel:
    # Current scaling: the kernel alone, and `linear_fp8` finds the amax itself.
    return (
        Fp8Kernel(kernel) if scale is None or seen is None else Fp8Kernel(kernel, scale[index], seen[index])
    )


def _shape(avals: Avals, name: str) -> jax.ShapeDtypeStruct:
    aval = avals[name]
    assert isinstance(aval, jax.ShapeDtypeStruct)
    return aval


def _ranks(avals: Avals) -> int:
    size = avals["axis_size"]
    assert isinstance(size, int)
    return size


def _work(op: OpName, avals: Avals, *, itemsize: int | None = None, in_8_bits: bool = False) -> OpWork:
    x = _shape(avals, "x")
    columns = sum(_shape(avals, name).shape[1] for name in avals if name.startswith("kernel"))
    gathers = op == "all_gather_matmul"
    # x is the shard when gathering and has all rows when scattering.
    rows = x.shape[0] * x.shape[1] * (_ranks(avals) if gathers else 1)
    # Gathering sends rows of x (K columns), scattering rows of the result (N columns).
    sent_columns = x.shape[2] if gathers else columns
    return OpWork(
        _ranks(avals), rows, x.shape[2], columns, sent_columns * (itemsize or x.dtype.itemsize), in_8_bits
    )


def _configs(op: OpName) -> Callable[[DeviceSpec, Avals], Sequence[Mapping[str, int]]]:
    """Candidate swizzles whose pieces divide the rows, the preferred one first.

    TPU links form a torus, so both directions are used. GPUs share a switch, so one direction with larger
    pieces comes first. A full mesh would suit a switch, but XLA:GPU runs one permute at a time, and was seen
    to schedule permutes that depend on nothing before all matmuls, one after the other.
    """

    def configs(device: DeviceSpec, avals: Avals) -> Sequence[Mapping[str, int]]:
        order: list[Swizzle] = ["bidirectional", "ring", "full_mesh"]
        if device.platform == "gpu":
            order = ["ring", "bidirectional", "full_mesh"]
        candidates = [
            {"swizzle": SWIZZLES.index(swizzle), "parts": number}
            # parts=1 first: a second part halves the pieces, which pays only where the last piece is long.
            for number in (1, 2)
            for swizzle in order
            if _divides(op, swizzle, number, avals)
        ]
        # If nothing divides the rows, `supports` refuses; the list has an entry all the same, as elsewhere.
        return candidates or [{"swizzle": SWIZZLES.index("ring"), "parts": 1}]

    return configs


def _divides(op: OpName, swizzle: Swizzle, parts: int, avals: Avals) -> bool:
    # All ranks' rows are split by rank, part and direction; when gathering, x is one rank's shard.
    rows = _shape(avals, "x").shape[1] * (_ranks(avals) if op == "all_gather_matmul" else 1)
    # Each of the two directions carries a piece of every part.
    return rows % (_ranks(avals) * parts * (2 if swizzle == "bidirectional" else 1)) == 0


def _op(
    op: OpName,
    permute: Callable[..., object],
    plain: Callable[..., object],
    case: Avals,
    *,
    in_8_bits: bool = False,
) -> Op:
    # Gathered operands are rounded before they are sent; partial sums are not.
    sent = {"itemsize": 1} if in_8_bits and op == "all_gather_matmul" else {}

    def supports(device: DeviceSpec, avals: Avals) -> str | None:
        if in_8_bits and (reason := unsupported(device)):
            return reason
        # A ring of one part has the fewest pieces: if they do not divide the rows, no others do.
        if _divides(op, "ring", 1, avals):
            return None
        return f"{_shape(avals, 'x').shape[1]} rows do not split evenly over {_ranks(avals)} devices"

    def permute_s(device: DeviceSpec, avals: Avals) -> float | None:
        # The preferred config stands for the op; tuning measures the others.
        config = _configs(op)(device, avals)[0]
        work = _work(op, avals, in_8_bits=in_8_bits, **sent)
        return overlapped_s(device, work, SWIZZLES[config["swizzle"]], config["parts"])

    def one_after_the_other_s(device: DeviceSpec, avals: Avals) -> float | None:
        return plain_s(device, _work(op, avals, in_8_bits=in_8_bits))

    back_ends = (
        Implementation("permute", permute, supports, permute_s, _configs(op)),
        Implementation("xla", plain, cost_s=one_after_the_other_s),
    )
    # Tensor parallelism over the 8 GPUs of a host: what tuning and the tests measure.
    axis = {"axis_name": "tensor", "axis_size": 8}
    if not in_8_bits:
        return Op(op, (mosaic_op.implementation(op, _work), *back_ends), cases={"llama8b": {**case, **axis}})
    scaling = jax.ShapeDtypeStruct((sum(name.startswith("kernel") for name in case), 3), jnp.float32)
    return Op(f"{op}_fp8", back_ends, cases={"llama8b": {**case, "scale": scaling, "seen": scaling, **axis}})


def _bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


# Llama 3 8B, sequence 8192 over 8 ranks: 1024 rows each, d_model 4096, ffn 14336 / 8 = 1792.
_UP = {"x": _bf16(1, 1024, 4096), "kernel_0": _bf16(4096, 1792), "kernel_1": _bf16(4096, 1792)}
_DOWN = {"x": _bf16(1, 8192, 1792), "kernel": _bf16(1792, 4096)}

ALL_GATHER_MATMUL = _op("all_gather_matmul", _gather_permute, _gather_plain, _UP)
MATMUL_REDUCE_SCATTER = _op("matmul_reduce_scatter", _scatter_permute, _scatter_plain, _DOWN)
ALL_GATHER_MATMUL_FP8 = _op("all_gather_matmul", _gather_fp8, _gather_fp8_plain, _UP, in_8_bits=True)
MATMUL_REDUCE_SCATTER_FP8 = _op(
    "matmul_reduce_scatter", _scatter_fp8, _scatter_fp8_plain, _DOWN, in_8_bits=True
)
OPS = (ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, ALL_GATHER_MATMUL_FP8, MATMUL_REDUCE_SCATTER_FP8)
