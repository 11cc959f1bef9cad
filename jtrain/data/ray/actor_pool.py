"""Pool of the Source Loaders of all hosts, for one Data Constructor, where both are Ray actors."""

import collections
import dataclasses
import time
from typing import Any

import numpy as np
from jaxtyping import UInt8

from jtrain.data.constructor.fetched_rows import FetchedIds, claim_unrequested
from jtrain.data.loaders.messages import ChunkRun, DataError, LoaderState, RequestPart
from jtrain.data.loaders.pool import LoaderPool, Request
from jtrain.data.ray.loader_actor import LoaderReply, RunKey, key_of
from jtrain.data.stream.source_setup import SourceSetup

IN_FLIGHT = 4
"""Requests of one constructor that a loader holds: the next one is there while an answer is in transit."""

_CALL_EVERY_S = 0.1


@dataclasses.dataclass(eq=False, kw_only=True)
class _Fetched(FetchedIds):
    """Payload of a run, with its request."""

    part: RequestPart


@dataclasses.dataclass(eq=False)
class _LoaderActor:
    """Loader or standby, as the pool sees it.

    in_flight: requests by the object reference whose arrival says that the answer is complete.
    released_runs: runs that this constructor no longer needs, to be told with the next request.
    is_away: True from its loss until it answers again.
    return_call: pending call that shows whether a lost actor is back.
    dying_pid: id of a process that has announced its own end.
    heard_s: time of its last answer, or of the first request after it was idle.
    liveness_call: pending call that shows whether a silent actor is alive.
    """

    name: str
    actor: Any
    sources: tuple[int, ...] = ()
    in_flight: dict[Any, Request] = dataclasses.field(default_factory=dict)
    released_runs: list[RunKey] = dataclasses.field(default_factory=list)
    is_away: bool = False
    return_call: Any = None
    return_call_s: float = 0.0
    dying_pid: int = -1
    lost_s: float = 0.0
    heard_s: float = 0.0
    liveness_call: Any = None
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
        self,
        setups: tuple[SourceSetup, ...],
        actors: dict[str, Any],
        *,
        constructor_index: int,
        read_timeout_s: float,
    ) -> None:
        # Imported where it is needed: it takes 1 s and 60 MB.
        import ray

        self._messages: list[str] = []
        super().__init__(setups, lambda line: self._messages.append(line))
        self._ray: Any = ray
        self._constructor_index = constructor_index
        self._read_timeout_s = read_timeout_s
        self._peers = {name: _LoaderActor(name, actor) for name, actor in actors.items()}
        self._loaders = [name for name in actors if name.startswith("loader")]
        self._standbys = [name for name in actors if not name.startswith("loader")]
        self.place(_deal_out(len(setups), self._loaders))

    def fetch(self, documents: list[tuple[ChunkRun, int]]) -> None:
        """Requests the ids of document `run.numbers[index]` for each (run, index), unless done before."""
        requests: dict[str, Request] = {}
        for run, indexes in claim_unrequested(documents).items():
            part: RequestPart = run.payload.part
            request = requests.setdefault(self._home(part), Request([], self._home(part), into=[]))
            assert request.into is not None
            request.parts.append(dataclasses.replace(part, id_positions=np.asarray(indexes, np.int64)))
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
        # One call for all references, not one per loader.
        ready_refs = set(self._ray.wait(refs, num_returns=len(refs), timeout=0)[0]) if refs else set()
        for peer in self._peers.values():
            for ref in [ref for ref in peer.in_flight if ref in ready_refs]:
                if ref not in peer.in_flight:
                    continue  # requeued when an earlier one of this loop was lost
                try:
                    answer, payload = self._ray.get(peer.in_flight[ref].refs)
                except self._ray.exceptions.RayActorError as error:
                    self._lose_loader(peer, "died", "")
                    # More than two losses per loader without an answer in between: the fault lies elsewhere.
                    if self._losses_in_a_row > 2 * (2 + len(self._peers)):
                        raise DataError(
                            f"data.engine='ray': {self._losses_in_a_row} loaders were lost in a row, {peer.name} "
                            f"the last. Ray: {error}"
                        ) from error
                except self._ray.exceptions.ObjectLostError:  # the node is gone, and the objects on it
                    self._urgent_requests.appendleft(peer.in_flight.pop(ref))
                else:
                    # Any answer shows that it is alive.
                    peer.heard_s, peer.liveness_call = time.monotonic(), None
                    self._take(peer, ref, answer, payload, runs)
            self._check_loader(peer)
        self._send_requests()
        return runs

    def release(self, run: ChunkRun) -> None:
        part: RequestPart = run.payload.part
        if part.id_positions is None:
            # Told with the next request, not in a call of its own.
            self._peers[self._home(part)].released_runs.append(key_of(part))
        run.payload = None

    def states(self) -> list[LoaderState]:
        states = []
        for name in self._loaders:
            peer = self._peers[name]
            queued = len(peer.in_flight) + sum(
                request.loader == name for request in (*self._urgent_requests, *self._normal_requests)
            )
            numbers = peer.answer.memory_bytes, peer.answer.documents, peer.busy_s
            states.append(LoaderState(name, queued, *numbers, peer.sources))
        return states

    def take_messages(self) -> list[str]:
        """Returns messages about losses and returns of loaders since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def place(self, placement: dict[str, tuple[int, ...]]) -> None:
        """Sets which loader gets which requests; starts and ends none, as other constructors share them."""
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
        # From the numbers alone: all constructors ask with the same ones, and so choose one loader.
        return names[(int(part.numbers[-1]) + 1) // len(part.numbers) % len(names)]

    def _pending(self) -> list[Any]:
        refs = [
            ref
            for peer in self._peers.values()
            for ref in (*peer.in_flight, peer.return_call, peer.liveness_call)
        ]
        return [ref for ref in refs if ref is not None]

    def _requests_for(self, parts: list[RequestPart]) -> list[Request]:
        by_home: dict[str, list[RequestPart]] = collections.defaultdict(list)
        for part in parts:
            if self._setups[part.source].prepared is not None:
                # The lengths of prepared sources are known: the ids are requested at once.
                part = dataclasses.replace(part, id_positions=np.arange(len(part.numbers)))
            by_home[self._home(part)].append(part)
        return [Request(parts_of_home, home) for home, parts_of_home in by_home.items()]

    def _loader_for(self, request: Request) -> _LoaderActor | None:
        assert request.loader is not None
        peer = self._stand_in(request.loader)
        return None if peer is None or len(peer.in_flight) >= IN_FLIGHT else peer

    def _send(self, loader: _LoaderActor, request: Request) -> None:
        # Idle until now: the time-out counts from this request.
        if not loader.in_flight:
            loader.heard_s = time.monotonic()
        released_runs, loader.released_runs = loader.released_runs, []
        reply, payload = request.refs = loader.actor.read.options(num_returns=2).remote(
            self._constructor_index, request.parts, released_runs
        )
        # The reply is sent at once; a large payload stays on the loader's node until somebody waits for it.
        loader.in_flight[reply if all(part.id_positions is None for part in request.parts) else payload] = (
            request
        )

    def _stand_in(self, home: str) -> _LoaderActor | None:
        """Returns the loader, or a standby while it is away (the same for all hosts); None if all are."""
        if not self._peers[home].is_away:
            return self._peers[home]
        standbys = [name for name in self._standbys if not self._peers[name].is_away]
        return self._peers[standbys[self._loaders.index(home) % len(standbys)]] if standbys else None

    def _take(
        self,
        peer: _LoaderActor,
        ref: Any,
        answer: LoaderReply,
        payload: UInt8[np.ndarray, " bytes"],
        runs: list[ChunkRun],
    ) -> None:
        self.retries, self._messages = (
            self.retries + len(answer.retry_lines),
            [*self._messages, *filter(None, answer.retry_lines)],
        )
        if answer.failed is not None:
            raise self._source_error(*answer.failed)
        if answer.stuck is not None:
            source, number, identity = answer.stuck
            peer.dying_pid = answer.pid
            reason = f"has not moved for {self._read_timeout_s:g} s (data.read_timeout_s)"
            activity = f"opening {self._field(source)}"
            if number >= 0:
                activity = f"at {self._field(source)}, document {number} ({identity})"
            self._lose_loader(
                peer, reason, activity, request=peer.in_flight[ref], opening=source if number < 0 else None
            )
            return
        request = self._take_answered(peer, ref)
        peer.answer = answer
        first_byte = 0
        for i, (part, head) in enumerate(zip(request.parts, answer.heads, strict=True)):
            # The ids of all parts lie end to end in one payload, in the order of the heads.
            ids = payload[first_byte : first_byte + head.ids_bytes]
            first_byte += head.ids_bytes
            run = head.run(part, ids, peer.name)
            run_payload: _Fetched | None = (
                _Fetched(part=part) if request.into is None else request.into[i].payload
            )
            # None: released before its ids have arrived.
            if part.id_positions is not None and run_payload is not None:
                run_payload.put(part.id_positions.tolist(), head.lengths, run.ids, run.ignored)
            if request.into is None and run_payload is not None:
                peer.busy_s += head.read_s
                run_payload.requested = set(run_payload.ids)
                run.payload = run_payload
                runs.append(run)

    def _lose_loader(
        self,
        peer: _LoaderActor,
        reason: str,
        activity: str,
        *,
        request: Request | None = None,
        opening: int | None = None,
    ) -> None:
        """Makes a loader's requests of standbys, until Ray has restarted the loader.

        Args:
          activity: what it was doing; empty if nobody knows.
          request: the one that it was reading; None: perhaps the oldest.
        """
        # The request that it was reading goes first: answers to earlier ones, with large payloads, may still
        # be on their way.
        if request is not None:
            other_requests = {
                ref: other_request
                for ref, other_request in peer.in_flight.items()
                if other_request is not request
            }
            peer.in_flight = {None: request, **other_requests}
        if not activity and peer.in_flight:
            part = next(iter(peer.in_flight.values())).parts[0]
            number = int(part.numbers[0 if part.id_positions is None else part.id_positions[0]])
            activity = f"at {self._field(part.source)}, document {number}"
        # Counts the loss, and requeues the requests.
        self._repeat_requests(peer, reason, activity, opening=opening)
        peer.liveness_call = None
        if not peer.is_away:
            peer.is_away, peer.lost_s = True, time.monotonic()
            standby = self._stand_in(peer.name) if peer.name in self._loaders else None
            loss = f"{peer.name} {reason}" + (f" {activity}" if request is not None else "")
            self._messages.append(f"data: {loss}" + (f"; {standby.name} answers for it" if standby else ""))

    def _check_loader(self, peer: _LoaderActor) -> None:
        """Checks whether a lost loader is back, and kills one that does not answer at all."""
        now_s = time.monotonic()
        # An actor that Ray restarts keeps its handle: a call that succeeds shows that it is back.
        if peer.is_away:
            if peer.return_call is None and now_s - peer.return_call_s > _CALL_EVERY_S:
                peer.return_call, peer.return_call_s = peer.actor.alive.remote(), now_s
            if peer.return_call is None or not self._is_ready(peer.return_call):
                return
            return_call, peer.return_call = peer.return_call, None
            try:
                pid, node, _ = self._ray.get(return_call)
            except self._ray.exceptions.ActorUnavailableError:
                return  # is being started
            except self._ray.exceptions.RayActorError as error:
                raise DataError(
                    f"data.engine='ray': {peer.name} is gone for good; its owner, process 0, may have ended. "
                    f"Restart the run: it goes on from its last save. Ray: {error}"
                ) from None
            # The old process still answers, in the half second before it ends itself.
            if pid == peer.dying_pid:
                return
            peer.is_away, peer.heard_s = False, now_s
            self._messages.append(
                f"data: {peer.name} is back after {now_s - peer.lost_s:.1f} s, on node {node[:8]}"
            )
        elif peer.in_flight and now_s - peer.heard_s > self._read_timeout_s:
            answered = peer.liveness_call is not None and self._is_ready(peer.liveness_call)
            # Not even the thread for `alive` answers: the process hangs as a whole.
            if peer.liveness_call is not None and not answered:
                self._ray.kill(peer.actor, no_restart=False)
            peer.liveness_call = peer.actor.alive.remote() if peer.liveness_call is None else None
            peer.heard_s = now_s

    def _is_ready(self, ref: Any) -> bool:
        return bool(self._ray.wait([ref], timeout=0)[0])


def _deal_out(num_sources: int, loaders: list[str]) -> dict[str, tuple[int, ...]]:
    """Deals sources to loaders in turn or, if there are more loaders than sources, loaders to sources."""
    if len(loaders) > num_sources:
        return {name: (i % num_sources,) for i, name in enumerate(loaders)}
    return {name: tuple(range(i, num_sources, len(loaders))) for i, name in enumerate(loaders)}
