"""Connections among the Data Constructors of a run: one per pair, made anew when it breaks."""

import asyncio
import collections
import contextlib
import hmac
import os
import pickle
import secrets
import socket
import struct
import threading
import time
from typing import Any

from jtrain.data.hosts.peers import Peers

CONNECTED = "connected"
"""Message that says that a connection is new: what was sent to that process before may be lost."""

_HANDSHAKE_S = 10.0
_MOST_PAUSE_S = 1.0
_NONCE_BYTES = 32
_HEADER = struct.Struct("!Q")
_INDEX = struct.Struct("!I")


class PeerLinks:
    """Sends messages to the other constructors and collects theirs, on a thread of its own.

    Each pair has one connection, which the process with the smaller index makes. Both sides prove that they know the
    run's token before anything else is read; the messages themselves are not encrypted. A message to a process that is
    not connected is dropped: `CONNECTED` says when to repeat what matters.

    Args:
      listening: socket of this process's address.
    """

    def __init__(self, listening: socket.socket, peers: Peers) -> None:
        self.peers = peers
        self._listening = listening
        self._inbox: collections.deque[tuple[int, Any]] = collections.deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._writers: dict[int, asyncio.StreamWriter] = {}
        others = [i for i in range(len(peers.addresses)) if i != peers.index]
        self._down = {i: (time.monotonic(), "never connected") for i in others}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="data-peers", daemon=True).start()

    def fileno(self) -> int:
        """Returns a descriptor that is readable while messages wait."""
        return self._wake

    def send(self, peer: int, messages: list[tuple[Any, ...]]) -> None:
        """Sends messages to one process, without waiting."""
        content = pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL)
        self._loop.call_soon_threadsafe(self._write, peer, content)

    def received(self) -> list[tuple[int, Any]]:
        """Returns (process, message) of what has arrived since the last call, in order per process."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        found = []
        while self._inbox:
            found.append(self._inbox.popleft())
        return found

    def unreachable(self) -> dict[int, tuple[float, str]]:
        """Returns the processes without a connection: since when (`time.monotonic`), and why."""
        return dict(self._down)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._dials = [self._loop.create_task(self._dial(i)) for i in self._down if i > self.peers.index]
        self._loop.run_until_complete(asyncio.start_server(self._accepted, sock=self._listening))
        self._loop.run_forever()

    def _write(self, peer: int, content: bytes) -> None:
        if (writer := self._writers.get(peer)) is not None:
            writer.write(_HEADER.pack(len(content)))
            writer.write(content)

    def _arrived(self, peer: int, messages: list[Any]) -> None:
        self._inbox.extend((peer, message) for message in messages)
        os.eventfd_write(self._wake, 1)

    async def _dial(self, peer: int) -> None:
        """Keeps up the connection to a process with a larger index."""
        host, port = self.peers.addresses[peer]
        pause_s = 0.02
        while True:
            writer = None
            try:
                reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), _HANDSHAKE_S)
                await asyncio.wait_for(self._introduce(reader, writer, peer), _HANDSHAKE_S)
                pause_s = 0.02
                await self._listen(peer, reader, writer)
            except (OSError, EOFError) as error:  # TimeoutError is an OSError
                self._lost(peer, writer, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a connection that was made from elsewhere; closes it if it is of no process of this run."""
        peer = -1
        try:
            peer = await asyncio.wait_for(self._recognise(reader, writer), _HANDSHAKE_S)
            if peer >= 0:
                await self._listen(peer, reader, writer)
        except (OSError, EOFError) as error:
            self._lost(peer, writer, error)
        finally:
            writer.close()

    async def _introduce(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: int) -> None:
        theirs, mine = await reader.readexactly(_NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
        index = _INDEX.pack(self.peers.index)
        writer.write(index + mine + self._proof(b"caller", index, theirs, mine))
        answer = await reader.readexactly(_NONCE_BYTES)
        if not hmac.compare_digest(answer, self._proof(b"called", _INDEX.pack(peer), theirs, mine)):
            raise ConnectionRefusedError("another program answers at its address")

    async def _recognise(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        """Returns the index of the process that calls, or -1 if the caller does not know the token."""
        mine = secrets.token_bytes(_NONCE_BYTES)
        writer.write(mine)
        index, theirs = await reader.readexactly(_INDEX.size), await reader.readexactly(_NONCE_BYTES)
        proof = await reader.readexactly(_NONCE_BYTES)
        [peer] = _INDEX.unpack(index)
        known = hmac.compare_digest(proof, self._proof(b"caller", index, mine, theirs))
        if not known or peer == self.peers.index or peer >= len(self.peers.addresses):
            return -1
        writer.write(self._proof(b"called", _INDEX.pack(self.peers.index), mine, theirs))
        return peer

    def _proof(self, *parts: bytes) -> bytes:
        return hmac.digest(self.peers.token, b"".join(parts), "sha256")

    async def _listen(self, peer: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Takes messages from a connection until it breaks, which raises EOFError or OSError."""
        if (old := self._writers.get(peer)) is not None:
            old.close()
        self._writers[peer] = writer
        self._down.pop(peer, None)
        self._arrived(peer, [CONNECTED])
        while True:
            [size] = _HEADER.unpack(await reader.readexactly(_HEADER.size))
            self._arrived(peer, pickle.loads(await reader.readexactly(size)))

    def _lost(self, peer: int, writer: asyncio.StreamWriter | None, error: Exception) -> None:
        if writer is not None:
            writer.close()
        if peer >= 0 and self._writers.get(peer) in (writer, None):
            self._writers.pop(peer, None)
            since_s = self._down.get(peer, (time.monotonic(), ""))[0]
            self._down[peer] = since_s, str(error) or type(error).__name__
