"""TCP proxy on loopback that forwards bytes until it is told to fail as a network does."""

import contextlib
import socket
import struct
import threading
import time
from typing import Literal

Fault = Literal["silent", "slow", "one_way", "reset", "partition"]

FAULTS: tuple[Fault, ...] = ("silent", "slow", "one_way", "reset", "partition")
"""silent: connections stay and nothing passes. slow: 100 bytes/s. one_way: nothing passes from the called to
the caller. reset: connections end with RST, new ones at once. partition: as silent, and nobody accepts new
connections.
"""

_SLOW_BYTES_PER_S = 100


class Proxy:
    """Proxy for connections to `target`; its own is `address`."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._changed = threading.Condition()
        self._fault: Fault | None = None
        self._armed: tuple[Fault, int] | None = None
        self._is_closed = False
        self._sockets: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listening.getsockname()
        threading.Thread(target=self._serve, daemon=True).start()

    def fail(self, fault: Fault, *, after_bytes: int = 0) -> None:
        """Fails now, or within the bytes that come when so many more have passed to the called."""
        with self._changed:
            if after_bytes:
                self._armed = fault, after_bytes
            else:
                self._begin(fault)

    def heal(self) -> None:
        """Forwards again; what was held up arrives late, as TCP would send it again."""
        with self._changed:
            self._fault = self._armed = None
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for one in (self._listening, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _begin(self, fault: Fault) -> None:
        self._fault, self._armed = fault, None
        if fault == "reset":
            for one in self._sockets:
                # Ends the thread that waits there, without FIN; until then a close would send nothing.
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RD)
        self._changed.notify_all()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listening.accept()
                with self._changed:
                    if self._fault == "reset":
                        _reset(caller)
                        continue
                    # Whom it has accepted just before waits, as for one that nobody accepts.
                    self._changed.wait_for(lambda: self._fault != "partition" or self._is_closed)
                    self._sockets.append(caller)
                    if self._is_closed:
                        caller.close()
                        return
                called = socket.create_connection(self._target)
                self._sockets.append(called)
                for source, target in ((caller, called), (called, caller)):
                    arguments = (source, target, target is called)
                    threading.Thread(target=self._forward, args=arguments, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, to_called: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if to_called and self._armed is not None and (count := self._armed[1]) < len(data):
                    # The message arrives up to here.
                    target.sendall(data[:count])
                    data = data[count:]
                    with self._changed:
                        self._begin(self._armed[0])
                elif to_called and self._armed is not None:
                    self._armed = self._armed[0], self._armed[1] - len(data)
                while self._fault == "slow" and data and not self._is_closed:
                    target.sendall(data[: _SLOW_BYTES_PER_S // 10])
                    data = data[_SLOW_BYTES_PER_S // 10 :]
                    time.sleep(0.1)
                with self._changed:
                    self._changed.wait_for(lambda to=to_called: self._is_closed or self._passes(to))
                if self._fault == "reset":
                    break
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                if self._fault == "reset":
                    _reset(one)
                else:
                    one.shutdown(socket.SHUT_RDWR)

    def _passes(self, to_called: bool) -> bool:
        return self._fault in (None, "slow", "reset") or (self._fault == "one_way" and to_called)


def _reset(connection: socket.socket) -> None:
    # A linger of 0 s: `close` sends RST.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
