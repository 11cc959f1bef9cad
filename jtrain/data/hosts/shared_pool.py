"""Pool of the Source Loaders of all hosts, for the Data Constructor of one of them."""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from jtrain.data.hosts.peer_links import CONNECTED, PeerLinks
from jtrain.data.hosts.run_keeper import RunKeeper
from jtrain.data.loaders.messages import ChunkRun, DataError, LoaderState, RequestPart, starts_of
from jtrain.data.loaders.pool import Pool
from jtrain.data.loss_mask import runs_within
from jtrain.data.sources.source import field_of
from jtrain.data.stream.source_setup import SourceSetup

_NO_IDS = np.empty(0, np.int32)


@dataclasses.dataclass(eq=False)
class _OpenRequest:
    """Request of this host's constructor, until all its numbers have been answered."""

    part: RequestPart
    hosts: tuple[int, ...]
    missing: Bool[np.ndarray, " n"]


@dataclasses.dataclass(eq=False)
class RunPayload:
    """Payload of a run, which `host` keeps under `number`: ids of its documents, by index in the run.

    requested: indexes whose ids were requested.
    ids: those that have arrived.
    ignored: runs of ids that are not learned, of documents that have such.
    """

    host: int
    number: int
    requested: set[int] = dataclasses.field(default_factory=set)
    ids: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    ignored: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)

    def put(
        self,
        indexes: Sequence[int],
        lengths: Int[np.ndarray, " n"],
        ids: np.ndarray,
        ignored: Int[np.ndarray, "runs 3"],
    ) -> None:
        """Stores the ids of the documents at `indexes` of the run, and their runs that are not learned."""
        ends = np.cumsum(lengths)
        for index, start, end in zip(indexes, (ends - lengths).tolist(), ends.tolist(), strict=True):
            self.ids[index] = ids[start:end]
            if len(ignored) and len(runs := runs_within(ignored, start, end)):
                # Most documents have no ignored runs: nothing is stored for them.
                self.ignored[index] = runs


@dataclasses.dataclass(eq=False)
class _Fetch:
    """Request for the ids of the documents at `indexes` of a run."""

    run: ChunkRun
    indexes: list[int]
    message: tuple[Any, ...]


class SharedPool:
    """Divides the reading among the hosts: each run of documents is read and tokenised by one of them.

    All constructors plan the same steps, so they ask for the same runs. Each asks the host that reads a run
    for the lengths, which is all that planning needs, and then for the ids of the documents in its own rows.
    A request never relies on what another one has done before: any host may be asked for anything again,
    after a restart for instance. What a host that cannot be reached should read is read here, until it is
    back. Prepared sources are not shared: each host reads what is in its rows.

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
        self._this_host, self._num_hosts = links.peers.index, len(links.peers.addresses)
        self._keeper = RunKeeper(
            local, this_host=self._this_host, num_hosts=self._num_hosts, answer=self._answer
        )
        # From the clock on: answers to a constructor before this one must not match new requests.
        self._request = itertools.count(time.time_ns())
        self._open_requests: dict[int, _OpenRequest] = {}
        self._fetches: dict[int, _Fetch] = {}
        # Last time at which this process was not standing still, and last call of `_replace_unreachable`.
        self._awake_s = self._looked_s = time.monotonic()
        # Hosts that have connected once; that are late and have been named; whose part is read here.
        self._met: set[int] = set()
        self._late: set[int] = set()
        self._replaced: set[int] = set()
        self._ready_runs: list[ChunkRun] = []
        self._outbox: dict[int, list[tuple[Any, ...]]] = collections.defaultdict(list)

    def request(self, parts: list[RequestPart], *, first: bool = False) -> None:
        for part in parts:
            request, hosts = next(self._request), self._readers(part)
            # Registered before it is sent: this host's own part is answered within `_send`.
            self._open_requests[request] = _OpenRequest(part, hosts, np.ones(len(part.numbers), np.bool_))
            # All questions before the first is sent: an answer may close the request.
            questions = [self._question(request, host, first=first) for host in hosts]
            for host, question in zip(hosts, questions, strict=True):
                self._send(host, question)
        self._flush()

    def fetch(self, documents: list[tuple[ChunkRun, int]]) -> None:
        """Requests the ids of document `run.numbers[index]` for each (run, index), unless done before."""
        indexes_by_run: dict[ChunkRun, list[int]] = {}
        for run, index in documents:
            # Pieces of one document in several rows ask for its ids once.
            if index not in run.payload.requested:
                run.payload.requested.add(index)
                indexes_by_run.setdefault(run, []).append(index)
        for run, indexes in indexes_by_run.items():
            request, payload = next(self._request), run.payload
            # Numbers and anchor too: a host that was restarted or stands in reads the run again.
            message = ("fetch", request, payload.number, run.source, run.numbers[indexes], run.anchor)
            self._fetches[request] = _Fetch(run, indexes, message)
            self._send(payload.host, message)
        self._flush()

    def connections(self) -> list[Any]:
        return [*self._local.connections(), self._links]

    def collect(self) -> list[ChunkRun]:
        # Runs of this host's loaders go to the keeper, which answers every host that asked for them.
        for run in self._local.collect():
            self._keeper.take(run)
        for host, message in self._links.received():
            if message == CONNECTED:
                self._met.add(host)
                self._late.discard(host)
                # Until it has answered, this host goes on to stand in for it.
                if host not in self._replaced:
                    self._outbox[host] += self._questions(host)
            else:
                self._handle(host, message)
        unreachable = self._links.unreachable()
        for host in self._replaced - unreachable.keys():
            self._replaced.discard(host)
            self._say(f"data: process {host} is back, and reads its part of the data again")
            self._outbox[host] += self._questions(host)
        self._replace_unreachable(unreachable)
        self._flush()
        runs, self._ready_runs = self._ready_runs, []
        return runs

    def release(self, run: ChunkRun) -> None:
        self._send(run.payload.host, ("done", run.payload.number))

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
        # From the numbers alone: all hosts ask with the same ones, and so choose the same reader.
        # The second term counts runs; the first lets the sources begin with different hosts.
        turn = part.source + (int(part.numbers[-1]) + 1) // len(part.numbers)
        return (turn % self._num_hosts,)

    def _question(self, request: int, host: int, *, first: bool) -> tuple[Any, ...]:
        open_request = self._open_requests[request]
        part = (
            open_request.part.split(self._num_hosts)[host]
            if len(open_request.hosts) > 1
            else open_request.part
        )
        return "ask", request, part, first

    def _send(self, host: int, message: tuple[Any, ...]) -> None:
        """Sends a question with the next `_flush`, or handles it if this host stands in for the receiver."""
        if host == self._this_host or host in self._replaced:
            self._handle(self._this_host, message)
        else:
            self._outbox[host].append(message)

    def _answer(self, host: int, message: tuple[Any, ...]) -> None:
        """Sends an answer with the next `_flush`, also to a host whose part is read here: it may be back."""
        if host == self._this_host:
            self._handle(host, message)
        else:
            self._outbox[host].append(message)

    def _flush(self) -> None:
        for host, messages in self._outbox.items():
            if messages:
                self._links.send(host, messages)
        self._outbox.clear()

    def _handle(self, host: int, message: tuple[Any, ...]) -> None:
        """Handles a message from a host."""
        match message:
            case ("ask", request, part, first):
                self._keeper.ask(host, request, part, first=first)
            case ("fetch", *fields):
                self._keeper.fetch(host, *fields)
            case ("done", number):
                self._keeper.finish_run(host, number)
            case ("run", request, number, numbers, lengths, skipped, anchor, seconds):
                run = ChunkRun(-1, numbers, starts_of(lengths), _NO_IDS, skipped, seconds, f"host-{host}")
                # source is unknown here: the answer does not carry it, the open request does.
                run.payload, run.anchor = RunPayload(host, number), anchor
                self._add_run(request, run)
            case ("ids", request, lengths, ids, ignored):
                self._add_ids(request, lengths, ids, ignored)
            case _:
                raise AssertionError(message)

    def _add_run(self, request: int, run: ChunkRun) -> None:
        """Hands a run to the constructor, but for numbers that have been answered before."""
        open_request = self._open_requests.get(request)
        indexes = (
            # Numbers of a part ascend, and a share's are among them.
            np.searchsorted(open_request.part.numbers, run.numbers) if open_request is not None else None
        )
        # Answered twice, after a repeated request: the reader must still hear that it is not needed.
        if open_request is None or not (is_new := open_request.missing[indexes]).any():
            self.release(run)
            return
        run.source = open_request.part.source
        open_request.missing[indexes] = False
        if not open_request.missing.any():
            del self._open_requests[request]
        # Drops the numbers that another answer brought; the run keeps its number for `fetch`.
        if not is_new.all():
            run.numbers, run.starts = run.numbers[is_new], starts_of(np.diff(run.starts)[is_new])
        self._ready_runs.append(run)

    def _add_ids(
        self,
        request: int,
        lengths: Int[np.ndarray, " n"],
        ids: np.ndarray,
        ignored: Int[np.ndarray, "runs 3"],
    ) -> None:
        # A second answer after a repeated request.
        if (fetch := self._fetches.pop(request, None)) is None:
            return
        run = fetch.run
        planned_lengths = np.diff(run.starts)[fetch.indexes]
        if (differs := lengths != planned_lengths).any():
            index = int(np.argmax(differs))
            source, document = field_of(self._setups[run.source].name), run.numbers[fetch.indexes[index]]
            raise DataError(
                f"{source}: document {document} has {lengths[index]} tokens now and had "
                f"{planned_lengths[index]} before: its files have changed, or differ between the hosts. "
                "Restore them, or start in a new --workdir."
            )
        run.payload.put(fetch.indexes, lengths, ids, ignored)

    def _questions(self, host: int) -> list[tuple[Any, ...]]:
        """Returns the questions to a host that are open, and may have been lost with a connection."""
        return [
            *(
                self._question(n, host, first=True)
                for n, open_request in self._open_requests.items()
                if host in open_request.hosts
            ),
            *(fetch.message for fetch in self._fetches.values() if fetch.run.payload.host == host),
        ]

    def _replace_unreachable(self, unreachable: dict[int, tuple[float, str]]) -> None:
        """Takes over the reading of hosts that have given no sign of life for `Peers.silence_s`.

        At the start hosts come one after another: those that have not been met yet are named after as long,
        and their part is read after `Peers.meeting_s`.
        """
        peers, now_s = self._links.peers, time.monotonic()
        # Called several times a second: after a longer pause this process has stood still and heard nobody.
        if now_s - self._looked_s > peers.silence_s / 2:
            self._awake_s = now_s
        self._looked_s = now_s
        for host, (since_s, reason) in unreachable.items():
            silent_s = now_s - max(since_s, self._awake_s)
            # A constructor restarts in a second: taking over sooner would read its part twice.
            if host in self._replaced or silent_s < peers.silence_s:
                continue
            if host not in self._met and silent_s < peers.meeting_s:
                if host not in self._late:
                    self._late.add(host)
                    self._say(
                        f"data: {peers.named(host)} has not been met for {silent_s:.1f} s ({reason}): this "
                        f"process waits for up to {peers.meeting_s:g} s, and then reads its part too"
                    )
                continue
            self._say(
                f"data: {peers.named(host)} has given no sign of life for {silent_s:.1f} s ({reason}): this "
                "process reads its part of the data too, until it is back. TCP must be open between the hosts"
            )
            self._replaced.add(host)
            for message in self._questions(host):
                self._handle(self._this_host, message)
