"""Forkserver of the data plane: starts small processes without jax that end together with their owner.

multiprocessing's own forkserver imports the caller's `__main__` in each child: a training script without a
guard would run twice, and a script that imports jax would load it in every loader. This forkserver starts
from a bare interpreter in which jax cannot be imported, imports the modules of all roles once, and forks: a
child's own memory is 6 to 8 MB.

A process that dies takes the processes it started along. The server watches the socket of each client and
kills that client's children when the socket closes. It exits when its first client, the trainer, is gone. If
the server itself is killed, the kernel kills its children.
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
"""First lines of the interpreter: jax cannot be imported, and jaxtyping is a stub.

Nothing checks annotations in these processes, and the real jaxtyping imports asyncio and unittest.mock: 5 MB
and 80 ms.
"""

ROLES = {"constructor": "jtrain.data.constructor.process", "loader": "jtrain.data.loaders.loader"}
"""Role -> module whose `serve(connection, descriptors)` is the main loop of a process in that role."""


class Child:
    """Process started by the forkserver. `connection` raises EOFError once the process has ended."""

    def __init__(self, pid: int, handle: int, connection: Connection) -> None:
        self.pid = pid
        self.connection = connection
        self._handle = handle  # a pidfd: unlike a process id, it is never reused for another process

    def kill(self) -> None:
        """Sends SIGKILL; does nothing if the process has ended."""
        if self._handle >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def close(self) -> None:
        """Closes the connection, which ends the process."""
        self.connection.close()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class ForkserverClient:
    """Client of the forkserver, for a process that starts children. Not thread-safe."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def start(self, role: str, name: str, descriptors: tuple[int, ...] = ()) -> Child:
        """Forks a child for `role`; process lists show it as `name`.

        Raises:
          ConnectionError: the forkserver is gone.
        """
        own_end, child_end = socket.socketpair()
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(own_end.close)
            with child_end:
                request = json.dumps({"role": role, "name": name}).encode()
                _send(self._socket, request, (child_end.fileno(), *descriptors))
            # The reply carries the child's pid as 8 bytes and its pidfd as a descriptor.
            reply, handles, *_ = socket.recv_fds(self._socket, _MESSAGE_BYTES, 1)
            if not reply:
                raise ConnectionResetError("the forkserver of the data plane is gone")
            on_failure.pop_all()
        return Child(struct.unpack("q", reply)[0], handles[0], Connection(own_end.detach()))

    def socket_for_child(self) -> socket.socket:
        """Returns a client socket to pass to a child, whose own children then die with it.

        Raises:
          ConnectionError: the forkserver is gone.
        """
        own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end, contextlib.ExitStack() as on_failure:
            on_failure.callback(own_end.close)
            _send(self._socket, json.dumps({"client": True}).encode(), (child_end.fileno(),))
            on_failure.pop_all()
        return own_end

    def close(self) -> None:
        self._socket.close()


class Forkserver:
    """Server process and its client, as the trainer holds them; needs Linux: pidfds and SOCK_SEQPACKET."""

    def __init__(self, *, preload: tuple[str, ...] = ()) -> None:
        own_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = _BARE + (
            f"sys.path[:] = {sys.path!r}\nfrom jtrain.data.loaders import forkserver; "
            f"forkserver.serve({server_end.fileno()}, {preload!r})"
        )
        environment = os.environ | {
            "RAYON_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }
        # Without these limits every loader would start a thread per core in each of its libraries.
        environment |= {"OPENBLAS_NUM_THREADS": "1", "ARROW_IO_THREADS": "1"}
        # Arrow's own pools keep freed memory: a loader of 306 Parquet sources takes twice as much and is no
        # faster.
        environment |= {"ARROW_DEFAULT_MEMORY_POOL": "system"}
        with server_end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=(server_end.fileno(),),
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        self.client = ForkserverClient(own_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the server and all its children, and waits for the server's exit; may be called twice."""
        # The server exits when its first client is gone.
        self.client.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(descriptor: int, preload: tuple[str, ...]) -> None:
    """Main loop of the server in its own process; never returns."""
    # Ctrl-C, Slurm and a closed terminal signal the whole process group; the trainer decides what happens.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _name_process("jtrain-data")
    # Imported before the first fork, so that all children share these pages.
    for module in (*ROLES.values(), *preload):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection would write to every page it visits, and so copy it
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # children should not inherit memory that the imports have freed
    trainer = socket.socket(fileno=descriptor)
    children: dict[socket.socket, list[int]] = {trainer: []}  # client socket -> pidfds of its children
    dying: list[int] = []
    while trainer in children:
        readable_clients, _, _ = select.select(list(children), [], [], 1.0)
        for client in readable_clients:
            message, descriptors, *_ = socket.recv_fds(client, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
            request = json.loads(message) if message else None
            # An empty message: the client has closed its socket, or has ended; its children end too.
            if request is None:
                dying += children.pop(client)
                for handle in dying:
                    _kill(handle)
                client.close()
            elif "client" in request:
                children[socket.socket(fileno=descriptors[0])] = []
            else:
                pid = os.fork()
                if pid == 0:
                    # The server's ends: while a child has copies, clients do not notice the server's death.
                    for inherited_socket in children:
                        inherited_socket.close()
                    for handle in (h for handles in (dying, *children.values()) for h in handles):
                        os.close(handle)
                    _run_child(request["role"], request["name"], descriptors)
                handle = os.pidfd_open(pid)
                children[client].append(handle)
                # The child has its own copies; here they would keep its connection from ending.
                for number in descriptors:
                    os.close(number)
                with contextlib.suppress(ConnectionError):
                    _send(client, struct.pack("q", pid), (handle,))
        for handles in (dying, *children.values()):
            _reap(handles)
    # Reaps the children before it exits: in a container whose init process does not, zombies would remain. It
    # gives up after 2 s, because a child that waits for a dead disk dies only when the disk answers.
    dying += [handle for handles in children.values() for handle in handles]
    for handle in dying:
        _kill(handle)
    deadline_s = time.monotonic() + 2.0
    while dying and time.monotonic() < deadline_s:
        _reap(dying)
        time.sleep(0.005)
    os._exit(0)


def _run_child(role: str, name: str, descriptors: list[int]) -> None:
    """Runs a child from fork to exit."""
    code = 1
    try:
        # First: until then the death of the server would leave this process behind.
        _die_with_parent()
        _name_process(name)
        connection = Connection(descriptors[0])
        with contextlib.suppress(EOFError, ConnectionError):  # the process it works for is gone
            importlib.import_module(ROLES[role]).serve(connection, descriptors[1:])
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _send(client: socket.socket, message: bytes, descriptors: tuple[int, ...]) -> None:
    socket.send_fds(client, [message], list(descriptors))


def _kill(handle: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGKILL)


def _reap(handles: list[int]) -> None:
    """Reaps the processes in `handles` that have ended, and removes them from the list."""
    for handle in list(handles):
        if select.select([handle], [], [], 0)[0]:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, handle, os.WEXITED)
            handles.remove(handle)
            os.close(handle)


def _die_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that forked it ends, the server's only one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _name_process(name: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
