"""Weights of 4 bits with a scale for each 32 (OCP Microscaling Formats 1.0), as gpt-oss is published."""

import ml_dtypes
import numpy as np

_HALF = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
VALUES = np.concatenate([_HALF, -_HALF])
"""Numbers of the 16 codes: a sign, 2 bits of exponent and 1 of mantissa."""
BIAS = 127
"""Exponent that a scale of one has: scales are powers of two, saved as their exponents."""


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Numbers in bfloat16, [..., groups * 32].

    Example: a byte 0x2A holds the codes 10 (-1.0), which comes first, and 2 (1.0); with a scale of 128 they
    are -2.0 and 2.0.

    Args:
      blocks: uint8 [..., groups, 16], two codes a byte, the lower half first.
      scales: uint8 [..., groups].
    """
    numbers = np.empty((*blocks.shape, 2), np.float32)
    numbers[..., 0], numbers[..., 1] = VALUES[blocks & 0x0F], VALUES[blocks >> 4]
    scale = np.ldexp(np.float32(1), scales.astype(np.int32) - BIAS)
    numbers *= scale[..., None, None]
    return numbers.reshape(*scales.shape[:-1], -1).astype(ml_dtypes.bfloat16)
