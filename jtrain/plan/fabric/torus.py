"""Torus of a TPU slice: share of the links and hops of a group's rings, and of its all-to-alls."""

import math

TORUS_HOP_S = 1e-6
"""Latency from one TPU to its neighbour. Source: scaling book, part 3."""


def torus_ring(dims: int, slice_devices: int, group: int) -> tuple[float, float]:
    """Fraction of a chip's links that a group of a slice uses, and the number of hops of its rings.

    A group lies along some of the slice's dimensions, at least one. Slices below a cube of 4 x 4 x 4, or 16 x
    16, have no wrap-around, which halves a ring's bandwidth. Source: scaling book, part 2.
    """
    slice_dims = max(1, min(dims, int(math.log2(slice_devices))))
    # In logarithms, because a group takes its part of the slice's factors of two.
    group_dims = max(1.0, slice_dims * math.log(group) / math.log(slice_devices))
    # A cube of 4 x 4 x 4, or 16 x 16 chips.
    wraps = slice_devices >= (64 if dims == 3 else 256)
    side = group ** (1 / group_dims)
    return group_dims / dims * (1.0 if wraps else 0.5), group_dims * (side / 2 if wraps else side - 1)


def exchange_share(dims: int, slice_devices: int, group: int) -> float:
    """Rate at which an all-to-all moves each device's whole array, as a fraction of that of all its links.

    A group lies as a block along as many dimensions as it can; a dimension has 1 / dims of the links. On a
    ring of s devices an array crosses s / 4 links on average, both ways round: 4 / s of a dimension's rate.
    On a line it crosses s / 3, and the middle link limits the rate to half of a ring's. Rings have at least 4
    devices, because slices with wrap-around are built of cubes of 4 x 4 x 4.

    Example: 64 chips of a v5p are rings of 4 along 3 dimensions: 1 / 3.
    """
    wraps = slice_devices >= (64 if dims == 3 else 256)
    group_dims = max(1, min(dims, int(math.log2(group))))
    side = group ** (1 / group_dims)
    return 4 / max(4.0, side) / dims if wraps else 2 / side / dims
