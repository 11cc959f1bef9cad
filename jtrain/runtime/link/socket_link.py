"""Links over blocking sockets.

Nobody waits for a silent or slow link: what is sent or read at a time, at most a frame, has a deadline of
`SILENCE_S`, and so has a sign of life from whoever works on an answer. The kernel ends connections whose
other end acknowledges nothing for as long.
"""

import contextlib
import math
import socket
import sys
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

from jtrain.runtime.link.protocol import (
    LinkError,
    Message,
    Schema,
    Session,
    WireStep,
    encoded,
    ended_early,
)

SILENCE_S = 5.0
"""Seconds without a sign of life, or for one frame, after which the other end of a link counts as lost."""

_WORKING = "working"
"""Kind of the message that `Link.working` sends and `Link.receive` passes over."""


def connect(address: tuple[str, int], silence_s: float) -> socket.socket:
    """Connects to a process; raises LinkError whatever the reason that it cannot be reached."""
    try:
        connection = socket.create_connection(address, timeout=silence_s)
    except OSError as error:
        raise LinkError(str(error)) from error
    set_deadlines(connection, silence_s)
    return connection


def set_deadlines(connection: Any, silence_s: float) -> None:
    """Has the kernel end a TCP connection whose other end acknowledges nothing for `silence_s` seconds.

    With keepalive also where nothing is sent: a host without power or network closes no connection.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(silence_s * 1000)))
        # The first probe after a second, then one a second.
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            connection.setsockopt(socket.IPPROTO_TCP, option, 1)
        # As many probes without an answer as the silence has seconds.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, math.ceil(silence_s)))


class Link:
    """Link over a blocking socket, for one thread.

    The time-out of the socket is the deadline of a frame, and of a sign of life before it.
    """

    def __init__(self, connection: socket.socket, session: Session) -> None:
        self.connection = connection
        self._session = session

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message."""
        for content in encoded(kind, fields):
            self.send_content(content)

    def send_content(self, content: bytes | memoryview) -> None:
        """Sends bytes that a message before has announced."""
        for part in self._session.sealed(content):
            send_all(self.connection, part)

    def receive(self, schema: Schema) -> Message:
        """Returns the next message; waits as long as the other end says that it is working.

        Raises:
          LinkError: what arrived was not sent by the other end, the connection ended, or nothing came in
            time.
        """
        while True:
            message = converse(self.connection, self._session.message({**schema, _WORKING: {}}))
            if message[0] != _WORKING:
                return message

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Tells the other end that this one is still at work, so that its wait has no limit; nothing else may
        be sent meanwhile.
        """
        has_ended = threading.Event()
        # Four signs of life in the time that the other end waits for one.
        beat_s = (self.connection.gettimeout() or SILENCE_S) / 4

        def beat() -> None:
            # A broken link is met by whoever sends next.
            with contextlib.suppress(OSError):
                while not has_ended.wait(beat_s):
                    self.send(_WORKING)

        thread = threading.Thread(target=beat, name="link-working", daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            # Frames are counted: the next one must not begin before the last of these has been sent.
            thread.join()

    def receive_content(self, size_bytes: int) -> Iterator[bytearray]:
        """Yields so many bytes, block by block, each of them authenticated."""
        while size_bytes > 0:
            block = converse(self.connection, self._session.frame())
            size_bytes -= len(block)
            yield block
        # A block may be longer than what was announced: the sender's frames do not fit the message.
        if size_bytes:
            raise LinkError(f"{-size_bytes} more bytes arrived than a message announced")


def converse[T](connection: socket.socket, steps: Generator[WireStep, bytearray, T]) -> T:
    """Runs one side of the protocol on a blocking socket; each step has the socket's time-out as deadline."""
    try:
        # `next` starts the generator up to its first request; a
        # read is answered by `send`, a write by `next`.
        request = next(steps)
        while True:
            if isinstance(request, int):
                request = steps.send(_read_exactly(connection, request))
            else:
                send_all(connection, request)
                request = next(steps)
    except StopIteration as end:
        return end.value


def send_all(connection: socket.socket, content: bytes | memoryview) -> None:
    """Sends all of `content`; raises LinkError if the other end does not take it, or not in time."""
    try:
        connection.sendall(content)
    except TimeoutError:
        raise LinkError(f"{len(content):,} bytes were not taken in {connection.gettimeout():g} s") from None
    except OSError as error:  # no route to a host without power is no ConnectionError
        raise LinkError(str(error)) from error


def _read_exactly(connection: socket.socket, size_bytes: int) -> bytearray:
    content = bytearray(size_bytes)
    target, filled = memoryview(content), 0
    # For all of it: a link on which a byte arrives now and then would otherwise be waited for.
    limit_s = connection.gettimeout()
    until_s = time.monotonic() + (math.inf if limit_s is None else limit_s)
    try:
        while filled < size_bytes:
            if limit_s is not None:
                # Above 0, which would make the socket a non-blocking one.
                connection.settimeout(max(1e-3, until_s - time.monotonic()))
            if not (count := connection.recv_into(target[filled:])):
                raise ended_early(filled, size_bytes)
            filled += count
    except TimeoutError:
        raise LinkError(f"{filled:,} of the next {size_bytes:,} bytes arrived in {limit_s:g} s") from None
    except LinkError:
        raise
    except OSError as error:
        raise LinkError(str(error)) from error
    finally:
        with contextlib.suppress(OSError):  # of a closed socket
            connection.settimeout(limit_s)
    return content
