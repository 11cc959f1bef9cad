"""Pools of Source Loaders, as a constructor uses them: request documents, collect them, free their memory.

`LoaderPool` is what pools have in common whose loaders can be lost: it hands out requests, and finds the
document that no loader survives. Its loaders are processes of this host (`process_pool`) or Ray actors
(`ray/actor_pool`).
"""

import abc
import collections
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, runtime_checkable

from jtrain.data.loaders.messages import ChunkRun, DataError, LoaderState, RequestPart
from jtrain.data.sources.source import field_of
from jtrain.data.stream.source_setup import SourceSetup

_OPENING = -1
"""Stands for a document's number where loaders were lost before reading one: opening or decoding a source."""


@runtime_checkable
class Pool(Protocol):
    """Interface between a constructor and its loaders, wherever these run."""

    @property
    def retries(self) -> int:
        """Number of reads that were repeated since the pool began."""
        ...

    def request(self, parts: list[RequestPart], *, first: bool = False) -> None:
        """Requests documents; with `first` they go before all requests that no loader has begun.

        A part of a grouped source may be answered in several runs, whose numbers are together those of the
        part, or of its share.
        """
        ...

    def connections(self) -> list[Any]:
        """Returns connections for `multiprocessing.connection.wait`; none for a pool without processes."""
        ...

    def collect(self) -> list[ChunkRun]:
        """Returns the documents read since the last call and replaces lost loaders; to call every second.

        Raises:
          DataError: the stream cannot continue.
        """
        ...

    def release(self, run: ChunkRun) -> None:
        """Frees the memory of a run; its arrays must not be used afterwards."""
        ...

    def states(self) -> list[LoaderState]: ...

    def place(self, placement: dict[str, tuple[int, ...]]) -> None:
        """Sets the placement, loader -> its sources; starts new loaders and retires those left out."""
        ...

    def close(self) -> None: ...


@dataclasses.dataclass(eq=False)
class Request:
    """Request to one loader.

    loader: name of the loader that answers it, if that is up; None: any that reads the first source.
    into: runs whose ids are requested, by part; None if the runs themselves are.
    refs: what the pool needs to receive the answer.
    """

    parts: list[RequestPart]
    loader: str | None
    into: list[ChunkRun] | None = None
    refs: Any = None

    def each(self) -> "list[Request]":
        """Splits the request into requests of one document each."""
        return [
            Request([single_part], self.loader, None if self.into is None else [self.into[i]])
            for i, part in enumerate(self.parts)
            for single_part in part.each(by_number=self.into is None)
        ]


@runtime_checkable
class Loader(Protocol):
    """Loader, as a pool sees it."""

    name: str
    in_flight: dict[Any, Request]
    """Requests that it has not answered, the oldest first."""


class LoaderPool[L: Loader](abc.ABC):
    """Pool of loaders that can be lost.

    A loader that dies, or that spends more than `data.read_timeout_s` on one document, is replaced, and its
    requests are made again: the stream of documents stays the same. The documents of the request that it was
    reading are then read one at a time. If loaders are lost at the same document again and again, the stream
    ends with an error, or skips and counts the document, according to `data.on_bad_record`.

    Args:
      say: called with messages for the user.
    """

    max_deaths: ClassVar[int]
    """Loaders that must die while reading the same document alone before it counts as the cause.

    A single loader that hangs there is enough. The first death or hang, in a request for several documents,
    is not counted.
    """

    def __init__(self, setups: tuple[SourceSetup, ...], say: Callable[[str], None]) -> None:
        self.retries = 0
        self._setups = setups
        self._say = say
        self._urgent_requests: collections.deque[Request] = collections.deque()
        self._normal_requests: collections.deque[Request] = collections.deque()
        self._skip: dict[int, set[int]] = collections.defaultdict(set)
        self._deaths: collections.Counter[tuple[int, int]] = collections.Counter()
        self._losses_in_a_row = 0  # loaders lost since documents last arrived

    def request(self, parts: list[RequestPart], *, first: bool = False) -> None:
        (self._urgent_requests if first else self._normal_requests).extend(self._requests_for(parts))
        self._send_requests()

    @abc.abstractmethod
    def _requests_for(self, parts: list[RequestPart]) -> list[Request]:
        """Returns the requests to loaders for some parts."""

    @abc.abstractmethod
    def _loader_for(self, request: Request) -> L | None:
        """Returns a loader with room that answers a request; None if there is none now."""

    @abc.abstractmethod
    def _send(self, loader: L, request: Request) -> None:
        """Sends a request, and adds it to those in flight."""

    def _send_requests(self) -> None:
        """Sends the requests for which there is a loader with room, the urgent ones first."""
        for queue in (self._urgent_requests, self._normal_requests):
            # Each request once: those without a loader rotate to the end, in their order.
            for _ in range(len(queue)):
                request = queue.popleft()
                if (loader := self._loader_for(request)) is None:
                    queue.append(request)
                    continue
                # Where ids are fetched, the plan holds the documents already.
                if request.into is None:
                    request.parts = [self._mark_skipped(part) for part in request.parts]
                self._send(loader, request)

    def _mark_skipped(self, part: RequestPart) -> RequestPart:
        if part.source not in self._skip:
            return part
        skip = self._skip[part.source].intersection(part.numbers.tolist())
        return dataclasses.replace(part, skip=part.skip | skip)

    def _take_answered(self, loader: L, number: Any) -> Request:
        """Returns the request that a loader has answered."""
        request = loader.in_flight.pop(number)
        self._losses_in_a_row = 0
        for part in request.parts:
            self._deaths.pop((part.source, _OPENING), None)
        return request

    def _field(self, source: int) -> str:
        return field_of(self._setups[source].name)

    def _source_error(self, source: int, message: str) -> DataError:
        return DataError(f"{self._field(source)}: {message}")

    def _repeat_requests(
        self, loader: L, cause: str, activity: str, *, opening: int | None = None, reading: bool = True
    ) -> None:
        """Makes the requests of a lost loader again, the one that it was reading one document at a time.

        Args:
          cause: `died`, or in which way it hung.
          activity: what it was doing, for messages.
          opening: source that it was opening; None if it was not.
          reading: False if it is known to have done nothing.

        Raises:
          DataError: no loader survives a document.
        """
        requests, loader.in_flight = list(loader.in_flight.values()), {}
        self._losses_in_a_row += 1
        if requests and opening is not None:
            self._deaths[opening, _OPENING] += 1
            # A source cannot be left out as a document can, so the second loader lost there ends the stream.
            if self._deaths[opening, _OPENING] >= 2:
                raise DataError(f"a loader {cause} {activity}, again and again. Check that source.")
        elif requests:
            single_requests = requests[0].each()
            if len(single_requests) == 1 and reading:
                self._count_death(requests[0], cause, activity)
            # One document at a time, so that a second death names the document.
            requests[:1] = single_requests
        # Reversed, since `extendleft` reverses: the oldest request stays first.
        self._urgent_requests.extendleft(reversed(requests))

    def _count_death(self, request: Request, cause: str, activity: str) -> None:
        """Counts a loader lost while it read one document; if that is the cause, leaves it out or raises."""
        [part], is_hung = request.parts, cause != "died"
        number = int(part.numbers[0 if part.id_positions is None else part.id_positions[0]])
        self._deaths[part.source, number] += 1
        if not is_hung and self._deaths[part.source, number] < self.max_deaths:
            return
        # Where ids are requested, the document's length is in the plan already: it can no longer be left out.
        if part.id_positions is not None or self._setups[part.source].on_bad_record == "fail":
            raise DataError(
                f"a loader {cause} {activity}, again and again. Mend or remove that file, "
                + ("raise data.read_timeout_s, " if is_hung else "")
                + "or set data.on_bad_record='skip' to leave the document out and count it."
            )
        self._say(f"data: {activity.removeprefix('at ')} is left out: its loader {cause}, again and again")
        self._skip[part.source].add(number)
