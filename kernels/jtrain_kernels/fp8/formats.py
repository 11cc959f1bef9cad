"""FP8 formats: scales that bring a tensor into their range, quantisation, and the chips that multiply them.

Scales are powers of two, so scaling is exact, and the rounding of a value does not depend on the scale unless
the value falls below the format's range. Two devices or microbatches with different scales therefore round
alike, and quantised values are exact in bfloat16, in which a chip without FP8 matmuls can compute the same
results.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels.device import DeviceSpec

FORWARD = jnp.float8_e4m3fn
"""Format of activations and weights: 3 bits of mantissa, 2^-9 to 448 (arXiv:2209.05433)."""

GRADIENT = jnp.float8_e5m2
"""Format of gradients: 2 bits of mantissa, 2^-16 to 57344."""


def unsupported(device: DeviceSpec) -> str | None:
    """Reason why these formats are useless on a device, one sentence without a full stop; None if they are
    useful.

    A CPU computes the same numbers slowly, for tests and for trying a recipe.
    """
    if device.platform == "cpu":
        return None
    if device.peak_fp8_flops is None:
        return f"{device.name} has no 8-bit matmul units, so casts would only cost time and precision"
    if device.platform == "gpu" and device.compute_capability is None:
        return (
            f"{device.name} multiplies float8_e4m3fnuz and float8_e5m2fnuz, which this code does not support"
        )
    return None


def largest(x: Float[Array, "..."]) -> Float[Array, ""]:
    """`max |x|` (amax), float32; nan if x contains nan."""
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def scale_of(
    amax: Float[Array, "*some"], dtype: jax.typing.DTypeLike, *, margin: int = 0
) -> Float[Array, "*some"]:
    """Largest power of two that scales `amax` to at most `dtype`'s largest number over 2^margin; 1 if amax is
    0.

    Computed from bits, because exp2 and log2 round differently on every chip. Limited to 2^-100 to 2^100, so
    that its inverse is exact as well.
    """
    fraction, exponent = jnp.frexp(amax)
    top, power = jnp.frexp(float(jnp.finfo(dtype).max))
    power = power - exponent - (fraction > top) - margin
    power = jnp.where((amax > 0) & jnp.isfinite(amax), jnp.clip(power, -100, 100), 0)
    return jax.lax.bitcast_convert_type((power + 127).astype(jnp.int32) << 23, jnp.float32)


def quantise(
    x: Float[Array, "..."], scale: Float[Array, ""], dtype: jax.typing.DTypeLike
) -> Float[Array, "..."]:
    """`x * scale` in an FP8 `dtype`, rounded to nearest even and clipped to the format's largest number.

    An infinity becomes nan, because clipping it would hide that a run has diverged.
    """
    top = float(jnp.finfo(dtype).max)
    scaled = x.astype(jnp.float32) * scale
    # `inf - inf` in place of a constant nan: XLA:GPU moves a whole float32 array of that constant out of a
    # loop over layers, and each cast then reads it, four times the bytes that the cast writes.
    return jnp.where(jnp.isinf(scaled), scaled - scaled, jnp.clip(scaled, -top, top)).astype(dtype)


def dequantise(
    x8: Float[Array, "..."], scale: Float[Array, ""], dtype: jax.typing.DTypeLike
) -> Float[Array, "..."]:
    """Inverse of `quantise` up to rounding, in `dtype`: exact in bfloat16 and float32.

    Before a matmul, XLA:GPU recognises this as a scaled FP8 operand and moves conversion and factor into
    cuBLAS.
    """
    return x8.astype(dtype) * (1.0 / scale).astype(dtype)
