"""Collectives over shards along `ZERO_AXES`, one torus dimension after another where devices form a torus.

`gather_shards` and `scatter_shards` are transposes of each other, and run inside the step's `jax.shard_map`.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from jtrain.layout.layout import Layout
from jtrain.layout.mesh import ZERO_AXES


def along_torus(layout: Layout, mesh: Mesh) -> Layout:
    """Returns the layout with ZeRO's collectives split by torus dimension, if the devices form a TPU torus.

    XLA:TPU turns an all-gather or reduce-scatter over 128 chips into an all-reduce of twice the bytes. Along
    one torus dimension at a time it does not, and the total bytes equal those of one collective over all
    chips.
    """
    # One line of devices along the axes of ZeRO stands for all: the others lie parallel to it.
    line = mesh.devices[tuple(slice(None) if axis in ZERO_AXES else 0 for axis in mesh.axis_names)].ravel()
    if line[0].platform != "tpu" or layout.rings:
        return layout
    rings = torus_rings(np.array([(*device.coords, device.core_on_chip) for device in line]))
    return dataclasses.replace(layout, rings=rings) if len(rings) > 1 else layout


def torus_rings(coordinates_NK: np.ndarray) -> tuple[int, ...]:
    """Returns the length of each torus dimension that N devices in a row run through, the slowest first.

    Args:
      coordinates_NK: K coordinates of each device.

    Returns:
      Lengths whose product is N; (N,) if the devices do not run through a torus in order.

    Example: devices at (0,0), (1,0), (0,1), (1,1), (0,2), (1,2) give (3, 2): their second coordinate is the
    slower one and takes 3 values.
    """
    num_devices, num_coordinates = coordinates_NK.shape
    first_changes = {
        dim: int(np.argmax(coordinates_NK[:, dim] != coordinates_NK[0, dim]))
        for dim in range(num_coordinates)
        if np.ptp(coordinates_NK[:, dim])
    }
    # The slower a dimension, the later its coordinate first changes.
    slowest_first = sorted(first_changes, key=lambda dim: -first_changes[dim])
    rings = tuple(len(np.unique(coordinates_NK[:, dim])) for dim in slowest_first)
    # A torus in order has every combination of coordinates once.
    if math.prod(rings) != num_devices:
        return (num_devices,)
    for index, dim in enumerate(slowest_first):
        ring_coordinates = np.moveaxis(coordinates_NK[:, dim].reshape(rings), index, 0).reshape(
            rings[index], -1
        )
        # Along ring `index` all devices of one position must share that coordinate.
        if np.ptp(ring_coordinates, axis=1).any():
            return (num_devices,)
    return rings


def gather_shards(layout: Layout, shard: Array, dim: int) -> Array:
    """Gathers the shards of all devices along `ZERO_AXES` along `dim`, in device order."""
    axes, lead = layout.mesh.zero_axes, _lead(layout, dim)
    shard = jnp.moveaxis(shard, dim, lead)
    # Fastest dimension first: each step joins adjacent parts.
    for groups in reversed(_ring_groups(layout.rings)):
        shard = jax.lax.all_gather(shard, axes, axis=lead, tiled=True, axis_index_groups=groups)
    return jnp.moveaxis(shard, lead, dim)


def scatter_shards(layout: Layout, full_grad: Array, dim: int) -> Array:
    """Returns this device's shard of the sum over `ZERO_AXES`; the transpose of `gather_shards`."""
    axes, lead = layout.mesh.zero_axes, _lead(layout, dim)
    full_grad = jnp.moveaxis(full_grad, dim, lead)
    # Slowest dimension first, the reverse of `gather_shards`: its transpose.
    for groups in _ring_groups(layout.rings):
        full_grad = jax.lax.psum_scatter(
            full_grad, axes, scatter_dimension=lead, tiled=True, axis_index_groups=groups
        )
    return jnp.moveaxis(full_grad, lead, dim)


def _lead(layout: Layout, dim: int) -> int:
    """Returns the position of `dim` during a collective: in front on a TPU torus.

    XLA:TPU gathers and scatters along the slowest dimension in memory. Asked for another, it keeps the shards
    with that dimension last, where 32 elements take a tile's 128 lanes; and it copies what it has gathered.
    """
    return 0 if layout.rings else dim


def _ring_groups(rings: tuple[int, ...]) -> list[list[list[int]] | None]:
    """Returns for each torus dimension, slowest first, the groups of devices that differ only in it."""
    if not rings:
        return [None]
    numbers = np.arange(math.prod(rings)).reshape(rings)
    return [np.moveaxis(numbers, dim, -1).reshape(-1, size).tolist() for dim, size in enumerate(rings)]
