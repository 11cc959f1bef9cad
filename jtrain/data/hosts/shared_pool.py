"""Pool of the Source Loaders of all hosts, for the Data Constructor of one of them."""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from jtrain.data.constructor.fetched_rows import FetchedIds, to_fetch
from jtrain.data.hosts.peer_links import CONNECTED, PeerLinks
from jtrain.data.hosts.run_keeper import RunKeeper
from jtrain.data.loaders.messages import ChunkRun, DataError, LoaderState, RequestPart, starts_of
from jtrain.data.loaders.pool import Pool
from jtrain.data.sources.source import field_of
from jtrain.data.stream.source_setup import SourceSetup

PATIENCE_S = 5.0
"""How long a host may be without a connection before its part is read here: a constructor restarts in 1 s."""

_NO_IDS = np.empty(0, np.int32)


@dataclasses.dataclass(eq=False)
class _Asked:
    """Request of this host's constructor, until all its numbers have been answered."""

    part: RequestPart
    hosts: tuple[int, ...]
    missing: Bool[np.ndarray, " n"]


@dataclasses.dataclass(eq=False, kw_only=True)
class _Place(FetchedIds):
    """Payload of a run: kept by `host` under `number`, or read here for this host alone (`local`)."""

    host: int = -1
    number: int = -1
    local: ChunkRun | None = None


@dataclasses.dataclass(eq=False)
class _Fetch:
    """Request for the ids of documents `places` of a run."""

    run: ChunkRun
    places: list[int]
    message: tuple[Any, ...]


class SharedPool:
    """Divides the reading among the hosts: each run of documents is read and tokenised by one of them.

    All constructors plan the same steps, so they ask for the same runs. Each asks the host that reads a run
    for the lengths, which is all that planning needs, and then for the ids of the documents in its own rows.
    A request never relies on what another one has done before: any host may be asked for anything again,
    after a restart for instance. What a host that cannot be reached should read is read here, until it is
    back. Prepared sources need no lengths, and each host reads what is in its rows.

    `messages` has what hosts send each other.

    Args:
      local: pool of this host's loaders.
      say: called with messages for the user.
    """

    def __init__(
        self, setups: tuple[SourceSetup, ...], local: Pool, links: PeerLinks, *, say: Callable[[str], None]
    ) -> None:
        self._setups = setups
        self._local = local
        self._links = links
        self._say = say
        self._here, self._num_hosts = links.peers.index, len(links.peers.addresses)
        self._keeper = RunKeeper(local, here=self._here, num_hosts=self._num_hosts, answer=self._send)
        self._request = itertools.count(time.time_ns())
        self._asked: dict[int, _Asked] = {}
        self._fetches: dict[int, _Fetch] = {}
        self._replaced: set[int] = set()
        self._ready: list[ChunkRun] = []
        self._out: dict[int, list[tuple[Any, ...]]] = collections.defaultdict(list)

    def request(self, parts: list[RequestPart], *, first: bool = False) -> None:
        prepared = [part for part in parts if self._setups[part.source].prepared is not None]
        if prepared:
            self._local.request(prepared, first=first)
        for part in parts:
            if self._setups[part.source].prepared is None:
                request, hosts = next(self._request), self._readers(part)
                self._asked[request] = _Asked(part, hosts, np.ones(len(part.numbers), np.bool_))
                questions = [self._question(request, host, first=first) for host in hosts]
                for host, question in zip(hosts, questions, strict=True):
                    self._send(host, question)
        self._flush()

    def fetch(self, documents: list[tuple[ChunkRun, int]]) -> None:
        """Requests the ids of document `run.numbers[at]` for each (run, at), unless that was done before."""
        for run, places in to_fetch(documents).items():
            request, place = next(self._request), run.payload
            message = ("fetch", request, place.number, run.source, run.numbers[places], run.anchor)
            self._fetches[request] = _Fetch(run, places, message)
            self._send(place.host, message)
        self._flush()

    def connections(self) -> list[Any]:
        return [*self._local.connections(), self._links]

    def collect(self) -> list[ChunkRun]:
        for run in self._local.collect():
            if not self._keeper.take(run):  # of a prepared source
                place = _Place(local=run)
                place.put(range(len(run.numbers)), np.diff(run.starts), run.ids, run.ignored)
                self._ready.append(dataclasses.replace(run, payload=place))
        for host, message in self._links.received():
            if message == CONNECTED:
                self._repeat(host)
            else:
                self._take(host, message)
        self._replace_unreachable()
        self._flush()
        ready, self._ready = self._ready, []
        return ready

    def release(self, run: ChunkRun) -> None:
        place: _Place = run.payload
        if place.local is not None:
            self._local.release(place.local)
        else:
            self._send(place.host, ("done", place.number))

    @property
    def retries(self) -> int:
        return self._local.retries

    def states(self) -> list[LoaderState]:
        return self._local.states()

    def place(self, placement: dict[str, tuple[int, ...]]) -> None:
        self._local.place(placement)

    def close(self) -> None:
        self._local.close()

    def _readers(self, part: RequestPart) -> tuple[int, ...]:
        """Returns the hosts that read a run: all share a grouped source; otherwise they take turns.

        Runs begin at multiples of their length, and all hosts ask for the same.
        """
        if self._setups[part.source].grouped:
            return tuple(range(self._num_hosts))
        turn = part.source + (int(part.numbers[-1]) + 1) // len(part.numbers)
        return (turn % self._num_hosts,)

    def _question(self, request: int, host: int, *, first: bool) -> tuple[Any, ...]:
        asked = self._asked[request]
        part = asked.part.split(self._num_hosts)[host] if len(asked.hosts) > 1 else asked.part
        return "ask", request, part, first

    def _send(self, host: int, message: tuple[Any, ...]) -> None:
        """Sends a message with the next `_flush`; what this host is asked, also in place of another, it does
        now.
        """
        if host == self._here or host in self._replaced:
            self._take(self._here, message)
        else:
            self._out[host].append(message)

    def _flush(self) -> None:
        for host, messages in self._out.items():
            if messages:
                self._links.send(host, messages)
        self._out.clear()

    def _take(self, host: int, message: tuple[Any, ...]) -> None:
        """Handles a message from a host."""
        match message:
            case ("ask", request, part, first):
                self._keeper.ask(host, request, part, first=first)
            case ("fetch", *what):
                self._keeper.fetch(host, *what)
            case ("done", number):
                self._keeper.done(host, number)
            case ("run", request, number, numbers, lengths, skipped, anchor, seconds):
                run = ChunkRun(-1, numbers, starts_of(lengths), _NO_IDS, skipped, seconds, f"host-{host}")
                run.payload, run.anchor = _Place(host=host, number=number), anchor
                self._got(request, run)
            case ("ids", request, lengths, ids, ignored):
                self._got_ids(request, lengths, ids, ignored)
            case _:
                raise AssertionError(message)

    def _got(self, request: int, run: ChunkRun) -> None:
        """Hands a run to the constructor, but for numbers that have been answered before."""
        asked = self._asked.get(request)
        at = np.searchsorted(asked.part.numbers, run.numbers) if asked is not None else None
        if asked is None or not (new := asked.missing[at]).any():
            self.release(run)
            return
        run.source = asked.part.source
        asked.missing[at] = False
        if not asked.missing.any():
            del self._asked[request]
        if not new.all():
            run.numbers, run.starts = run.numbers[new], starts_of(np.diff(run.starts)[new])
        self._ready.append(run)

    def _got_ids(
        self,
        request: int,
        lengths: Int[np.ndarray, " n"],
        ids: np.ndarray,
        ignored: Int[np.ndarray, "runs 2"],
    ) -> None:
        if (fetch := self._fetches.pop(request, None)) is None:
            return
        run = fetch.run
        planned = np.diff(run.starts)[fetch.places]
        if (differs := lengths != planned).any():
            at = int(np.argmax(differs))
            raise DataError(
                f"{field_of(self._setups[run.source].name)}: document {run.numbers[fetch.places[at]]} has "
                f"{lengths[at]} tokens now and had {planned[at]} before: its files have changed, or differ "
                "between the hosts. Restore them, or start in a new --workdir."
            )
        run.payload.put(fetch.places, lengths, ids, ignored)

    def _repeat(self, host: int) -> None:
        """Sends again what may have been lost with the connection before."""
        if host in self._replaced:
            self._replaced.discard(host)
            self._say(f"data: process {host} is back, and reads its part of the data again")
        self._out[host] = [
            *(self._question(n, host, first=True) for n, asked in self._asked.items() if host in asked.hosts),
            *(fetch.message for fetch in self._fetches.values() if fetch.run.payload.host == host),
        ]

    def _replace_unreachable(self) -> None:
        """Reads here what hosts should read that have been without a connection for `PATIENCE_S`."""
        for host, (since_s, why) in self._links.unreachable().items():
            if host in self._replaced or time.monotonic() - since_s < PATIENCE_S:
                continue
            address, port = self._links.peers.addresses[host]
            self._say(
                f"data: process {host} at {address}:{port} has not been reached for {PATIENCE_S:g} s "
                f"({why}): this process reads its part of the data too, until it is back. TCP must be open "
                "between the hosts"
            )
            self._repeat(host)
            self._replaced.add(host)
            for message in self._out.pop(host):
                self._take(self._here, message)
