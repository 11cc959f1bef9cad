"""Start of an attempt: one process as the launcher's variables say, or several that meet on localhost."""

import socket
import sys
from collections.abc import Iterator, Mapping, Sequence

from jtrain.supervise.child import WatchedProcess


def start_processes(
    command: Sequence[str], environ: Mapping[str, str], *, count: int, host: str
) -> Iterator[WatchedProcess]:
    """Starts the processes of an attempt, and yields each at once, so that the caller can end those that run.

    Args:
      command: argument vector of each.
      environ: environment; names the coordinator and this process's number where there are several hosts.
      count: processes on this host; more than one meet on a free port of localhost.
      host: name of this host, for messages.
    """
    has_several = count > 1
    shared_environ = dict(environ)
    if has_several:
        # A port of its own for each attempt: the coordinator of the one before may still hold its port.
        shared_environ |= {
            "JTRAIN_COORDINATOR": f"localhost:{free_port()}",
            "JTRAIN_NUM_PROCESSES": str(count),
        }
    for number in range(count):
        number_environ = {"JTRAIN_PROCESS_ID": str(number)} if has_several else {}
        index, prefix = (number, f"[{number}] ") if has_several else (None, "")
        # One process of several hosts: the number alone would not say where it runs.
        if not has_several and (launched := launched_process(environ)) is not None:
            index, prefix = launched, f"[{host}:{launched}] "
        # Only process 0 draws a bar; None is the only process of a run.
        bar = index in (0, None) and sys.stdout.isatty()
        yield WatchedProcess(
            command, shared_environ | number_environ, index=index, host=host, prefix=prefix, bar=bar
        )


def launched_process(environ: Mapping[str, str]) -> int | None:
    """Number of this host's process by the launcher's variables; None for a run of one process."""
    for number, count in (
        ("JTRAIN_PROCESS_ID", "JTRAIN_NUM_PROCESSES"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ):
        if (
            "JTRAIN_COORDINATOR" in environ
            and environ.get(number, "").isdecimal()
            and environ.get(count) != "1"
        ):
            return int(environ[number])
    return None


def free_port() -> int:
    """Returns a port of localhost that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
