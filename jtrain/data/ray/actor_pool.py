"""Pool of the Source Loaders of all hosts, for one Data Constructor, where both are Ray actors."""

import collections
import dataclasses
import time
from typing import Any

import numpy as np
from jaxtyping import UInt8

from jtrain.data.constructor.fetched_rows import FetchedIds, to_fetch
from jtrain.data.loaders.messages import ChunkRun, DataError, LoaderState, RequestPart
from jtrain.data.loaders.pool import LoaderPool, Request
from jtrain.data.ray.loader_actor import LoaderReply, RunKey, key_of
from jtrain.data.stream.source_setup import SourceSetup

IN_FLIGHT = 4
"""Requests of one constructor that a loader holds, so that the next one is there while an answer is in
transit."""

_CALL_EVERY_S = 0.1


@dataclasses.dataclass(eq=False, kw_only=True)
class _Fetched(FetchedIds):
    """Payload of a run, with its request."""

    part: RequestPart


@dataclasses.dataclass(eq=False)
class _LoaderActor:
    """Loader or standby, as the pool sees it.

    in_flight: requests by the object reference whose arrival says that the answer is complete.
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
    in_flight: dict[Any, Request] = dataclasses.field(default_factory=dict)
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


class RayPool(LoaderPool[_LoaderActor]):
    """Requests runs from loader actors, and token ids only of documents that are fetched. Only `wait` blocks.

    Every constructor requests a run from the same loader, so it is read once for all of them. Requests to a
    lost loader go to a standby until Ray has restarted the loader. For sources that are not prepared a
    request returns only the lengths; `fetch` requests ids.
    """

    # One more than of processes: a dead actor does not tell if it was reading a request of this constructor.
    max_deaths = 3

    def __init__(
        self, setups: tuple[SourceSetup, ...], actors: dict[str, Any], *, who: int, read_timeout_s: float
    ) -> None:
        import ray

        self._said: list[str] = []
        super().__init__(setups, lambda line: self._said.append(line))
        self._ray: Any = ray
        self._who = who
        self._read_timeout_s = read_timeout_s
        self._peers = {name: _LoaderActor(name, actor) for name, actor in actors.items()}
        self._loaders = [name for name in actors if name.startswith("loader")]
        self._standbys = [name for name in actors if not name.startswith("loader")]
        self.place(_dealt_out(len(setups), self._loaders))

    def fetch(self, documents: list[tuple[ChunkRun, int]]) -> None:
        """Requests the ids of document `run.numbers[at]` for each (run, at), unless that was done before."""
        requests: dict[str, Request] = {}
        for run, places in to_fetch(documents).items():
            part: RequestPart = run.payload.part
            request = requests.setdefault(self._home(part), Request([], self._home(part), into=[]))
            assert request.into is not None
            request.parts.append(dataclasses.replace(part, id_positions=np.asarray(places, np.int64)))
            request.into.append(run)
        self._urgent_requests.extend(requests.values())
        self._send_requests()

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
                    self._away(peer, "died", "")
                    if self._losses_in_a_row > 2 * (2 + len(self._peers)):
                        raise DataError(
                            f"data.engine='ray': {self._losses_in_a_row} loaders were lost in a row, {peer.name} "
                            f"the last. Ray: {error}"
                        ) from error
                except self._ray.exceptions.ObjectLostError:  # the node is gone, and the objects on it
                    self._urgent_requests.appendleft(peer.in_flight.pop(ref))
                else:
                    peer.heard_s, peer.watch = time.monotonic(), None
                    self._take(peer, ref, answer, payload, runs)
            self._look_after(peer)
        self._send_requests()
        return runs

    def release(self, run: ChunkRun) -> None:
        part: RequestPart = run.payload.part
        if part.id_positions is None:
            self._peers[self._home(part)].done.append(key_of(part))
        run.payload = None

    def states(self) -> list[LoaderState]:
        states = []
        for name in self._loaders:
            peer = self._peers[name]
            queued = len(peer.in_flight) + sum(
                r.loader == name for r in (*self._urgent_requests, *self._normal_requests)
            )
            numbers = peer.answer.memory_bytes, peer.answer.documents, peer.busy_s
            states.append(LoaderState(name, queued, *numbers, peer.sources))
        return states

    def said(self) -> list[str]:
        """Returns messages about losses and returns of loaders since the last call."""
        said, self._said = self._said, []
        return said

    def place(self, placement: dict[str, tuple[int, ...]]) -> None:
        """Sets which loader gets which requests; it starts and ends no loaders, since other constructors
        share them.
        """
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

    def _requests_for(self, parts: list[RequestPart]) -> list[Request]:
        by_home: dict[str, list[RequestPart]] = collections.defaultdict(list)
        for part in parts:
            if self._setups[part.source].prepared is not None:
                part = dataclasses.replace(part, id_positions=np.arange(len(part.numbers)))
            by_home[self._home(part)].append(part)
        return [Request(asked, home) for home, asked in by_home.items()]

    def _loader_for(self, request: Request) -> _LoaderActor | None:
        assert request.loader is not None
        peer = self._stand_in(request.loader)
        return None if peer is None or len(peer.in_flight) >= IN_FLIGHT else peer

    def _send(self, loader: _LoaderActor, request: Request) -> None:
        if not loader.in_flight:
            loader.heard_s = time.monotonic()
        done, loader.done = loader.done, []
        reply, payload = request.refs = loader.actor.read.options(num_returns=2).remote(
            self._who, request.parts, done
        )
        # The reply is sent at once; a large payload stays on the loader's node until somebody waits for it.
        loader.in_flight[reply if all(part.id_positions is None for part in request.parts) else payload] = (
            request
        )

    def _stand_in(self, home: str) -> _LoaderActor | None:
        """Returns the loader; while it is away a standby, the same for every constructor; None if all are
        away.
        """
        if not self._peers[home].away:
            return self._peers[home]
        up = [name for name in self._standbys if not self._peers[name].away]
        return self._peers[up[self._loaders.index(home) % len(up)]] if up else None

    def _take(
        self,
        peer: _LoaderActor,
        ref: Any,
        answer: LoaderReply,
        payload: UInt8[np.ndarray, " bytes"],
        runs: list[ChunkRun],
    ) -> None:
        self.retries, self._said = (
            self.retries + len(answer.again),
            [*self._said, *filter(None, answer.again)],
        )
        if answer.failed is not None:
            raise self._source_error(*answer.failed)
        if answer.stuck is not None:
            source, number, identity = answer.stuck
            peer.dying = answer.pid
            why = f"has not moved for {self._read_timeout_s:g} s (data.read_timeout_s)"
            where = f"opening {self._field(source)}"
            if number >= 0:
                where = f"at {self._field(source)}, document {number} ({identity})"
            self._away(peer, why, where, request=peer.in_flight[ref], opening=source if number < 0 else None)
            return
        request = self._take_answered(peer, ref)
        peer.answer = answer
        begin = 0
        for i, (part, head) in enumerate(zip(request.parts, answer.heads, strict=True)):
            ids = payload[begin : begin + head.ids_bytes]
            begin += head.ids_bytes
            run = head.run(part, ids, peer.name)
            place: _Fetched | None = _Fetched(part=part) if request.into is None else request.into[i].payload
            if (
                part.id_positions is not None and place is not None
            ):  # None: released before its ids have arrived
                place.put(part.id_positions.tolist(), head.lengths, run.ids, run.ignored)
            if request.into is None and place is not None:
                peer.busy_s += head.read_s
                place.asked = set(place.ids)
                run.payload = place
                runs.append(run)

    def _away(
        self,
        peer: _LoaderActor,
        why: str,
        where: str,
        *,
        request: Request | None = None,
        opening: int | None = None,
    ) -> None:
        """Makes a loader's requests of standbys, until Ray has restarted the loader.

        Args:
          request: the one that it was reading; None: perhaps the oldest.
          where: what it was doing; empty if nobody knows.
        """
        if (
            request is not None
        ):  # answers with large payloads to earlier ones may be on their way: they come after it
            others = {ref: other for ref, other in peer.in_flight.items() if other is not request}
            peer.in_flight = {None: request, **others}
        if not where and peer.in_flight:
            part = next(iter(peer.in_flight.values())).parts[0]
            number = int(part.numbers[0 if part.id_positions is None else part.id_positions[0]])
            where = f"at {self._field(part.source)}, document {number}"
        self._repeat_requests(peer, why, where, opening=opening)
        peer.watch = None
        if not peer.away:
            peer.away, peer.lost_s = True, time.monotonic()
            instead = self._stand_in(peer.name) if peer.name in self._loaders else None
            said = f"{peer.name} {why}" + (f" {where}" if request is not None else "")
            self._said.append(f"data: {said}" + (f"; {instead.name} answers for it" if instead else ""))

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
                    f"data.engine='ray': {peer.name} is gone for good; its owner, process 0, may have ended. "
                    f"Restart the run: it goes on from its last save. Ray: {error}"
                ) from None
            if pid == peer.dying:
                return
            peer.away, peer.heard_s = False, now_s
            self._said.append(
                f"data: {peer.name} is back after {now_s - peer.lost_s:.1f} s, on node {node[:8]}"
            )
        elif peer.in_flight and now_s - peer.heard_s > self._read_timeout_s:
            answered = peer.watch is not None and self._is_ready(peer.watch)
            if peer.watch is not None and not answered:  # not even its other thread answers
                self._ray.kill(peer.actor, no_restart=False)
            peer.watch = peer.actor.alive.remote() if peer.watch is None else None
            peer.heard_s = now_s

    def _is_ready(self, ref: Any) -> bool:
        return bool(self._ray.wait([ref], timeout=0)[0])


def _dealt_out(num_sources: int, loaders: list[str]) -> dict[str, tuple[int, ...]]:
    """Deals sources to loaders in turn or, if there are more loaders than sources, loaders to sources."""
    if len(loaders) > num_sources:
        return {name: (i % num_sources,) for i, name in enumerate(loaders)}
    return {name: tuple(range(i, num_sources, len(loaders))) for i, name in enumerate(loaders)}
