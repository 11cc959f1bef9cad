"""Example of a new vendor's chip with a kernel, complete in one file, which may be part of another
distribution.

1. Describe the chip in `DEVICES`. The planner, MFU and the choice of kernels then know it by name (`acme1`).
2. Write the kernel: here in Pallas, emulated on CPUs; Triton, an FFI call or plain JAX work as well. It takes
   the op's arguments by name (see the op's `api.py`), and further keywords for the parameters of a
   configuration.
3. State where it runs (`supports`: None or the reason), its configurations, the best first (`configs`), and
   if possible its cost.
4. Name the module in the distribution's pyproject.toml, so that jtrain finds it:

    [project.entry-points.jtrain_kernels]
    acme = "jtrain_kernels.examples.new_backend"

Then `python -m jtrain.bench kernels --explain rms_norm --device acme1` explains whether it is chosen, `--set
"kernels=(('rms_norm','acme'),)"` forces it in a run, and `python -m jtrain.bench kernels --tune` on the chip
measures which configuration is fastest. Test it with the ladder of tests/kernels/test_ladder.py.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels import registry
from jtrain_kernels.device import DeviceSpec

ACME1 = DeviceSpec(
    "acme1",
    "gpu",
    "Acme A1",  # part of JAX's `device_kind`
    peak_bf16_flops=500e12,
    peak_fp8_flops=None,
    hbm_bytes=64 * 10**9,
    hbm_bytes_per_s=2e12,
    link_bytes_per_s=None,
)
DEVICES = (ACME1,)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm(
    x: Float[Array, "*rest C"], scale_C: Float[Array, " C"], eps: float, rows: int
) -> Float[Array, "*rest C"]:
    """`x / sqrt(mean(x^2) + eps) * scale`, `rows` rows at a time; both passes in float32."""
    return _forward(x, scale_C, eps, rows)[0]


def _forward(x: Array, scale_C: Array, eps: float, rows: int) -> tuple[Array, tuple[Array, Array]]:
    from jax.experimental import pallas as pl  # lazy: importing jtrain must stay fast

    def kernel(x_ref: Any, scale_ref: Any, y_ref: Any) -> None:
        x_RC = x_ref[...].astype(jnp.float32)
        inverse_R1 = jax.lax.rsqrt(jnp.mean(x_RC * x_RC, axis=-1, keepdims=True) + eps)
        y_ref[...] = (x_RC * inverse_R1 * scale_ref[...].astype(jnp.float32)).astype(y_ref.dtype)

    C, total = x.shape[-1], math.prod(x.shape[:-1])
    block = pl.BlockSpec((rows, C), lambda i: (i, 0))
    y = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((total, C), x.dtype),
        grid=(total // rows,),
        in_specs=[block, pl.BlockSpec((1, C), lambda i: (0, 0))],
        out_specs=block,
        # The device that is traced for, not the live one, because a program may be compiled for another chip.
        interpret=registry.device().platform == "cpu",
        name="acme_rms_norm",
    )(x.reshape(total, C), scale_C[None])
    return y.reshape(x.shape), (x, scale_C)


def _backward(eps: float, rows: int, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    del rows
    x, scale_C = saved
    x32, dy32 = x.astype(jnp.float32), dy.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    unit = x32 * inverse
    dunit = dy32 * scale_C.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + scale_C.shape)
    dx = inverse * (dunit - unit * jnp.mean(dunit * unit, axis=-1, keepdims=True))
    dscale_C = jnp.sum(dy32 * unit, axis=tuple(range(x.ndim - 1)))
    return dx.astype(x.dtype), dscale_C.astype(scale_C.dtype)


rms_norm.defvjp(_forward, _backward)


def _rows(avals: registry.Avals) -> int:
    x = avals["x"]
    assert isinstance(x, jax.ShapeDtypeStruct)
    return math.prod(x.shape[:-1])


def supports(device: DeviceSpec, avals: registry.Avals) -> str | None:
    """Reason why the kernel cannot run; None on Acme's chip and on CPUs, which emulate it, for whole blocks
    of rows.
    """
    if device.name not in (ACME1.name, "cpu"):
        return f"it is written for {ACME1.name}, not for {device.name}"
    return None if _rows(avals) % 8 == 0 else f"{_rows(avals)} rows are no multiple of 8"


def configs(device: DeviceSpec, avals: registry.Avals) -> tuple[dict[str, int], ...]:
    """Candidate rows of a block; the first is taken."""
    del device
    return tuple({"rows": rows} for rows in (64, 16, 8) if _rows(avals) % rows == 0)


def cost_s(device: DeviceSpec, avals: registry.Avals) -> float | None:
    """Seconds of two passes over x in the kernel and six in the backward pass, at 80 % of the memory's
    bandwidth.
    """
    x = avals["x"]
    assert isinstance(x, jax.ShapeDtypeStruct)
    if device.hbm_bytes_per_s is None:
        return None
    return 8 * x.size * x.dtype.itemsize / (0.8 * device.hbm_bytes_per_s)


IMPLEMENTATIONS = {"rms_norm": registry.Implementation("acme", rms_norm, supports, cost_s, configs)}
