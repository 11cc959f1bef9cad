"""Sets of weights over a link: whole, or not at all, whatever a reader or a run does."""

import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jtrain.config.weight_stream_spec import read_token
from jtrain.hf.weight_link import SCHEMA, WeightReader, send_weights
from jtrain.runtime.link import meeting, protocol, socket_link
from jtrain.runtime.link.protocol import LinkError
from jtrain.runtime.link.socket_link import Link


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("token") / "token.txt"
    path.write_text("a secret of more than 16 bytes\n")
    return str(path)


def test_a_reader_waits_for_a_tensor_that_takes_long_to_make(token_file: str) -> None:
    """Longer than its deadline: the run says that it is at work."""

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for number in range(2):
            time.sleep(1.5)  # longer than the reader waits for a frame
            yield f"t{number}", np.zeros(2, np.float32)

    received: list[str] = []
    with meeting.listen(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with listening.accept()[0] as connection:
                connection.settimeout(1.0)
                handshake = protocol.answering(read_token(token_file), 1, processes=2)
                link = Link(connection, socket_link.converse(connection, handshake)[1])
                for _ in range(link.receive(SCHEMA)[1]["tensors"]):
                    received.append(link.receive(SCHEMA)[1]["name"])
                    assert [len(block) for block in link.receive_content(8)] == [8]
                link.send("taken")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        send_weights(listening.getsockname(), read_token(token_file), 1, tensors(), count=2, silence_s=1.0)
        thread.join()
    assert received == ["t0", "t1"]


def test_a_reader_without_a_free_file_says_so(token_file: str) -> None:
    """It is not closed: an iteration that ended would look like the end of the run."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        WeightReader("127.0.0.1:0", token_file) as reader,
        socket.create_connection(("127.0.0.1", reader.port)),
    ):
        with open(os.devnull) as lowest:
            first_free = lowest.fileno()
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, limits[1]))
            with pytest.raises(OSError) as raised:  # noqa: PT011  # its number is compared
                next(iter(reader))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert raised.value.errno == errno.EMFILE
        reader.close()
        assert list(reader) == []


def test_a_reader_that_takes_nothing_is_given_up(token_file: str) -> None:
    """After the deadline of a frame: 8 MiB do not fit into the buffers of a connection."""
    token = read_token(token_file)
    with meeting.listen(("127.0.0.1", 0)) as listening:

        def shake_hands() -> None:
            connection, _ = listening.accept()
            connections.append(connection)
            socket_link.converse(connection, protocol.answering(token, 1, processes=2))

        connections: list[socket.socket] = []
        thread = threading.Thread(target=shake_hands)
        thread.start()
        tensors = iter([(f"t{number}", np.zeros(1 << 20, np.float32)) for number in range(8)])
        with pytest.raises(LinkError, match=r"were not taken in 0\.3 s"):
            send_weights(listening.getsockname(), token, 1, tensors, count=8, silence_s=0.3)
        thread.join()
        connections[0].close()


def test_a_set_that_breaks_off_and_a_stranger_yield_nothing(token_file: str) -> None:
    """The set behind them comes whole, in bfloat16 and with tensors of no element."""
    sent = {
        "a": np.arange(600_000, dtype=np.float32).reshape(2, -1),
        "b": np.arange(6).astype(ml_dtypes.bfloat16),
        "c": np.zeros((0, 3), np.float32),
    }
    with WeightReader("127.0.0.1:0", token_file) as reader:
        address, token, weights = ("127.0.0.1", reader.port), read_token(token_file), iter(reader)
        received: list[Any] = []
        thread = threading.Thread(target=lambda: received.append(next(weights)))
        thread.start()

        def breaks_off() -> Iterator[tuple[str, np.ndarray]]:
            yield "a", sent["a"]
            raise RuntimeError

        with pytest.raises(RuntimeError):
            send_weights(address, token, 1, breaks_off(), count=3)
        with pytest.raises(LinkError):
            send_weights(address, b"another secret of 32 bytes or so", 2, iter(sent.items()), count=3)
        send_weights(address, token, 3, iter(sent.items()), count=3)
        thread.join()
    ((step, tensors),) = received
    assert step == 3
    for name, array in sent.items():
        assert (tensors[name].dtype, tensors[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(tensors[name], array)
