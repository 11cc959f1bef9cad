"""Agreement among the processes of one run. With one process nothing goes over the network.

`gather`, `gather_texts`, `from_process_zero`, `agree` and `same_everywhere` are collectives: all processes must call
them at the same steps.
"""

import hashlib
import socket
import sys
from collections.abc import MutableMapping

import numpy as np

from jtrain.errors import UserError


def process_index() -> int:
    """Number of this process; process 0 writes all files that hold no arrays."""
    import jax  # lazy, here and below: `python -m jtrain.checkpoint` does not need it

    return jax.process_index()


def process_count() -> int:
    """Number of processes in this run."""
    import jax

    return jax.process_count()


def is_joined() -> bool:
    """True if this process has joined others; never starts a backend, and does not import jax."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized() and jax.process_count() > 1


def own_address() -> str:
    """Returns the address of this host on the network over which the processes of the run have found each other."""
    from jax._src import distributed  # public jax does not tell the coordinator's address

    host, _, port = (distributed.global_state.coordinator_address or "").rpartition(":")
    [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    with socket.socket(family, kind, protocol) as to_coordinator:
        to_coordinator.connect(address)  # sends nothing: the kernel chooses the interface
        return to_coordinator.getsockname()[0]


def gather(values: np.ndarray) -> np.ndarray:
    """Returns [processes, ...]: the `values` that each process passed, all of one shape and dtype."""
    if process_count() == 1:
        return values[None]
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(values))


def from_process_zero(values: np.ndarray) -> np.ndarray:
    """Returns the `values` of process 0 in every process."""
    if process_count() == 1:
        return values
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.broadcast_one_to_all(values))


def gather_texts(text: str) -> list[str]:
    """Returns the `text` that each process passed, in the order of the processes."""
    if process_count() == 1:
        return [text]
    encoded = np.frombuffer(text.encode(), np.uint8)
    sizes = gather(np.asarray(encoded.size, np.int32))
    padded = gather(np.pad(encoded, (0, int(sizes.max()) - encoded.size)))
    return [bytes(row[:size]).decode() for row, size in zip(padded, sizes, strict=True)]


def agree(*flags: bool) -> tuple[bool, ...]:
    """Returns each flag as True in every process if it is True in any.

    A signal reaches processes at different times, and a process that stops alone leaves the others waiting in a
    collective. With several processes this is an all-gather of one byte per flag, which queues behind the steps already
    dispatched. The host waits for the device, so call it where the loop reads metrics anyway, not before each dispatch.
    """
    return tuple(bool(flag) for flag in gather(np.asarray(flags, np.bool_)).any(axis=0))


def same_everywhere(text: str) -> bool:
    """True if all processes passed the same text."""
    digest = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), np.uint32)
    return bool((gather(digest) == digest).all())


def join_processes(environ: MutableMapping[str, str]) -> None:
    """Joins the other processes of this run, if environment variables name them.

    launch/local.sh sets `JTRAIN_COORDINATOR=host:port`, `JTRAIN_NUM_PROCESSES` and `JTRAIN_PROCESS_ID`. With
    `JTRAIN_COORDINATOR=auto` jax finds the processes, under Slurm, Open MPI and on TPU pods.

    Raises:
      UserError: only some of the three variables are set, or one is not a number.
    """
    coordinator = environ.get("JTRAIN_COORDINATOR")
    names = ("JTRAIN_NUM_PROCESSES", "JTRAIN_PROCESS_ID")
    if coordinator is None:
        if given := [name for name in names if name in environ]:
            raise UserError(f"{given[0]} is set, but JTRAIN_COORDINATOR is not. Set it to host:port or to auto.")
        return

    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # for CPU processes; others ignore it
    if coordinator == "auto":
        jax.distributed.initialize()
        return
    values = [environ.get(name, "") for name in names]
    if not all(value.isdecimal() for value in values):
        said = ", ".join(f"{name}={value!r}" for name, value in zip(names, values, strict=True))
        raise UserError(f"JTRAIN_COORDINATOR={coordinator} needs two numbers too, but {said}. Set both.")
    jax.distributed.initialize(coordinator, int(values[0]), int(values[1]))
