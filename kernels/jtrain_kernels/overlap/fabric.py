"""How a kernel reaches the memory and counters of other ranks: of other GPUs, or of ranks that share one GPU's memory.

The kernels of `mosaic_gpu` are written once, over this. On one GPU the ranks are groups of blocks, and every array and
counter has a leading rank dimension: the same tables, waits and copies, without a second GPU.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jtrain_kernels.overlap.tiles import THREADS


@runtime_checkable
class Fabric(Protocol):
    """Of one rank, inside of a kernel whose grid's only axis is `block`.

    num_ranks: joined.
    """

    @property
    def num_ranks(self) -> int: ...

    def blocks(self, num_cores: int) -> tuple[int, int]:
        """Blocks of one rank, and of the whole grid, on a chip of that many cores: no more than run at once."""
        ...

    def grid(self, blocks: int) -> dict[str, Any]:
        """Arguments of `plgpu.kernel` for a grid of so many."""
        ...

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of an array of which each rank has one of `shape`."""
        ...

    def counter_inputs(self, blocks: int, *shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
        """What the kernel needs besides to count with; nothing where the chip has counters of its own."""
        ...

    def counters(self, shape: tuple[int, ...], given: Any) -> Any:
        """Counters, `shape` of them for each rank, 0 when the kernel starts; `given` is their input or None."""
        ...

    def rank(self) -> jax.Array: ...

    def block(self, blocks: int) -> jax.Array:
        """This block's number within its rank."""
        ...

    def mine(self, ref: Any) -> Any:
        """This rank's."""
        ...

    def to_peer(self, copy: Callable[[Any], None], ref: Any, peer: jax.Array, offsets: tuple[int, ...]) -> None:
        """Calls `copy` with the same array of a peer, to be written.

        offsets: of all peers that there are, each (peer - rank) % num_ranks.
        """
        ...

    def signal(self, counters: Any, at: tuple[Any, ...], peer: jax.Array) -> None:
        """Adds one to a counter of a peer, after all that this warpgroup wrote and waited for."""
        ...

    def signal_self(self, counters: Any, at: tuple[Any, ...]) -> None: ...

    def wait(self, counters: Any, at: tuple[Any, ...], value: Any) -> None:
        """Until a counter of this rank has `value`; they only grow."""
        ...


@dataclasses.dataclass(frozen=True)
class Devices:
    """Ranks are the GPUs along a mesh axis, in one process or with NVSHMEM; arrays that peers write are symmetric.

    axis: of a mesh over which the kernel is traced in shard_map.
    """

    axis: str
    num_ranks: int

    def blocks(self, num_cores: int) -> tuple[int, int]:
        return num_cores, num_cores

    def grid(self, blocks: int) -> dict[str, Any]:
        return {"grid": (blocks,), "grid_names": ("block",)}

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def counter_inputs(self, blocks: int, *shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
        return ()

    def counters(self, shape: tuple[int, ...], given: Any) -> Any:
        return pl.get_global(plgpu.SemaphoreType.REGULAR(self.shape(shape)))

    def rank(self) -> jax.Array:
        return lax.axis_index(self.axis)

    def block(self, blocks: int) -> jax.Array:
        return lax.axis_index("block")

    def mine(self, ref: Any) -> Any:
        return ref

    def to_peer(self, copy: Callable[[Any], None], ref: Any, peer: jax.Array, offsets: tuple[int, ...]) -> None:
        # TMA writes through a descriptor that the host makes before the launch, so the host must be able to name the
        # peer too: by its offset, one branch for each. Naming it by what a table holds works from JAX 0.12 on, for at
        # most 8 devices in a mesh and without NVSHMEM.
        rank, size = self.rank(), jnp.int32(self.num_ranks)
        for offset in offsets:
            named = lax.rem(rank + jnp.int32(offset), size)

            @pl.when(peer == named)
            def _copy(named: Any = named) -> None:
                copy(plgpu.remote_ref(ref, {self.axis: named}))

    def signal(self, counters: Any, at: tuple[Any, ...], peer: jax.Array) -> None:
        pl.semaphore_signal(counters.at[at], device_id={self.axis: peer})

    def signal_self(self, counters: Any, at: tuple[Any, ...]) -> None:
        pl.semaphore_signal(counters.at[at])

    def wait(self, counters: Any, at: tuple[Any, ...], value: Any) -> None:
        pl.semaphore_wait(counters.at[at], value, decrement=False)


@dataclasses.dataclass(frozen=True)
class Shared:
    """Ranks are groups of blocks of one GPU: to prove and to time a protocol where there is one GPU."""

    num_ranks: int

    def blocks(self, num_cores: int) -> tuple[int, int]:
        each = num_cores // self.num_ranks
        return each, each * self.num_ranks

    def grid(self, blocks: int) -> dict[str, Any]:
        return {"grid": (blocks,), "grid_names": ("block",)}

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.num_ranks, *shape)

    def counter_inputs(self, blocks: int, *shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
        return ()

    def counters(self, shape: tuple[int, ...], given: Any) -> Any:
        return pl.get_global(plgpu.SemaphoreType.REGULAR(self.shape(shape)))

    def rank(self) -> jax.Array:
        return lax.rem(lax.axis_index("block"), self.num_ranks)

    def block(self, blocks: int) -> jax.Array:
        return lax.div(lax.axis_index("block"), self.num_ranks)

    def mine(self, ref: Any) -> Any:
        return ref.at[self.rank()]

    def to_peer(self, copy: Callable[[Any], None], ref: Any, peer: jax.Array, offsets: tuple[int, ...]) -> None:
        copy(ref.at[peer])

    def signal(self, counters: Any, at: tuple[Any, ...], peer: jax.Array) -> None:
        pl.semaphore_signal(counters.at[(peer, *at)])

    def signal_self(self, counters: Any, at: tuple[Any, ...]) -> None:
        self.signal(counters, at, self.rank())

    def wait(self, counters: Any, at: tuple[Any, ...], value: Any) -> None:
        pl.semaphore_wait(counters.at[(self.rank(), *at)], value, decrement=False)


@dataclasses.dataclass(frozen=True)
class Interpreted(Shared):
    """`Shared` for `plgpu.InterpretGPUParams`, which has no semaphores: every warpgroup counts in a cell of its own.

    One cluster of blocks, because those alone run at the same time there. Not for a GPU: nothing orders the counting.
    """

    def grid(self, blocks: int) -> dict[str, Any]:
        return {"grid": (1,), "grid_names": ("all",), "cluster": (blocks,), "cluster_names": ("block",)}

    def counter_inputs(self, blocks: int, *shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros((*self.shape(shape), blocks * THREADS), jnp.int32) for shape in shapes)

    def counters(self, shape: tuple[int, ...], given: Any) -> Any:
        return given

    def signal(self, counters: Any, at: tuple[Any, ...], peer: jax.Array) -> None:
        cell = (peer, *at, lax.axis_index("block") * THREADS + lax.axis_index("wg"))
        counters[cell] = counters[cell] + 1

    def wait(self, counters: Any, at: tuple[Any, ...], value: Any) -> None:
        def read(_: Any) -> jax.Array:
            return jnp.sum(counters[(self.rank(), *at, slice(None))])

        lax.while_loop(lambda count: count < value, read, jnp.int32(-1))


def when(condition: Any, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """Either, by a value that the kernel reads."""
    pl.when(condition)(then)
    pl.when(~condition)(otherwise)
