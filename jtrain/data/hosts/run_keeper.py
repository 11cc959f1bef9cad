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
"""Most bytes of ids kept for other hosts only; beyond it the oldest are dropped, and read again if they are
wanted."""

_MOST_PASSED = 4096
"""Requests that are remembered, in case another host has yet to make them."""

_RunKey = tuple[int, bytes, tuple[int, int]]

Answer = Callable[[int, tuple[Any, ...]], None]
"""answer(host, message) sends a message to a host, this one included; see `SharedPool`."""


@dataclasses.dataclass(eq=False)
class _Kept:
    """Run that was read. taken: hosts that need it no more."""

    number: int
    run: ChunkRun
    taken: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(eq=False)
class _Requested:
    """Request for a run, which loaders answer with one or several.

    asked: number of the request at each host that has made it.
    broken: a part of the answer was freed, so the run must be read again if somebody asks anew.
    """

    key: _RunKey
    asked: dict[int, int] = dataclasses.field(default_factory=dict)
    kept: dict[int, _Kept] = dataclasses.field(default_factory=dict)
    broken: bool = False


@dataclasses.dataclass(eq=False)
class _Again:
    """Documents that are read once more, because a host wants ids that are not here any more."""

    host: int
    request: int
    numbers: Int[np.ndarray, " n"]
    runs: list[ChunkRun] = dataclasses.field(default_factory=list)


class RunKeeper:
    """Reads runs for all hosts, each once, and keeps them until every host has what it needs.

    Args:
      local: pool of this host's loaders.
      here: number of this host.
      num_hosts: number of hosts.
      answer: sends a message to a host.
    """

    def __init__(self, local: Pool, *, here: int, num_hosts: int, answer: Answer) -> None:
        self._local = local
        self._here = here
        self._num_hosts = num_hosts
        self._answer = answer
        self._number = itertools.count(
            time.time_ns()
        )  # other numbers than those of a constructor before this one
        self._requested: dict[int, _Requested] = {}
        self._tag_of: dict[_RunKey, int] = {}
        self._kept: dict[int, _Kept] = {}
        self._for_others: dict[int, int] = {}  # runs that only other hosts may want -> bytes of ids
        self._again: dict[int, _Again] = {}

    def ask(self, host: int, request: int, part: RequestPart, *, first: bool) -> None:
        """Notes that a host wants the lengths of a run; answers with what has been read, and later with the
        rest.
        """
        key = part.source, part.numbers.tobytes(), part.share
        requested = self._requested.get(self._tag_of.get(key, -1))
        is_new = requested is None or requested.broken
        if requested is None or requested.broken:
            tag = self._tag_of[key] = next(self._number)
            requested = self._requested[tag] = _Requested(key)
            self._forget_passed()
        requested.asked[host] = request
        for kept in requested.kept.values():
            self._tell(host, request, kept)
        if is_new:
            self._local.request([dataclasses.replace(part, tag=self._tag_of[key])], first=first)

    def take(self, run: ChunkRun) -> bool:
        """Handles a run that loaders of this host have read; returns False if it was requested elsewhere."""
        if (again := self._again.get(run.tag)) is not None:
            again.runs.append(run)
            if sum(len(part.numbers) for part in again.runs) == len(again.numbers):
                del self._again[run.tag]
                self._answer_again(again)
            return True
        if (requested := self._requested.get(run.tag)) is None:
            return False
        kept = _Kept(next(self._number), run)
        self._kept[kept.number] = requested.kept[kept.number] = kept
        if self._here not in requested.asked:
            self._keep_for_others(kept)
        for host, request in requested.asked.items():
            self._tell(host, request, kept)
        return True

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
        if (kept := self._kept.get(number)) is not None:
            self._answer(
                host, ("ids", request, *_payload(kept.run, np.searchsorted(kept.run.numbers, numbers)))
            )
            return
        tag = next(self._number)
        self._again[tag] = _Again(host, request, numbers)
        self._local.request([RequestPart(source, numbers, anchor, tag=tag)], first=True)

    def done(self, host: int, number: int) -> None:
        """Notes that a host needs a run no more; frees it after the last host."""
        if (kept := self._kept.get(number)) is None:
            return
        kept.taken.add(host)
        if len(kept.taken) == self._num_hosts:
            self._free(kept)
        elif host == self._here:
            self._keep_for_others(kept)

    def _tell(self, host: int, request: int, kept: _Kept) -> None:
        run = kept.run
        if host == self._here:
            self._for_others.pop(kept.number, None)
        lengths = np.diff(run.starts).astype(np.int32)
        more = run.skipped, run.anchor, run.read_s
        self._answer(host, ("run", request, kept.number, run.numbers, lengths, *more))

    def _keep_for_others(self, kept: _Kept) -> None:
        self._for_others[kept.number] = kept.run.ids.nbytes
        total = sum(self._for_others.values())
        while total > KEPT_BYTES:
            oldest = next(iter(self._for_others))
            total -= self._for_others[oldest]
            self._free(self._kept[oldest])

    def _free(self, kept: _Kept) -> None:
        del self._kept[kept.number]
        self._for_others.pop(kept.number, None)
        if (requested := self._requested.get(kept.run.tag)) is not None:
            del requested.kept[kept.number]
            requested.broken = True
        self._local.release(kept.run)

    def _forget_passed(self) -> None:
        for tag in list(itertools.islice(self._requested, max(0, len(self._requested) - _MOST_PASSED))):
            if not self._requested[tag].kept:
                requested = self._requested.pop(tag)
                if self._tag_of.get(requested.key) == tag:
                    del self._tag_of[requested.key]

    def _answer_again(self, again: _Again) -> None:
        found = {
            number: _payload(run, np.asarray([at]))
            for run in again.runs
            for at, number in enumerate(run.numbers.tolist())
        }
        lengths, ids, ignored = zip(*(found[number] for number in again.numbers.tolist()), strict=True)
        first = np.cumsum([0, *map(len, ids)])[:-1].tolist()
        runs = np.concatenate([one + start for one, start in zip(ignored, first, strict=True)]).astype(
            np.int32
        )
        self._answer(again.host, ("ids", again.request, np.concatenate(lengths), np.concatenate(ids), runs))
        for run in again.runs:
            self._local.release(run)


def _payload(run: ChunkRun, places: Int64[np.ndarray, " n"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns lengths and ids of documents of a run, and the runs of those ids that are not learned."""
    starts, ends = run.starts[places], run.starts[places + 1]
    ids = [run.ids[low:high] for low, high in zip(starts.tolist(), ends.tolist(), strict=True)]
    ignored = runs_of_spans(run.ignored, starts, ends) if len(run.ignored) else NO_RUNS
    return (ends - starts).astype(np.int32), np.concatenate(ids), ignored
