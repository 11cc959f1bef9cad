"""Device mesh with six named axes, all always present."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jtrain.errors import UserError
from jtrain.layout.constants import BATCH_AXES as BATCH_AXES

AXES = ("replica", "stage", "data", "expert", "context", "tensor")
"""Mesh axes, outermost (slowest network) first, so that neighbours along `tensor` are the closest devices."""

ZERO_AXES = ("data", "context")
"""Mesh axes over which ZeRO splits state: devices along them hold different tokens and would hold the same
state."""


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """Number of devices along each mesh axis.

    replica: data parallelism without sharding, across slices or pods.
    stage: pipeline stages.
    data: data parallelism; ZeRO shards state over `data` and `context` together. `auto`, which a config has
      that does not say it, is what is left of the devices that are here (`config.devices.resolve_mesh`); all
      else takes a number.
    expert: experts of MoE layers; data parallelism for all other parameters.
    context: positions of a sequence; ZeRO shards state over it too.
    tensor: heads, feed-forward hidden and vocabulary; activations between layers are split by position.
    """

    replica: int = 1
    stage: int = 1
    data: int | Literal["auto"] = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        # `auto` counts as 1 here: the other axes can be checked before the devices are known.
        for axis, size in self.resolve_data(1).shape.items() if self.data == "auto" else self.shape.items():
            if size < 1:
                raise UserError(
                    f"mesh.{axis}={size} must be at least 1. Set mesh.{axis}=1 to leave the axis unused."
                )

    def resolve_data(self, data: int) -> "MeshSpec":
        """Returns the mesh with `data` devices along that axis if it is `auto`; else the mesh as it is."""
        return dataclasses.replace(self, data=data) if self.data == "auto" else self

    @functools.cached_property
    def shape(self) -> dict[str, int]:
        """Number of devices along each axis of `AXES`, cached: a search reads it 100,000 times.

        Raises:
          UserError: `data` is still `auto`.
        """
        if self.data == "auto":
            raise UserError(
                "mesh.data=auto has to be chosen first: it depends on the devices. Set it to a number."
            )
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def zero_axes(self) -> tuple[str, ...]:
        """Returns the axes of `ZERO_AXES` that have several devices."""
        return tuple(axis for axis in ZERO_AXES if self.shape[axis] > 1)

    @property
    def zero_shards(self) -> int:
        """Number of shards into which ZeRO splits an array: the devices along `ZERO_AXES`."""
        return math.prod(self.shape[axis] for axis in ZERO_AXES)

    @property
    def batch_shards(self) -> int:
        """Number of parts into which the sequences of a batch are split."""
        return math.prod(self.shape[axis] for axis in BATCH_AXES)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape.values())


def make_mesh(spec: MeshSpec, devices: Sequence[jax.Device]) -> Mesh:
    """Arranges `devices` in a mesh of the shape `spec`; on TPUs along the torus.

    Raises:
      UserError: the number of devices is not the product of the axes.
    """
    if spec.size != len(devices):
        product = " * ".join(f"{axis}={size}" for axis, size in spec.shape.items() if size > 1) or "1"
        raise UserError(
            f"{len(devices)} {'device is' if len(devices) == 1 else 'devices are'} here "
            f"({devices[0].platform}), but mesh {product} = {spec.size} devices. Set mesh.data so that the "
            f"product is {len(devices)}, or to auto, which takes what is here; or add --emulate-devices "
            f"{spec.size} to try the layout on this CPU."
        )
    shape = tuple(spec.shape.values())
    if devices[0].platform == "tpu":
        from jax.experimental import mesh_utils  # lazy: 0.1 s that CPU and GPU runs need not pay

        grid = mesh_utils.create_device_mesh(shape, devices)
    else:
        grid = np.asarray(devices).reshape(shape)
    # Auto axes: XLA partitions the optimizer's global arrays; everything else is manual.
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def shard_size(name: str, size: int, shape: Mapping[str, int], axes: Sequence[str]) -> int:
    """Returns the length of one shard of a dimension of `size`, split over `axes` of a mesh of `shape`.

    Raises:
      UserError: the dimension does not split evenly; names the nearest sizes that do.
    """
    shards = math.prod(shape[axis] for axis in axes)
    if size % shards:
        product = " * ".join(f"{axis}={shape[axis]}" for axis in axes)
        below = size - size % shards
        nearest = f"{below}, {below + shards}" if below else f"{shards}"
        # One axis alone may end it, with the largest length that does.
        lengths = {
            axis: [n for n in range(1, shape[axis]) if size % (shards // shape[axis] * n) == 0]
            for axis in axes
        }
        fields = [f"mesh.{axis} to {choices[-1]}" for axis, choices in lengths.items() if choices]
        product_of_axes = " * ".join("mesh." + axis for axis in axes)
        fields = fields or [f"the product of {product_of_axes} to a divisor of {size}"]
        raise UserError(
            f"{name}={size} does not split evenly over mesh axes {product} = {shards} shards. "
            f"Nearest sizes that do: {nearest}. Set {name}, or {' or '.join(fields)}."
        )
    return size // shards


def local_shape(spec: PartitionSpec, shape: Sequence[int], mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape of one device's block; a dimension shorter than its axes has length 1."""
    lengths = list(shape)
    # A plain loop: a search calls this tens of thousands of times.
    for dim, axes in enumerate(spec):
        if axes is not None:
            # At least 1: with more devices than key heads each device computes one head.
            lengths[dim] = max(1, lengths[dim] // math.prod([mesh[axis] for axis in axis_names(axes)]))
    return tuple(lengths)


def axis_names(axis: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Mesh axes of one entry of a partition."""
    return () if axis is None else (axis,) if isinstance(axis, str) else axis


def unsplit_axes(spec: PartitionSpec, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes of several devices that hold the same array; its gradient is summed over them."""
    # One entry of a partition may name several axes: D over (data, context).
    split_axes = {name for axis in spec for name in axis_names(axis)}
    return tuple(axis for axis in AXES if mesh[axis] > 1 and axis not in split_axes)
