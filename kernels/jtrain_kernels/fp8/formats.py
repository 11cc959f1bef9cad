"""8-bit floats: which of them, by what factor a tensor is brought into their range, and which chips multiply them.

Scales are powers of two. Scaling is exact then, so a value's rounding does not depend on the scale unless it falls
below the format's range: two devices or two microbatches that scale by other factors still round alike, and what is
quantised is exact in bfloat16, where a chip without 8-bit matmuls can compute the same.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels.device import DeviceSpec

FORWARD = jnp.float8_e4m3fn
"""Of activations and weights: 3 bits of mantissa, 2^-9 to 448 (arXiv:2209.05433)."""

GRADIENT = jnp.float8_e5m2
"""Of gradients: 2 bits of mantissa, 2^-16 to 57344."""


def unsupported(device: DeviceSpec) -> str | None:
    """Why these formats are of no use on a device, one sentence without a full stop; None if they are.

    A CPU computes the same numbers slowly, for tests and for trying a recipe.
    """
    if device.platform == "cpu":
        return None
    if device.peak_fp8_flops is None:
        return f"{device.name} has no 8-bit matmul units, so casts would only cost time and precision"
    if device.platform == "gpu" and device.compute_capability is None:
        return f"{device.name} multiplies float8_e4m3fnuz and float8_e5m2fnuz, other formats than are written here"
    return None


def largest(x: Float[Array, "..."]) -> Float[Array, ""]:
    """`max |x|`, float32; nan if x has one."""
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def scale_of(amax: Float[Array, "*some"], dtype: jax.typing.DTypeLike, *, margin: int = 0) -> Float[Array, "*some"]:
    """The largest power of two that brings `amax` to at most `dtype`'s largest number over 2^margin; 1 for 0.

    Made of bits, since exp2 and log2 round otherwise on every chip. It stays within 2^-100 to 2^100, so that its
    inverse is exact as well.
    """
    fraction, exponent = jnp.frexp(amax)
    top, power = jnp.frexp(float(jnp.finfo(dtype).max))
    power = power - exponent - (fraction > top) - margin
    power = jnp.where((amax > 0) & jnp.isfinite(amax), jnp.clip(power, -100, 100), 0)
    return jax.lax.bitcast_convert_type((power + 127).astype(jnp.int32) << 23, jnp.float32)


def quantised(x: Float[Array, "..."], scale: Float[Array, ""], dtype: jax.typing.DTypeLike) -> Float[Array, "..."]:
    """`x * scale` in an 8-bit `dtype`, rounded to nearest even; beyond its largest number, that number.

    An infinity becomes nan: clipping it would hide that a run has diverged.
    """
    top = float(jnp.finfo(dtype).max)
    scaled = x.astype(jnp.float32) * scale
    return jnp.where(jnp.isinf(scaled), jnp.nan, jnp.clip(scaled, -top, top)).astype(dtype)


def restored(x8: Float[Array, "..."], scale: Float[Array, ""], dtype: jax.typing.DTypeLike) -> Float[Array, "..."]:
    """What `quantised` kept of its x, in `dtype`: exact in bfloat16 and float32.

    In front of a matmul XLA:GPU takes this for its scaled 8-bit operand: conversion and factor go into cuBLAS.
    """
    return x8.astype(dtype) * (1.0 / scale).astype(dtype)
