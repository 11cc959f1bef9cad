"""The device mesh: six named axes, always all present."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("replica", "stage", "data", "expert", "context", "tensor")
"""Outermost (slowest network) first, so that `tensor` neighbours are the closest devices."""

BATCH_AXES = ("replica", "data", "expert")
"""The axes that the sequences of a batch are split over."""


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """Devices along each axis.

    replica: data parallel, never sharded: across slices or pods.
    stage: pipeline stages.
    data: data parallel, over which ZeRO shards.
    expert: experts of a mixture, and data parallel for the rest.
    context: the sequence.
    tensor: heads, feed-forward hidden and vocabulary; activations between them are split by sequence.
    """

    replica: int = 1
    stage: int = 1
    data: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis, size in self.shape.items():
            if size < 1:
                raise ValueError(f"mesh.{axis}={size} must be at least 1. Set mesh.{axis}=1 to leave the axis unused.")

    @property
    def shape(self) -> dict[str, int]:
        """Devices along each axis, in the order of `AXES`."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def size(self) -> int:
        return math.prod(self.shape.values())


def make_mesh(spec: MeshSpec, devices: Sequence[jax.Device]) -> Mesh:
    """Arranges `devices` as `spec` says; on TPUs along the torus.

    Raises:
      ValueError: the number of devices is not the product of the axes.
    """
    if spec.size != len(devices):
        product = " * ".join(f"{axis}={size}" for axis, size in spec.shape.items() if size > 1) or "1"
        raise ValueError(
            f"mesh {product} = {spec.size} devices, but {len(devices)} are here. "
            f"Set mesh.data so that the product is {len(devices)}, or add --emulate-devices {spec.size} to try "
            "the layout on this CPU."
        )
    shape = tuple(spec.shape.values())
    if devices[0].platform == "tpu":
        from jax.experimental import mesh_utils  # lazy: 0.1 s that CPU and GPU runs need not pay

        grid = mesh_utils.create_device_mesh(shape, devices)
    else:
        grid = np.asarray(devices).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def shard_size(name: str, size: int, shape: Mapping[str, int], axes: Sequence[str]) -> int:
    """Length of one shard of a dimension of `size` split over mesh `axes` of a mesh of `shape`.

    Raises:
      ValueError: it does not split evenly; says the nearest sizes that do.
    """
    shards = math.prod(shape[axis] for axis in axes)
    if size % shards:
        product = " * ".join(f"{axis}={shape[axis]}" for axis in axes)
        below = size - size % shards
        nearest = f"{below}, {below + shards}" if below else f"{shards}"
        fields = ", ".join("mesh." + axis for axis in axes)
        raise ValueError(
            f"{name}={size} does not split evenly over mesh axes {product} = {shards} shards. "
            f"Nearest sizes that do: {nearest}. Set {name}, or change one of {fields}."
        )
    return size // shards
