"""Processes of one run: how they join, which one this is, and what they agree on; alone, nothing goes over
the network.

`gather`, `gather_texts`, `from_process_zero`, `agree` and `same_everywhere` wait for all processes, which
must call them at the same points of the program. `gather` and `agree` are collectives of the devices, in
order with the steps; the others go through jax's coordination service.
"""

import errno
import functools
import hashlib
import ipaddress
import itertools
import math
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jtrain.errors import AwayError, UserError
from jtrain.runtime.accelerators import local_device_ids
from jtrain.runtime.agreement import Agreement, DictCarrier, ServiceCarrier
from jtrain.runtime.retry import Backoff, retried

GATHER_S = 3600.0
"""Time in which all processes must have called what waits for all: one may be compiling, or reading a
checkpoint."""


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
    """Returns the address of this host on the network over which the processes of the run have found each
    other.
    """
    from jax._src import distributed  # public jax does not tell the coordinator's address

    host, _, port = (distributed.global_state.coordinator_address or "").rpartition(":")
    # UDP: `connect` on such a socket sends nothing, and the kernel still chooses the interface.
    [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_DGRAM
    )
    with socket.socket(family, kind, protocol) as to_coordinator:
        to_coordinator.connect(address)
        return to_coordinator.getsockname()[0]


def agreement(task: str) -> Agreement:
    """Returns the agreement of all processes of this run on one task, through jax's coordination service.

    Starts no backend, so that processes can agree before they use devices.

    Args:
      task: the same in all processes, and of no other task of this run.
    """
    # From `sys.modules`: a process that has not imported jax is alone, and must not pay for the import.
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
        return Agreement(task, DictCarrier(), process=0, processes=1)
    from jax._src import distributed  # public jax has no way to the coordination service

    state = distributed.global_state
    return Agreement(
        task, ServiceCarrier(state.client), process=state.process_id, processes=state.num_processes
    )


_gathered = itertools.count()


def gather_texts(text: str) -> list[str]:
    """Returns the `text` that each process passed, in the order of the processes.

    All processes call it at the same points of the program, from the main thread: the number of the call is
    its topic.

    Raises:
      ProcessesSilent: some processes did not call it within `GATHER_S`.
    """
    if process_count() == 1:
        return [text]
    # Counted in every process, so the topics match as long as all call it in the same order.
    number = next(_gathered)
    texts = agreement("gather").gather(str(number), text, seconds=GATHER_S)
    if number and process_index() == 0:
        # All are in this call, so none still reads the one before.
        agreement("gather").forget(str(number - 1))
    return texts


def from_process_zero(values: np.ndarray) -> np.ndarray:
    """Returns the `values` of process 0, of the same shape and dtype in all processes, in every process."""
    if process_count() == 1:
        return values
    values = np.asarray(values)
    # In hex: the service carries text. Only process 0's counts, so the others send nothing.
    content = gather_texts(values.tobytes().hex() if process_index() == 0 else "")[0]
    return np.frombuffer(bytes.fromhex(content), values.dtype).reshape(values.shape)


def same_everywhere(text: str) -> bool:
    """True if all processes passed the same text."""
    return len(set(gather_texts(hashlib.blake2b(text.encode(), digest_size=8).hexdigest()))) == 1


def gather(values: np.ndarray) -> np.ndarray:
    """Returns [processes, ...]: the `values` that each process passed, all of one shape and dtype.

    A collective of the devices, as `agree` is: for values of every step, which would be thousands of requests
    per step to the one process that runs the coordination service, and which have to be in order with the
    steps.
    """
    if process_count() == 1:
        return values[None]
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(values))


def agree(*flags: bool) -> tuple[bool, ...]:
    """Returns each flag as True in every process if it is True in any.

    A signal reaches processes at different times, and a process that stops alone leaves the others waiting in
    a collective. With several processes this is an all-gather of one byte per flag, which queues behind the
    steps already dispatched. The host waits for the device, so call it where the loop reads metrics anyway,
    not before each dispatch.
    """
    # `any` over the processes: one that stops or fails is enough.
    return tuple(bool(flag) for flag in gather(np.asarray(flags, np.bool_)).any(axis=0))


def join_processes(environ: Mapping[str, str], *, peer_s: float = 30.0) -> None:
    """Joins the other processes of this run, if environment variables name them.

    `--processes` sets `JTRAIN_COORDINATOR=host:port`, `JTRAIN_NUM_PROCESSES` and `JTRAIN_PROCESS_ID`. With
    `JTRAIN_COORDINATOR=auto` jax finds them and the address, under Slurm, Open MPI and on TPU pods. Process 0
    listens at that address only; `JAX_COORDINATOR_BIND_ADDRESS` names another one where the two differ.
    Processes on one host share its GPUs (`local_device_ids`), unless `JAX_LOCAL_DEVICE_IDS` names them.

    Args:
      peer_s: jax ends all processes if one of them sends no sign of life for longer than this.

    Raises:
      UserError: only some of the three variables are set, one is not a number, the address cannot be used,
        nobody answers there, no scheduler tells the others, or the GPUs of this host cannot be shared.
    """
    coordinator = environ.get("JTRAIN_COORDINATOR")
    names = ("JTRAIN_NUM_PROCESSES", "JTRAIN_PROCESS_ID")
    if coordinator is None:
        if set_names := [name for name in names if name in environ]:
            raise UserError(
                f"{set_names[0]} is set, but JTRAIN_COORDINATOR is not. Set it to host:port or to auto."
            )
        return

    if coordinator == "auto":
        address, count, number = _detect_cluster(environ)
    else:
        values = [environ.get(name, "") for name in names]
        if not all(value.isdecimal() for value in values):
            shown_values = ", ".join(f"{name}={value!r}" for name, value in zip(names, values, strict=True))
            raise UserError(
                f"JTRAIN_COORDINATOR={coordinator} needs two numbers too, but {shown_values}. Set both."
            )
        address, count, number = coordinator, int(values[0]), int(values[1])
        # At once: process 0 would wait for one that cannot be among its own, and the others for process 0.
        if not 0 <= number < count:
            raise UserError(
                f"JTRAIN_PROCESS_ID={number} of JTRAIN_NUM_PROCESSES={count} must be from 0 to {count - 1}. "
                "Set JTRAIN_PROCESS_ID to the number of this process, or JTRAIN_NUM_PROCESSES to that of all."
            )
    bind = environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    addresses = _coordinator_addresses(address, wait_s=NAME_S if number > 0 else 0.0)
    # The others wait until process 0 listens; process 0 checks that it can, and names the port if not.
    if number > 0:
        _wait_for_coordinator(address, addresses, wait_s=float(JOIN_S))
    elif bind is None:
        _check_can_listen(address, addresses)
        bind = address
        if coordinator == "auto":
            bind = choose_bind_address(address, [numbers[0] for _, numbers in addresses])
    # None leaves the choice to jax: the user has named the GPUs, or one process takes all.
    local_ids = None if environ.get("JAX_LOCAL_DEVICE_IDS") else local_device_ids(environ)

    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # for CPU processes; others ignore it
    try:
        jax.distributed.initialize(
            address,
            count,
            number,
            local_ids,
            # Under Slurm, jax's detection would leave each process one GPU of its host.
            cluster_detection_method="deactivate",
            initialization_timeout=JOIN_S,
            heartbeat_timeout_seconds=math.ceil(peer_s),
            shutdown_timeout_seconds=JOIN_S,
            coordinator_bind_address=bind,
        )
    except RuntimeError as error:
        raise AwayError(
            f"JTRAIN_COORDINATOR={_coordinator_text(coordinator, address)}: process {number} of {count} "
            f"could not join within {JOIN_S} s. Check that all processes were started, each with the same "
            "number of processes and with its own JTRAIN_PROCESS_ID or rank, and that no other program "
            f"listens there. jax says: {error}"
        ) from error


def _detect_cluster(environ: Mapping[str, str]) -> tuple[str, int, int]:
    """Returns what jax finds of a scheduler: address of process 0, number of processes, number of this
    one.
    """
    from jax._src.clusters import ClusterEnv  # public jax tells the address only after process 0 has listened

    coordinator = environ.get("JAX_COORDINATOR_ADDRESS")
    reason = (
        "it finds neither a step of Slurm (srun), Open MPI, a TPU pod nor an indexed Job of Kubernetes here"
    )
    try:
        address, count, number, _ = ClusterEnv.auto_detect_unset_distributed_params(
            coordinator, None, None, None, None, JOIN_S
        )
    except Exception as error:  # each scheduler has its own: a missing package, a server that does not answer
        address, count, number, reason = None, None, None, f"{type(error).__name__}: {error}"
    if address is None or count is None or number is None:
        raise UserError(
            f"JTRAIN_COORDINATOR=auto has jax ask the scheduler for the other processes, but {reason}. Set "
            "JTRAIN_COORDINATOR to host:port of process 0, and JTRAIN_NUM_PROCESSES and JTRAIN_PROCESS_ID; "
            "or unset it for a run of one process."
        )
    return address, count, number


def _coordinator_text(coordinator: str, address: str) -> str:
    return coordinator if coordinator == address else f"{coordinator} ({address})"


def choose_bind_address(coordinator: str, addresses: Sequence[str]) -> str | None:
    """Returns the address for process 0 to listen at, None for all interfaces.

    Debian and others give a host's own name the address 127.0.1.1 on that host, where no other host could
    reach it.

    Args:
      coordinator: name or address that jax has found, with a port.
      addresses: what the name stands for on this host.
    """
    host, _, port = coordinator.rpartition(":")
    if host == "localhost" or host.strip("[]") in addresses:
        return coordinator
    # One address that is not loopback is enough: others reach process 0 there.
    if not all(ipaddress.ip_address(address).is_loopback for address in addresses):
        return coordinator
    print(
        f"process 0 listens on all interfaces: this host knows its name {host} as {addresses[0]} only, where "
        f"others do not reach it. JAX_COORDINATOR_BIND_ADDRESS=ADDRESS:{port} for process 0 chooses one "
        "interface.",
        flush=True,
    )
    return None


NAME_S = 60.0
"""Time in which the name of process 0's host must be known to the others: Kubernetes publishes it when its
pod runs."""


JOIN_S = 300
"""Time in which all processes must have joined, and at the end have left."""


def _coordinator_addresses(coordinator: str, *, wait_s: float) -> list[tuple[Any, Any]]:
    """Returns (family, address) for each address that `host:port` stands for on this host, once its name is
    known.
    """
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(
            f"JTRAIN_COORDINATOR={coordinator} must be host:port, with a port from 1 to 65535, or auto."
        )
    look_up = functools.partial(socket.getaddrinfo, host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    asking = Backoff(1.0, factor=1.0, deadline_s=wait_s)  # a name server does not tell when a name appears
    try:
        entries = retried(look_up, asking, passes=lambda error: isinstance(error, socket.gaierror))
    except socket.gaierror as error:
        # Who did not wait asks for its own name: that is the user's to mend, and no server's to learn.
        raise (AwayError if wait_s else UserError)(
            f"JTRAIN_COORDINATOR={coordinator}: this host does not know the name {host} ({error.strerror}), "
            f"after asking for {wait_s:g} s. Set the name or address by which all hosts reach process 0."
        ) from error
    return [(family, address) for family, _, _, _, address in entries]


def _check_can_listen(coordinator: str, addresses: Sequence[tuple[Any, Any]]) -> None:
    """Refuses an address of another host, and a port that another program listens at."""
    port = coordinator.rpartition(":")[2]
    for family, address in addresses:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # Connections of the last attempt may linger.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
                probe.listen()
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise UserError(
                        f"JTRAIN_COORDINATOR={coordinator}: another program listens at port {port} of this "
                        "host, perhaps an earlier run. Choose another port, the same for all processes."
                    ) from error
                if error.errno == errno.EADDRNOTAVAIL and len(addresses) == 1:
                    raise UserError(
                        f"JTRAIN_COORDINATOR={coordinator}: process 0 runs on this host, which has no "
                        f"address {address[0]}. Set the address of the host of process 0; where others reach "
                        f"it by a forwarded address, set JAX_COORDINATOR_BIND_ADDRESS=[::]:{port} for "
                        "process 0."
                    ) from error


def _wait_for_coordinator(coordinator: str, addresses: Sequence[tuple[Any, Any]], *, wait_s: float) -> None:
    """Waits until something listens at the coordinator's address: process 0 may start later than this one."""

    def connect() -> None:
        # The last address decides: a name may stand for an IPv6 address where nobody listens.
        for number, (family, address) in enumerate(addresses, start=1):
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.settimeout(5.0)
                try:
                    probe.connect(address)
                except OSError:
                    if number == len(addresses):
                        raise
                else:
                    return

    asking = Backoff(0.2, factor=1.0, deadline_s=wait_s)  # a port that nobody listens at refuses at once
    try:
        retried(connect, asking, passes=lambda error: isinstance(error, OSError))
    except OSError as error:
        raise AwayError(
            f"JTRAIN_COORDINATOR={coordinator}: nobody answers there after {wait_s:g} s ({error}). Check "
            "that process 0 was started on that host, and that no firewall closes the port."
        ) from error
