"""Connections among the Data Constructors of a run: one per pair, made anew when it breaks."""

import asyncio
import collections
import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Generator
from typing import Any

from jtrain.data.hosts import messages
from jtrain.runtime import link
from jtrain.runtime.link import LinkError, Peers, Session, WireStep

CONNECTED = "connected"
"""Message that says that a connection is new: what was sent to that process before may be lost."""

_HANDSHAKE_S = 10.0
_MOST_PAUSE_S = 1.0


class PeerLinks:
    """Sends messages to the other constructors and collects theirs, on a thread of its own.

    Each pair has one link (`jtrain.runtime.link`), which the process with the smaller index makes. A message
    to a process that is not connected is dropped: `CONNECTED` says when to repeat what matters.

    Args:
      listening: socket of this process's address. The trainer holds it: a constructor that is restarted is
        found at the same address.
    """

    def __init__(self, listening: socket.socket, peers: Peers) -> None:
        self.peers = peers
        self._listening = listening
        self._inbox: collections.deque[tuple[int, Any]] = collections.deque()
        # The constructor waits for this descriptor among those of its loaders.
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._links: dict[int, tuple[asyncio.StreamWriter, Session]] = {}
        other_peers = [i for i in range(len(peers.addresses)) if i != peers.index]
        self._down = {i: (time.monotonic(), "never connected") for i in other_peers}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="data-peers", daemon=True).start()

    def fileno(self) -> int:
        """Returns a descriptor that is readable while messages wait."""
        return self._wake

    def send(self, peer: int, batch: list[tuple[Any, ...]]) -> None:
        """Sends messages to one process, without waiting."""
        contents = [content for message in batch for content in messages.encode_message(message)]
        # Encoded on the caller's thread, sealed on the loop's: seals count messages, in the order of writing.
        self._loop.call_soon_threadsafe(self._write, peer, contents)

    def received(self) -> list[tuple[int, Any]]:
        """Returns (process, message) of what has arrived since the last call, in order per process."""
        with contextlib.suppress(BlockingIOError):
            # Reset before the inbox is emptied: a message in between then costs one wake in vain, not a wait.
            os.eventfd_read(self._wake)
        arrivals = []
        # deque.popleft is atomic; the other thread only appends.
        while self._inbox:
            arrivals.append(self._inbox.popleft())
        return arrivals

    def unreachable(self) -> dict[int, tuple[float, str]]:
        """Returns the processes without a connection: since when (`time.monotonic`), and why."""
        return dict(self._down)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        # The list keeps the tasks alive: the loop itself holds them weakly.
        self._dial_tasks = [
            self._loop.create_task(self._keep_connected(i)) for i in self._down if i > self.peers.index
        ]
        self._loop.run_until_complete(asyncio.start_server(self._serve_accepted, sock=self._listening))
        self._loop.run_forever()

    def _write(self, peer: int, contents: list[bytes]) -> None:
        # Dropped without a link: the sender repeats what matters at the next CONNECTED.
        if peer in self._links:
            writer, session = self._links[peer]
            for part in itertools.chain.from_iterable(map(session.sealed, contents)):
                writer.write(part)

    def _add_to_inbox(self, peer: int, message: Any) -> None:
        self._inbox.append((peer, message))
        os.eventfd_write(self._wake, 1)

    async def _keep_connected(self, peer: int) -> None:
        """Keeps up the connection to a process with a larger index."""
        host, port = self.peers.addresses[peer]
        pause_s = 0.02
        while True:
            writer = None
            try:
                reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), _HANDSHAKE_S)
                steps = link.calling(self.peers.token, self.peers.index, peer)
                session = await asyncio.wait_for(_converse(reader, writer, steps), _HANDSHAKE_S)
                # Back to the short pause: a constructor that is restarted listens again within a second.
                pause_s = 0.02
                await self._listen(peer, reader, writer, session)
            except OSError as error:  # LinkError and TimeoutError are such
                self._note_lost(peer, writer, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    async def _serve_accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a connection that was made from elsewhere; closes it if it is of no process of this run."""
        peer = -1
        try:
            steps = link.answering(self.peers.token, self.peers.index, len(self.peers.addresses))
            peer, session = await asyncio.wait_for(_converse(reader, writer, steps), _HANDSHAKE_S)
            await self._listen(peer, reader, writer, session)
        except OSError as error:
            self._note_lost(peer, writer, error)
        finally:
            writer.close()

    async def _listen(
        self, peer: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: Session
    ) -> None:
        """Takes messages from a link until it breaks, which raises OSError."""
        # A peer that connects anew has lost its old link, even if this side has not noticed.
        if peer in self._links:
            self._links[peer][0].close()
        self._links[peer] = writer, session
        self._down.pop(peer, None)
        # Before any message of the new link, so that what was lost is repeated first.
        self._add_to_inbox(peer, CONNECTED)
        while True:
            kind, fields = await _converse(reader, writer, session.message(messages.SCHEMA))
            try:
                message = messages.decode_message(kind, fields)
            except (TypeError, ValueError) as error:
                raise LinkError(f"a message {kind} arrived that no process sends ({error})") from error
            self._add_to_inbox(peer, message)

    def _note_lost(self, peer: int, writer: asyncio.StreamWriter | None, error: Exception) -> None:
        if writer is not None:
            writer.close()
        # An old link that breaks late must not take down the new one.
        if peer >= 0 and (peer not in self._links or self._links[peer][0] is writer):
            self._links.pop(peer, None)
            # The time of the first failure counts: each further attempt only renews the reason.
            since_s = self._down.get(peer, (time.monotonic(), ""))[0]
            self._down[peer] = since_s, str(error) or type(error).__name__


async def _converse[T](
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, steps: Generator[WireStep, bytearray, T]
) -> T:
    """Runs one side of the protocol of links in asyncio."""
    try:
        request = next(steps)
        while True:
            if isinstance(request, int):
                request = steps.send(bytearray(await reader.readexactly(request)))
            else:
                writer.write(request)
                request = next(steps)
    except StopIteration as end:
        # A generator's return value arrives in StopIteration.
        return end.value
    except asyncio.IncompleteReadError as error:
        raise link.ended_early(len(error.partial), error.expected) from None
