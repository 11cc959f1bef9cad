"""Ports for the processes that a test starts."""

import socket

_held: list[socket.socket] = []


def free_port() -> int:
    """Returns a port of localhost that no other program is given before this process ends.

    A port that was free a moment ago may be another test's before the started process listens there. The
    kernel chooses none that a socket is bound to; who asks for it by number gets it, as long as nobody
    listens there and both reuse addresses, as servers of gRPC do.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("localhost", 0))
    _held.append(held)
    return held.getsockname()[1]
