"""Messages among constructors arrive as they were sent, over links of which a changed byte is the end."""

import contextlib
import dataclasses
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest

from jtrain.data.hosts.messages import SCHEMA, decode_message
from jtrain.data.hosts.peer_links import CONNECTED, PeerLinks
from jtrain.data.loaders.messages import RequestPart
from jtrain.data.loss_mask import NO_RUNS
from jtrain.data.stream.growing_order import WindowAnchor
from jtrain.runtime.link.meeting import Peers

ANCHOR = WindowAnchor(1, 2, 3)
MESSAGES: tuple[tuple[Any, ...], ...] = (
    ("ask", 2**62, RequestPart(3, np.arange(4), None, frozenset({7, 9}), share=(1, 4)), True),
    ("ask", 1, RequestPart(0, np.arange(0), ANCHOR), False),
    ("run", 5, 6, np.arange(3), np.asarray([1, 2, 3], np.int32), {4: "a.jsonl:7 ünreadable"}, ANCHOR, 0.1),
    ("run", 5, 6, np.arange(0), np.zeros(0, np.int32), {}, None, 0.0),
    ("fetch", 7, 8, 0, np.asarray([5, 2**40]), ANCHOR),
    (
        "ids",
        9,
        np.asarray([2], np.int32),
        np.arange(1 << 20, dtype=np.uint16),
        np.asarray([[0, 1], [2, 3]], np.int32),
    ),
    ("ids", 9, np.asarray([1], np.int32), np.asarray([1], np.int32), NO_RUNS),
    ("done", 10),
)


_OPEN: list[Any] = []
"""Links and sockets: a constructor keeps them until its process ends, and so does this one."""


def two_constructors(*, change_byte: int | None = None) -> tuple[PeerLinks, PeerLinks]:
    """Links of two processes; the first one reaches the second through a program that changes a byte, but
    only once.
    """
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    proxy = socket.create_server(("127.0.0.1", 0))
    own = [one.getsockname()[:2] for one in listening]
    changed = threading.Event()

    def forward(source: socket.socket, target: socket.socket, change: bool) -> None:
        seen = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if change and change_byte is not None and seen <= change_byte < seen + len(data):
                    if not changed.is_set():
                        data[change_byte - seen] ^= 1
                    changed.set()
                seen += len(data)
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, far = proxy.accept()[0], socket.create_connection(own[1])
                _OPEN.extend([near, far])
                for source, target, change in ((near, far, True), (far, near, False)):
                    threading.Thread(
                        target=forward, args=(source, target), kwargs={"change": change}, daemon=True
                    ).start()

    threading.Thread(target=serve, daemon=True).start()
    token = bytes(range(32))
    first = PeerLinks(listening[0], Peers(0, (own[0], proxy.getsockname()[:2]), token))
    second = PeerLinks(listening[1], Peers(1, (own[0], own[1]), token))
    _OPEN.extend([*listening, proxy, first, second])
    return first, second


def wait_for(links: PeerLinks, count: int) -> list[Any]:
    """Returns the next messages that have arrived."""
    messages: list[Any] = []
    until_s = time.monotonic() + 120
    while len(messages) < count and time.monotonic() < until_s:
        messages += [message for _, message in links.received()]
        time.sleep(0.01)
    return messages


def plain(value: Any) -> Any:
    """Returns a message in a form that can be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.tolist()
    if isinstance(value, RequestPart):
        return plain(tuple(getattr(value, field.name) for field in dataclasses.fields(value)))
    return tuple(map(plain, value)) if type(value) is tuple else value


def test_all_kinds_of_messages_arrive_as_they_were_sent() -> None:
    assert {message[0] for message in MESSAGES} | {"beat", "echo"} == set(SCHEMA)
    ends = two_constructors()
    for one in ends:
        assert wait_for(one, 1) == [CONNECTED]
    for number, (one, other) in enumerate((ends, ends[::-1])):
        one.send(1 - number, list(MESSAGES))
        assert [plain(message) for message in wait_for(other, len(MESSAGES))] == [
            plain(one) for one in MESSAGES
        ]


def test_a_byte_changed_on_the_way_ends_the_link_and_a_new_one_is_made() -> None:
    """The message with the changed byte never arrives; both ends say that the connection is new, and messages
    pass.
    """
    first, second = two_constructors(change_byte=68 + 10)
    assert wait_for(first, 1) == [CONNECTED]
    assert wait_for(second, 1) == [CONNECTED]
    first.send(1, [("done", 10)])
    assert wait_for(first, 1) == [CONNECTED]
    assert wait_for(second, 1) == [CONNECTED]
    first.send(1, [("done", 11)])
    assert wait_for(second, 1) == [("done", 11)]


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "fetch", "anchor": [1, 2]},
        {"kind": "fetch", "anchor": [1, 2, "3"]},
        {"kind": "ask", "anchor": [], "skip": [[]], "share": [0, 1]},
        {"kind": "ask", "anchor": [], "skip": [], "share": [0]},
        {"kind": "run", "anchor": [], "skipped": [3]},
        {"kind": "run", "anchor": [], "skipped": [["3", "why"]]},
    ],
    ids=str,
)
def test_lists_of_other_contents_are_no_message(fields: dict[str, Any]) -> None:
    kind = fields.pop("kind")
    with pytest.raises((TypeError, ValueError)):
        decode_message(kind, fields)
