"""OpenSHMEM's words for what a Pallas TPU kernel says about other devices' memory (OpenSHMEM 1.5, section 9).

A kernel author who knows them from NVSHMEM or Triton-distributed finds them here. What differs: a put names the ref on
the other side, which must be the same array of the same kernel there; its arrival is a semaphore there, counted in
bytes by the copy engine, so one put is waited for by one wait with the same refs.

| OpenSHMEM | here |
|---|---|
| shmem_my_pe, shmem_n_pes | `my_pe`, `n_pes` |
| shmem_putmem_nbi with a signal (put_signal_nbi) | `put_signal_nbi` |
| shmem_quiet, of one put | `quiet` |
| shmem_signal_wait_until, of one put | `wait_until_arrived` |
| shmemx_signal_op | `signal_op` |
| shmem_signal_wait_until, of a counter | `signal_wait_until` |
| shmem_barrier_all, of some devices | `barrier` |
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

type Index = int | Array


def my_pe(axis_name: str) -> Array:
    """Which device along the axis this is."""
    return jax.lax.axis_index(axis_name)


def n_pes(axis_name: str) -> int:
    """Devices along the axis."""
    return jax.lax.axis_size(axis_name)


def put_signal_nbi(source: Any, target: Any, sent: Any, arrived: Any, *, axis_name: str, pe: Index) -> None:
    """Begins to copy `source` into `target` of another device and goes on.

    Args:
      target: the ref as this device calls its own.
      sent, arrived: DMA semaphores: of this device when `source` has been read, of the other when it is there.
      pe: the other device along the axis; along the rest of the mesh it has this one's place.
    """
    _copy(source, target, sent, arrived, axis_name, pe).start()


def quiet(source: Any, target: Any, sent: Any, arrived: Any, *, axis_name: str, pe: Index) -> None:
    """Waits until `source` of a put with the same arguments has been read."""
    _copy(source, target, sent, arrived, axis_name, pe).wait_send()


def wait_until_arrived(target: Any, sent: Any, arrived: Any, *, axis_name: str) -> None:
    """Waits until what another device put into `target` of this one is there."""
    _copy(target, target, sent, arrived, axis_name, my_pe(axis_name)).wait_recv()


def signal_op(semaphore: Any, *, axis_name: str, pe: Index, add: int = 1) -> None:
    """Adds to a semaphore of another device."""
    pl.semaphore_signal(semaphore, add, device_id={axis_name: pe})


def signal_wait_until(semaphore: Any, value: int = 1) -> None:
    """Waits until a semaphore of this device is at least `value`, and takes that from it."""
    pl.semaphore_wait(semaphore, value)


def barrier(pes: Sequence[Index], *, axis_name: str) -> None:
    """Waits until all of these devices wait here too; the kernel needs a `collective_id` of its own."""
    semaphore = pltpu.get_barrier_semaphore()
    for pe in pes:
        signal_op(semaphore, axis_name=axis_name, pe=pe)
    signal_wait_until(semaphore, len(pes))


def _copy(source: Any, target: Any, sent: Any, arrived: Any, axis_name: str, pe: Index) -> Any:
    return pltpu.make_async_remote_copy(source, target, sent, arrived, device_id={axis_name: pe})
