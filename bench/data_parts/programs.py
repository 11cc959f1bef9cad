"""Readers in processes of their own: starting them, asking them, and measuring what they use."""

import contextlib
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.data_parts.files import READERS
from jtrain.bench.fault_trials.processes import descendants
from jtrain.errors import UserError

INSTALL = "sh bench/peers/setup.sh"


def peer_python(path: str | None) -> str:
    """Returns the peers' interpreter.

    Raises:
      UserError: none was given, or it lacks a peer.
    """
    check = (
        "import importlib.util as u; [u.find_spec(n).name for n in ('torchdata', 'webdataset', 'streaming')]"
    )
    # find_spec looks a package up without importing it, which would take seconds.
    if path is None or subprocess.run([path, "-c", check], capture_output=True, check=False).returncode:
        reason = f"{path} cannot import them all" if path else "no interpreter that has them was given"
        raise UserError(
            f"the data benchmarks compare with torchdata, webdataset and mosaicml-streaming, but {reason}. "
            f"Make one with `{INSTALL}`, then give --torch-python or PEER_TORCH_PYTHON."
        )
    return path


class Program:
    """A program in a process of its own that answers each line with a line of JSON. See `start_program`."""

    def __init__(self, process: subprocess.Popen[str], command: Sequence[str]) -> None:
        self._process = process
        self._command = command
        self.pid = process.pid

    def ask(self, line: object = "") -> dict[str, Any]:
        """Sends the line and waits for the answer. The first answer needs no question: see `answer`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Waits for a line of its standard output.

        Raises:
          RuntimeError: it ended instead.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"it ended, exit code {self._process.wait()}: {shlex.join(self._command)}")
        return json.loads(line)


@contextlib.contextmanager
def start_program(python: str | None, script: Path, *words: object, **options: object) -> Iterator[Program]:
    """Starts a script, in this interpreter if python is None; it ends where its standard input does.

    Args:
      words: its first arguments.
      options: more of them, as `--name value`.
    """
    option_words = (
        word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)
    )
    command = [python or sys.executable, *map(str, (script, *words, *option_words))]
    # PYTHONPATH names packages of this interpreter's version; another interpreter must not find them.
    environment = {
        name: value for name, value in os.environ.items() if python is None or name != "PYTHONPATH"
    }
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        try:
            yield Program(process, command)
        finally:
            # Programs end at the end of their standard input, also if this process is killed.
            process.stdin.close()


@contextlib.contextmanager
def reader(python: str | None, task: str, name: str, folder: object, **options: object) -> Iterator[Program]:
    """Starts one of `peers/readers.py`."""
    with start_program(python, READERS, task, name, folder, **options) as program:
        yield program


@dataclasses.dataclass(frozen=True)
class Usage:
    """Resources of some processes at one moment. pss_mib: a page shared by n counts 1/n in each."""

    pss_mib: float
    processes: int
    threads: int
    fds: int


def usage(pids: Iterable[int]) -> Usage:
    """Returns memory, threads and open files of some processes."""
    pids = list(pids)
    # One entry per thread, the main one included.
    threads = sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids)
    fds = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
    return Usage(sum(_smaps(pid)["Pss"] for pid in pids) / 1024, len(pids), threads, fds)


def largest_usage(pids: Iterable[int], *, seconds: float) -> Usage:
    """Returns the largest use within `seconds`, so that no pipeline is caught with empty buffers."""
    end = time.monotonic() + seconds
    largest = usage(pids)
    while time.monotonic() < end:
        time.sleep(0.1)  # looking at every process takes milliseconds of the cores that they use
        largest = max(largest, usage(pids), key=lambda usage_then: usage_then.pss_mib)
    return largest


def _smaps(pid: int) -> dict[str, int]:
    """KiB by name, such as Pss, Pss_Anon and Pss_Shmem."""
    # The first line is the range of addresses.
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}


class Trainers:
    """Memory of trainers before they open their data, to tell how much they grow by.

    Pages of files that a trainer had mapped before, such as JAX's libraries, are left out: how many other
    processes share them changes all the time, and on a machine in use with every program that starts.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._files = {pid: set(_file_kib(pid)) for pid in pids}
        self._anonymous_kib = {pid: _smaps(pid)["Pss_Anon"] for pid in pids}

    def grown_mib(self) -> float:
        """Returns the growth of their own and shared memory, and the pages of files mapped since."""
        grown_kib = 0
        for pid, files_before in self._files.items():
            smaps = _smaps(pid)
            # No shared memory is taken off: slots of batches exist only since the data is open.
            grown_kib += smaps["Pss_Anon"] + smaps["Pss_Shmem"] - self._anonymous_kib[pid]
            grown_kib += sum(kib for path, kib in _file_kib(pid).items() if path not in files_before)
        return grown_kib / 1024


def _file_kib(pid: int) -> dict[str, int]:
    """Returns KiB of page cache by path of the mapped file, shared pages divided, private pages left out."""
    sizes: dict[str, int] = {}
    path = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if not words[0].endswith(":"):  # a mapping: addresses, rights, offset, device, inode, path
            path = words[5] if len(words) == 6 else ""
        elif (
            path.startswith("/")
            and not path.startswith(("/dev/", "/memfd:"))
            and words[0] in ("Pss:", "Anonymous:")
        ):
            sizes[path] = sizes.get(path, 0) + int(words[1]) * (1 if words[0] == "Pss:" else -1)
    return sizes


def tree(pid: int) -> list[int]:
    """Returns a process and all its descendants."""
    return [pid, *descendants(pid)]


def cpu_s(pids: Iterable[int]) -> float:
    """Returns the CPU seconds of the processes so far, user and system, without children that have ended."""
    ticks = 0
    for pid in pids:
        # After the last parenthesis, as a name may hold spaces: utime and stime are then fields 11 and 12.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
