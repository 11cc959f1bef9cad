"""Protocol of the links between the processes of a run: handshake, authenticated frames, messages.

    called -> caller   nonce (32 bytes)
    caller -> called   index of its process (4), nonce (32), proof that it knows the run's token (32)
    called -> caller   proof (32)
    both ways          frames: size (4), content of at most `FRAME_BYTES`, HMAC-SHA256 (32)

Keys of a link are derived from the token, both nonces and both indices, one for each direction. The HMAC of a
frame covers its number in the direction, its size and its content, and is checked before a byte of the
content is used: a frame that was altered, repeated, left out or moved ends the link with a `LinkError`.
Nothing is encrypted.

A message is a frame of JSON, which a schema of its kind checks, and the bytes of its arrays in the frames
that follow. No message can name code. The protocol is written once, as generators that yield what they want
to send or to read; `Link` runs them on a blocking socket, `jtrain.data.hosts.peer_links` in asyncio.

HMAC-SHA256 hashes 1.4 GiB/s per core where the CPU has SHA instructions (AMD EPYC), keyed BLAKE2b 0.7 GiB/s.
"""

import hmac
import json
import math
import secrets
import struct
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import numpy as np

FRAME_BYTES = 1 << 20
NONCE_BYTES = 32

DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()  # noqa: SIM905
)
"""Names of the dtypes that arrays in messages may have."""

_MAC_BYTES = 32
_INDEX = struct.Struct("!I")
_SIZE = struct.Struct("!I")
_COUNTED_SIZE = struct.Struct("!QI")
_MOST_ARRAY_BYTES = 1 << 31

type WireStep = bytes | memoryview | int
"""Step of one side of the protocol, a generator: bytes to send, or a number of bytes to read and hand to
it."""

type Schema = Mapping[str, Mapping[str, type]]
"""Kind of a message -> name and type of each of its fields: JSON's types, or np.ndarray."""

type Message = tuple[str, dict[str, Any]]
"""Kind and fields of a message."""


class LinkError(ConnectionError):
    """The other end of a link is not of this run, the connection ended, or what arrived is not what was
    sent.
    """


class Session:
    """Keys and counters of one link."""

    def __init__(self, send_key: bytes, receive_key: bytes) -> None:
        self._send_mac = hmac.new(send_key, digestmod="sha256")
        self._receive_mac = hmac.new(receive_key, digestmod="sha256")
        # Both count frames, so a frame that is repeated or left out gets another MAC.
        self._sent = self._received = 0

    def sealed(self, content: bytes | memoryview) -> Iterator[bytes | memoryview]:
        """Yields the parts of the frames that carry `content`; no frame for no content."""
        view = memoryview(content)
        for start in range(0, len(view), FRAME_BYTES):
            part = view[start : start + FRAME_BYTES]
            yield _SIZE.pack(len(part))
            yield part
            yield _mac_of(self._send_mac, self._sent, part)
            self._sent += 1

    def frame(self) -> Generator[WireStep, bytearray, bytearray]:
        """Reads the content of the next frame."""
        [size] = _SIZE.unpack((yield _SIZE.size))
        # Before the content is read: a wrong size must not make this process take 4 GiB of memory.
        if not 0 < size <= FRAME_BYTES:
            raise LinkError(f"a frame of {size:,} bytes arrived; frames have 1 to {FRAME_BYTES:,}")
        content = yield size
        mac = yield _MAC_BYTES
        # In constant time, and before a byte of the content is used.
        if not hmac.compare_digest(mac, _mac_of(self._receive_mac, self._received, content)):
            raise LinkError(
                f"frame {self._received} is not what the other process sent: altered, repeated or moved"
            )
        self._received += 1
        return content

    def message(self, schema: Schema) -> Generator[WireStep, bytearray, Message]:
        """Reads the next message."""
        header = yield from self.frame()
        try:
            kind, fields, described = _check_message(json.loads(header), schema)
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            raise LinkError(
                f"a message arrived that no process sends ({type(error).__name__}: {error})"
            ) from error
        # Arrays follow their message in this order, each in frames of its own.
        for name, dtype, shape in described:
            array = np.empty(shape, dtype)
            target, filled = memoryview(array.reshape(-1).view(np.uint8)), 0
            # An empty array has no frame, as `sealed` yields none for no content.
            while filled < len(target):
                part = yield from self.frame()
                if filled + len(part) > len(target):
                    raise LinkError(
                        f"array {name} of a message {kind} has {len(target)} bytes, and more arrived"
                    )
                target[filled : filled + len(part)] = part
                filled += len(part)
            fields[name] = array
        return kind, fields


def encoded(kind: str, fields: Mapping[str, Any]) -> list[bytes]:
    """Returns the contents that a message consists of, to be sealed in this order.

    Raises:
      ValueError: an array has another dtype than `DTYPES`, or the other fields do not fit into one frame.
      TypeError: a field is neither an array nor JSON.
    """
    arrays = {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}
    for name, array in arrays.items():
        # A dtype such as object would need code to be read; foreign byte order would be read wrongly.
        if array.dtype.name not in DTYPES or not array.dtype.isnative:
            raise ValueError(f"array {name} of a message {kind} has dtype {array.dtype}")
    header = {
        "kind": kind,
        "fields": {name: value for name, value in fields.items() if name not in arrays},
        "arrays": [[name, array.dtype.name, array.shape] for name, array in arrays.items()],
    }
    text = json.dumps(header, allow_nan=False).encode()
    if len(text) > FRAME_BYTES:
        raise ValueError(f"a message {kind} has {len(text):,} bytes beside its arrays; {FRAME_BYTES:,} fit")
    return [text, *(array.tobytes() for array in arrays.values())]


def calling(token: bytes, own: int, peer: int) -> Generator[WireStep, bytearray, Session]:
    """Handshake of process `own`, which has connected to where process `peer` listens."""
    theirs = bytes((yield NONCE_BYTES))
    nonce = secrets.token_bytes(NONCE_BYTES)
    # Both nonces: a recorded handshake proves nothing to a peer whose nonce is new.
    secret = _Secret(token, own, peer, nonce, theirs)
    # The caller proves first: the called side tells a stranger nothing that depends on the token.
    yield _INDEX.pack(own) + nonce + secret.derive("proof of the caller")
    if not hmac.compare_digest((yield _MAC_BYTES), secret.derive("proof of the called")):
        raise LinkError(
            f"another program answers at the address of process {peer}: it does not know the run's token"
        )
    return Session(secret.derive("key of the caller"), secret.derive("key of the called"))


def answering(token: bytes, own: int, processes: int) -> Generator[WireStep, bytearray, tuple[int, Session]]:
    """Handshake of process `own`, to which somebody has connected; returns who, and the session."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    yield nonce
    [peer] = _INDEX.unpack((yield _INDEX.size))
    theirs = bytes((yield NONCE_BYTES))
    secret = _Secret(token, peer, own, theirs, nonce)
    proof = yield _MAC_BYTES
    if (
        # The whole condition after the proof: who does not know the token learns nothing about indices.
        not hmac.compare_digest(proof, secret.derive("proof of the caller"))
        or peer == own
        or peer >= processes
    ):
        raise LinkError("a program called that does not know the run's token")
    yield secret.derive("proof of the called")
    # The keys of the two sides are swapped: what one sends with, the other receives with.
    return peer, Session(secret.derive("key of the called"), secret.derive("key of the caller"))


def ended_early(arrived: int, expected: int | None) -> LinkError:
    """Returns the error for a connection that ended within, or before, the next bytes."""
    return LinkError(f"the connection ended: {arrived} of the next {expected} bytes arrived")


class _Secret:
    """Token of a run, bound to one link."""

    def __init__(
        self, token: bytes, caller: int, called: int, caller_nonce: bytes, called_nonce: bytes
    ) -> None:
        self._token = token
        self._link = _INDEX.pack(caller) + _INDEX.pack(called) + caller_nonce + called_nonce

    def derive(self, purpose: str) -> bytes:
        # The zero byte ends the purpose: no purpose can be the start of another one's input.
        return hmac.digest(self._token, purpose.encode() + b"\0" + self._link, "sha256")


def _mac_of(keyed: hmac.HMAC, number: int, content: bytes | bytearray | memoryview) -> bytes:
    # `copy` is cheaper than hashing the key again for each frame.
    mac = keyed.copy()
    mac.update(_COUNTED_SIZE.pack(number, len(content)))
    mac.update(content)
    return mac.digest()


def _check_message(
    header: Any, schema: Schema
) -> tuple[str, dict[str, Any], list[tuple[str, np.dtype, tuple[int, ...]]]]:
    """Returns kind, plain fields and descriptions of the arrays of a message that fits the schema."""
    kind, fields = header["kind"], header["fields"]
    described = [(name, dtype, tuple(shape)) for name, dtype, shape in header["arrays"]]
    expected = schema[kind]
    types = {name: type(value) for name, value in fields.items()} | dict.fromkeys(
        (n for n, *_ in described), np.ndarray
    )
    # Exactly the fields of the schema, and no name both plain and an array.
    if types != dict(expected) or len(types) != len(fields) + len(described):
        raise ValueError(f"message {kind} has fields {types}")
    for name, dtype, shape in described:
        if dtype not in DTYPES or not all(type(dim) is int and dim >= 0 for dim in shape):
            raise ValueError(f"array {name} of message {kind} is {dtype}{shape}")
        # Before memory is taken for them.
        if math.prod(shape) * np.dtype(dtype).itemsize > _MOST_ARRAY_BYTES:
            raise ValueError(
                f"array {name} of message {kind} is {dtype}{shape}: more than {_MOST_ARRAY_BYTES:,} bytes"
            )
    return kind, fields, [(name, np.dtype(dtype), shape) for name, dtype, shape in described]
