"""How a kernel reaches the memory and counters of other ranks: of other GPUs, or of ranks that share one GPU's memory.

The kernels of `mosaic_gpu` are written once, over this. On one GPU the ranks are groups of blocks, and every array and
counter has a leading rank dimension: the same tables, waits and copies, without a second GPU.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Fabric(Protocol):
    """Of one rank, inside of a kernel whose grid's only axis is `block`.

    num_ranks: joined.
    """

    @property
    def num_ranks(self) -> int: ...

    def blocks(self, num_cores: int) -> tuple[int, int]:
        """Blocks of one rank, and of the whole grid, on a chip of that many cores: no more than run at once."""
        ...

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of an array or of counters of which each rank has one of `shape`."""
        ...

    def rank(self) -> jax.Array: ...

    def block(self, blocks: int) -> jax.Array:
        """This block's number within its rank."""
        ...

    def mine(self, ref: Any) -> Any:
        """This rank's."""
        ...

    def of(self, ref: Any, peer: jax.Array) -> Any:
        """The same array of a peer, to be written."""
        ...

    def signal(self, counters: Any, at: tuple[Any, ...], peer: jax.Array) -> None:
        """Adds one to a counter of a peer, after all that this warpgroup wrote and waited for."""
        ...

    def signal_self(self, counters: Any, at: tuple[Any, ...]) -> None: ...

    def wait(self, counters: Any, at: tuple[Any, ...], value: Any) -> None:
        """Until a counter of this rank has `value`; counters start at 0 in every call and only grow."""
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

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def rank(self) -> jax.Array:
        return lax.axis_index(self.axis)

    def block(self, blocks: int) -> jax.Array:
        return lax.axis_index("block")

    def mine(self, ref: Any) -> Any:
        return ref

    def of(self, ref: Any, peer: jax.Array) -> Any:
        return plgpu.remote_ref(ref, {self.axis: peer})

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

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.num_ranks, *shape)

    def rank(self) -> jax.Array:
        return lax.rem(lax.axis_index("block"), self.num_ranks)

    def block(self, blocks: int) -> jax.Array:
        return lax.div(lax.axis_index("block"), self.num_ranks)

    def mine(self, ref: Any) -> Any:
        return ref.at[self.rank()]

    def of(self, ref: Any, peer: jax.Array) -> Any:
        return ref.at[peer]

    def signal(self, counters: Any, at: tuple[Any, ...], peer: jax.Array) -> None:
        pl.semaphore_signal(counters.at[(peer, *at)])

    def signal_self(self, counters: Any, at: tuple[Any, ...]) -> None:
        self.signal(counters, at, self.rank())

    def wait(self, counters: Any, at: tuple[Any, ...], value: Any) -> None:
        pl.semaphore_wait(counters.at[(self.rank(), *at)], value, decrement=False)


def when(condition: Any, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """Either, by a value that the kernel reads."""
    pl.when(condition)(then)
    pl.when(~condition)(otherwise)
