"""Links between hosts fail as networks do: both ends name the other and read its part; no batch changes."""

import asyncio
import itertools
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jtrain.data import BatchIterator, open_dataset
from jtrain.data.hosts.peer_links import CONNECTED, PeerLinks
from jtrain.data.plane import data_plane
from jtrain.layout.dims import Batch
from jtrain.runtime.link.meeting import Peers
from tests.data.conftest import assert_same_batch
from tests.data.four_sources import spec
from tests.data.hosts.conftest import Start, joined, pids_of
from tests.tcp_proxy import FAULTS, Fault, Proxy

MOMENTS = ("at the start", "between steps", "within a message", "while a constructor restarts")

NAMED = re.compile(r"data: process (\d) at \S+ has (?:given no sign of life|not been met) for ([\d.]+) s")


class Reader:
    """Takes the batches of all hosts in turn and compares them with those of one thread.

    named: (host, host that it has named) -> seconds of silence in the message.
    """

    def __init__(self, hosts: list[BatchIterator], alone: Iterator[Batch]) -> None:
        self._hosts = hosts
        self._alone = alone
        self.named: dict[tuple[int, int], float] = {}
        self.messages: list[str] = []

    def read(self, steps: int) -> None:
        for expected in itertools.islice(self._alone, steps):
            assert_same_batch(joined([next(host) for host in self._hosts]), expected)
            for number, host in enumerate(self._hosts):
                for line in host.take_messages():
                    self.messages.append(line)
                    if (match := NAMED.match(line)) is not None:
                        self.named.setdefault((number, int(match[1])), float(match[2]))

    def read_until(self, condition: Callable[[], Any]) -> None:
        """Reads on; the limit is long because the machine may be busy."""
        until_s = time.monotonic() + 240
        while not condition():
            assert time.monotonic() < until_s, self.messages
            self.read(1)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_host_whose_links_fail_is_named_by_all_and_its_part_is_read(
    folder: Path, start: Start, fault: Fault, moment: str
) -> None:
    """Four hosts, of which the last loses its links to all others: each end names the other after at most
    10 s.
    """
    dataset = open_dataset(spec(folder), seed=0)
    start.prepare_proxies(4)
    links = [start.proxies[host, 3] for host in range(3)]
    if moment == "at the start":
        for proxy in links:
            proxy.fail(fault)
    with dataset.train_batches(inline=True) as alone:
        # The default of a run but for the start, where a late host is waited for.
        hosts = start([dataset] * 4, silence_s=5.0, meeting_s=11.0)
        reader = Reader(hosts, alone)
        if moment != "at the start":
            reader.read(4)
            for proxy in links:
                proxy.fail(fault, after_bytes=700 if moment == "within a message" else 0)
        if moment == "while a constructor restarts":
            [pid] = pids_of(hosts[3], "jtrain-constr")
            os.kill(pid, signal.SIGKILL)
        everyone = {(host, 3) for host in range(3)} | {(3, host) for host in range(3)}
        reader.read_until(lambda: everyone <= reader.named.keys())
        assert max(reader.named.values()) <= 10, reader.named
        assert reader.named.keys() == everyone, "no host is accused wrongly"
        reader.read(10)


def test_a_silent_link_is_named_read_around_and_used_again(folder: Path, start: Start) -> None:
    dataset = open_dataset(spec(folder), seed=0)
    start.prepare_proxies(2)
    with dataset.train_batches(inline=True) as alone:
        reader = Reader(start([dataset] * 2, silence_s=2.0), alone)
        reader.read(2)
        start.proxies[0, 1].fail("silent")
        reader.read_until(lambda: reader.named.keys() == {(0, 1), (1, 0)})
        start.proxies[0, 1].heal()
        reader.read_until(lambda: sum("is back" in line for line in reader.messages) >= 2)
        reader.read(2)


@pytest.mark.slow
def test_a_constructor_that_is_stopped_is_said_at_all_hosts(
    folder: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: its own trainer says so, the other host reads its part, and it goes on without blaming
    anybody.
    """
    monkeypatch.setattr(data_plane, "QUIET_S", 2.0)
    dataset = open_dataset(spec(folder), seed=0)
    with dataset.train_batches(inline=True) as alone:
        want = list(itertools.islice(alone, 60))
    hosts = start([dataset] * 2, silence_s=2.0)
    for expected in want[:4]:
        assert_same_batch(joined([next(host) for host in hosts]), expected)
    [pid] = pids_of(hosts[1], "jtrain-constr")
    os.kill(pid, signal.SIGSTOP)
    half = len(want[0].token_BL) // 2
    messages: list[str] = []
    # The host that is left goes on alone: more batches than were ready.
    for expected in want[4:40]:
        assert (next(hosts[0]).token_BL == expected.token_BL[:half]).all()
        messages += hosts[0].take_messages()
    assert any("process 1 at" in line and "no sign of life" in line for line in messages), messages
    threading.Timer(8.0, os.kill, (pid, signal.SIGCONT)).start()
    for expected in want[4:]:
        assert (next(hosts[1]).token_BL == expected.token_BL[half:]).all()
    [line] = [line for line in hosts[1].take_messages() if "no sign of life" in line]
    assert f"process {pid} of this host" in line


@pytest.fixture
def ends() -> Iterator[tuple[PeerLinks, PeerLinks, Proxy]]:
    """Links of two processes through a proxy, both in this one."""
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    proxy = Proxy(listening[1].getsockname())
    addresses = listening[0].getsockname(), proxy.address
    first, second = (
        PeerLinks(one, Peers(number, addresses, bytes(32), silence_s=0.3))
        for number, one in enumerate(listening)
    )
    yield first, second, proxy
    # A constructor's links end with its process; here they would connect again and again.
    for one, socket_of_one in zip((first, second), listening, strict=True):
        asyncio.run_coroutine_threadsafe(cancel_tasks(), one._loop).result()
        one._loop.call_soon_threadsafe(one._loop.stop)
        wait_for(lambda one=one: not one._loop.is_running())
        one._loop.close()
        socket_of_one.close()
        os.close(one.fileno())
    proxy.close()


async def cancel_tasks() -> None:
    """Cancels all other tasks of this loop, and lets it close their connections."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(0.01)


def wait_for(condition: Callable[[], Any]) -> None:
    """Waits until the condition holds; the limit is long because the machine may be busy."""
    until_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def answer_until(ends: tuple[PeerLinks, ...], condition: Callable[[], Any]) -> None:
    """Answers beats, as constructors do between their work."""
    wait_for(lambda: [one.received() for one in ends] and condition())


@pytest.mark.parametrize("fault", FAULTS)
def test_both_ends_notice_each_fault_of_a_link(
    ends: tuple[PeerLinks, PeerLinks, Proxy], fault: Fault
) -> None:
    """Until it heals; then both are connected, and messages pass."""
    first, second, proxy = ends
    answer_until((first, second), lambda: not (first.unreachable() or second.unreachable()))
    proxy.fail(fault)
    answer_until((first, second), lambda: first.unreachable() and second.unreachable())
    if fault != "reset":
        reasons = first.unreachable()[1][1], second.unreachable()[0][1]
        assert any("no answer" in reason for reason in reasons), reasons
    proxy.heal()
    answer_until((first, second), lambda: not (first.unreachable() or second.unreachable()))
    arrivals: list[Any] = []
    while ("done", 1) not in arrivals:
        # Again and again, as a link that has just been made may be dropped once more.
        first.send(1, [("done", 1)])
        time.sleep(0.05)
        arrivals += [message for one in (first, second) for _, message in one.received()]


def test_a_constructor_that_is_stuck_is_noticed_while_its_links_live(
    ends: tuple[PeerLinks, PeerLinks, Proxy],
) -> None:
    """Its thread of links goes on; only what its main loop answers counts."""
    first, second, _ = ends
    answer_until((first, second), lambda: not (first.unreachable() or second.unreachable()))
    answer_until((first,), first.unreachable)
    assert "no answer" in first.unreachable()[1][1]


@pytest.mark.parametrize("stuck", [0, 1])
def test_a_constructor_that_is_stuck_is_not_back_before_it_answers(
    ends: tuple[PeerLinks, PeerLinks, Proxy], stuck: int
) -> None:
    """Its thread of links connects anew again and again, whichever side calls; its main loop says nothing."""
    other = (ends[0], ends[1])[1 - stuck]
    answer_until((ends[0], ends[1]), lambda: not (ends[0].unreachable() or ends[1].unreachable()))
    answer_until((other,), other.unreachable)
    since_s, _ = other.unreachable()[stuck]
    handshakes = 0
    until_s = time.monotonic() + 120
    while handshakes < 3 and time.monotonic() < until_s:
        handshakes += sum(message == CONNECTED for _, message in other.received())
        assert stuck in other.unreachable()
        time.sleep(0.01)
    assert handshakes >= 3
    assert other.unreachable()[stuck][0] == since_s, "a handshake is no sign of life"
    answer_until((ends[0], ends[1]), lambda: not other.unreachable())
