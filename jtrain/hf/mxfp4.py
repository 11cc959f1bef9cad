"""Weights of 4 bits with a scale for each 32 (OCP Microscaling Formats 1.0), as gpt-oss is published."""

import functools
from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np

from jtrain.errors import UserError

_BLOCKS, _SCALES = "_blocks", "_scales"
_HALF = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
VALUES = np.concatenate([_HALF, -_HALF])
"""Numbers of the 16 codes: a sign, 2 bits of exponent and 1 of mantissa."""
BIAS = 127
"""Exponent that a scale of one has: scales are powers of two, saved as their exponents."""

type Tensors = Mapping[str, Callable[[], np.ndarray]]


def with_dequantized(tensors: Tensors) -> dict[str, Callable[[], np.ndarray]]:
    """The tensors of a directory, where pairs `NAME_blocks` and `NAME_scales` are one tensor `NAME` in bfloat16.

    Every number of 4 bits times its scale is a bfloat16, so nothing is rounded. A tensor is dequantized when it is
    read.

    Raises:
      UserError: blocks without scales.
    """
    read = dict(tensors)
    for blocks_name in [name for name in tensors if name.endswith(_BLOCKS)]:
        name = blocks_name.removesuffix(_BLOCKS)
        if (scales_name := name + _SCALES) not in tensors:
            raise UserError(f"tensor {blocks_name} has no {scales_name}. A file is incomplete.")
        read[name] = functools.partial(_read, read.pop(blocks_name), read.pop(scales_name))
    return read


def _read(blocks: Callable[[], np.ndarray], scales: Callable[[], np.ndarray]) -> np.ndarray:
    # Saved as [expert, outputs, inputs], but the tensors that they stand for are [expert, inputs, outputs].
    return np.swapaxes(dequantize(blocks(), scales()), -1, -2)


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Numbers in bfloat16, [..., groups * 32].

    Example: a byte 0x2A holds the codes 10 (-1.0), which comes first, and 2 (1.0); with a scale of 128 they are
    -2.0 and 2.0.

    Args:
      blocks: uint8 [..., groups, 16], two codes a byte, the lower half first.
      scales: uint8 [..., groups].
    """
    numbers = np.empty((*blocks.shape, 2), np.float32)
    numbers[..., 0], numbers[..., 1] = VALUES[blocks & 0x0F], VALUES[blocks >> 4]
    scale = np.ldexp(np.float32(1), scales.astype(np.int32) - BIAS)
    numbers *= scale[..., None, None]
    return numbers.reshape(*scales.shape[:-1], -1).astype(ml_dtypes.bfloat16)
