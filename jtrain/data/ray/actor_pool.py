"""Pool of the Source Loaders of all hosts, for one Data Constructor, where both are Ray actors."""

import collections
import dataclasses
import time
from typing import Any

import numpy as np
from jaxtyping import UInt8

from jtrain.data.constructor.fetched_rows import FetchedIds
from jtrain.data.loaders.loader import RequestPart
from jtrain.data.loaders.messages import ChunkRun, DataError, LoaderState, runs_of_bytes, starts_of
from jtrain.data.loaders.pool import MOST_DEATHS
from jtrain.data.loss_mask import runs_within
from jtrain.data.ray.loader_actor import LoaderReply, RunKey, RunRequest
from jtrain.data.sources.source import field_of
from jtrain.data.stream.source_setup import SourceSetup

IN_FLIGHT = 4
"""Requests of one constructor that a loader holds, so that the next one is there while an answer is in transit."""

_CALL_EVERY_S = 0.1

_SUSPECTS = 8
"""Pieces into which a request is cut after loaders were lost at it: two cuts narrow a run down to one document."""


@dataclasses.dataclass(eq=False, kw_only=True)
class _Fetched(FetchedIds):
    """Payload of a run, with its request."""

    ask: RunRequest


@dataclasses.dataclass(eq=False)
class _Request:
    """Request to one loader.

    asks: runs requested.
    home: name of the loader that answers it, if that is up.
    into: runs whose ids are requested; None if the runs themselves are.
    refs: object references of the reply and its payload.
    deaths: loaders lost while they held the request.
    """

    asks: list[RunRequest]
    home: str
    into: list[ChunkRun] | None = None
    refs: Any = None
    deaths: int = 0


@dataclasses.dataclass(eq=False)
class _LoaderActor:
    """Loader or standby, as the pool sees it.

    done: runs that this constructor no longer needs, to be told with the next request.
    away: True from its loss until it answers again.
    calling: pending call that shows whether a lost actor is back.
    dying: id of a process that has announced its own end.
    heard_s: time of its last answer, or of the first request after it was idle.
    watch: pending call that shows whether a silent actor is alive.
    """

    name: str
    actor: Any
    sources: tuple[int, ...] = ()
    in_flight: dict[Any, _Request] = dataclasses.field(default_factory=dict)
    done: list[RunKey] = dataclasses.field(default_factory=list)
    away: bool = False
    calling: Any = None
    called_s: float = 0.0
    dying: int = -1
    lost_s: float = 0.0
    heard_s: float = 0.0
    watch: Any = None
    answer: LoaderReply = dataclasses.field(default_factory=lambda: LoaderReply(-1))
    busy_s: float = 0.0


class RayPool:
    """Requests runs from loader actors, and token ids only of documents that are fetched. Only `wait` blocks.

    Every constructor requests a run from the same loader, so it is read once for all of them. Requests to a lost loader
    go to a standby until Ray has restarted the loader.
    """

    def __init__(
        self, setups: tuple[SourceSetup, ...], actors: dict[str, Any], *, who: int, read_timeout_s: float
    ) -> None:
        import ray

        self._ray: Any = ray
        self._setups = setups
        self._who = who
        self._read_timeout_s = read_timeout_s
        self._peers = {name: _LoaderActor(name, actor) for name, actor in actors.items()}
        self._loaders = [name for name in actors if name.startswith("loader")]
        self._standbys = [name for name in actors if not name.startswith("loader")]
        self._urgent: collections.deque[_Request] = collections.deque()
        self._waiting: collections.deque[_Request] = collections.deque()
        self._deaths: collections.Counter[tuple[int, int]] = collections.Counter()
        self._skip: dict[int, set[int]] = collections.defaultdict(set)
        self._fruitless = self.retries = 0
        self._said: list[str] = []
        self.place(_dealt_out(len(setups), self._loaders))

    def request(self, parts: list[RequestPart], *, first: bool = False) -> None:
        """Requests runs. For sources that are not prepared only the lengths are returned; `fetch` requests ids."""
        by_home: dict[str, list[RunRequest]] = collections.defaultdict(list)
        for part in parts:
            prepared = self._setups[part.source].prepared is not None
            by_home[self._home(part)].append(RunRequest(part, np.arange(len(part.numbers)) if prepared else None))
        (self._urgent if first else self._waiting).extend(_Request(asks, home) for home, asks in by_home.items())
        self._hand_out()

    def fetch(self, documents: list[tuple[ChunkRun, int]]) -> None:
        """Requests the ids of document `run.numbers[at]` for each (run, at), unless that was done before."""
        by_run: dict[ChunkRun, list[int]] = collections.defaultdict(list)
        for run, at in documents:
            if at not in run.place.asked:
                run.place.asked.add(at)
                by_run[run].append(at)
        by_home: dict[str, list[tuple[ChunkRun, RunRequest]]] = collections.defaultdict(list)
        for run, places in by_run.items():
            part = run.place.ask.part
            by_home[self._home(part)].append((run, RunRequest(part, np.asarray(places, np.int64))))
        for home, pairs in by_home.items():
            self._urgent.append(_Request([ask for _, ask in pairs], home, into=[run for run, _ in pairs]))
        self._hand_out()

    def connections(self) -> list[Any]:
        return []

    def wait(self, timeout_s: float) -> None:
        """Waits until an answer and its ids have arrived."""
        if refs := self._pending():
            self._ray.wait(refs, num_returns=1, timeout=timeout_s)
        else:
            time.sleep(min(timeout_s, 0.01))

    def collect(self) -> list[ChunkRun]:
        runs: list[ChunkRun] = []
        refs = self._pending()
        ready = set(self._ray.wait(refs, num_returns=len(refs), timeout=0)[0]) if refs else set()
        for peer in self._peers.values():
            for ref in [ref for ref in peer.in_flight if ref in ready]:
                if ref not in peer.in_flight:
                    continue  # requeued when an earlier one of this loop was lost
                try:
                    answer, payload = self._ray.get(peer.in_flight[ref].refs)
                except self._ray.exceptions.RayActorError as error:
                    self._lost(peer, error)
                except self._ray.exceptions.ObjectLostError:  # the node is gone, and the objects on it
                    self._urgent.appendleft(peer.in_flight.pop(ref))
                else:
                    peer.heard_s, peer.watch = time.monotonic(), None
                    self._take(peer, peer.in_flight.pop(ref), answer, payload, runs)
            self._look_after(peer)
        self._hand_out()
        return runs

    def release(self, run: ChunkRun) -> None:
        ask: RunRequest = run.place.ask
        if ask.wanted is None:
            self._peers[self._home(ask.part)].done.append(ask.key)
        run.place = None

    def states(self) -> list[LoaderState]:
        found = []
        for name in self._loaders:
            peer = self._peers[name]
            queued = len(peer.in_flight) + sum(r.home == name for r in (*self._urgent, *self._waiting))
            numbers = peer.answer.memory_bytes, peer.answer.documents, peer.busy_s
            found.append(LoaderState(name, queued, *numbers, peer.sources))
        return found

    def said(self) -> list[str]:
        """Returns messages about losses and returns of loaders since the last call."""
        said, self._said = self._said, []
        return said

    def place(self, placement: dict[str, tuple[int, ...]]) -> None:
        """Sets which loader gets which requests; it starts and ends no loaders, since other constructors share them."""
        self._readers: list[list[str]] = [[] for _ in self._setups]
        for name in self._loaders:
            self._peers[name].sources = placement.get(name, ())
            for source in self._peers[name].sources:
                self._readers[source].append(name)
        for source, names in enumerate(self._readers):
            if not names:
                names.append(self._loaders[source % len(self._loaders)])

    def close(self) -> None: ...

    def _home(self, part: RequestPart) -> str:
        """Returns the loader that reads a run; several loaders of one source take turns by run."""
        names = self._readers[part.source]
        return names[(int(part.numbers[-1]) + 1) // len(part.numbers) % len(names)]

    def _pending(self) -> list[Any]:
        refs = [ref for peer in self._peers.values() for ref in (*peer.in_flight, peer.calling, peer.watch)]
        return [ref for ref in refs if ref is not None]

    def _hand_out(self) -> None:
        full: set[str] = set()
        for queue in (self._urgent, self._waiting):
            for _ in range(len(queue)):
                request = queue.popleft()
                peer = None if request.home in full else self._stand_in(request.home)
                if peer is None or len(peer.in_flight) >= IN_FLIGHT:
                    full.add(request.home)
                    queue.append(request)
                else:
                    self._send(peer, request)

    def _send(self, peer: _LoaderActor, request: _Request) -> None:
        if not peer.in_flight:
            peer.heard_s = time.monotonic()
        if request.into is None:
            request.asks = [self._without_skipped(ask) for ask in request.asks]
        done, peer.done = peer.done, []
        reply, payload = request.refs = peer.actor.read.options(num_returns=2).remote(self._who, request.asks, done)
        # The reply is sent at once; a large payload stays on the loader's node until somebody waits for it.
        peer.in_flight[reply if all(ask.wanted is None for ask in request.asks) else payload] = request

    def _stand_in(self, home: str) -> _LoaderActor | None:
        """Returns the loader; while it is away a standby, the same for every constructor; None if all are away."""
        if not self._peers[home].away:
            return self._peers[home]
        up = [name for name in self._standbys if not self._peers[name].away]
        return self._peers[up[self._loaders.index(home) % len(up)]] if up else None

    def _without_skipped(self, ask: RunRequest) -> RunRequest:
        skip = frozenset(self._skip.get(ask.part.source, ())) & frozenset(ask.part.numbers.tolist())
        return dataclasses.replace(ask, part=dataclasses.replace(ask.part, skip=skip)) if skip else ask

    def _take(
        self,
        peer: _LoaderActor,
        request: _Request,
        answer: LoaderReply,
        payload: UInt8[np.ndarray, " bytes"],
        runs: list[ChunkRun],
    ) -> None:
        self.retries, self._said = self.retries + len(answer.again), [*self._said, *filter(None, answer.again)]
        if answer.failed is not None:
            source, message = answer.failed
            raise DataError(f"{field_of(self._setups[source].name)}: {message}")
        if answer.stuck is not None:
            source, number, identity = answer.stuck
            self._urgent.appendleft(request)
            peer.dying = answer.pid
            at = f"{field_of(self._setups[source].name)}, document {number} ({identity})"
            self._away(peer, f"has not moved for {self._read_timeout_s:g} s (data.read_timeout_s) at {at}")
            if number < 0:
                self._blame(source, number, f" ({identity})", hung=True, known=False)
            else:  # formats that read several records at once name only the first, so the document is searched for
                self._suspect(request, f" ({identity})", hung=True)
            return
        self._fruitless = 0
        peer.answer = answer
        begin = 0
        for i, (ask, found) in enumerate(zip(request.asks, answer.found, strict=True)):
            ids = payload[begin : begin + found.ids_bytes].view(found.dtype)
            begin += found.ids_bytes
            starts = starts_of(found.lengths)
            by_place, ignored, all_ignored = {}, {}, runs_of_bytes(found.ignored)
            if ask.wanted is not None:
                spans = list(zip(ask.wanted.tolist(), starts[:-1].tolist(), starts[1:].tolist(), strict=True))
                by_place = {place: ids[start:end] for place, start, end in spans}
                if len(all_ignored):
                    ignored = {place: runs_within(all_ignored, start, end) for place, start, end in spans}
            if request.into is not None:
                if (fetched := request.into[i].place) is not None:
                    fetched.ids |= by_place
                    fetched.ignored |= ignored
                continue
            peer.busy_s += found.seconds
            part = ask.part
            run = ChunkRun(part.source, part.numbers, starts, ids, dict(found.skipped), found.seconds, peer.name)
            run.anchor, run.place = found.anchor, _Fetched(by_place, set(by_place), ignored, ask=ask)
            runs.append(run)

    def _lost(self, peer: _LoaderActor, error: Exception) -> None:
        """Handles the death of a loader, which may be due to the oldest request it held."""
        suspect = next(iter(peer.in_flight.values()), None)
        self._away(peer, "died")
        if suspect is not None:
            self._suspect(suspect, "", hung=False)
        if self._fruitless > MOST_DEATHS * (2 + len(self._peers)):
            raise DataError(
                f"data.engine='ray': {self._fruitless} loaders were lost in a row, {peer.name} the last. Ray: {error}"
            )

    def _away(self, peer: _LoaderActor, why: str) -> None:
        """Requeues a loader's requests for standbys, until Ray has restarted the loader."""
        self._urgent.extendleft(reversed(peer.in_flight.values()))
        peer.in_flight, peer.watch = {}, None
        self._fruitless += 1
        if not peer.away:
            peer.away, peer.lost_s = True, time.monotonic()
            instead = self._stand_in(peer.name) if peer.name in self._loaders else None
            self._said.append(f"data: {peer.name} {why}" + (f"; {instead.name} answers for it" if instead else ""))

    def _look_after(self, peer: _LoaderActor) -> None:
        """Checks whether a lost loader is back, and kills one that does not answer at all."""
        now_s = time.monotonic()
        if peer.away:
            if peer.calling is None and now_s - peer.called_s > _CALL_EVERY_S:
                peer.calling, peer.called_s = peer.actor.alive.remote(), now_s
            if peer.calling is None or not self._is_ready(peer.calling):
                return
            calling, peer.calling = peer.calling, None
            try:
                pid, node, _ = self._ray.get(calling)
            except self._ray.exceptions.ActorUnavailableError:
                return  # is being started
            except self._ray.exceptions.RayActorError as error:
                raise DataError(
                    f"data.engine='ray': {peer.name} is gone for good; its owner, process 0, may have ended. Restart "
                    f"the run: it goes on from its last save. Ray: {error}"
                ) from None
            if pid == peer.dying:
                return
            peer.away, peer.heard_s = False, now_s
            self._said.append(f"data: {peer.name} is back after {now_s - peer.lost_s:.1f} s, on node {node[:8]}")
        elif peer.in_flight and now_s - peer.heard_s > self._read_timeout_s:
            answered = peer.watch is not None and self._is_ready(peer.watch)
            if peer.watch is not None and not answered:  # not even its other thread answers
                self._ray.kill(peer.actor, no_restart=False)
            peer.watch = peer.actor.alive.remote() if peer.watch is None else None
            peer.heard_s = now_s

    def _is_ready(self, ref: Any) -> bool:
        return bool(self._ray.wait([ref], timeout=0)[0])

    def _suspect(self, request: _Request, identity: str, *, hung: bool) -> None:
        """Cuts a request at which two loaders were lost into pieces, until one document is left as the cause."""
        request.deaths += 1
        if request.deaths < 2:
            return
        asks = request.asks
        if len(asks) == 1 and asks[0].num_documents == 1:
            part, wanted = asks[0].part, asks[0].wanted
            number = int(part.numbers[0 if wanted is None else wanted[0]])
            self._blame(part.source, number, identity, hung=hung, known=request.into is not None)
            return
        self._urgent.remove(request)
        for i, ask in reversed(list(enumerate(asks))):
            into = None if request.into is None else [request.into[i]]
            pieces = [ask] if len(asks) > 1 else _cut(ask, by_numbers=into is None)
            self._urgent.extendleft(_Request([piece], request.home, into, deaths=1) for piece in reversed(pieces))

    def _blame(self, source: int, number: int, identity: str, *, hung: bool, known: bool) -> None:
        """Counts a loader lost at one document; at the second one the document is skipped or the stream ends.

        Args:
          known: True if the length of the document was already delivered, so that it can no longer be skipped.
        """
        self._deaths[source, number] += 1
        if self._deaths[source, number] < 2:
            return
        setup = self._setups[source]
        if number >= 0 and not known and setup.prepared is None and setup.on_bad_record == "skip":
            self._skip[source].add(number)
            return
        raise DataError(
            f"loaders {'hang' if hung else 'die'} again and again at {field_of(setup.name)}"
            + (f", document {number}{identity}" if number >= 0 else identity)
            + ". Mend or remove that file"
            + (", or raise data.read_timeout_s." if hung else ".")
            + (" data.on_bad_record='skip' leaves the document out and counts it." if number >= 0 else "")
        )


def _cut(ask: RunRequest, *, by_numbers: bool) -> list[RunRequest]:
    """Cuts a request into several, by its document numbers or by the documents whose ids are wanted."""
    pieces = min(_SUSPECTS, ask.num_documents)
    if not by_numbers:
        assert ask.wanted is not None
        return [RunRequest(ask.part, wanted) for wanted in np.array_split(ask.wanted, pieces)]
    cut = []
    for places in np.array_split(np.arange(len(ask.part.numbers)), pieces):
        part = dataclasses.replace(ask.part, numbers=ask.part.numbers[places])
        cut.append(RunRequest(part, None if ask.wanted is None else np.arange(len(places))))
    return cut


def _dealt_out(num_sources: int, loaders: list[str]) -> dict[str, tuple[int, ...]]:
    """Deals sources to loaders in turn or, if there are more loaders than sources, loaders to sources."""
    if len(loaders) > num_sources:
        return {name: (i % num_sources,) for i, name in enumerate(loaders)}
    return {name: tuple(range(i, num_sources, len(loaders))) for i, name in enumerate(loaders)}
