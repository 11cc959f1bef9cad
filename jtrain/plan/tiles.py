"""How many elements an array takes in a device's memory, where that is not as many as it has."""

import functools
import itertools
import math

from jax.sharding import PartitionSpec

from jtrain.layout import Layout
from jtrain_kernels.device import Platform

_LANES, _SUBLANES = 128, 8


def local_elements(layout: Layout, spec: PartitionSpec, shape: tuple[int, ...], platform: Platform) -> int:
    """Elements that one device's block of an array of `shape` takes under `spec`, with padding."""
    if platform != "tpu":
        return layout.local_size(spec, shape)
    axes = (*spec, *(None,) * (len(shape) - len(spec)))
    sizes = layout.mesh.shape
    return tiled(tuple(n // (sizes[axis] if axis is not None else 1) for n, axis in zip(shape, axes, strict=True)))


@functools.cache
def tiled(shape: tuple[int, ...]) -> int:
    """Elements with XLA:TPU's padding, which makes tiles of 8 x 128 of two dimensions: of the two that need least.

    Two dimensions of 1, 2 or 4 make smaller tiles instead. One dimension is filled up to 128.
    """
    size = math.prod(shape)
    if len(shape) == 1:
        return _filled(size, _LANES)
    pairs = ((shape[i], shape[k]) for i, k in itertools.permutations(range(len(shape)), 2))
    return min((size // (rows * lanes) * _rows(rows) * _filled(lanes, _LANES) for rows, lanes in pairs), default=size)


def _rows(rows: int) -> int:
    tile = _SUBLANES if rows >= _SUBLANES else 1 << (rows - 1).bit_length()
    return _filled(rows, tile)


def _filled(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
