"""Weights of a run that trains, over a link (`jtrain.runtime.link`): the run calls a reader that listens.

    run -> reader   weights (step, number of tensors), then each tensor: name, dtype, shape, and its bytes
    reader -> run   taken

Each frame has the deadline of a link, 5 s: a reader that takes nothing for so long is given up, and the next
weights are sent to it anew.
"""

import contextlib
import math
import socket
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jtrain.config.weight_stream_spec import read_token
from jtrain.hf.mapping import DTYPES
from jtrain.runtime.link import meeting, protocol, socket_link
from jtrain.runtime.link.protocol import LinkError
from jtrain.runtime.link.socket_link import SILENCE_S, Link

SCHEMA: protocol.Schema = {
    "weights": {"step": int, "tensors": int},
    "tensor": {"name": str, "dtype": str, "shape": list},
    "taken": {},
}
"""Messages; the bytes of a tensor follow its own."""

_RUN, _READER = 0, 1


def send_weights(
    address: tuple[str, int],
    token: bytes,
    step: int,
    tensors: Iterator[tuple[str, np.ndarray]],
    *,
    count: int,
    silence_s: float = SILENCE_S,
) -> None:
    """Sends `count` tensors to the reader at an address, and returns when it has them all.

    Raises:
      LinkError: nobody listens there, it does not know the token, or it takes nothing for `silence_s`.
    """
    with socket_link.connect(address, silence_s) as connection:
        session = socket_link.converse(connection, protocol.calling(token, _RUN, _READER))
        link = Link(connection, session)
        link.send("weights", step=step, tensors=count)
        while True:
            # Taking a large one transposes it, for longer than a reader waits without a sign of life.
            with link.working():
                tensor = next(tensors, None)
            if tensor is None:
                break
            name, array = tensor
            link.send("tensor", name=name, dtype=array.dtype.name, shape=list(array.shape))
            link.send_content(memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))
        if (kind := link.receive(SCHEMA)[0]) != "taken":
            raise LinkError(f"the reader answers {kind}")


class WeightReader:
    """Listens for the weights of a run, and yields each set whole.

    with WeightReader("0.0.0.0:7000", "token.txt") as reader:
        for step, tensors in reader:
            ...

    Tensors are arrays by their names in Hugging Face files. While a set is worked on no other is taken: the
    run leaves out what comes meanwhile, and goes on. A set that broke off, and a stranger's call, yield
    nothing. An iteration raises OSError where no call can be accepted, as with too many open files.

    Args:
      address: host and port to listen at; port 0 for a free one.
      token_file: as `weight_stream.token_file` of the run.

    Attributes:
      port: port that it listens at.

    Raises:
      FileError, UserError: as `read_token`.
      OSError: the address is not of this host, or taken.
    """

    def __init__(self, address: str, token_file: str) -> None:
        host, _, port = address.rpartition(":")
        self._token = read_token(token_file)
        self._is_closed = False
        self._listening = meeting.listen((host.strip("[]"), int(port)))
        self.port: int = self._listening.getsockname()[1]

    def __enter__(self) -> "WeightReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the iteration, also in another thread."""
        self._is_closed = True
        # `close` alone does not wake a thread in `accept`; `shutdown` does.
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def __iter__(self) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Yields the step and the tensors of each set, until `close`."""
        while True:
            try:
                connection, _ = self._listening.accept()
            except ConnectionError:
                continue  # whoever called is gone already
            except OSError:
                if self._is_closed:
                    return
                raise
            weights = None
            # Of a LinkError, and of options that a broken connection does not take.
            with connection, contextlib.suppress(OSError):
                weights = self._receive(connection)
            if weights is not None:
                yield weights

    def _receive(self, connection: socket.socket) -> tuple[int, dict[str, np.ndarray]]:
        connection.settimeout(SILENCE_S)
        socket_link.set_deadlines(connection, SILENCE_S)
        handshake = protocol.answering(self._token, _READER, processes=2)
        link = Link(connection, socket_link.converse(connection, handshake)[1])
        fields = _expect(link, "weights")
        tensors = dict(_tensor(link) for _ in range(fields["tensors"]))
        link.send("taken")
        return fields["step"], tensors


def _tensor(link: Link) -> tuple[str, np.ndarray]:
    fields = _expect(link, "tensor")
    shape, dtype = fields["shape"], DTYPES.get(fields["dtype"])
    if dtype is None or not all(type(dim) is int and dim >= 0 for dim in shape):
        raise LinkError(f"tensor {fields['name']} is {fields['dtype']}{shape}")
    content = bytearray(math.prod(shape) * dtype.itemsize)
    filled = 0
    for block in link.receive_content(len(content)):
        content[filled : filled + len(block)] = block
        filled += len(block)
    return fields["name"], np.frombuffer(content, dtype).reshape(shape)


def _expect(link: Link, expected: str) -> Mapping[str, Any]:
    kind, fields = link.receive(SCHEMA)
    if kind != expected:
        raise LinkError(f"{kind} instead of {expected} arrived")
    return fields
