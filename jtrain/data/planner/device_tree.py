"""Tree of the mesh's devices, which says which process fetches which rows of a batch."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Int64

from jtrain.layout.mesh import shard_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientPlaceTree:
    """Tree that splits a batch's rows over devices: a level per mesh axis, a leaf per equal part of the rows.

        tree = ClientPlaceTree(shape=dict(mesh.shape), process_of_device=processes, global_batch=256)
        tree = tree.distribute("replica", "data", "expert").broadcast_at("tensor", "stage", "context")

    Example: data=4 and tensor=2, 8 devices on 4 processes by data. distribute("data") makes 4 leaves of 64
    rows; both devices along tensor are in one process, so broadcast_at adds no level, and process 1 fetches
    rows 64 to 127. With each tensor device in a process of its own, broadcast_at("tensor") halves the leaves.

    The devices that the levels do not tell apart belong to the same leaf and need the same rows. The names
    are OVERLORD's. The tree is the same at every step, and no plan depends on it, so a run may change its
    mesh.

    shape: devices along each mesh axis, outermost first.
    process_of_device: process index of each device, in the shape of the mesh.
    global_batch: rows per step.
    levels: mesh axes that split the rows, outermost first; `PartitionSpec(levels)` splits a batch the same
      way.
    """

    shape: Mapping[str, int]
    process_of_device: Int64[np.ndarray, "..."]
    global_batch: int
    levels: tuple[str, ...] = ()

    @property
    def rows_per_leaf(self) -> int:
        """Number of rows of each leaf."""
        return self.global_batch // math.prod(self.shape[axis] for axis in self.levels)

    def distribute(self, *axes: str) -> "ClientPlaceTree":
        """Splits the rows along `axes`, whose devices compute with different rows.

        Raises:
          UserError: the rows do not split evenly.
        """
        levels = (*self.levels, *axes)
        # Only the check is wanted here: it raises with the axes and the sizes that would do.
        shard_size("data.global_batch", self.global_batch, self.shape, levels)
        return dataclasses.replace(self, levels=levels)

    def broadcast_at(self, *axes: str) -> "ClientPlaceTree":
        """Lets one process fetch each row where `axes`, whose peers need the same rows, span processes.

        Each of these processes fetches another part, and the devices exchange the parts (`share_batch`). If
        the rows of a leaf do not split evenly over the peers along an axis, every process fetches all of
        them.
        """
        tree = self
        for axis in axes:
            # Largest less smallest process number along the axis: 0 where all peers are in one process.
            in_several = np.ptp(self.process_of_device, axis=list(self.shape).index(axis)).any()
            if in_several and tree.rows_per_leaf % self.shape[axis] == 0:
                tree = dataclasses.replace(tree, levels=(*tree.levels, axis))
        return tree

    def rows(self, process: int) -> Int64[np.ndarray, " rows"]:
        """Returns the rows of the global batch that a process fetches, ascending."""
        position = dict(zip(self.shape, np.indices(self.process_of_device.shape), strict=True))
        leaf = np.zeros_like(self.process_of_device)
        for axis in self.levels:
            # Mixed radix, outermost level first: as PartitionSpec(levels) numbers its shards.
            leaf = leaf * self.shape[axis] + position[axis]
        # unique: devices that the levels do not tell apart share a leaf.
        leaves = np.unique(leaf[self.process_of_device == process])
        return (leaves[:, None] * self.rows_per_leaf + np.arange(self.rows_per_leaf)).reshape(-1)
