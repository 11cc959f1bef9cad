"""Processes of a training in a trial: how they start, are watched and end, and which of them stay behind.

Importing jax, flax and orbax takes two seconds of each start. The harness has imported them and starts no
backend of jax, so a training is usually a fork of the harness. A trial that needs the imports as well starts
a real `python -m jtrain.launch`.
"""

import atexit
import contextlib
import ctypes
import importlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
POLL_S = 0.0005
ENDED_S = 20.0
"""Time in which the processes that a training has started must end after it, before they count as stray."""


NOT_OF_TRAININGS: set[int] = set()
"""Servers of the harness, whose processes are no training's."""


class StillRunning(Exception):
    """A training neither ended nor reached what was waited for within the time limit."""


def adopt_orphans() -> None:
    """Becomes the parent of every descendant whose own parent ends, so none escapes `descendants`."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int | None = None) -> dict[int, str]:
    """Returns process id -> name of all processes below `root` (default: this one) that have not ended."""
    children: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    # /proc in place of a library: it must work in any environment of a training.
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            stat = Path(entry.path, "stat").read_text()
            # The name is in parentheses and may contain some itself, hence the last one.
            name, _, fields = stat.partition("(")[2].rpartition(")")
            state, parent = fields.split()[:2]
            children.setdefault(int(parent), []).append(int(entry.name))
            # Zombies have ended and only wait to be reaped.
            if state not in "ZX":
                names[int(entry.name)] = name
    pids, parents = [], [os.getpid() if root is None else root]
    # The order does not matter: all levels below the root are collected.
    while parents:
        children_of = children.get(parents.pop(), [])
        pids += children_of
        parents += children_of
    return {pid: names[pid] for pid in pids if pid in names and pid not in NOT_OF_TRAININGS}


def end_descendants() -> None:
    """Kills and reaps everything below this process."""
    # Again until none is left: a process may fork while it is being killed.
    while below := descendants():
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap()
        time.sleep(0.01)  # the kernel tells nobody when a grandchild has died
    reap()


def reap() -> None:
    """Reaps children that nobody waits for: orphans that this process has adopted."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def fork(work: Callable[[], int], log: Path, *, environ: Mapping[str, str] = {}) -> int:
    """Runs `work` in a fork with a session and output file of its own; returns the fork's process id."""
    # What is buffered would be printed by both processes.
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        # A session of its own, so that a signal to it does not reach the harness.
        os.setsid()
        # The kernel kills the fork if the harness dies, however that happens.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The harness may have handlers of its own, which a fork inherits.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the benchmark runs under nohup
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        # A training must not read what is typed at the harness.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # New objects, since those of the harness (under pytest) may not write to the descriptors.
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        os.environ.update(environ)
        code = work()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            # What the end of an interpreter does, in its order, and nothing of the harness's own `finally`.
            threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        # _exit: the harness's own cleanups must not run in the fork.
        os._exit(code)


def in_fork(work: Callable[[], int], log: Path) -> str:
    """Runs `work` in a fork, waits for it and returns what it printed.

    Raises:
      RuntimeError: the fork failed.
    """
    log.unlink(missing_ok=True)
    _, status = os.waitpid(fork(work, log), 0)
    if status:
        raise RuntimeError(
            "a helper process of the harness ended with "
            f"{os.waitstatus_to_exitcode(status)}:\n{log.read_text()}"
        )
    return log.read_text()


def run_imported(argv: Sequence[str]) -> int:
    """Body of a forked training: does what `python -m MODULE ARGUMENTS` does, with imports done already."""
    module, *arguments = argv
    sys.argv = [*argv]
    # The training records its own command line.
    sys.orig_argv = [sys.executable, "-m", *argv]
    return importlib.import_module(module).main(arguments)


def free_port() -> int:
    """Returns a port of localhost on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_command(argv: Sequence[str]) -> int:
    """Body of a training that starts as a user starts it: `python -m ...` in a new interpreter."""
    os.execv(sys.executable, [sys.executable, "-m", *argv])


class TrialAttempt:
    """One start of the training command, with one or several processes.

    pids, logs: process id, and file of stdout and stderr, of each process.
    codes: exit codes of the processes that have ended, by their index; a signal's number is negative.
    killed: indices of the processes that the harness has killed.
    """

    def __init__(self, pids: Sequence[int], logs: Sequence[Path], *, limit_s: float) -> None:
        self.pids = list(pids)
        self.logs = list(logs)
        self.codes: dict[int, int] = {}
        self.ended_s: dict[int, float] = {}
        self.killed: set[int] = set()
        self.started_s = time.monotonic()
        self._limit_s = limit_s

    def running(self) -> list[int]:
        """Returns the indices of the processes that have not ended."""
        for index, pid in enumerate(self.pids):
            if index not in self.codes:
                # WNOHANG: asks without waiting, and reaps those that have ended.
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[index] = os.waitstatus_to_exitcode(status)
                    self.ended_s[index] = time.monotonic()
        return [index for index in range(len(self.pids)) if index not in self.codes]

    def send(self, number: signal.Signals, indices: Sequence[int] | None = None) -> None:
        """Sends a signal to processes that still run (default: all)."""
        running = self.running()
        # Those that still run only: the id of an ended one may belong to another process by now.
        for index in running if indices is None else indices:
            if index in running:
                os.kill(self.pids[index], number)
                if number == signal.SIGKILL:
                    self.killed.add(index)

    def until(self, condition: Callable[[], Any], *, poll_s: float = POLL_S) -> bool:
        """Waits until `condition` holds; False if all processes ended before.

        Raises:
          StillRunning: neither happened within the time limit of the attempt.
        """
        while True:
            # Before the condition: what it reads may be the last words of a process.
            running = self.running()
            if condition():
                return True
            if not running:
                return False
            if time.monotonic() - self.started_s > self._limit_s:
                raise StillRunning(f"no end after {self._limit_s:.0f} s; processes {running} still run")
            time.sleep(poll_s)  # between looks at files, which tell nobody that they changed

    def wait(self) -> None:
        """Waits until all processes have ended; raises StillRunning at the time limit."""
        self.until(lambda: False, poll_s=0.005)

    def freeze_if(self, condition: Callable[[], Any]) -> bool:
        """Stops all processes (SIGSTOP) at an instant at which `condition` holds; else lets them go on.

        A stopped process changes nothing more, so what is killed next dies at exactly such an instant.
        """
        self.send(signal.SIGSTOP)
        if condition():
            return True
        self.send(signal.SIGCONT)
        return False

    def kill(self, indices: Sequence[int] | None = None) -> None:
        """Sends SIGKILL to `indices` (default: all) and waits until they have ended; the others go on."""
        self.send(signal.SIGKILL, indices)
        self.until(
            lambda: not set(self.running()) & set(range(len(self.pids)) if indices is None else indices)
        )
        # Processes that were stopped and not killed go on.
        self.send(signal.SIGCONT)

    def text(self) -> str:
        """Returns what all processes printed."""
        return "".join(log.read_text(errors="replace") for log in self.logs if log.exists())


def end_strays() -> list[str]:
    """Waits until all processes below this one have ended; kills those that stay, and returns their names."""
    end_s = time.monotonic() + ENDED_S
    # Helpers need a moment to notice that their training has ended.
    while (below := descendants()) and time.monotonic() < end_s:
        reap()
        time.sleep(0.01)  # as in `end_descendants`
    names = [f"{name} ({pid})" for pid, name in below.items()]
    end_descendants()
    return names
