"""OpenSHMEM names for remote memory operations of a Pallas TPU kernel (OpenSHMEM 1.5, section 9).

The names are those that kernel authors know from NVSHMEM or Triton-distributed. There are two differences: a put names
the target ref, which must be the same array of the same kernel on the other device; and arrival is signalled by a
semaphore there, counted in bytes by the copy engine, so each put needs exactly one wait with the same refs.

| OpenSHMEM | here |
|---|---|
| shmem_my_pe, shmem_n_pes | `my_pe`, `n_pes` |
| shmem_putmem_nbi with a signal (put_signal_nbi) | `put_signal_nbi` |
| shmem_quiet, for one put | `quiet` |
| shmem_signal_wait_until, for one put | `wait_until_arrived` |
| shmemx_signal_op | `signal_op` |
| shmem_signal_wait_until, for a counter | `signal_wait_until` |
| shmem_barrier_all, for some devices | `barrier` |
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

type PeerIndex = int | Array


def my_pe(axis_name: str) -> Array:
    """Index of this device along the axis."""
    return jax.lax.axis_index(axis_name)


def n_pes(axis_name: str) -> int:
    """Number of devices along the axis."""
    return jax.lax.axis_size(axis_name)


def put_signal_nbi(source: Any, target: Any, sent: Any, arrived: Any, *, axis_name: str, pe: PeerIndex) -> None:
    """Starts to copy `source` into `target` of another device, without waiting for the copy.

    Args:
      target: this device's own ref of the array that is written on the other device.
      sent: DMA semaphore of this device, signalled when `source` has been read.
      arrived: DMA semaphore of the other device, signalled when the copy has arrived.
      pe: index of the other device along the axis; its coordinates along all other axes are this device's.
    """
    _copy(source, target, sent, arrived, axis_name, pe).start()


def quiet(source: Any, target: Any, sent: Any, arrived: Any, *, axis_name: str, pe: PeerIndex) -> None:
    """Waits until `source` of a put with the same arguments has been read."""
    _copy(source, target, sent, arrived, axis_name, pe).wait_send()


def wait_until_arrived(target: Any, sent: Any, arrived: Any, *, axis_name: str) -> None:
    """Waits until a put of another device has arrived in `target` of this one."""
    _copy(target, target, sent, arrived, axis_name, my_pe(axis_name)).wait_recv()


def signal_op(semaphore: Any, *, axis_name: str, pe: PeerIndex, add: int = 1) -> None:
    """Adds to a semaphore of another device."""
    pl.semaphore_signal(semaphore, add, device_id={axis_name: pe})


def signal_wait_until(semaphore: Any, value: int = 1) -> None:
    """Waits until a semaphore of this device is at least `value`, then subtracts `value`."""
    pl.semaphore_wait(semaphore, value)


def barrier(pes: Sequence[PeerIndex], *, axis_name: str) -> None:
    """Waits until all of these devices are at this barrier too; the kernel needs a `collective_id` of its own."""
    semaphore = pltpu.get_barrier_semaphore()
    for pe in pes:
        signal_op(semaphore, axis_name=axis_name, pe=pe)
    signal_wait_until(semaphore, len(pes))


def _copy(source: Any, target: Any, sent: Any, arrived: Any, axis_name: str, pe: PeerIndex) -> Any:
    return pltpu.make_async_remote_copy(source, target, sent, arrived, device_id={axis_name: pe})
