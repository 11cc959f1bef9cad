"""Copies of a process's state in the memory of another host, sent over TCP.

Each process sends to one of another host: the k-th process of a host to the k-th of the next. On one host with several
processes it is the next process. Both sides prove that they know a secret of this start before anything else is read;
what they send is not encrypted.
"""

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.runtime import multihost
from jtrain.runtime.atomic_io import write_whole

_ADDRESS_BYTES = 128
_NONCE_BYTES = 32
_SIZES = struct.Struct("!QQ")
_TIMEOUT_S = 30.0
_MOST_HEADER_BYTES = 1 << 28
_BLOCK_BYTES = 1 << 20


class Neighbours:
    """Connections among the processes of a run, by which they keep copies of each other's generations.

    Args:
      folder: folder of the run in local memory, as on every host.

    Attributes:
      is_first_of_host: True in one process per host.
      processes_here: processes of this host.
      copies_here: processes whose copies this host keeps.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process, processes = multihost.process_index(), multihost.process_count()
        self._server: socket.socket | None = None
        self._addresses: list[tuple[str, int]] = []
        self.is_first_of_host, self.processes_here, self.copies_here = True, {self._process}, set[int]()
        self._to: int | None = None
        if processes == 1:
            return
        host = multihost.own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family, backlog=processes)
        # Containers of one host may have one address and memory of their own: one host is who shares the folder.
        here = f"{host}/{_identity(folder)}"
        said = f"{host} {self._server.getsockname()[1]} {here}".encode()
        everyone = multihost.gather(np.frombuffer(said.ljust(_ADDRESS_BYTES), np.uint8))
        found = [row.tobytes().decode().split() for row in everyone]
        self._addresses = [(name, int(port)) for name, port, _ in found]
        hosts = [there for _, _, there in found]
        self._token = multihost.from_process_zero(np.frombuffer(secrets.token_bytes(32), np.int32)).tobytes()
        to = neighbours_of(hosts)
        self._to = to[self._process]
        self.processes_here = {p for p, there in enumerate(hosts) if there == here}
        self.copies_here = {p for p, other in enumerate(to) if other in self.processes_here}
        self.is_first_of_host = self._process == min(self.processes_here)
        threading.Thread(target=self._serve, name="local-memory-server", daemon=True).start()

    @property
    def names_here(self) -> set[str]:
        """Names of the folders that this host keeps."""
        return {f"process-{p}" for p in self.processes_here} | {f"copy-{p}" for p in self.copies_here}

    def send(self, number: int, header: bytes, content: memoryview) -> None:
        """Sends a generation to the neighbour and returns when it has committed its copy; raises OSError."""
        if self._to is None:
            return
        with self._connected(self._to) as link:
            _send(link, json.dumps({"put": self._process, "number": number}).encode(), b"")
            _send(link, header, content)
            answer, _ = _receive_head(link)
            if answer != b"kept":
                raise OSError(f"process {self._to} could not keep a copy: {answer.decode(errors='replace')[:200]}")

    def fetch(self, holder: int, process: int, step: int, generation: Path) -> None:
        """Fetches a process's generation from the host of `holder`; raises OSError if it is not there."""
        with self._connected(holder) as link:
            _send(link, json.dumps({"get": process, "step": step}).encode(), b"")
            header, size = _receive_head(link)
            if not size:
                raise OSError(f"process {holder} has no state of step {step} of process {process}")
            generation.with_suffix(".json").unlink(missing_ok=True)
            _receive_content(link, size, generation.with_suffix(".bin"))
        write_whole(generation.with_suffix(".json"), header, durable=False)

    def close(self) -> None:
        """Stops to listen."""
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)
            self._server.close()

    @contextlib.contextmanager
    def _connected(self, process: int) -> Iterator[socket.socket]:
        with socket.create_connection(self._addresses[process], timeout=_TIMEOUT_S) as link:
            theirs, mine = _exactly(link, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
            link.sendall(mine + self._proof(b"caller", theirs, mine))
            if not hmac.compare_digest(_exactly(link, _NONCE_BYTES), self._proof(b"called", theirs, mine)):
                raise ConnectionRefusedError(f"another program answers at the address of process {process}")
            yield link

    def _serve(self) -> None:
        assert self._server is not None
        while True:
            try:
                link, _ = self._server.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._answer, args=(link,), name="local-memory-link", daemon=True).start()

    def _answer(self, link: socket.socket) -> None:
        """Serves one connection; closes it if the other side does not know the secret."""
        with link, contextlib.suppress(OSError, EOFError, ValueError, LookupError):
            link.settimeout(_TIMEOUT_S)
            mine = secrets.token_bytes(_NONCE_BYTES)
            link.sendall(mine)
            theirs, proof = _exactly(link, _NONCE_BYTES), _exactly(link, _NONCE_BYTES)
            if not hmac.compare_digest(proof, self._proof(b"caller", mine, theirs)):
                return
            link.sendall(self._proof(b"called", mine, theirs))
            asked: dict[str, Any] = json.loads(_receive_head(link)[0])
            if "put" in asked:
                self._keep(link, int(asked["put"]), int(asked["number"]))
            else:
                self._give(link, int(asked["get"]), int(asked["step"]))

    def _keep(self, link: socket.socket, process: int, number: int) -> None:
        folder = self._folder / f"copy-{process}"
        header, size = _receive_head(link)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (folder / f"{number}.json").unlink(missing_ok=True)
            _receive_content(link, size, folder / f"{number}.bin")
            write_whole(folder / f"{number}.json", header, durable=False)
        except OSError as error:
            _send(link, f"{type(error).__name__}: {error}".encode(), b"")
            return
        _send(link, b"kept", b"")

    def _give(self, link: socket.socket, process: int, step: int) -> None:
        for name in (f"process-{process}", f"copy-{process}"):
            for header in sorted((self._folder / name).glob("[01].json")):
                text = header.read_bytes()
                if json.loads(text)["step"] == step:
                    _send(link, text, memoryview(np.memmap(header.with_suffix(".bin"), np.uint8, "r")))
                    return
        _send(link, b"", b"")

    def _proof(self, *parts: bytes) -> bytes:
        return hmac.digest(self._token, b"".join(parts), "sha256")


def open_private(path: Path) -> Any:
    """Opens a file to write without cutting it, made with mode 0600 if it is not there."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")


def reserve(file: Any, size_bytes: int) -> None:
    """Gives an open file this size and takes its memory: a map of a file without it would end the process when full."""
    if os.fstat(file.fileno()).st_size != size_bytes:
        os.ftruncate(file.fileno(), size_bytes)
    os.posix_fallocate(file.fileno(), 0, size_bytes)


def _identity(folder: Path) -> str:
    """Returns device and number of a folder, which it makes; empty if that fails, which its owner finds, too."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}"


def neighbours_of(hosts: list[str]) -> list[int]:
    """Returns the process to which each process sends: the k-th of a host to the k-th of the next host, counted round.

    Args:
      hosts: name of the host of each process.
    """
    of_host: dict[str, list[int]] = {}
    for process, host in enumerate(hosts):
        of_host.setdefault(host, []).append(process)
    groups = list(of_host.values())
    if len(groups) == 1:
        return [(process + 1) % len(hosts) for process in range(len(hosts))]
    to = [0] * len(hosts)
    for group, following in zip(groups, [*groups[1:], groups[0]], strict=True):
        for k, process in enumerate(group):
            to[process] = following[k % len(following)]
    return to


def _send(link: socket.socket, header: bytes, content: Any) -> None:
    link.sendall(_SIZES.pack(len(header), len(content)) + header)
    link.sendall(content)


def _receive_head(link: socket.socket) -> tuple[bytes, int]:
    """Returns a header, and the bytes of content that follow it."""
    header_bytes, size = _SIZES.unpack(_exactly(link, _SIZES.size))
    if header_bytes > _MOST_HEADER_BYTES:
        raise ValueError(f"a header of {header_bytes:,} bytes")
    return _exactly(link, header_bytes), size


def _receive_content(link: socket.socket, size: int, path: Path) -> None:
    """Writes the content that arrives into a file, whose memory is taken before."""
    with open_private(path) as file:
        reserve(file, size)
        block, left = memoryview(bytearray(_BLOCK_BYTES)), size
        while left:
            count = link.recv_into(block[: min(left, _BLOCK_BYTES)])
            if not count:
                raise EOFError("the connection ended early")
            file.write(block[:count])
            left -= count


def _exactly(link: socket.socket, count: int) -> bytes:
    """Returns the next bytes of a connection; raises EOFError if it ends before."""
    found = bytearray()
    while len(found) < count:
        if not (more := link.recv(min(count - len(found), _BLOCK_BYTES))):
            raise EOFError("the connection ended early")
        found += more
    return bytes(found)
