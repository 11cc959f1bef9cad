"""Links of neighbours that fail: both ends name the other one, and neither waits for it."""

import dataclasses
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jtrain.checkpoint import files, slots
from jtrain.checkpoint.neighbours import Neighbours
from jtrain.runtime import multihost
from jtrain.runtime.link import meeting
from jtrain.runtime.link.meeting import Peers
from jtrain.runtime.link.protocol import LinkError
from tests.tcp_proxy import FAULTS, Fault, Proxy

CONTENT_BYTES = 8 << 20

MOMENTS = ("at the start", "within the slot", "before the answer")

QUICK = {("silent", "within the slot"), ("reset", "before the answer")}


class Pair:
    """Two neighbours in this process, of which the first calls the second through a proxy.

    said: lines of both.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, silence_s: float) -> None:
        self.said: list[list[str]] = [[], []]
        self.folders = [folder / "memory-0", folder / "memory-1"]
        monkeypatch.setattr(multihost, "process_count", lambda: 2)
        monkeypatch.setattr(multihost, "own_address", lambda: "127.0.0.1")
        monkeypatch.setattr(multihost, "from_process_zero", lambda values: values * 0)
        monkeypatch.setattr(multihost, "gather_texts", lambda text: [text, text])
        meet, ends = meeting.meet, []
        for _ in range(2):
            listening, peers = meet()
            ends.append((listening, peers.token))
        self.proxy = Proxy(ends[1][0].getsockname())
        addresses = ends[0][0].getsockname(), self.proxy.address
        self.ends: list[Neighbours] = []
        for process, (listening, token) in enumerate(ends):
            peers = Peers(process, addresses, token, silence_s=silence_s)
            monkeypatch.setattr(multihost, "process_index", lambda process=process: process)
            monkeypatch.setattr(meeting, "meet", lambda met=(listening, peers): met)
            # Two hosts, as their folders are two.
            monkeypatch.setattr(
                multihost,
                "gather_texts",
                lambda text: [f"host {one} {self.folders[one]}" for one in range(2)],
            )
            self.ends.append(Neighbours(self.folders[process], self.said[process].append))

    def slot(self, process: int) -> Path:
        """Makes the first slot of a process, with a state of 8 MiB."""
        slot = self.folders[process] / f"process-{process}" / "a"
        (slot / "state" / "w").mkdir(parents=True)
        (slot / "state" / "w" / "c.0").write_bytes(os.urandom(CONTENT_BYTES))
        part = files.ProcessPart(process, "run", "config", 0)
        files.seal(slot, step=7, leaves={}, data="{}", config="", hashes={}, processes=2, part=part)
        return slot

    def close(self) -> None:
        for one in self.ends:
            one.close()
        self.proxy.close()


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    pair = Pair(tmp_path, monkeypatch, silence_s=0.5)
    yield pair
    pair.close()


def test_a_slot_is_kept_by_the_neighbour_and_fetched_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where taking its memory takes longer than anybody waits for a silent process."""
    pair, reserve = Pair(tmp_path, monkeypatch, silence_s=1.5), slots.reserve

    def slow_reserve(*arguments: Any) -> None:
        time.sleep(2.5)
        reserve(*arguments)

    monkeypatch.setattr(slots, "reserve", slow_reserve)
    slot = pair.slot(0)
    pair.ends[0].send(slot)
    monkeypatch.setattr(slots, "reserve", reserve)
    pair.ends[0].fetch(1, 0, 7, tmp_path / "fetched")
    for copy in (pair.folders[1] / "copy-0" / "a", tmp_path / "fetched"):
        for file in ("state/w/c.0", files.MANIFEST):
            assert (copy / file).read_bytes() == (slot / file).read_bytes()
    assert pair.said == [[], []]
    pair.close()


@pytest.mark.parametrize(
    ("fault", "moment"),
    [
        pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.slow)
        for cell in itertools.product(FAULTS, MOMENTS)
    ],
)
def test_a_link_that_fails_is_named_by_both_ends(pair: Pair, fault: Fault, moment: str) -> None:
    slot = pair.slot(0)
    # The manifest is the last file: it is cut, so that nothing is answered.
    pair.proxy.fail(
        fault,
        after_bytes={"at the start": 0, "within the slot": CONTENT_BYTES // 2}.get(
            moment, CONTENT_BYTES + 600
        ),
    )
    with pytest.raises(LinkError, match=r"the link to process 1 at 127\.0\.0\.1:\d+ has failed"):
        pair.ends[0].send(slot)
    # Who does not know yet who calls names nobody.
    if moment != "at the start":
        wait_for(lambda: pair.said[1])
        assert "the link to process 0 at 127.0.0.1" in pair.said[1][0]
    # One way passes all of the slot, and only its end is not known.
    assert any(slots.whole_slots(pair.folders[1] / "copy-0")) == (
        fault == "one_way" and moment != "at the start"
    )


def test_a_neighbour_on_a_host_without_a_route_is_named(pair: Pair, tmp_path: Path) -> None:
    """As one without power: the error of the kernel is neither a ConnectionError nor a TimeoutError."""
    own, _ = pair.ends[0]._peers.addresses
    # The kernel has no route for a TCP connection to everybody.
    pair.ends[0]._peers = dataclasses.replace(pair.ends[0]._peers, addresses=(own, ("255.255.255.255", 9)))
    for move in (
        lambda: pair.ends[0].send(pair.slot(0)),
        lambda: pair.ends[0].fetch(1, 1, 7, tmp_path / "got"),
    ):
        with pytest.raises(LinkError, match=r"process 1 at 255\.255\.255\.255:9 has failed \(.*unreachable"):
            move()


@pytest.mark.parametrize("fault", [pytest.param(one, marks=pytest.mark.slow) for one in FAULTS])
def test_a_fetch_over_a_link_that_fails_ends(pair: Pair, tmp_path: Path, fault: Fault) -> None:
    slot = pair.slot(1)
    assert slot.exists()
    # Of handshake and question 180 pass, so the holder has sent nothing of the slot yet.
    pair.proxy.fail(fault, after_bytes=200)
    with pytest.raises(LinkError, match=r"the link to process 1 at 127\.0\.0\.1:\d+ has failed"):
        pair.ends[0].fetch(1, 1, 7, tmp_path / "fetched")


def wait_for(condition: Any) -> None:
    """Waits until the condition holds; the limit is long because the machine may be busy."""
    end_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)
