"""Pool of the Source Loaders of all hosts, for the Data Constructor of one of them."""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Int64

from jtrain.data.chunk_stream import SourceSetup
from jtrain.data.constructor.fetched_rows import FetchedIds
from jtrain.data.hosts.peer_links import CONNECTED, PeerLinks
from jtrain.data.loaders.loader import RequestPart
from jtrain.data.loaders.messages import ChunkRun, DataError, LoaderState, runs_of_bytes, starts_of
from jtrain.data.loaders.pool import Pool
from jtrain.data.loss_mask import NO_RUNS, runs_of_spans, runs_within

PATIENCE_S = 5.0
"""How long a host may be without a connection before its part is read here: a constructor restarts in 1 s."""

KEPT_BYTES = 64 << 20
"""Most bytes of ids kept for other hosts only; beyond it the oldest are dropped, and read again if they are wanted."""

_MOST_PASSED = 4096
_NO_IDS = np.empty(0, np.int32)

_RunKey = tuple[int, bytes]


@dataclasses.dataclass(eq=False)
class _Unit:
    """Run that loaders of this host have read for all hosts.

    taken: hosts that need it no more.
    """

    number: int
    tag: int
    run: ChunkRun
    taken: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(eq=False)
class _Share:
    """Request that loaders of this host answer for all hosts.

    asked: number of the request at each host that has asked for it, this one included.
    broken: some of its units were freed, so the request must be read again if somebody asks anew.
    """

    key: _RunKey
    asked: dict[int, int] = dataclasses.field(default_factory=dict)
    units: dict[int, _Unit] = dataclasses.field(default_factory=dict)
    broken: bool = False


@dataclasses.dataclass(eq=False)
class _Asked:
    """Request of this host's constructor, until all its numbers have been answered."""

    part: RequestPart
    hosts: tuple[int, ...]
    missing: Bool[np.ndarray, " n"]


@dataclasses.dataclass(eq=False)
class _Place(FetchedIds):
    """Payload of a run at the constructor: read by `unit` here, or under the number `there` at another host."""

    unit: _Unit | None = None
    host: int = -1
    there: int = -1


@dataclasses.dataclass(eq=False)
class _Fetch:
    """Request for the ids of some documents of a run that another host has read."""

    run: ChunkRun
    places: list[int]
    message: tuple[Any, ...]


@dataclasses.dataclass(eq=False)
class _Again:
    """Documents that are read once more, because another host wants ids that were dropped here."""

    host: int
    fetch: int
    numbers: Int[np.ndarray, " n"]
    runs: list[ChunkRun] = dataclasses.field(default_factory=list)


class SharedPool:
    """Divides the reading among the hosts: each run of documents is read and tokenised by one of them.

    All constructors plan the same steps, so they ask for the same runs. Each asks the host that reads a run for the
    lengths, which is all that planning needs, and then for the ids of the documents in its own rows. A request never
    waits on what another one has done before: any host may be asked for anything again, after a restart for instance.
    What a host that cannot be reached should read is read here, until it is back. Prepared sources need no lengths, and
    each host reads what is in its rows.

    Messages between hosts: `("ask", request, part, first)`, answered by some `("run", request, unit, numbers, lengths,
    skipped, anchor, seconds)`; `("fetch", request, unit, source, numbers, anchor)`, answered by `("ids", request,
    lengths, ids, bytes of the runs of ids that are not learned)`; and `("done", units)`.

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
        self._here = links.peers.index
        self._hosts = tuple(range(len(links.peers.addresses)))
        self._number = itertools.count(time.time_ns())  # not those that a constructor before this one has given out
        self._shares: dict[int, _Share] = {}
        self._tag_of: dict[_RunKey, int] = {}
        self._units: dict[int, _Unit] = {}
        self._kept_only: dict[int, int] = {}  # units that only other hosts may want -> bytes
        self._again: dict[int, _Again] = {}
        self._asked: dict[int, _Asked] = {}
        self._fetches: dict[int, _Fetch] = {}
        self._replaced: set[int] = set()
        self._ready: list[ChunkRun] = []
        self._out: dict[int, list[tuple[Any, ...]]] = collections.defaultdict(list)

    def request(self, parts: list[RequestPart], *, first: bool = False) -> None:
        mine: list[RequestPart] = []
        for part in parts:
            if self._setups[part.source].prepared is not None:
                mine.append(part)
                continue
            request, hosts = next(self._number), self._readers(part)
            self._asked[request] = _Asked(part, hosts, np.ones(len(part.numbers), np.bool_))
            for host in hosts:
                if host != self._here and host not in self._replaced:
                    self._out[host].append(("ask", request, part, first))
                else:
                    mine += self._serve(self._here, request, part)
        self._local.request(mine, first=first)
        self._flush()

    def fetch(self, documents: list[tuple[ChunkRun, int]]) -> None:
        """Requests the ids of document `run.numbers[at]` for each (run, at), unless that was done before."""
        elsewhere: dict[ChunkRun, list[int]] = collections.defaultdict(list)
        for run, at in documents:
            place: _Place = run.place
            if at in place.asked:
                continue
            place.asked.add(at)
            if place.unit is None:
                elsewhere[run].append(at)
            else:
                _take_ids(place, place.unit.run, at, int(run.numbers[at]))
        for run, places in elsewhere.items():
            request, numbers = next(self._number), run.numbers[places]
            message = ("fetch", request, run.place.there, run.source, numbers, run.anchor)
            self._fetches[request] = _Fetch(run, places, message)
            if run.place.host in self._replaced:
                self._send_ids(self._here, *message[1:])
            else:
                self._out[run.place.host].append(message)
        self._flush()

    def connections(self) -> list[Any]:
        return [*self._local.connections(), self._links]

    def collect(self) -> list[ChunkRun]:
        for run in self._local.collect():
            if run.tag in self._again:
                self._read_again(run)
            elif run.tag in self._shares:
                self._read(run)
            else:  # of a prepared source
                place = _Place(unit=_Unit(-1, 0, run))
                for at in range(len(run.numbers)):
                    _take_ids(place, run, at, int(run.numbers[at]))
                self._ready.append(dataclasses.replace(run, place=place))
        for host, message in self._links.received():
            self._take(host, message)
        self._replace_unreachable()
        self._flush()
        ready, self._ready = self._ready, []
        return ready

    def release(self, run: ChunkRun) -> None:
        place: _Place = run.place
        if place.unit is None:
            self._out[place.host].append(("done", [place.there]))
        elif place.unit.number < 0:
            self._local.release(place.unit.run)
        else:
            self._done(self._here, place.unit)

    def states(self) -> list[LoaderState]:
        return self._local.states()

    def place(self, placement: dict[str, tuple[int, ...]]) -> None:
        self._local.place(placement)

    def close(self) -> None:
        self._local.close()

    def _readers(self, part: RequestPart) -> tuple[int, ...]:
        """Returns the hosts that read a run: the hosts take turns, as runs begin at multiples of their length."""
        turn = part.source + (int(part.numbers[-1]) + 1) // len(part.numbers)
        return (turn % len(self._hosts),)

    def _take(self, host: int, message: Any) -> None:
        """Handles a message from another host."""
        match message:
            case str() if message == CONNECTED:
                self._repeat(host)
            case ("ask", request, part, first):
                self._local.request(self._serve(host, request, part), first=first)
            case ("run", request, number, numbers, lengths, skipped, anchor, seconds):
                run = ChunkRun(host, numbers, starts_of(lengths), _NO_IDS, skipped, seconds, f"host-{host}")
                run.place, run.anchor = _Place(host=host, there=number), anchor
                self._got(request, run)
            case ("fetch", request, number, source, numbers, anchor):
                self._send_ids(host, request, number, source, numbers, anchor)
            case ("ids", request, lengths, ids, ignored):
                self._got_ids(request, lengths, ids, runs_of_bytes(ignored))
            case ("done", numbers):
                for number in numbers:
                    if (unit := self._units.get(number)) is not None:
                        self._done(host, unit)
            case _:
                raise AssertionError(message)

    def _serve(self, host: int, request: int, part: RequestPart) -> list[RequestPart]:
        """Notes that a host wants a run, and tells it what has been read; returns what is to be read for it."""
        key = part.source, part.numbers.tobytes()
        share = self._shares.get(self._tag_of.get(key, -1))
        found: list[RequestPart] = []
        if share is None or share.broken:
            tag = next(self._number)
            share = self._shares[tag] = _Share(key)
            self._tag_of[key] = tag
            self._forget_passed()
            found = [dataclasses.replace(part, tag=tag)]
        share.asked[host] = request
        for unit in share.units.values():
            self._tell(host, request, unit)
        return found

    def _forget_passed(self) -> None:
        """Drops the oldest requests of which nothing is kept, but for the last few thousand."""
        for tag in list(itertools.islice(self._shares, max(0, len(self._shares) - _MOST_PASSED))):
            if not self._shares[tag].units:
                share = self._shares.pop(tag)
                if self._tag_of.get(share.key) == tag:
                    del self._tag_of[share.key]

    def _read(self, run: ChunkRun) -> None:
        """Tells the hosts that have asked for it what this host's loaders have read."""
        share = self._shares[run.tag]
        unit = _Unit(next(self._number), run.tag, run)
        self._units[unit.number] = share.units[unit.number] = unit
        if self._here not in share.asked:
            self._keep_for_others(unit)
        for host, request in share.asked.items():
            self._tell(host, request, unit)

    def _tell(self, host: int, request: int, unit: _Unit) -> None:
        run = unit.run
        if host != self._here:
            lengths = np.diff(run.starts).astype(np.int32)
            more = run.skipped, run.anchor, run.read_s
            self._out[host].append(("run", request, unit.number, run.numbers, lengths, *more))
            return
        self._kept_only.pop(unit.number, None)
        self._got(request, dataclasses.replace(run, ids=_NO_IDS, ignored=NO_RUNS, place=_Place(unit=unit)))

    def _got(self, request: int, run: ChunkRun) -> None:
        """Hands a run to the constructor, but for numbers that have been answered before."""
        if (asked := self._asked.get(request)) is None:
            return
        run.source = asked.part.source
        at = np.searchsorted(asked.part.numbers, run.numbers)
        new = asked.missing[at]
        asked.missing[at] = False
        if not asked.missing.any():
            del self._asked[request]
        if not new.any():
            self.release(run)
            return
        if not new.all():
            run.numbers, run.starts = run.numbers[new], starts_of(np.diff(run.starts)[new])
        self._ready.append(run)

    def _done(self, host: int, unit: _Unit) -> None:
        """Notes that a host needs a unit no more; frees it after the last one."""
        unit.taken.add(host)
        if len(unit.taken) == len(self._hosts):
            self._free(unit)
        elif host == self._here:
            self._keep_for_others(unit)

    def _keep_for_others(self, unit: _Unit) -> None:
        self._kept_only[unit.number] = unit.run.ids.nbytes
        total = sum(self._kept_only.values())
        while total > KEPT_BYTES:
            oldest = next(iter(self._kept_only))
            total -= self._kept_only[oldest]
            self._free(self._units[oldest])

    def _free(self, unit: _Unit) -> None:
        self._local.release(unit.run)
        del self._units[unit.number]
        self._kept_only.pop(unit.number, None)
        if (share := self._shares.get(unit.tag)) is not None:
            del share.units[unit.number]
            share.broken = True

    def _send_ids(
        self, host: int, request: int, number: int, source: int, numbers: Int[np.ndarray, " n"], anchor: Any
    ) -> None:
        """Sends the ids of documents, read again if they were dropped or a constructor before this one had them."""
        if (unit := self._units.get(number)) is None:
            tag = next(self._number)
            self._again[tag] = _Again(host, request, numbers)
            self._local.request([RequestPart(source, numbers, anchor, tag=tag)], first=True)
            return
        assert host != self._here, "ids that were read here are at hand"
        self._out[host].append(("ids", request, *_payload(unit.run, np.searchsorted(unit.run.numbers, numbers))))

    def _read_again(self, run: ChunkRun) -> None:
        again = self._again[run.tag]
        again.runs.append(run)
        if sum(len(run.numbers) for run in again.runs) < len(again.numbers):
            return
        del self._again[run.tag]
        found = {}
        for part in again.runs:
            for at, number in enumerate(part.numbers.tolist()):
                found[number] = _payload(part, np.asarray([at]))
        lengths, ids, ignored = zip(*(found[number] for number in again.numbers.tolist()), strict=True)
        ends = np.cumsum([len(one) for one in ids])
        runs = [runs_of_bytes(one) + start for one, start in zip(ignored, [0, *ends[:-1].tolist()], strict=True)]
        answer = np.concatenate(lengths), np.concatenate(ids), np.concatenate(runs).astype(np.int32)
        if again.host == self._here:
            self._got_ids(again.fetch, *answer)
        else:
            self._out[again.host].append(("ids", again.fetch, *answer[:2], answer[2].tobytes()))
        for part in again.runs:
            self._local.release(part)

    def _got_ids(
        self, request: int, lengths: Int[np.ndarray, " n"], ids: np.ndarray, ignored: Int[np.ndarray, "runs 2"]
    ) -> None:
        if (fetch := self._fetches.pop(request, None)) is None:
            return
        run, places = fetch.run, np.asarray(fetch.places)
        starts = starts_of(lengths)
        if (lengths != np.diff(run.starts)[places]).any():
            at = int(np.argmax(lengths != np.diff(run.starts)[places]))
            raise DataError(
                f"{self._setups[run.source].name}: document {run.numbers[places[at]]} has {lengths[at]} tokens at "
                f"{self._address(run.place.host)} now, and had {np.diff(run.starts)[places[at]]} before: its files "
                "have changed. Restore them, or start in a new --workdir."
            )
        for at, low, high in zip(fetch.places, starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            run.place.ids[at] = ids[low:high]
            if len(ignored) and len(here := runs_within(ignored, low, high)):
                run.place.ignored[at] = here

    def _repeat(self, host: int) -> None:
        """Sends again what may have been lost with the connection before."""
        self._out[host] = []
        if host in self._replaced:
            self._replaced.discard(host)
            self._say(f"data: process {host} is back, and reads its part of the data again")
        for request, asked in self._asked.items():
            if host in asked.hosts and asked.missing.any():
                self._out[host].append(("ask", request, asked.part, True))
        self._out[host] += [fetch.message for fetch in self._fetches.values() if fetch.run.place.host == host]

    def _replace_unreachable(self) -> None:
        """Reads here what hosts should read that have been without a connection for `PATIENCE_S`."""
        down = self._links.unreachable()
        for host, (since_s, why) in down.items():
            if host in self._replaced or time.monotonic() - since_s < PATIENCE_S:
                continue
            self._replaced.add(host)
            self._say(
                f"data: process {host} at {self._address(host)} has not been reached for {PATIENCE_S:g} s ({why}): "
                "this process reads its part of the data too, until it is back. TCP must be open between the hosts"
            )
            for request, asked in list(self._asked.items()):
                if host in asked.hosts:
                    self._local.request(self._serve(self._here, request, asked.part), first=True)
            for fetch in list(self._fetches.values()):
                if fetch.run.place.host == host:
                    self._send_ids(self._here, *fetch.message[1:])

    def _address(self, host: int) -> str:
        name, port = self._links.peers.addresses[host]
        return f"{name}:{port}"

    def _flush(self) -> None:
        for host, messages in self._out.items():
            if messages:
                self._links.send(host, messages)
        self._out.clear()


def _take_ids(place: _Place, run: ChunkRun, at: int, number: int) -> None:
    """Puts the ids of a document of a run that was read here where those of place `at` are expected."""
    i = int(np.searchsorted(run.numbers, number))
    low, high = int(run.starts[i]), int(run.starts[i + 1])
    place.ids[at] = run.ids[low:high]
    if len(run.ignored) and len(here := runs_within(run.ignored, low, high)):
        place.ignored[at] = here


def _payload(run: ChunkRun, places: Int64[np.ndarray, " n"]) -> tuple[np.ndarray, np.ndarray, bytes]:
    """Returns lengths and ids of documents of a run, and the bytes of the runs of those ids that are not learned."""
    starts, ends = run.starts[places], run.starts[places + 1]
    ids = [run.ids[low:high] for low, high in zip(starts.tolist(), ends.tolist(), strict=True)]
    ignored = runs_of_spans(run.ignored, starts, ends) if len(run.ignored) else NO_RUNS
    return (ends - starts).astype(np.int32), np.concatenate(ids), ignored.tobytes()
