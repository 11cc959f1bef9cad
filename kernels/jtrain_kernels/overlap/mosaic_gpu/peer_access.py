"""Access to the memory and counters of peers: other GPUs, or virtual ranks that share one GPU.

The kernels of `mosaic_gpu` are written once, against `PeerAccess`. Virtual ranks are groups of blocks of one
GPU, where every array and counter has a leading rank dimension: the same tables, waits and copies without a
second GPU.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jtrain_kernels.overlap.mosaic_gpu.tile_shapes import THREADS


@dataclasses.dataclass(frozen=True)
class PeerAccess(abc.ABC):
    """Operations of one rank on its peers, inside a kernel whose grid has the single axis `block`.

    num_ranks: number of ranks, this one included.
    """

    num_ranks: int

    @abc.abstractmethod
    def blocks(self, num_cores: int) -> tuple[int, int]:
        """Blocks of one rank and of the whole grid on a chip with `num_cores` cores; all run at one time."""

    def grid(self, blocks: int) -> dict[str, Any]:
        """Arguments of `plgpu.kernel` for a grid of `blocks` blocks."""
        return {"grid": (blocks,), "grid_names": ("block",)}

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the whole array if each rank has an array of shape `shape`."""
        return shape

    def counter_inputs(self, blocks: int, *shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
        """Extra kernel inputs that serve as counters; empty where the chip has semaphores."""
        return ()

    def counters(self, shape: tuple[int, ...], extra_input: Any) -> Any:
        """Counters of shape `shape` per rank, 0 when the kernel starts; `extra_input` is their extra input or
        None.
        """
        return pl.get_global(plgpu.SemaphoreType.REGULAR(self.shape(shape)))

    @abc.abstractmethod
    def rank(self) -> jax.Array:
        """This rank's number."""

    @abc.abstractmethod
    def block(self, blocks: int) -> jax.Array:
        """This block's number within its rank."""

    @abc.abstractmethod
    def mine(self, ref: Any) -> Any:
        """This rank's part of `ref`."""

    @abc.abstractmethod
    def to_peer(
        self, copy: Callable[[Any], None], ref: Any, peer: jax.Array, offsets: tuple[int, ...]
    ) -> None:
        """Calls `copy` with the ref of the same array on a peer, to be written.

        offsets: (peer - rank) % num_ranks for every peer that this rank writes to.
        """

    @abc.abstractmethod
    def signal(self, counters: Any, index: tuple[Any, ...], peer: jax.Array) -> None:
        """Adds one to a counter of a peer, after all writes that this warpgroup has waited for."""

    @abc.abstractmethod
    def wait(self, counters: Any, index: tuple[Any, ...], value: Any) -> None:
        """Waits until a counter of this rank is at least `value`; counters only grow."""


@dataclasses.dataclass(frozen=True)
class PeerDevices(PeerAccess):
    """Ranks as the GPUs along a mesh axis, in one process or with NVSHMEM; peers write to symmetric arrays.

    axis: mesh axis over which the kernel is traced in shard_map.
    """

    axis: str

    def blocks(self, num_cores: int) -> tuple[int, int]:
        return num_cores, num_cores

    def rank(self) -> jax.Array:
        return lax.axis_index(self.axis)

    def block(self, blocks: int) -> jax.Array:
        return lax.axis_index("block")

    def mine(self, ref: Any) -> Any:
        return ref

    def to_peer(
        self, copy: Callable[[Any], None], ref: Any, peer: jax.Array, offsets: tuple[int, ...]
    ) -> None:
        # TMA writes through a descriptor that the host makes before the launch, so the host must know the
        # peer as well: one branch per offset. Reading the peer from a table works from JAX 0.12 on, for at
        # most 8 devices in a mesh and without NVSHMEM.
        rank, size = self.rank(), jnp.int32(self.num_ranks)
        # Offsets are few: a ring writes to one or two peers, a full mesh to all others.
        for offset in offsets:
            named = lax.rem(rank + jnp.int32(offset), size)

            @pl.when(peer == named)
            # Bound as a default argument, so that the closure does not see the loop's last value.
            def _copy(named: Any = named) -> None:
                copy(plgpu.remote_ref(ref, {self.axis: named}))

    def signal(self, counters: Any, index: tuple[Any, ...], peer: jax.Array) -> None:
        # The caller has waited for its writes (`wait_smem_to_gmem`) before it signals.
        pl.semaphore_signal(counters.at[index], device_id={self.axis: peer})

    def wait(self, counters: Any, index: tuple[Any, ...], value: Any) -> None:
        # Not consumed: several blocks wait for one counter, and counters start at 0 in each launch.
        pl.semaphore_wait(counters.at[index], value, decrement=False)


@dataclasses.dataclass(frozen=True)
class VirtualRanks(PeerAccess):
    """Ranks as groups of blocks of one GPU, to test and time a protocol where only one GPU is available."""

    def blocks(self, num_cores: int) -> tuple[int, int]:
        # Rounded down, so that every rank has as many blocks and all fit on the chip at one time.
        blocks_per_rank = num_cores // self.num_ranks
        return blocks_per_rank, blocks_per_rank * self.num_ranks

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.num_ranks, *shape)

    def rank(self) -> jax.Array:
        # Neighbouring blocks are of different ranks, which spreads each rank over the chip.
        return lax.rem(lax.axis_index("block"), self.num_ranks)

    def block(self, blocks: int) -> jax.Array:
        return lax.div(lax.axis_index("block"), self.num_ranks)

    def mine(self, ref: Any) -> Any:
        return ref.at[self.rank()]

    def to_peer(
        self, copy: Callable[[Any], None], ref: Any, peer: jax.Array, offsets: tuple[int, ...]
    ) -> None:
        copy(ref.at[peer])

    def signal(self, counters: Any, index: tuple[Any, ...], peer: jax.Array) -> None:
        pl.semaphore_signal(counters.at[(peer, *index)])

    def wait(self, counters: Any, index: tuple[Any, ...], value: Any) -> None:
        pl.semaphore_wait(counters.at[(self.rank(), *index)], value, decrement=False)


@dataclasses.dataclass(frozen=True)
class EmulatedRanks(VirtualRanks):
    """`VirtualRanks` for `plgpu.InterpretGPUParams`, without semaphores: every warpgroup has its own cell.

    The grid is one cluster of blocks, because the interpreter runs only the blocks of a cluster concurrently.
    Not for a GPU: nothing orders the counting.
    """

    def grid(self, blocks: int) -> dict[str, Any]:
        # The axis named `block` is the cluster's here, so the kernel's code needs no change.
        return {"grid": (1,), "grid_names": ("all",), "cluster": (blocks,), "cluster_names": ("block",)}

    def counter_inputs(self, blocks: int, *shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros((*self.shape(shape), blocks * THREADS), jnp.int32) for shape in shapes)

    def counters(self, shape: tuple[int, ...], extra_input: Any) -> Any:
        return extra_input

    def signal(self, counters: Any, index: tuple[Any, ...], peer: jax.Array) -> None:
        # One cell per warpgroup of the grid: two writers of one cell would lose a count.
        cell = (peer, *index, lax.axis_index("block") * THREADS + lax.axis_index("wg"))
        counters[cell] = counters[cell] + 1

    def wait(self, counters: Any, index: tuple[Any, ...], value: Any) -> None:
        def read(_: Any) -> jax.Array:
            return jnp.sum(counters[(self.rank(), *index, slice(None))])

        # The count is read again until it suffices; -1 forces the first read.
        lax.while_loop(lambda count: count < value, read, jnp.int32(-1))


def when(condition: Any, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """Runs `then` or `otherwise`, depending on a value that the kernel computes."""
    pl.when(condition)(then)
    pl.when(~condition)(otherwise)
