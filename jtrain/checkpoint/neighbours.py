"""Copies of a process's state in the memory of another host, sent over a link (`jtrain.runtime.link`).

Each process sends to one of another host: the k-th process of a host to the k-th of the next. On one host
with several processes it is the next process. A link that is silent, slow or broken is named by both ends
after `socket_link.SILENCE_S`, and the copy on it is given up: no save and no restart waits for it.
"""

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.checkpoint import files, folders, slots
from jtrain.runtime import multihost
from jtrain.runtime.link import meeting, protocol, socket_link
from jtrain.runtime.link.protocol import LinkError
from jtrain.runtime.link.socket_link import Link

SCHEMA: protocol.Schema = {
    "put": {"slot": str},
    "get": {"process": int, "step": int},
    "slot": {"names": np.ndarray, "sizes": np.ndarray},
    "ready": {},
    "kept": {},
    "done": {},
    "error": {"reason": str},
}
"""Messages: `put` and a slot, and `get`, which a slot or `error` answers. `slot` announces one; `ready` says
that its memory is taken; then the contents of its files follow, the manifest's last; `kept` says that all is
there, and `done` that `kept` has arrived. In place of `ready` or `kept` comes `error`."""

_FILE_NAME = re.compile(rf"({files.STATE}/[^/]+/)?[^/.][^/]*")


class Neighbours:
    """Links among the processes of a run, by which they keep copies of each other's slots.

    Args:
      folder: folder of the run in local memory, as on every host.
      say: prints a line; called in threads.

    Attributes:
      is_first_of_host: True in one process per host.
      local_processes: processes of this host.
      local_copies: processes whose copies this host keeps.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._process, processes = multihost.process_index(), multihost.process_count()
        self._listening: socket.socket | None = None
        self.is_first_of_host, self.local_processes, self.local_copies = True, {self._process}, set[int]()
        if processes == 1:
            return
        self._listening, self._peers = meeting.meet()
        # Containers of one host may have one address and memory
        # of their own: one host is who shares the folder.
        hosts = multihost.gather_texts(f"{self._peers.addresses[self._process][0]} {_identity(folder)}")
        receivers = neighbours_of(hosts)
        self._receiver = receivers[self._process]
        self.local_processes = {p for p, host in enumerate(hosts) if host == hosts[self._process]}
        # The folder is shared on a host, so copies that any process of this host receives are all in it.
        self.local_copies = {p for p, receiver in enumerate(receivers) if receiver in self.local_processes}
        self.is_first_of_host = self._process == min(self.local_processes)
        # After the fields above: the thread reads them at the first connection.
        threading.Thread(target=self._serve, name="local-memory-server", daemon=True).start()

    @property
    def local_names(self) -> set[str]:
        """Names of the folders that this host keeps."""
        return {f"process-{p}" for p in self.local_processes} | {f"copy-{p}" for p in self.local_copies}

    def send(self, slot: Path) -> None:
        """Sends a slot to the neighbour and returns when it has committed its copy; raises OSError."""
        if self._listening is None:
            return
        # A link of its own for each slot: the last one may have broken since.
        with self._open_link(self._receiver) as peer:
            peer.send("put", slot=slot.name)
            _send(peer, slot)

    def fetch(self, holder: int, process: int, step: int, slot: Path) -> None:
        """Fetches what the host of `holder` has of a process's state into `slot`; raises OSError if nothing
        comes.
        """
        with self._open_link(holder) as peer:
            peer.send("get", process=process, step=step)
            _receive(peer, slot)

    def close(self) -> None:
        """Stops to listen."""
        if self._listening is not None:
            # `close` alone does not wake a thread in `accept`; `shutdown` does.
            with contextlib.suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)
            self._listening.close()

    @contextlib.contextmanager
    def _open_link(self, process: int) -> Iterator[Link]:
        try:
            with socket_link.connect(self._peers.addresses[process], self._peers.silence_s) as connection:
                handshake = protocol.calling(self._peers.token, self._process, process)
                yield Link(connection, socket_link.converse(connection, handshake))
        # No other OSError: one of a full folder says its own name.
        except LinkError as error:
            raise LinkError(f"the link to {self._peers.named(process)} has failed ({error})") from error

    def _serve(self) -> None:
        assert self._listening is not None
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return  # closed
            # A thread per connection: a neighbour that stalls must not keep another one waiting.
            threading.Thread(
                target=self._answer, args=(connection,), name="local-memory-link", daemon=True
            ).start()

    def _answer(self, connection: socket.socket) -> None:
        """Serves one connection; closes it if the other side does not know the token."""
        caller = None
        try:
            with connection:
                connection.settimeout(self._peers.silence_s)
                socket_link.set_deadlines(connection, self._peers.silence_s)
                handshake = protocol.answering(self._peers.token, self._process, len(self._peers.addresses))
                caller, session = socket_link.converse(connection, handshake)
                peer = Link(connection, session)
                kind, fields = peer.receive(SCHEMA)
                if kind == "put":
                    self._store_copy(peer, caller, fields["slot"])
                elif kind == "get":
                    self._send_copy(peer, fields["process"], fields["step"])
        except (OSError, ValueError, LookupError) as error:
            # Not of a stranger, who could fill the log.
            if caller is not None:
                self._say(
                    f"Local memory: the link to {self._peers.named(caller)} has failed "
                    f"({str(error) or type(error).__name__})."
                )

    def _store_copy(self, peer: Link, process: int, slot: str) -> None:
        # The slot's name becomes a path: a peer may name none but ours.
        if slot not in slots.SLOTS:
            raise LinkError(f"there is no slot {slot!r}")
        try:
            _receive(peer, self._folder / f"copy-{process}" / slot)
        # A broken link cannot carry the answer; a full folder can be told.
        except LinkError:
            raise
        except OSError as error:
            peer.send("error", reason=f"{type(error).__name__}: {error}"[:200])

    def _send_copy(self, peer: Link, process: int, step: int) -> None:
        # Its own slots first, then a copy: either serves, since each is found by its step.
        for kind in ("process", "copy"):
            for slot, manifest in slots.whole_slots(self._folder / f"{kind}-{process}"):
                if manifest.step == step:
                    _send(peer, slot)
                    return
        peer.send("error", reason=f"process {self._process} has no state of step {step} of process {process}")


def _send(peer: Link, slot: Path) -> None:
    sizes = folders.sizes(slot)
    # To the end of the dict, so that it is sent last: a copy that broke off has no manifest.
    sizes[files.MANIFEST] = sizes.pop(files.MANIFEST)
    names = np.frombuffer("\n".join(sizes).encode(), np.uint8)
    peer.send("slot", names=names, sizes=np.array(list(sizes.values())))
    _expect(peer, "ready")
    for name in sizes:
        with open(slot / name, "rb") as file:
            while block := file.read(protocol.FRAME_BYTES):
                peer.send_content(block)
    _expect(peer, "kept")
    peer.send("done")


def _receive(peer: Link, slot: Path) -> None:
    """Writes the slot that arrives over what `slot` held."""
    fields = _expect(peer, "slot")
    sizes = dict(zip(fields["names"].tobytes().decode().split("\n"), fields["sizes"].tolist(), strict=True))
    if not all(map(_FILE_NAME.fullmatch, sizes)):
        raise LinkError("a slot arrived with files elsewhere")
    # The manifest goes before the first byte changes, and arrives again as the last file.
    slots.mark_empty(slot)
    # The first time 3.6 s per GiB: longer than the sender would wait for a silent process.
    with peer.working():
        slots.reserve(slot, sizes)
    peer.send("ready")
    # `r+b` keeps the reserved memory; `wb` would give it back and take it anew.
    for name, size in sizes.items():
        with open(slot / name, "r+b") as file:
            for block in peer.receive_content(size):
                file.write(block)
    peer.send("kept")
    # Or this end would not know that the other one has given up.
    _expect(peer, "done")


def _expect(peer: Link, expected: str) -> dict[str, Any]:
    """Returns the fields of the next message; raises OSError with the other end's reason if it is not
    `expected`.
    """
    kind, fields = peer.receive(SCHEMA)
    if kind != expected:
        raise OSError(f"the other process says: {fields.get('reason', f'{kind} instead of {expected}')}")
    return fields


def _identity(folder: Path) -> str:
    """Returns device and number of a folder, which it makes; empty if that fails, which its owner finds,
    too.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}"


def neighbours_of(hosts: list[str]) -> list[int]:
    """Returns the process to which each process sends: the k-th of a host to the k-th of the next host,
    counted round.

    Args:
      hosts: name of the host of each process.
    """
    of_host: dict[str, list[int]] = {}
    for process, host in enumerate(hosts):
        of_host.setdefault(host, []).append(process)
    groups = list(of_host.values())
    if len(groups) == 1:
        return [(process + 1) % len(hosts) for process in range(len(hosts))]
    receivers = [0] * len(hosts)
    for group, following in zip(groups, [*groups[1:], groups[0]], strict=True):
        # `%`: the next host may run fewer processes; then one of them keeps several copies.
        for k, process in enumerate(group):
            receivers[process] = following[k % len(following)]
    return receivers
