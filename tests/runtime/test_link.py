"""Links between processes: everything arrives as it was sent, and nothing else is accepted."""

import contextlib
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jtrain.runtime.link import protocol, socket_link
from jtrain.runtime.link.protocol import LinkError, Session
from jtrain.runtime.link.socket_link import Link

TOKEN = bytes(range(32))
SCHEMA: protocol.Schema = {
    "plain": {"count": int, "text": str, "seconds": float, "first": bool, "names": list, "nested": dict},
    "arrays": {"number": int, **dict.fromkeys(sorted(protocol.DTYPES), np.ndarray)},
    "large": {"ids": np.ndarray},
}
_FRAME_EXTRA = 36  # size and HMAC


def run_together(*sides: Any) -> list[Any]:
    """Runs both sides of a handshake in memory; returns their results, or raises what one of them raises."""
    results: list[Any] = [None, None]
    inboxes = [bytearray(), bytearray()]
    requests = [next(side) for side in sides]
    while any(request is not None for request in requests):
        for number, side in enumerate(sides):
            request = requests[number]
            with contextlib.suppress(StopIteration):
                try:
                    if isinstance(request, int) and len(inboxes[number]) >= request:
                        content, inboxes[number] = inboxes[number][:request], inboxes[number][request:]
                        requests[number] = side.send(content)
                    elif isinstance(request, bytes | memoryview):
                        inboxes[1 - number] += request
                        requests[number] = next(side)
                except StopIteration as end:
                    results[number], requests[number] = end.value, None
                    raise
    return results


def sessions() -> tuple[Session, Session]:
    """Returns the sessions of the process that called and of the one that was called."""
    caller, (_, called) = run_together(protocol.calling(TOKEN, 0, 1), protocol.answering(TOKEN, 1, 2))
    return caller, called


def frame_of(session: Session, content: bytes) -> bytes:
    return b"".join(bytes(part) for part in session.sealed(content))


def opened(session: Session, frame: bytes) -> bytes:
    """Returns the content of a frame, as a process accepts it that is sent these bytes and then the end."""
    steps = session.frame()
    request, rest = next(steps), bytearray(frame)
    try:
        while True:
            assert isinstance(request, int)
            if len(rest) < request:
                raise protocol.ended_early(len(rest), request)
            content, rest = rest[:request], rest[request:]
            request = steps.send(content)
    except StopIteration as end:
        return bytes(end.value)


@contextlib.contextmanager
def linked(alter: Callable[[bytes], bytes] = bytes) -> Iterator[tuple[Link, Link]]:
    """Two ends of a TCP connection through a program on its path, which `alter`s what goes to the second
    one.
    """
    with contextlib.ExitStack() as stack:

        def pair() -> tuple[socket.socket, socket.socket]:
            with socket.create_server(("127.0.0.1", 0)) as server:
                near = stack.enter_context(socket.create_connection(server.getsockname()))
                far = stack.enter_context(server.accept()[0])
            near.settimeout(300)
            far.settimeout(300)
            return near, far

        caller, proxy_in = pair()
        proxy_out, called = pair()

        def forward(source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    target.sendall(change(data))
                target.shutdown(socket.SHUT_WR)

        for arguments in ((proxy_in, proxy_out, alter), (proxy_out, proxy_in, bytes)):
            threading.Thread(target=forward, args=arguments, daemon=True).start()
        answers: list[tuple[int, Session]] = []
        answering = threading.Thread(
            target=lambda: answers.append(socket_link.converse(called, protocol.answering(TOKEN, 1, 2))),
            daemon=True,
        )
        answering.start()
        session = socket_link.converse(caller, protocol.calling(TOKEN, 0, 1))
        answering.join()
        yield Link(caller, session), Link(called, answers[0][1])


def test_messages_and_content_arrive_as_they_were_sent() -> None:
    """Plain data, arrays of every dtype, empty ones, scalars and such of several frames, and bytes, both
    ways.
    """
    rng = np.random.default_rng(0)
    plain = {
        "count": -(2**63),
        "text": "Grüße",
        "seconds": 0.1,
        "first": True,
        "names": [1, "a", None],
        "nested": {},
    }
    arrays: dict[str, Any] = {
        name: np.frombuffer(rng.bytes(48), np.uint8).astype(name).reshape(2, -1) for name in protocol.DTYPES
    }
    arrays |= {"int8": np.zeros((0, 3), np.int8), "float64": np.asarray(0.1), "number": 7}
    ids = rng.integers(0, 2**31, protocol.FRAME_BYTES, np.int64)[::2]
    content = rng.bytes(3 * protocol.FRAME_BYTES + 5)
    with linked() as ends:
        for one, other in (ends, ends[::-1]):
            sending = threading.Thread(
                target=lambda one=one: (
                    one.send("plain", **plain),
                    one.send("arrays", **arrays),
                    one.send("large", ids=ids),
                    one.send_content(content),
                )
            )
            sending.start()
            assert other.receive(SCHEMA) == ("plain", plain)
            kind, fields = other.receive(SCHEMA)
            assert kind == "arrays"
            assert fields.pop("number") == 7
            for name, array in fields.items():
                assert array.dtype == name
                assert array.shape == arrays[name].shape
                assert array.flags.writeable
                np.testing.assert_array_equal(array, arrays[name])
            np.testing.assert_array_equal(other.receive(SCHEMA)[1]["ids"], ids)
            assert b"".join(other.receive_content(len(content))) == content
            sending.join()


class Payload:
    """Object whose unpickling creates a file."""

    def __init__(self, owned: Path) -> None:
        self._owned = owned

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._owned,)


def test_no_frame_is_accepted_but_the_next_of_the_other_process(tmp_path: Path) -> None:
    """10,000 frames: random, with a changed bit, cut, repeated, left out, reflected, of another link. None is
    taken.
    """
    rng = np.random.default_rng(0)
    code = pickle.dumps(Payload(tmp_path / "owned"))
    accepted = 0
    stranger = next(iter(sessions()))
    of_others = [frame_of(stranger, code) for _ in range(3)]
    for _ in range(100):
        caller, called = sessions()
        earlier, following, later = (frame_of(caller, code + rng.bytes(20)) for _ in range(3))
        reflected = frame_of(called, code)
        assert opened(called, earlier)[:-20] == code, "or all below would be refused for another reason"
        for number in range(100):
            changed = bytearray(following)
            changed[rng.integers(len(changed))] ^= 1 << int(rng.integers(8))
            size = int(rng.integers(1, 200))
            frames = (
                rng.bytes(size),
                size.to_bytes(4) + rng.bytes(size + _FRAME_EXTRA - 4),
                bytes(changed),
                following[: rng.integers(len(following))],
                earlier,
                later,
                reflected,
                of_others[number % 3],
            )
            with contextlib.suppress(LinkError):
                opened(called, frames[number % len(frames)])
                accepted += 1
        assert opened(called, following)[:-20] == code
    assert accepted == 0
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("place", [0, 100, protocol.FRAME_BYTES + 50, -1], ids=str)
def test_a_byte_changed_on_the_way_ends_the_link(place: int) -> None:
    """In the first frame, in a later one, and in the last HMAC; what was accepted before is what was sent."""
    content = np.random.default_rng(0).bytes(2 * protocol.FRAME_BYTES)
    total = len(content) + 2 * _FRAME_EXTRA
    seen = -68  # of the handshake

    def alter(data: bytes) -> bytes:
        nonlocal seen
        at = (place % total) - seen
        seen += len(data)
        return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :] if 0 <= at < len(data) else data

    def send() -> None:
        with contextlib.suppress(OSError):  # the other end leaves
            near.send_content(content)

    with linked(alter) as (near, far):
        threading.Thread(target=send, daemon=True).start()
        arrived = bytearray()

        def receive() -> None:
            for block in far.receive_content(len(content)):
                arrived.extend(block)

        with pytest.raises(
            LinkError, match=r"is not what the other process sent|a frame of \d[\d,]* bytes arrived"
        ):
            receive()
        assert content.startswith(arrived)
        assert len(arrived) < len(content)


def test_the_end_within_a_message_is_no_message() -> None:
    with linked() as (near, far):
        near.send_content(b"1234")
        near.connection.close()
        with pytest.raises(LinkError, match=r"the connection ended: 0 of the next 4 bytes"):
            list(far.receive_content(5))


def test_every_error_of_the_connection_is_one_of_the_link() -> None:
    """Also one that is no ConnectionError, unlike an error of the file that is sent or written."""
    with linked() as (near, _):
        near.connection.close()
        with pytest.raises(LinkError, match="Bad file descriptor"):
            near.send_content(b"12345")
        with pytest.raises(LinkError, match="Bad file descriptor"):
            list(near.receive_content(5))


def test_who_does_not_know_the_token_is_refused() -> None:
    """Neither end goes on; nor does the end of another process at an address, or one that repeats a
    handshake.
    """
    wrong = bytes(32)
    with pytest.raises(LinkError, match="a program called that does not know the run's token"):
        run_together(protocol.calling(wrong, 0, 1), protocol.answering(TOKEN, 1, 2))
    with pytest.raises(LinkError, match="a program called that does not know the run's token"):
        run_together(protocol.calling(TOKEN, 5, 1), protocol.answering(TOKEN, 1, 2))
    with pytest.raises(LinkError, match="a program called that does not know the run's token"):
        run_together(protocol.calling(TOKEN, 0, 2), protocol.answering(TOKEN, 1, 3))

    def pretending() -> Any:
        yield bytes(32)
        yield 68
        yield bytes(32)

    with pytest.raises(LinkError, match="another program answers at the address of process 1"):
        run_together(protocol.calling(TOKEN, 0, 1), pretending())

    heard: list[bytes] = []

    def overheard(steps: Any) -> Any:
        request = next(steps)
        while True:
            if isinstance(request, bytes):
                heard.append(request)
                yield request
                request = next(steps)
            else:
                request = steps.send((yield request))

    with contextlib.suppress(RuntimeError):  # StopIteration of the generator within
        run_together(overheard(protocol.calling(TOKEN, 0, 1)), protocol.answering(TOKEN, 1, 2))

    def repeating() -> Any:
        yield 32
        yield heard[0]
        yield 32

    assert len(heard[0]) == 68
    with pytest.raises(LinkError, match="a program called that does not know the run's token"):
        run_together(repeating(), protocol.answering(TOKEN, 1, 2))


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"\xff",
        b"{}",
        b'{"kind": "none", "fields": {}, "arrays": []}',
        b'{"kind": [], "fields": {}, "arrays": []}',
        b'{"kind": "large", "fields": [], "arrays": []}',
        b'{"kind": "large", "fields": {}, "arrays": []}',
        b'{"kind": "large", "fields": {"ids": 1}, "arrays": []}',
        b'{"kind": "large", "fields": {"ids": 1}, "arrays": [["ids", "int8", [1]]]}',
        b'{"kind": "large", "fields": {}, "arrays": [["ids", "object", [1]]]}',
        b'{"kind": "large", "fields": {}, "arrays": [["ids", "int8", [-1]]]}',
        b'{"kind": "large", "fields": {}, "arrays": [["ids", "int8", [true]]]}',
        b'{"kind": "large", "fields": {}, "arrays": [["ids", "int8", [4294967296, 2]]]}',
        b'{"kind": "large", "fields": {"more": 1}, "arrays": [["ids", "int8", [1]]]}',
        b"[" * 100_000,
    ],
)
def test_a_message_of_another_form_ends_the_link(header: bytes) -> None:
    """Also from a process that knows the token: another version of the program, for instance."""
    with linked() as (near, far):
        near.send_content(header)
        with pytest.raises(LinkError, match="a message arrived that no process sends"):
            far.receive(SCHEMA)


def test_what_is_no_data_is_not_sent() -> None:
    with pytest.raises(ValueError, match="array ids of a message large has dtype object"):
        protocol.encoded("large", {"ids": np.asarray([object()])})
    with pytest.raises(ValueError, match=r"array ids of a message large has dtype >i4"):
        protocol.encoded("large", {"ids": np.zeros(1, ">i4")})
    with pytest.raises(
        ValueError, match=r"a message plain has 1,\d{3},\d{3} bytes beside its arrays; 1,048,576 fit"
    ):
        protocol.encoded("plain", {"text": "x" * protocol.FRAME_BYTES})
    with pytest.raises(TypeError):
        protocol.encoded("plain", {"text": object()})
