"""Source Loader as a Ray actor: reads each run of documents once for the constructors of all hosts.

Like every loader it may be killed, replaced or duplicated at any time. It keeps only ids that some
constructor has yet to fetch, and reads them again if they are lost.
"""

import collections
import concurrent.futures
import dataclasses
import os
import sys
import threading
import time
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt8

from jtrain.data.loaders.loader import SourceLoader
from jtrain.data.loaders.messages import RequestPart, RunHead, starts_of
from jtrain.data.loss_mask import NO_RUNS, runs_of_spans
from jtrain.data.sources import retry
from jtrain.data.sources.source import field_of
from jtrain.data.stream.chunk_reader import Read
from jtrain.data.stream.source_setup import SourceSetup
from jtrain.runtime.platform import resident_bytes

KEPT_BYTES = 64 << 20
"""Most bytes of ids kept for constructors that have yet to fetch them; the oldest are dropped first."""

_FAREWELL_S = 0.5

RunKey = tuple[int, bytes, frozenset[int]]
"""Key of a run: source, bytes of its numbers, and the numbers left out."""


@dataclasses.dataclass(frozen=True)
class ActorEnvironment:
    """Working directory and module path of the trainer, which its actors take over."""

    folder: str
    modules: tuple[str, ...]

    @classmethod
    def of_this_process(cls) -> "ActorEnvironment":
        return cls(os.getcwd(), tuple(path for path in sys.path if path))

    def enter(self) -> None:
        """Applies both to this process; FileNotFoundError if the trainer's folder is not on this node."""
        # jax takes 1 s and 200 MB and is never needed here.
        sys.modules["jax"] = None  # pyright: ignore[reportArgumentType]
        # Appended: the worker's own modules, Ray's among them, keep precedence.
        sys.path += [path for path in self.modules if path not in sys.path]
        # Before the libraries are imported: they read these once. One thread, as each core has a loader.
        os.environ.update(RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", ARROW_IO_THREADS="1")
        os.chdir(self.folder)


def key_of(part: RequestPart) -> RunKey:
    """Returns the key of the run that a part of a request is about."""
    return part.source, part.numbers.tobytes(), part.skip


@dataclasses.dataclass(frozen=True)
class LoaderReply:
    """Reply of a loader; if `failed` or `stuck` is set, the other fields have their defaults.

    heads: answer to each part of the request; the ids of those that were wanted are in the payload.
    failed: source and message.
    stuck: source, document (-1: none yet) and `file:number` that the loader has been reading for longer than
      `data.read_timeout_s`; the process `pid` then ends itself.
    """

    pid: int
    heads: tuple[RunHead, ...] = ()
    memory_bytes: int = 0
    documents: int = 0
    failed: tuple[int, str] | None = None
    stuck: tuple[int, int, str] | None = None
    retry_lines: tuple[str, ...] = ()
    """Line for the log of each read that was repeated; empty once there were many."""


@dataclasses.dataclass
class _StoredRun:
    read: Read
    starts: Int64[np.ndarray, " n_and_end"]
    finished_constructors: set[int] = dataclasses.field(default_factory=set)


class RayLoader:
    """Ray actor of a Source Loader.

    Args:
      constructors: number of constructors that take each run; ids that all of them have taken are dropped.
      names: names of all loaders and standbys, for trainers that have found one of them.
    """

    def __init__(
        self,
        setups: tuple[SourceSetup, ...],
        surroundings: ActorEnvironment,
        *,
        constructors: int,
        read_timeout_s: float,
        names: tuple[str, ...],
    ) -> None:
        surroundings.enter()
        self._names = names
        self._loader = SourceLoader(setups)
        self._constructors = constructors
        self._read_timeout_s = read_timeout_s
        self._stored_runs: collections.OrderedDict[RunKey, _StoredRun] = collections.OrderedDict()
        self._stored_bytes = 0
        self._documents = 0
        # Source, document, record, since: one tuple, so that the other thread never sees half a change.
        self._reading = (0, -1, -1, 0.0)
        self._setups = setups
        self._retry_lines: list[str] = []
        self._retries = retry.Retries(self._note_retry)
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "reader")

    def alive(self) -> tuple[int, str, tuple[str, ...]]:
        """Returns process id, node and the names of all loaders, even while the actor reads."""
        import ray

        return os.getpid(), ray.get_runtime_context().get_node_id(), self._names

    def memory_report(self) -> tuple[int, int, list[str]]:
        """Returns documents read so far, bytes of ids kept, and needless heavy libraries that are loaded."""
        heavy = [name for name in ("jax", "jaxlib", "flax", "orbax") if sys.modules.get(name) is not None]
        return self._documents, self._stored_bytes, heavy

    def read(
        self, constructor: int, parts: list[RequestPart], released_runs: list[RunKey]
    ) -> tuple[LoaderReply, UInt8[np.ndarray, " bytes"]]:
        """Answers a request of constructor `constructor`, which needs `released_runs` no more."""
        # First: it makes room for what is read below.
        for key in released_runs:
            if (stored := self._stored_runs.get(key)) is not None:
                stored.finished_constructors.add(constructor)
                if len(stored.finished_constructors) == self._constructors:
                    self._drop_run(key)
        # -1: no document yet. A source may hang while it is opened, too.
        self._reading = (parts[0].source, -1, -1, time.monotonic())
        # On another thread, so that this one can watch the time.
        answer = self._reader.submit(self._answer, parts)
        while not concurrent.futures.wait([answer], min(1.0, self._read_timeout_s / 4)).done:
            source, number, record, since_s = self._reading
            if time.monotonic() - since_s > self._read_timeout_s:
                identity = "opening it" if record < 0 else self._loader.documents(source).identity_of(record)
                # Ends after the answer is sent. A thread stuck in a read cannot be stopped otherwise; Ray
                # restarts the actor.
                threading.Timer(_FAREWELL_S, os._exit, (1,)).start()
                return LoaderReply(os.getpid(), stuck=(source, number, identity)), np.zeros(0, np.uint8)
        return answer.result()

    def _answer(self, parts: list[RequestPart]) -> tuple[LoaderReply, UInt8[np.ndarray, " bytes"]]:
        heads: list[RunHead] = []
        payload: list[np.ndarray] = []
        for part in parts:
            begun_s = time.perf_counter()
            try:
                with retry.report_retries_to(self._retries):
                    read = self._read_or_recall(part)
            except (ValueError, OSError) as error:
                # As text: an exception of a library need not unpickle in the constructor.
                failed = part.source, str(error)
                return LoaderReply(
                    os.getpid(), failed=failed, retry_lines=self._take_retry_lines()
                ), np.zeros(0, np.uint8)
            heads.append(RunHead.of(read, time.perf_counter() - begun_s))
            # Bytes: sources may have ids of different widths.
            payload.append(np.ascontiguousarray(read.ids).view(np.uint8))
        reply = LoaderReply(
            os.getpid(),
            tuple(heads),
            resident_bytes() or 0,
            self._documents,
            retry_lines=self._take_retry_lines(),
        )
        return reply, np.concatenate(payload)

    def _note_retry(self, line: str, wait_s: float) -> None:
        source, number, record, _ = self._reading
        # A pause before a retry is no hang: the read time-out counts from its end.
        self._reading = (source, number, record, time.monotonic() + wait_s)
        self._retry_lines.append(line and f"data: {field_of(self._setups[source].name)}: {line}")

    def _take_retry_lines(self) -> tuple[str, ...]:
        lines, self._retry_lines = self._retry_lines, []
        return tuple(lines)

    def _read_or_recall(self, part: RequestPart) -> Read:
        stored, wanted_indexes = self._stored_runs.get(key_of(part)), part.id_positions
        if wanted_indexes is None:
            if stored is None:
                read = self._read(part)
                stored = self._stored_runs[key_of(part)] = _StoredRun(read, starts_of(read.lengths))
                self._stored_bytes += read.ids.nbytes
                # The newest run stays even if it is larger by itself.
                while self._stored_bytes > KEPT_BYTES and len(self._stored_runs) > 1:
                    self._drop_run(next(iter(self._stored_runs)))
            # Lengths alone: most constructors need the ids of few documents.
            return dataclasses.replace(stored.read, ids=stored.read.ids[:0], ignored=NO_RUNS)
        if stored is None:  # of a prepared source, dropped, or kept by a loader that is gone
            return self._read(dataclasses.replace(part, numbers=part.numbers[wanted_indexes]))
        read, starts, ends = stored.read, stored.starts[wanted_indexes], stored.starts[wanted_indexes + 1]
        ids = [read.ids[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        ignored = runs_of_spans(read.ignored, starts, ends)
        return Read(read.lengths[wanted_indexes], np.concatenate(ids), ignored=ignored)

    def _read(self, part: RequestPart) -> Read:
        self._reading = (part.source, -1, -1, time.monotonic())

        def watch(number: int, record: int) -> None:
            self._reading = (part.source, number, record, time.monotonic())

        self._documents += len(part.numbers)
        documents = self._loader.documents(part.source)
        return documents.read(part.numbers, skip=part.skip, anchor=part.anchor, watch=watch)

    def _drop_run(self, key: Any) -> None:
        self._stored_bytes -= self._stored_runs.pop(key).read.ids.nbytes
