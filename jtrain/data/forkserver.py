"""Starts the processes of the data plane: small, without jax, and gone whenever their owner is.

multiprocessing's own forkserver imports the caller's `__main__` in each child, so a training script without a guard
would run twice, and a script that imports jax would bring it into each loader. This one starts from a bare
interpreter in which jax cannot be imported, loads what the roles need once, and forks: 6 to 8 MB of its own per child.

Who dies takes along what it started. The server watches the socket of each process that may ask it for children, kills
that process's children when the socket ends, and leaves when the first one, the trainer, is gone; the kernel kills the
children of a server that was killed itself.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from multiprocessing.connection import Connection

_MESSAGE_BYTES = 4096
_MOST_DESCRIPTORS = 8
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15

_BARE = """
import sys, types
sys.modules["jax"] = None
class Annotation:
    __class_getitem__ = classmethod(lambda cls, item: cls)
sys.modules["jaxtyping"] = types.ModuleType("jaxtyping")
sys.modules["jaxtyping"].__getattr__ = lambda name: Annotation
"""
"""What the interpreter begins with: no jax, and of jaxtyping only the names.

Here annotations are for readers alone, and importing it brings asyncio and unittest.mock along: 5 MB and 80 ms.
"""

ROLES = {"constructor": "jtrain.data.constructor_process", "loader": "jtrain.data.loader"}
"""Role -> module whose `serve(connection, descriptors)` is its whole life."""


class Child:
    """A process started by a forkserver. `connection` ends (EOFError) when it does."""

    def __init__(self, pid: int, handle: int, connection: Connection) -> None:
        self.pid = pid
        self.connection = connection
        self._handle = handle  # a pidfd: unlike the number, it cannot come to mean another process

    def kill(self) -> None:
        """SIGKILL; does nothing to one that is gone."""
        if self._handle >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def close(self) -> None:
        """Lets go of it: a role ends when its connection does."""
        self.connection.close()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class Door:
    """Where a process asks the forkserver for children. One at a time: not for two threads at once."""

    def __init__(self, door: socket.socket) -> None:
        self._socket = door

    def start(self, role: str, name: str, descriptors: tuple[int, ...] = ()) -> Child:
        """Forks a child for `role`; `name` is what process lists show.

        Raises:
          ConnectionError: the forkserver is gone.
        """
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as failed:
            failed.callback(ours.close)
            with theirs:
                request = json.dumps({"role": role, "name": name}).encode()
                _send(self._socket, request, (theirs.fileno(), *descriptors))
            reply, handles, *_ = socket.recv_fds(self._socket, _MESSAGE_BYTES, 1)
            if not reply:
                raise ConnectionResetError("the forkserver of the data plane is gone")
            failed.pop_all()
        return Child(struct.unpack("q", reply)[0], handles[0], Connection(ours.detach()))

    def another(self) -> socket.socket:
        """A door for a child, to be passed on as a descriptor: what is started there dies with that child.

        Raises:
          ConnectionError: the forkserver is gone.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as failed:
            failed.callback(ours.close)
            _send(self._socket, json.dumps({"door": True}).encode(), (theirs.fileno(),))
            failed.pop_all()
        return ours

    def close(self) -> None:
        self._socket.close()


class Forkserver:
    """The server, as the trainer holds it. Needs Linux: memfd, pidfd and SOCK_SEQPACKET."""

    def __init__(self, *, preload: tuple[str, ...] = ()) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = _BARE + (
            f"sys.path[:] = {sys.path!r}\n"
            f"from jtrain.data import forkserver; forkserver.serve({theirs.fileno()}, {preload!r})"
        )
        environment = os.environ | {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        # The libraries' own thread pools would make the threads a product of loaders and cores.
        environment |= {"OPENBLAS_NUM_THREADS": "1", "ARROW_IO_THREADS": "1"}
        # Arrow's own pools keep what they freed: twice the memory in a loader of 306 Parquet sources, and no quicker.
        environment |= {"ARROW_DEFAULT_MEMORY_POOL": "system"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=(theirs.fileno(),),
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        self.door = Door(ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the server and every child, and waits until it is gone. May be called twice."""
        self.door.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(descriptor: int, preload: tuple[str, ...]) -> None:
    """The server's life, in its own process; returns in no process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C and Slurm signal the whole group; the trainer decides
        signal.signal(number, signal.SIG_IGN)
    _name_process("jtrain-data")
    for module in (*ROLES.values(), *preload):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # the collector would write into, and so copy, every page it looks at
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # what imports have freed is not to be inherited
    first = socket.socket(fileno=descriptor)
    children: dict[socket.socket, list[int]] = {first: []}  # door -> pidfds of what was started there
    dying: list[int] = []
    while first in children:
        ready, _, _ = select.select(list(children), [], [], 1.0)
        for door in ready:
            message, descriptors, *_ = socket.recv_fds(door, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
            request = json.loads(message) if message else None
            if request is None:
                dying += children.pop(door)
                for handle in dying:
                    _kill(handle)
                door.close()
            elif "door" in request:
                children[socket.socket(fileno=descriptors[0])] = []
            else:
                pid = os.fork()
                if pid == 0:
                    for other in children:
                        other.close()
                    for handle in (h for handles in (dying, *children.values()) for h in handles):
                        os.close(handle)
                    _live(request["role"], request["name"], descriptors)
                handle = os.pidfd_open(pid)
                children[door].append(handle)
                for number in descriptors:
                    os.close(number)
                with contextlib.suppress(ConnectionError):
                    _send(door, struct.pack("q", pid), (handle,))
        for handles in (dying, *children.values()):
            _reap(handles)
    # The last one buries them, too: where nobody adopts orphans, zombies would be left. But not for ever: one that
    # waits for a dead disk dies when the disk answers.
    dying += [handle for handles in children.values() for handle in handles]
    for handle in dying:
        _kill(handle)
    deadline_s = time.monotonic() + 2.0
    while dying and time.monotonic() < deadline_s:
        _reap(dying)
        time.sleep(0.005)
    os._exit(0)


def _live(role: str, name: str, descriptors: list[int]) -> None:
    """A child's whole life."""
    code = 1
    try:
        _die_with_parent()
        _name_process(name)
        connection = Connection(descriptors[0])
        with contextlib.suppress(EOFError, ConnectionError):  # whoever it works for is gone
            importlib.import_module(ROLES[role]).serve(connection, descriptors[1:])
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _send(door: socket.socket, message: bytes, descriptors: tuple[int, ...]) -> None:
    socket.send_fds(door, [message], list(descriptors))


def _kill(handle: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGKILL)


def _reap(handles: list[int]) -> None:
    """Buries the dead of a list: a zombie keeps its number, and the pidfd of one that is gone is one too many."""
    for handle in list(handles):
        if select.select([handle], [], [], 0)[0]:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, handle, os.WEXITED)
            handles.remove(handle)
            os.close(handle)


def _die_with_parent() -> None:
    """For the server's children only: of a parent with threads, the end of the thread that forked would do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _name_process(name: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
