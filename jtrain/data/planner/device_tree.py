"""Mapping from devices of the mesh to the rows and the part of the sequence that each of them needs."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from jtrain.constants import BATCH_AXES
from jtrain.errors import UserError


class BatchBlock(NamedTuple):
    """One part of the global batch: rows `first` to `end` (exclusive), and one slice of the sequence."""

    first: int
    end: int
    context: int


class ClientPlaceTree:
    """Mapping from devices to the blocks of a batch. It is built for one topology, and no plan depends on it.

    Args:
      shape: devices along each mesh axis, outermost first.
      process_of_device: process index of each device, in row-major order of the mesh.
      global_batch: rows per step; must be a multiple of replica * data * expert.
    """

    def __init__(
        self, shape: Mapping[str, int], process_of_device: Int64[np.ndarray, " devices"], *, global_batch: int
    ) -> None:
        self.shape = dict(shape)
        self.process_of_device = process_of_device
        assert math.prod(shape.values()) == len(process_of_device), (shape, len(process_of_device))
        self.num_blocks = self.count("data")
        if global_batch % self.num_blocks:
            raise UserError(
                f"data.global_batch={global_batch} does not split over mesh.replica * mesh.data * mesh.expert = "
                f"{self.num_blocks}. Set data.global_batch to a multiple of {self.num_blocks}."
            )
        self.rows_per_block = global_batch // self.num_blocks
        at = dict(zip(shape, np.unravel_index(np.arange(len(process_of_device)), tuple(shape.values())), strict=True))
        self._at = {axis: index.astype(np.int64) for axis, index in at.items()}
        self.row_block = np.zeros(len(process_of_device), np.int64)
        for axis in (axis for axis in shape if axis in BATCH_AXES):
            self.row_block = self.row_block * shape[axis] + self._at[axis]
        self.context = self._at.get("context", np.zeros(len(process_of_device), np.int64))

    def count(self, axis: str) -> int:
        """Returns the number of ranks along a mesh axis; `data` means all axes that split rows, `world` all devices."""
        if axis == "world":
            return math.prod(self.shape.values())
        if axis == "data":
            return math.prod(self.shape.get(name, 1) for name in BATCH_AXES)
        if axis not in self.shape:
            raise UserError(f"distribute({axis!r}): must be 'world' or one of the mesh axes {', '.join(self.shape)}.")
        return self.shape[axis]

    def blocks(self, process: int) -> list[BatchBlock]:
        """Returns the blocks that the devices of a process need, each block once, in order."""
        here = np.flatnonzero(self.process_of_device == process)
        found = sorted({(int(self.row_block[i]), int(self.context[i])) for i in here})
        return [BatchBlock(block * self.rows_per_block, (block + 1) * self.rows_per_block, at) for block, at in found]

    def rows(self, process: int) -> Int64[np.ndarray, " rows"]:
        """Returns the rows of the global batch of which a process needs any part, ascending."""
        firsts = sorted({block.first for block in self.blocks(process)})
        return np.concatenate(
            [np.arange(first, first + self.rows_per_block) for first in firsts] or [np.empty(0, np.int64)]
        )

    def fetch_from(self, *dims: str) -> Int64[np.ndarray, " devices"]:
        """Returns for each device its first peer along `dims`, which fetches for it; this may be the device itself.

        Peers along `tensor` and `stage` need the same block; peers along `context` need the same rows.
        """
        strides = np.cumprod([1, *reversed(self.shape.values())])[:-1][::-1]
        stride = dict(zip(self.shape, strides.tolist(), strict=True))
        device = np.arange(len(self.process_of_device))
        for axis in dims:
            if axis not in self.shape or axis in BATCH_AXES:
                raise UserError(
                    f"broadcast_at({axis!r}): peers along this axis need different rows. Use tensor, stage or context."
                )
            device = device - self._at[axis] * stride[axis]
        return device

    def fetching_process(self, process: int, *dims: str) -> dict[BatchBlock, int]:
        """Maps each block that a process needs to the process that fetches it when `dims` are broadcast."""
        source = self.fetch_from(*dims)
        found = {}
        for i in np.flatnonzero(self.process_of_device == process).tolist():
            first = int(self.row_block[i]) * self.rows_per_block
            block = BatchBlock(first, first + self.rows_per_block, int(self.context[i]))
            found[block] = min(int(self.process_of_device[source[i]]), found.get(block, 1 << 62))
        return found
