"""Addresses and the secret by which the processes of a run have links to each other."""

import dataclasses
import secrets
import socket

import numpy as np

from jtrain.runtime import multihost
from jtrain.runtime.link.socket_link import SILENCE_S

MEETING_S = 30.0
"""Seconds that the processes of a run wait for each other's first connection before they go on without."""


@dataclasses.dataclass(frozen=True)
class Peers:
    """Processes of a run that have links to each other.

    index: number of this process.
    addresses: host and port of each one.
    token: secret of this start of the run.
    silence_s, meeting_s: see `SILENCE_S` and `MEETING_S`.
    """

    index: int
    addresses: tuple[tuple[str, int], ...]
    token: bytes = dataclasses.field(repr=False)
    silence_s: float = SILENCE_S
    meeting_s: float = MEETING_S

    def named(self, process: int) -> str:
        """Returns a process with its address, for messages."""
        host, port = self.addresses[process]
        return f"process {process} at {host}:{port}"


def meet() -> tuple[socket.socket, Peers]:
    """Opens a socket for links to this process and tells all processes where it listens; a collective.

    It listens only on the network by which the processes of the run have found each other.
    """
    host = multihost.own_address()
    # Port 0: the kernel chooses a free one, and the gather
    # tells it to all. The backlog holds everybody at once.
    listening = listen((host, 0), backlog=multihost.process_count())
    texts = multihost.gather_texts(f"{host} {listening.getsockname()[1]}")
    token = multihost.from_process_zero(np.frombuffer(secrets.token_bytes(32), np.int32))
    addresses = tuple((host_name, int(port)) for host_name, port in map(str.split, texts))
    return listening, Peers(multihost.process_index(), addresses, token.tobytes())


def listen(address: tuple[str, int], *, backlog: int = 1) -> socket.socket:
    """Opens a socket that accepts links; raises OSError if the address is not of this host, or taken."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    return socket.create_server(address, family=family, backlog=backlog)
