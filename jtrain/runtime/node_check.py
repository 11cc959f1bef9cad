"""Sums, disk and devices of this node, checked beside those of all others before a run starts.

Each process multiplies two matrices on each of its devices and writes, reads and removes a file on its node's
disk. Then all processes add up one number per device. A node that computes wrongly, has fewer devices than
the others or a full disk costs half a minute here, and hours in a run of many nodes.
"""

import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from jtrain.errors import HardwareFault, UserError
from jtrain.runtime import exit_codes, multihost
from jtrain.runtime.accelerators import DeviceChoice
from jtrain.runtime.agreement import Agreement
from jtrain.runtime.platform import start_jax

SIZE = 1024
"""Rows and columns of the matrices: 2 GFLOP, a fraction of a second on a CPU core."""

FILE_BYTES = 16 << 20
WAIT_S = 120.0
"""Time that the other processes, and then the sum over all devices, may take."""

CLOCKS_S = 5.0
"""Difference of two clocks that is said."""


class OtherNode(Exception):
    """Another node fails the check; this one is to be used again."""


def matmul_fault(device: object) -> str:
    """Multiplies on one device; returns what is wrong, "" if nothing is.

    The elements are whole numbers, so that the product is exact in bfloat16 with float32 sums. It is checked
    by Freivalds' method, `(A B) v = A (B v)` on the host: a wrong element stays unseen in one of 1,000 cases.
    """
    import jax

    # Fixed seed: all devices multiply the same matrices.
    rng = np.random.default_rng(0)
    # -1, 0 and 1: sums of 1024 of them stay exact in float32.
    a, b = (rng.integers(-1, 2, (SIZE, SIZE)) for _ in range(2))
    v = rng.integers(0, 1000, SIZE)
    on_device = [jax.device_put(matrix.astype(jax.numpy.bfloat16), device) for matrix in (a, b)]
    product = jax.jit(lambda a, b: jax.numpy.matmul(a, b, preferred_element_type=jax.numpy.float32))(
        *on_device
    )
    wrong = np.flatnonzero(np.asarray(product).astype(np.int64) @ v != a @ (b @ v))
    return f"{device}: {wrong.size} rows of a matmul's {SIZE} are wrong" if wrong.size else ""


def disk_fault(folder: Path) -> str:
    """Writes a file on the node's own disk, reads it back and removes it; returns what is wrong, "" if
    nothing is.
    """
    block = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(FILE_BYTES // len(block)):
                file.write(block)
            # A full or broken disk may show only when the data reaches it.
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            is_same = all(file.read(len(block)) == block for _ in range(FILE_BYTES // len(block)))
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    return "" if is_same else f"{folder}: what was read is not what was written"


def local_fault() -> str:
    """Checks the devices and the disk of this process; returns what is wrong, "" if nothing is."""
    import jax

    faults = [disk_fault(Path(tempfile.gettempdir()))]
    for device in jax.local_devices():
        try:
            faults.append(matmul_fault(device))
        except Exception as error:  # a broken device raises whatever its driver says
            faults.append(f"{device}: {type(error).__name__}: {error}")
    return "; ".join(fault for fault in faults if fault)


def fewer_devices(counts: dict[int, int]) -> dict[int, str]:
    """Returns the fault of each process that has fewer devices than another one."""
    largest = max(counts, key=lambda process: counts[process])
    return {
        process: f"has {count} devices, and process {largest} has {counts[largest]}"
        for process, count in counts.items()
        if count < counts[largest]
    }


def clock_apart(exchange: Agreement) -> str:
    """Compares this host's clock with that of process 0; returns "" where they agree within CLOCKS_S.

    The processes have just met, so process 0 writes its time down now, and the others read it within
    milliseconds.
    """
    if multihost.process_index() == 0:
        exchange.announce("clock", repr(time.time()))
    clock = exchange.announced("clock")
    assert clock is not None, "an endless wait"
    # The time until the text arrives is part of the difference: milliseconds, against CLOCKS_S.
    behind_s = float(clock) - time.time()
    if abs(behind_s) < CLOCKS_S:
        return ""
    side = "behind" if behind_s > 0 else "ahead of"
    return (
        f"{abs(behind_s):.0f} s {side} that of process 0. Training does not mind, but times in logs do not "
        "fit together, and object stores refuse requests from clocks 15 minutes off: start chrony on that "
        "host."
    )


def check_nodes(exchange: Agreement, fault: str, devices: int, *, wait_s: float) -> None:
    """Compares what all processes found.

    Args:
      exchange: carries texts without the network of the devices, which is not proven yet.
      fault: what is wrong in this process, "" if nothing is.
      devices: number of devices of this process.
      wait_s: time for the others to answer.

    Raises:
      HardwareFault: this process fails, or some others do; the message names process and host.
    """
    me, host = multihost.process_index(), socket.gethostname()
    exchange.tell("found", f"{host}\n{devices}\n{fault}")
    reports = exchange.collect("found", seconds=wait_s)
    if apart := clock_apart(exchange):
        print(f"node check: the clock of process {me} on {host} is {apart}", flush=True)
    fields_of = {process: text.split("\n", 2) for process, text in reports.items()}
    hosts = {process: fields[0] for process, fields in fields_of.items()}
    # A node that lost a GPU still answers, with fewer devices: only the comparison shows it.
    faults = fewer_devices({process: int(fields[1]) for process, fields in fields_of.items()})
    for process, (_, _, text) in fields_of.items():
        if text:
            faults[process] = "; ".join([text, *filter(None, [faults.get(process)])])
    silent = exchange.missing(reports)
    lines = [f"process {process} on {hosts[process]}: {text}" for process, text in sorted(faults.items())]
    if silent:
        lines.append(f"no answer within {wait_s:g} s from process {', '.join(map(str, silent))}")
    if lines:
        # The exit codes differ: a supervisor replaces the host that fails, and starts the others again.
        raise (HardwareFault if me in faults else OtherNode)("node check: " + "; ".join(lines))


def all_reduce_fault() -> str:
    """Adds up one number per device over all processes; returns what is wrong, "" if nothing is."""
    import jax

    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("all",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("all"))
    numbers = jax.make_array_from_callback(
        (count,), sharding, lambda index: np.arange(1, count + 1, dtype=np.int32)[index]
    )
    total = int(jax.jit(jax.numpy.sum)(numbers))
    expected = count * (count + 1) // 2
    return (
        ""
        if total == expected
        else f"the sum of 1 to {count} over {count} devices is {total} and not {expected}"
    )


def check_all_reduce(*, wait_s: float) -> None:
    """Adds up over all devices, and ends the process with exit code 2 if that does not end.

    Raises:
      UserError: the sum is wrong.
    """
    prefix = f"node check: process {multihost.process_index()} on {socket.gethostname()}"
    advice = (
        "Each device computes alone, so look at the network: NCCL_DEBUG=INFO says which interface it takes, "
        "NCCL_SOCKET_IFNAME and NCCL_IB_HCA choose others; a firewall must let all ports through between the "
        "nodes."
    )

    # A collective that hangs cannot be interrupted from Python: a timer ends the process.
    def give_up() -> None:
        os.write(
            2,
            f"error: {prefix}: a sum over all devices has not ended after {wait_s:g} s. {advice}\n".encode(),
        )
        os._exit(exit_codes.REFUSED)  # the main thread is in C++ and never returns

    timer = threading.Timer(wait_s, give_up)
    timer.daemon = True
    timer.start()
    fault = all_reduce_fault()
    timer.cancel()
    if fault:
        raise UserError(f"{prefix}: {fault}. {advice}")


def check(emulate_devices: int | None, device: DeviceChoice | None) -> int:
    """Runs the whole check in this process; returns the exit code."""
    start_jax(os.environ, emulate_devices=emulate_devices, device=device)
    multihost.join_processes(os.environ)
    import jax

    # Faults of single nodes first: a hanging sum would hide which node is to blame.
    exchange = multihost.agreement("node-check")
    try:
        check_nodes(exchange, local_fault(), jax.local_device_count(), wait_s=WAIT_S)
    except OtherNode as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_codes.STOPPED
    check_all_reduce(wait_s=WAIT_S)
    if jax.process_index() == 0:
        print(
            f"node check: {jax.device_count()} devices of {jax.process_count()} processes are fine",
            flush=True,
        )
    return exit_codes.DONE
