"""A new vendor's chip and a kernel for it, whole, in one file that may lie in a distribution of its own.

1. Say what the chip is: `DEVICES`. The planner, MFU and the choice of kernels then know it by name (`acme1`).
2. Write the kernel. Here Pallas, emulated on CPUs; Triton, an FFI call or plain JAX do as well. It takes the op's
   arguments by name (see the op's `api.py`), and keywords of its own for what can be tuned.
3. Say where it runs (`supports`: None or the reason), what can be tuned (`configs`), and if you can what it costs.
4. Name the module in the distribution's pyproject.toml, so that jtrain finds it:

    [project.entry-points.jtrain_kernels]
    acme = "jtrain_kernels.examples.new_backend"

Then `python -m jtrain.bench kernels --explain rms_norm --device acme1` says why it is taken or not,
`--set "layout.kernels=(('rms_norm','acme'),)"` forces it in a run, and `python -m jtrain.bench kernels --tune` on the
chip measures which configuration is best. Prove it by the ladder of tests/kernels/test_ladder.py.
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
    "Acme A1",  # part of what JAX calls `device_kind`
    peak_bf16_flops=500e12,
    peak_fp8_flops=None,
    hbm_bytes=64 * 10**9,
    hbm_bytes_per_s=2e12,
    link_bytes_per_s=None,
)
DEVICES = (ACME1,)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm(x: Float[Array, "*rest C"], scale_C: Float[Array, " C"], eps: float, rows: int) -> Float[Array, "*rest C"]:
    """`x / sqrt(mean(x^2) + eps) * scale`, `rows` rows at a time; both passes in float32."""
    return _forward(x, scale_C, eps, rows)[0]


def _forward(x: Array, scale_C: Array, eps: float, rows: int) -> tuple[Array, tuple[Array, Array]]:
    from jax.experimental import pallas as pl  # lazy: importing jtrain must not pay for it

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
        # Asks what is traced for, not what is here: a program may be compiled for a chip that is not.
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
    """Acme's chip, and CPUs, which emulate it; whole blocks of rows."""
    if device.name not in (ACME1.name, "cpu"):
        return f"it is written for {ACME1.name}, not for {device.name}"
    return None if _rows(avals) % 8 == 0 else f"{_rows(avals)} rows are no multiple of 8"


def configs(device: DeviceSpec, avals: registry.Avals) -> tuple[dict[str, int], ...]:
    """Rows of a block; the first is the guess of a chip that was never tuned."""
    del device
    return tuple({"rows": rows} for rows in (64, 16, 8) if _rows(avals) % rows == 0)


def cost_s(device: DeviceSpec, avals: registry.Avals) -> float | None:
    """It reads x once and writes the result once: the memory's bandwidth decides, at 80 % of the maker's figure."""
    x = avals["x"]
    assert isinstance(x, jax.ShapeDtypeStruct)
    if device.hbm_bytes_per_s is None:
        return None
    return 2 * x.size * x.dtype.itemsize / (0.8 * device.hbm_bytes_per_s)


IMPLEMENTATIONS = {"rms_norm": registry.Implementation("acme", rms_norm, supports, cost_s, configs)}
