"""Test hosts on one machine: network namespaces with a switch between them, or loopback addresses.

Where the kernel allows it (root, or user namespaces), each host has its own network, name, /etc/hosts and
folder, and reaches the others through a veth pair and a bridge. Where it does not, hosts are addresses of
127.0.0.0/8, which share the machine's name and network; `KIND` says which, and pytest's header prints it.
"""

import contextlib
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]

SWITCH = """
set -euo pipefail
ip link set lo up
ip link add switch type bridge
ip link set switch up
number=0
for name in "$@"; do
  number=$((number + 1))
  unshare --net --mount --uts bash -c '
    set -euo pipefail
    hostname "${1%%.*}"
    mount --bind "$2/hosts" /etc/hosts
    mount --bind "$2/disk-$1" "$2/disk"
    ip link set lo up
    exec sleep infinity' host "$name" "$FOLDER" &
  until [[ "$(readlink "/proc/$!/ns/net")" != "$(readlink /proc/$$/ns/net)" ]]; do sleep 0.01; done
  ip link add "port$number" type veth peer name eth0 netns "$!"
  ip link set "port$number" master switch up
  nsenter --target "$!" --net ip address add "10.77.0.$number/24" dev eth0
  nsenter --target "$!" --net ip link set eth0 up
  until [[ "$(cat "/proc/$!/comm")" == sleep ]]; do kill -0 "$!"; sleep 0.01; done
  echo "$!"
done
exec 2>/dev/null # the shell would say of each host that it was killed
read -r _ || true # until the test closes the pipe, or has ended
kill $(jobs -p)
"""
"""Makes the hosts, in a namespace of its own: when all of it has ended, the kernel removes networks and
mounts."""


@functools.cache
def unshare() -> tuple[str, ...] | None:
    """Command that runs another in new namespaces; None where they are not allowed."""
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    command = ("unshare", *user, "--net", "--mount", "--uts")
    bridge = "ip link add probe type bridge && ip link add port0 type veth peer name port1"
    probe = f"{bridge} && mount --bind /etc/hosts /etc/hosts"
    try:
        done = subprocess.run([*command, "sh", "-c", probe], capture_output=True, check=False, timeout=300)
    except OSError:  # no such program
        return None
    return command if done.returncode == 0 else None


def kind() -> str:
    """Describes what the test hosts of this machine are."""
    return "loopback addresses (no namespaces here)" if unshare() is None else "network namespaces"


@dataclasses.dataclass(frozen=True)
class Host:
    """One test host.

    name: by which others reach it; in a namespace also its own name.
    address: its IPv4 address.
    enter: put before a command to run it on this host.
    disk: a folder that only this host has, at the same path on all hosts of namespaces.
    """

    name: str
    address: str
    enter: tuple[str, ...]
    disk: Path

    def start(self, command: Sequence[str], environ: Mapping[str, str], *, cwd: Path = ROOT) -> "Running":
        """Starts a program on this host."""
        return Running([*self.enter, "env", f"--chdir={cwd}", *command], environ, cwd=cwd)


class Running:
    """A program, with the lines that it prints."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], *, cwd: Path) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command, cwd=cwd, env=dict(environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            self.lines.extend(line.rstrip("\n") for line in stream)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Waits for an event; fails if the program ends before it."""
        while not what():
            assert self.process.poll() is None, self.output
            time.sleep(0.05)  # a program of another host tells of an event by its files and lines alone

    def end(self) -> int:
        """Waits for the end; returns the exit code."""
        code = self.process.wait()
        self._reader.join()
        return code

    def close(self) -> None:
        """Ends the program and what it started."""
        for pid in [*descendants(self.process.pid), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.end()


def descendants(pid: int) -> list[int]:
    """Process ids of all that a process has started, and those have."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


@contextlib.contextmanager
def hosts(count: int, folder: Path, *, names: Sequence[str] | None = None) -> Iterator[list[Host]]:
    """Context with `count` test hosts.

    Args:
      folder: on a disk that all hosts share.
      names: by which they know each other, node0, node1, ... without it; only namespaces have names.
    """
    names = names or [f"node{number}" for number in range(count)]
    if (command := unshare()) is None:
        for name in names:
            (folder / f"disk-{name}").mkdir()
        yield [
            Host(f"127.0.0.{number + 2}", f"127.0.0.{number + 2}", (), folder / f"disk-{name}")
            for number, name in enumerate(names)
        ]
        return
    addresses = [f"10.77.0.{number + 1}" for number in range(count)]
    known = zip(addresses, names, strict=True)
    lines = [
        "127.0.0.1 localhost",
        *(f"{address} {name} {name.partition('.')[0]}" for address, name in known),
    ]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    for name in ("disk", *(f"disk-{name}" for name in names)):
        (folder / name).mkdir()
    user = ("--user", "--preserve-credentials") if "--user" in command else ()
    with subprocess.Popen(
        [*command, "bash", "-c", SWITCH, "switch", *names],
        env=os.environ | {"FOLDER": str(folder)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as switch:  # fmt: skip
        assert switch.stdin is not None
        assert switch.stdout is not None
        pids = [switch.stdout.readline().strip() for _ in names]
        assert all(pids), "the namespaces could not be made, see above"
        try:
            yield [
                Host(
                    name,
                    address,
                    ("nsenter", "--target", pid, *user, "--net", "--mount", "--uts"),
                    folder / "disk",
                )
                for name, address, pid in zip(names, addresses, pids, strict=True)
            ]
        finally:
            end_all(pids)
            switch.stdin.close()


def end_all(pids: Sequence[str]) -> None:
    """Ends every process in the networks of these processes, whoever started it: Ray's leave their
    parents.
    """
    networks = {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "ns" / "net") in networks:
                os.kill(int(process.name), signal.SIGKILL)


def environment(**more: str) -> dict[str, str]:
    """Variables of a process on a test host: those of a user, and what finds this checkout."""
    dropped = ("XLA_FLAGS", "JAX_PLATFORMS")
    clean = {name: value for name, value in os.environ.items() if name not in dropped}
    clean["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    )
    return clean | {"PYTHON": sys.executable} | more
