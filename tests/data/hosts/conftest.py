"""Data planes of several hosts in one process: real constructors, loaders and connections."""

import contextlib
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jtrain.data import BatchIterator
from jtrain.data.dataset import TextDataset
from jtrain.data.plane.data_plane import ProcessPlane
from jtrain.layout.dims import Batch
from jtrain.runtime import multihost
from jtrain.runtime.link.meeting import Peers
from tests.tcp_proxy import Proxy


class Start:
    """Starts the data planes of all hosts, each with its part of the rows.

    proxies: of each pair of hosts, the proxy by which the first reaches the second; if asked for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, on_end: contextlib.ExitStack) -> None:
        self._monkeypatch = monkeypatch
        self._on_end = on_end
        self.proxies: dict[tuple[int, int], Proxy] = {}

    def prepare_proxies(self, hosts: int) -> None:
        """Makes the sockets of the hosts, and a proxy for each pair."""
        self._sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(hosts)]
        for first in range(hosts):
            for second in range(first + 1, hosts):
                proxy = self.proxies[first, second] = Proxy(self._sockets[second].getsockname())
                self._on_end.callback(proxy.close)

    def __call__(
        self, datasets: list[TextDataset], *args: Any, silence_s: float = 60.0, meeting_s: float = 120.0
    ) -> list[BatchIterator]:
        if not self.proxies:
            self._sockets = [socket.create_server(("127.0.0.1", 0)) for _ in datasets]
        token, iterators = secrets.token_bytes(32), []
        for i, dataset in enumerate(datasets):
            addresses = tuple(
                self.proxies[i, j].address if (i, j) in self.proxies else one.getsockname()
                for j, one in enumerate(self._sockets)
            )
            met = self._sockets[i], Peers(i, addresses, token, silence_s=silence_s, meeting_s=meeting_s)
            self._monkeypatch.setattr("jtrain.data.dataset.meet", lambda met=met: met)
            rows = rows_of(dataset, i, len(datasets))
            iterators.append(self._on_end.enter_context(dataset.train_batches(*args, rows=rows)))
        return iterators


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts hosts; closes them at the end."""
    monkeypatch.setattr(multihost, "is_joined", lambda: True)
    with contextlib.ExitStack() as stack:
        yield Start(monkeypatch, stack)


def rows_of(dataset: TextDataset, host: int, hosts: int) -> np.ndarray:
    return np.array_split(np.arange(dataset.spec.global_batch), hosts)[host]


def joined(batches: list[Batch]) -> Batch:
    fields = ("token_BL", "target_BL", "position_BL", "segment_BL")
    return Batch(**{name: np.concatenate([getattr(one, name) for one in batches]) for name in fields})


def pids_of(batches: BatchIterator, role: str) -> list[int]:
    assert isinstance(batches.plane, ProcessPlane)
    found = [(pid, Path(f"/proc/{pid}/comm").read_text().strip()) for pid in batches.plane.pids()]
    return [pid for pid, name in found if name.startswith(role)]


def documents_read(batches: BatchIterator) -> int:
    assert batches.stats is not None
    return sum(loader.documents for loader in batches.stats.loaders)
