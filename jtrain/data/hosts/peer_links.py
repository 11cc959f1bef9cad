"""Connections among the Data Constructors of a run: one per pair, made anew when it breaks."""

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import os
import socket
import threading
import time
from collections.abc import Generator
from typing import Any

from jtrain.data.hosts import messages
from jtrain.runtime.link import protocol, socket_link
from jtrain.runtime.link.meeting import Peers
from jtrain.runtime.link.protocol import LinkError, Session, WireStep

CONNECTED = "connected"
"""Message that says that a connection is new: what was sent to that process before may be lost."""

_BEATS = 5
"""Beats in the time after which a process counts as silent."""

_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.02, 1.0
_MOST_SILENT_PAUSE_S = 60.0
"""Longest pause before a link is made anew that was silent or slow again and again."""

_GOOD_LINK_S = 600.0
"""Seconds after which a link that is lost has been a good one."""


@dataclasses.dataclass(eq=False)
class _Connection:
    """Link to one process.

    answered_s: time of the latest beat that it has answered; of the handshake, before the first answer.
    has_answered: True after the first answer.
    """

    writer: asyncio.StreamWriter
    session: Session
    answered_s: float
    has_answered: bool = False
    is_silent: bool = False


class PeerLinks:
    """Sends messages to the other constructors and collects theirs, on a thread of its own.

    Each pair has one link (`jtrain.runtime.link`), which the process with the smaller index makes. A message
    to a process that is not connected is dropped: `CONNECTED` says when to repeat what matters.

    Both ends of a link send beats, which the other constructor answers between its work (`received`), not
    this thread: an answer shows that the link passes both ways, how long what is queued takes, and that the
    constructor is not stuck. A link on which an answer takes longer than `Peers.silence_s` is ended. The
    threads of both ends then make a new one, so only the first answer on it shows that a constructor is back.

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
        self._links: dict[int, _Connection] = {}
        other_peers = [i for i in range(len(peers.addresses)) if i != peers.index]
        self._down = {i: (time.monotonic(), "never connected") for i in other_peers}
        # Those of them that had a link and did not answer on it.
        self._silent: set[int] = set()
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
            peer, message = self._inbox.popleft()
            if message[0] == "beat":
                self.send(peer, [("echo", message[1])])
            else:
                arrivals.append((peer, message))
        return arrivals

    def unreachable(self) -> dict[int, tuple[float, str]]:
        """Returns the processes that have not answered on the latest connection, if there is one: their last
        sign of life (`time.monotonic`), and what happened to the connection.
        """
        return dict(self._down)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        # The list keeps the tasks alive: the loop itself holds them weakly.
        self._tasks = [
            self._loop.create_task(self._keep_connected(i)) for i in self._down if i > self.peers.index
        ]
        self._tasks.append(self._loop.create_task(self._beat()))
        self._loop.run_until_complete(asyncio.start_server(self._serve_accepted, sock=self._listening))
        self._loop.run_forever()

    def _write(self, peer: int, contents: list[bytes]) -> None:
        # Dropped without a link: the sender repeats what matters at the next CONNECTED.
        if peer in self._links:
            connection = self._links[peer]
            for part in itertools.chain.from_iterable(map(connection.session.sealed, contents)):
                connection.writer.write(part)

    def _add_to_inbox(self, peer: int, message: Any) -> None:
        self._inbox.append((peer, message))
        os.eventfd_write(self._wake, 1)

    async def _beat(self) -> None:
        """Sends beats, and ends links on which their answers do not come in time."""
        silence_s = self.peers.silence_s
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(silence_s / _BEATS)
            now_s = time.monotonic()
            # Where this process stood still itself, it has heard nobody for as long.
            standstill_s = max(0.0, now_s - looked_s - 2 * silence_s / _BEATS)
            looked_s = now_s
            for peer, connection in list(self._links.items()):
                connection.answered_s += standstill_s
                if (waited_s := now_s - connection.answered_s) > silence_s:
                    connection.is_silent = True
                    self._lose(peer, connection, f"no answer for {waited_s:.1f} s")
                self._write(peer, messages.encode_message(("beat", int(now_s * 1000))))

    async def _keep_connected(self, peer: int) -> None:
        """Keeps up the connection to a process with a larger index."""
        host, port = self.peers.addresses[peer]
        silence_s = self.peers.silence_s
        pause_s, silent_pause_s = _FIRST_PAUSE_S, silence_s
        while True:
            writer = connection = None
            try:
                reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), silence_s)
                steps = protocol.calling(self.peers.token, self.peers.index, peer)
                session = await asyncio.wait_for(_converse(reader, writer, steps), silence_s)
                # Back to the short pause: a constructor that is restarted listens again within a second.
                pause_s = _FIRST_PAUSE_S
                began_s = time.monotonic()
                connection = await self._listen(peer, reader, writer, session)
                if time.monotonic() - began_s > _GOOD_LINK_S:
                    silent_pause_s = silence_s
            except OSError as error:  # LinkError and TimeoutError are such
                if peer in self._down:
                    reason = str(error) or f"no answer to a connection for {silence_s:g} s"
                    self._down[peer] = self._down[peer][0], reason
            finally:
                if writer is not None:
                    writer.transport.abort()
            # A link that is slow answers a handshake, and holds up the stream anew each time it is trusted.
            if connection is not None and connection.is_silent:
                await asyncio.sleep(silent_pause_s)
                silent_pause_s = min(2 * silent_pause_s, _MOST_SILENT_PAUSE_S)
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    async def _serve_accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a connection that was made from elsewhere; closes it if it is of no process of this run."""
        try:
            steps = protocol.answering(self.peers.token, self.peers.index, len(self.peers.addresses))
            peer, session = await asyncio.wait_for(_converse(reader, writer, steps), self.peers.silence_s)
            await self._listen(peer, reader, writer, session)
        except OSError:
            pass  # a stranger, or a process that calls again
        finally:
            writer.transport.abort()

    async def _listen(
        self, peer: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: Session
    ) -> _Connection:
        """Takes messages from a link until it is lost; returns it."""
        socket_link.set_deadlines(writer.get_extra_info("socket"), self.peers.silence_s)
        # A peer that connects anew has lost its old link, even if this side has not noticed.
        if peer in self._links:
            self._links[peer].writer.transport.abort()
        connection = self._links[peer] = _Connection(writer, session, time.monotonic())
        # A process that starts is alive; one that was silent may still be stuck behind its thread of links.
        if peer not in self._silent:
            self._down[peer] = connection.answered_s, "no answer yet"
        # Before any message of the new link, so that what was lost is repeated first.
        self._add_to_inbox(peer, CONNECTED)
        try:
            while True:
                kind, fields = await _converse(reader, writer, session.message(messages.SCHEMA))
                try:
                    message = messages.decode_message(kind, fields)
                except (TypeError, ValueError) as error:
                    raise LinkError(f"a message {kind} arrived that no process sends ({error})") from error
                if kind == "echo":
                    connection.answered_s = max(connection.answered_s, fields["sent_ms"] / 1000)
                    # Of an old link that the peer has replaced, an answer says nothing of the new one.
                    if not connection.has_answered and self._links.get(peer) is connection:
                        connection.has_answered = True
                        self._silent.discard(peer)
                        del self._down[peer]
                        os.eventfd_write(self._wake, 1)
                else:
                    self._add_to_inbox(peer, message)
        except OSError as error:
            self._lose(peer, connection, str(error) or type(error).__name__)
        return connection

    def _lose(self, peer: int, connection: _Connection, reason: str) -> None:
        # An old link that breaks late must not take down the new one.
        if self._links.get(peer) is connection:
            del self._links[peer]
            since_s = self._down[peer][0] if peer in self._silent else connection.answered_s
            self._down[peer] = since_s, reason
            if connection.is_silent:
                self._silent.add(peer)
        # Not `close`, which would wait until what is queued has been sent.
        connection.writer.transport.abort()


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
        raise protocol.ended_early(len(error.partial), error.expected) from None
