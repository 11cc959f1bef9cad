"""Clock of a compute stream and its links: when transfers pass, and which of their seconds are waited for."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

HOST = ("to device", "to host")
"""Kinds of transfers between device and host memory, which have a link of their own each way."""


@dataclasses.dataclass(frozen=True)
class Hop:
    """All executions of one transfer: of one instruction of the program at one place.

    kind: a collective's, or the direction of a copy between device and host memory, `to device` or `to host`.
    scope: path of named scopes that it was traced from.
    count: executions per run of the program.
    bytes, seconds, hidden_s: sent by one device in all executions, their time on the link, and the hidden
      part of it.
    """

    name: str
    kind: str
    scope: str
    count: int
    bytes: int
    seconds: float
    hidden_s: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One run of a program.

    compute_s: seconds of the compute stream's instructions.
    waiting_s: seconds in which the compute stream waits for a transfer.
    """

    compute_s: float
    waiting_s: float
    hops: tuple[Hop, ...]

    @property
    def wire_s(self) -> float:
        """Seconds of all transfers."""
        return sum(hop.seconds for hop in self.hops)

    @property
    def hidden_share(self) -> float:
        """Hidden fraction of all transfers' seconds; 1 if there is no transfer."""
        return hidden_share(self.hops)


def hidden_share(hops: Iterable[Hop]) -> float:
    """Hidden fraction of the seconds of some transfers; 1 if there is none."""
    rows = list(hops)
    seconds = sum(hop.seconds for hop in rows)
    return sum(hop.hidden_s for hop in rows) / seconds if seconds else 1.0


@dataclasses.dataclass(frozen=True)
class ComputeTime:
    """Seconds of the compute stream."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class LoopRun:
    """A computation that runs `trips` times."""

    body: str
    trips: int


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A transfer; its link is "" if it uses all of the device's links to other devices."""

    name: str
    kind: str
    scope: str
    link: str
    bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class TransferWait:
    """The compute stream waits until a transfer ends."""

    name: str


type Action = ComputeTime | LoopRun | Transfer | TransferWait
"""What a computation does next."""


class StreamClock:
    """Both streams: time of the compute stream, when each link is free again, transfers and waits so far.

    Args:
      actions: name of a computation -> what it does, in order.
      links: as in `jtrain.plan.compile.two_streams.Rates`.
    """

    def __init__(self, actions: Callable[[str], Sequence[Action]], links: Literal["switch", "torus"]) -> None:
        self._actions = actions
        self._shared = links == "switch"
        self._now = 0.0
        self._free: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._waits: list[tuple[float, float]] = []
        self._sent: dict[str, tuple[Transfer, list[float], list[float]]] = {}

    def run(self, name: str) -> None:
        """Runs a computation once."""
        # Of this run alone: in a loop, a wait is for the transfer of its own turn.
        arrives: dict[str, float] = {}
        for action in self._actions(name):
            match action:
                case ComputeTime():
                    self._now += action.seconds
                case LoopRun():
                    for _ in range(action.trips):
                        self.run(action.body)
                case Transfer():
                    arrives[action.name] = self._send(action)
                case TransferWait():
                    self._wait(arrives[action.name])

    def _send(self, transfer: Transfer) -> float:
        """Queues a transfer; returns when it ends."""
        link = "" if self._shared and transfer.kind not in HOST else transfer.link
        # A link sends one transfer at a time, in the order in which they are queued.
        begin = max(self._now, self._free[link])
        if transfer.kind not in HOST:
            # A collective on all links ("") waits for every permute, and permutes wait for it.
            contending_links = [name for name in self._free if name not in HOST] if link == "" else [""]
            begin = max([begin, *(self._free[name] for name in contending_links)])
        end = begin + transfer.seconds
        self._free[link] = end
        _, begins, ends = self._sent.setdefault(transfer.name, (transfer, [], []))
        begins.append(begin)
        ends.append(end)
        return end

    def _wait(self, end: float) -> None:
        # A transfer that has already ended holds nothing up.
        if end > self._now:
            # Waits never overlap: the compute stream stands still until `end`.
            self._waits.append((self._now, end))
            self._now = end

    def timeline(self) -> Timeline:
        """Sums so far; a transfer that nobody waited for is waited for at the end."""
        # The program ends when its last transfer does.
        self._wait(max(self._free.values(), default=0.0))
        # A first wait of no length, so that a program without waits has one too.
        waits = np.array([(0.0, 0.0), *self._waits])
        waited_s = np.cumsum(waits[:, 1] - waits[:, 0])
        # Seconds waited until a time: constant between waits, rising by a second per second within each.
        times = waits.reshape(-1)
        waited_until = np.stack([np.concatenate([[0.0], waited_s[:-1]]), waited_s], axis=1).reshape(-1)
        hops: list[Hop] = []
        for name, (transfer, begins, ends) in self._sent.items():
            total_s = transfer.seconds * len(begins)
            exposed_s = float(
                # Seconds that the compute stream waited while the transfer passed, for this one or another.
                np.sum(np.interp(ends, times, waited_until) - np.interp(begins, times, waited_until))
            )
            # Not below 0, where rounding makes the exposed part larger than the whole.
            count, hidden_s = len(begins), max(0.0, total_s - exposed_s)
            hops.append(
                Hop(name, transfer.kind, transfer.scope, count, count * transfer.bytes, total_s, hidden_s)
            )
        return Timeline(self._now - float(waited_s[-1]), float(waited_s[-1]), tuple(hops))
