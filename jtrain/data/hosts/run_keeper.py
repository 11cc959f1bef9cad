"""Runs of documents that the loaders of this host read for all hosts."""

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int, Int64

from jtrain.data.loaders.messages import ChunkRun, RequestPart
from jtrain.data.loaders.pool import Pool
from jtrain.data.loss_mask import NO_RUNS, runs_of_spans
from jtrain.data.stream.growing_order import WindowAnchor

KEPT_BYTES = 64 << 20
"""Most bytes of ids kept for other hosts only; the oldest are dropped first, and read again on request."""

_MOST_PASSED = 4096
"""Requests that are remembered, in case another host has yet to make them."""

_RunKey = tuple[int, bytes, tuple[int, int]]

Answer = Callable[[int, tuple[Any, ...]], None]
"""answer(host, message) sends a message to a host, this one included; see `SharedPool`."""


@dataclasses.dataclass(eq=False)
class _StoredRun:
    """Run that was read. finished_hosts: hosts that need it no more."""

    number: int
    run: ChunkRun
    finished_hosts: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(eq=False)
class _Requested:
    """Request for a run, which loaders answer with one or several.

    request_of_host: number of the request at each host that has made it.
    broken: a part of the answer was freed, so the run must be read again if somebody asks anew.
    """

    key: _RunKey
    request_of_host: dict[int, int] = dataclasses.field(default_factory=dict)
    stored_runs: dict[int, _StoredRun] = dataclasses.field(default_factory=dict)
    broken: bool = False


@dataclasses.dataclass(eq=False)
class _Reread:
    """Documents that are read once more, because a host wants ids that are not here any more."""

    host: int
    request: int
    numbers: Int[np.ndarray, " n"]
    runs: list[ChunkRun] = dataclasses.field(default_factory=list)


class RunKeeper:
    """Reads runs for all hosts, each once, and keeps them until every host has what it needs.

    Args:
      local: pool of this host's loaders.
      this_host: number of this host.
      num_hosts: number of hosts.
      answer: sends a message to a host.
    """

    def __init__(self, local: Pool, *, this_host: int, num_hosts: int, answer: Answer) -> None:
        self._local = local
        self._this_host = this_host
        self._num_hosts = num_hosts
        self._answer = answer
        # From the clock on: a constructor that was restarted must not use numbers of the one before it.
        self._number = itertools.count(time.time_ns())
        self._requested: dict[int, _Requested] = {}
        self._tag_of: dict[_RunKey, int] = {}
        self._stored_runs: dict[int, _StoredRun] = {}
        # Number of each run that only other hosts may want -> bytes of its ids.
        self._for_others: dict[int, int] = {}
        self._rereads: dict[int, _Reread] = {}

    def ask(self, host: int, request: int, part: RequestPart, *, first: bool) -> None:
        """Notes that a host wants the lengths of a run; answers with those read so far, others later."""
        # By content: hosts number their requests independently.
        key = part.source, part.numbers.tobytes(), part.share
        requested = self._requested.get(self._tag_of.get(key, -1))
        is_new = requested is None or requested.broken
        if requested is None or requested.broken:
            tag = self._tag_of[key] = next(self._number)
            requested = self._requested[tag] = _Requested(key)
            self._forget_old_requests()
        # Before the read is requested, so that `take` finds everyone who has asked.
        requested.request_of_host[host] = request
        for stored in requested.stored_runs.values():
            self._tell(host, request, stored)
        if is_new:
            self._local.request([dataclasses.replace(part, tag=self._tag_of[key])], first=first)

    def take(self, run: ChunkRun) -> None:
        """Handles a run that loaders of this host have read."""
        if (reread := self._rereads.get(run.tag)) is not None:
            reread.runs.append(run)
            # A pool may answer one request with several runs.
            if sum(len(part.numbers) for part in reread.runs) == len(reread.numbers):
                del self._rereads[run.tag]
                self._answer_reread(reread)
            return
        if (requested := self._requested.get(run.tag)) is None:
            self._local.release(run)  # forgotten, since a host that wants it may ask again
            return
        stored = _StoredRun(next(self._number), run)
        self._stored_runs[stored.number] = requested.stored_runs[stored.number] = stored
        # Only other hosts have asked for it so far: its ids count against KEPT_BYTES.
        if self._this_host not in requested.request_of_host:
            self._store_for_others(stored)
        for host, request in requested.request_of_host.items():
            self._tell(host, request, stored)

    def fetch(
        self,
        host: int,
        request: int,
        number: int,
        source: int,
        numbers: Int[np.ndarray, " n"],
        anchor: WindowAnchor | None,
    ) -> None:
        """Answers with ids of some documents of a run; reads them again if the run is not here any more."""
        if (stored := self._stored_runs.get(number)) is not None:
            self._answer(
                host, ("ids", request, *_payload(stored.run, np.searchsorted(stored.run.numbers, numbers)))
            )
            return
        tag = next(self._number)
        self._rereads[tag] = _Reread(host, request, numbers)
        self._local.request([RequestPart(source, numbers, anchor, tag=tag)], first=True)

    def finish_run(self, host: int, number: int) -> None:
        """Notes that a host needs a run no more; frees it after the last host.

        Args:
          number: number of the run, as the host was told it.
        """
        if (stored := self._stored_runs.get(number)) is None:
            return
        stored.finished_hosts.add(host)
        if len(stored.finished_hosts) == self._num_hosts:
            self._free(stored)
        elif host == self._this_host:
            # From now on only other hosts may fetch its ids: they count against KEPT_BYTES.
            self._store_for_others(stored)

    def _tell(self, host: int, request: int, stored: _StoredRun) -> None:
        run = stored.run
        if host == self._this_host:
            self._for_others.pop(stored.number, None)
        # Lengths alone: each host fetches the ids of its own rows.
        lengths = np.diff(run.starts).astype(np.int32)
        details = run.skipped, run.anchor, run.read_s
        self._answer(host, ("run", request, stored.number, run.numbers, lengths, *details))

    def _store_for_others(self, stored: _StoredRun) -> None:
        self._for_others[stored.number] = stored.run.ids.nbytes
        total = sum(self._for_others.values())
        while total > KEPT_BYTES:
            # dicts keep insertion order: the first has waited longest.
            oldest = next(iter(self._for_others))
            total -= self._for_others[oldest]
            self._free(self._stored_runs[oldest])

    def _free(self, stored: _StoredRun) -> None:
        del self._stored_runs[stored.number]
        self._for_others.pop(stored.number, None)
        if (requested := self._requested.get(stored.run.tag)) is not None:
            del requested.stored_runs[stored.number]
            # A later request for the same run cannot be answered from the parts that are left.
            requested.broken = True
        self._local.release(stored.run)

    def _forget_old_requests(self) -> None:
        for tag in list(itertools.islice(self._requested, max(0, len(self._requested) - _MOST_PASSED))):
            # Without a freed part no loader has answered yet; with stored runs the rest is still in use.
            if self._requested[tag].broken and not self._requested[tag].stored_runs:
                requested = self._requested.pop(tag)
                # The run may have been requested again since, under a newer tag.
                if self._tag_of.get(requested.key) == tag:
                    del self._tag_of[requested.key]

    def _answer_reread(self, reread: _Reread) -> None:
        payloads = {
            number: _payload(run, np.asarray([index]))
            for run in reread.runs
            for index, number in enumerate(run.numbers.tolist())
        }
        lengths, ids, ignored = zip(*(payloads[number] for number in reread.numbers.tolist()), strict=True)
        # Ignored runs count from their document's first id: shifted to the joined ids.
        first = np.cumsum([0, *map(len, ids)])[:-1].tolist()
        runs = np.concatenate(
            [
                document_runs + np.asarray([start, start, 0])
                for document_runs, start in zip(ignored, first, strict=True)
            ]
        ).astype(np.int32)
        self._answer(reread.host, ("ids", reread.request, np.concatenate(lengths), np.concatenate(ids), runs))
        for run in reread.runs:
            self._local.release(run)


def _payload(run: ChunkRun, indexes: Int64[np.ndarray, " n"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns lengths and ids of documents of a run, and the runs of those ids that are not learned."""
    starts, ends = run.starts[indexes], run.starts[indexes + 1]
    ids = [run.ids[low:high] for low, high in zip(starts.tolist(), ends.tolist(), strict=True)]
    ignored = runs_of_spans(run.ignored, starts, ends) if len(run.ignored) else NO_RUNS
    return (ends - starts).astype(np.int32), np.concatenate(ids), ignored
