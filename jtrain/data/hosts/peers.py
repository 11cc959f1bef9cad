"""Addresses of the Data Constructors of a run, and the secret by which they know each other."""

import dataclasses
import secrets
import socket

import numpy as np

from jtrain.runtime import multihost

_ADDRESS_BYTES = 64


@dataclasses.dataclass(frozen=True)
class Peers:
    """Constructors of a run, one per process.

    index: process of this constructor.
    addresses: host and port of each one.
    token: secret of this run; a connection that does not prove that it knows it is closed.
    """

    index: int
    addresses: tuple[tuple[str, int], ...]
    token: bytes = dataclasses.field(repr=False)


def meet() -> tuple[socket.socket, Peers]:
    """Opens a socket for this process's constructor and tells all processes where it listens; a collective.

    The trainer holds the socket: a constructor that is restarted is found at the same address. It listens only on the
    network by which the processes of the run have found each other.
    """
    host = multihost.own_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family, backlog=multihost.process_count())
    said = f"{host} {listening.getsockname()[1]}".encode()
    assert len(said) <= _ADDRESS_BYTES, said
    everyone = multihost.gather(np.frombuffer(said.ljust(_ADDRESS_BYTES), np.uint8))
    found = [row.tobytes().decode().split() for row in everyone]
    token = multihost.from_process_zero(np.frombuffer(secrets.token_bytes(32), np.int32))
    addresses = tuple((host, int(port)) for host, port in found)
    return listening, Peers(multihost.process_index(), addresses, token.tobytes())
