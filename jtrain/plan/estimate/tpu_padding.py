"""Padded array sizes on TPU: XLA tiles two dimensions of an array to 8 x 128."""

import functools
import itertools
import math

from jax.sharding import PartitionSpec

from jtrain.layout.layout import Layout
from jtrain.layout.mesh import local_shape
from jtrain_kernels.device import Platform

_LANES, _SUBLANES = 128, 8


def local_elements(layout: Layout, spec: PartitionSpec, shape: tuple[int, ...], platform: Platform) -> int:
    """Elements of one device's block of an array of `shape` under `spec`, with the platform's padding."""
    if platform != "tpu":
        return layout.local_size(spec, shape)
    return tiled(local_shape(spec, shape, layout.mesh.shape))


@functools.cache
def tiled(shape: tuple[int, ...]) -> int:
    """Elements with XLA:TPU's padding to tiles of 8 x 128, over the two dimensions that need the least.

    Dimensions of 1, 2 or 4 rows make smaller tiles. A one-dimensional array is padded to a multiple of 128.
    """
    size = math.prod(shape)
    if len(shape) == 1:
        return _round_up(size, _LANES)
    # XLA:TPU chooses the layout, so any two dimensions may be the tiled ones, in either order.
    pairs = ((shape[i], shape[k]) for i, k in itertools.permutations(range(len(shape)), 2))
    return min(
        (size // (rows * lanes) * _padded_rows(rows) * _round_up(lanes, _LANES) for rows, lanes in pairs),
        default=size,
    )


def _padded_rows(rows: int) -> int:
    # The next power of two: 1, 2, 4 or 8 rows.
    tile = _SUBLANES if rows >= _SUBLANES else 1 << (rows - 1).bit_length()
    return _round_up(rows, tile)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
