"""Who needs which rows and which part of the sequence: the trainer's mesh as a tree of clients."""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int64

BATCH_AXES = ("replica", "data", "expert")
"""The axes over which the rows of a batch are split, as in `jtrain.mesh`, which loader processes cannot import."""

ContextSplit = Literal["contiguous", "zigzag"]


class Block(NamedTuple):
    """One part of the global batch: rows first, first + 1, ... up to `end`, of them one slice of the sequence."""

    first: int
    end: int
    context: int


class ClientPlaceTree:
    """Which devices need which block of a batch; made anew for any topology, and no plan depends on it.

    Args:
      shape: devices along each mesh axis, outermost first.
      process_of_device: for each device in the order of the mesh, row-major.
      global_batch: rows per step; must divide by replica * data * expert.
    """

    def __init__(
        self, shape: Mapping[str, int], process_of_device: Int64[np.ndarray, " devices"], *, global_batch: int
    ) -> None:
        self.shape = dict(shape)
        self.process_of_device = process_of_device
        assert math.prod(shape.values()) == len(process_of_device), (shape, len(process_of_device))
        self.num_blocks = self.count("data")
        if global_batch % self.num_blocks:
            raise ValueError(
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
        """Ranks along a mesh axis; `data` counts all axes that rows are split over, `world` every device."""
        if axis == "world":
            return math.prod(self.shape.values())
        if axis == "data":
            return math.prod(self.shape.get(name, 1) for name in BATCH_AXES)
        if axis not in self.shape:
            raise ValueError(f"distribute({axis!r}): must be 'world' or one of the mesh axes {', '.join(self.shape)}.")
        return self.shape[axis]

    def blocks(self, process: int) -> list[Block]:
        """What the devices of a process need, each block once, in order."""
        here = np.flatnonzero(self.process_of_device == process)
        found = sorted({(int(self.row_block[i]), int(self.context[i])) for i in here})
        return [Block(block * self.rows_per_block, (block + 1) * self.rows_per_block, at) for block, at in found]

    def rows(self, process: int) -> Int64[np.ndarray, " rows"]:
        """The rows of the global batch that a process needs any part of, ascending."""
        firsts = sorted({block.first for block in self.blocks(process)})
        return np.concatenate(
            [np.arange(first, first + self.rows_per_block) for first in firsts] or [np.empty(0, np.int64)]
        )

    def fetch_from(self, *dims: str) -> Int64[np.ndarray, " devices"]:
        """For each device the peer along `dims` that fetches for it; itself where it is the first of them.

        Peers along `tensor` and `stage` need the very same block; those along `context` the same rows.
        """
        strides = np.cumprod([1, *reversed(self.shape.values())])[:-1][::-1]
        stride = dict(zip(self.shape, strides.tolist(), strict=True))
        device = np.arange(len(self.process_of_device))
        for axis in dims:
            if axis not in self.shape or axis in BATCH_AXES:
                raise ValueError(
                    f"broadcast_at({axis!r}): peers along it do not need the same rows. Use tensor, stage or context."
                )
            device = device - self._at[axis] * stride[axis]
        return device

    def fetching_process(self, process: int, *dims: str) -> dict[Block, int]:
        """Each block that a process needs, with the process that fetches it when `dims` are broadcast."""
        source = self.fetch_from(*dims)
        found = {}
        for i in np.flatnonzero(self.process_of_device == process).tolist():
            first = int(self.row_block[i]) * self.rows_per_block
            block = Block(first, first + self.rows_per_block, int(self.context[i]))
            found[block] = min(int(self.process_of_device[source[i]]), found.get(block, 1 << 62))
        return found


def context_order(seq_len: int, context: int, split: ContextSplit) -> Int64[np.ndarray, " seq_len"]:
    """The order of a row's tokens in which device i of `context` has the i-th equal part.

    zigzag: the row in 2 * context parts, of which device i has part i and the i-th from the end, so that under a
    causal mask each device has the same attention to do.

    Raises:
      ValueError: the row does not split into so many equal parts.
    """
    parts = context * (2 if split == "zigzag" and context > 1 else 1)
    if seq_len % parts:
        below = seq_len - seq_len % parts
        nearest = f"{below}, {below + parts}" if below else f"{parts}"
        raise ValueError(
            f"data.seq_len={seq_len} does not split into {parts} parts ({split}, mesh.context={context}). Nearest that "
            f"do: {nearest}."
        )
    chunks = np.arange(seq_len).reshape(parts, -1)
    if parts == context:
        return chunks.reshape(-1)
    return np.stack([chunks[:context], chunks[::-1][:context]], axis=1).reshape(-1)
