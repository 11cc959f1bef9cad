"""A Source Loader as a Ray actor: answers the constructors of all hosts, and reads each run of documents once for them.

Like every loader it may be killed, replaced or doubled at any time. What it keeps is only what somebody has yet to
fetch, and is read again where it is gone.
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
from jaxtyping import Int, Int64, Integer, UInt8

from jtrain.data.documents import Read, SourceSetup
from jtrain.data.loader import Part, SourceLoader, resident_bytes
from jtrain.data.runs import starts_of

KEPT_BYTES = 64 << 20
"""Ids a loader keeps for constructors that have not taken them; beyond, the oldest are read again when asked for."""

_FAREWELL_S = 0.5

Key = tuple[int, bytes, frozenset[int]]
"""Of a run: source, numbers, and which of them are left out."""


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What an actor takes over from its trainer, so that relative paths and modules mean the same there."""

    folder: str
    modules: tuple[str, ...]

    @classmethod
    def here(cls) -> "Surroundings":
        return cls(os.getcwd(), tuple(path for path in sys.path if path))

    def enter(self) -> None:
        """Raises FileNotFoundError: the trainer's folder is not on this node."""
        sys.modules["jax"] = None  # pyright: ignore[reportArgumentType]: a second and 200 MB, never needed here
        sys.path += [path for path in self.modules if path not in sys.path]
        os.environ.update(RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", ARROW_IO_THREADS="1")
        os.chdir(self.folder)


@dataclasses.dataclass(frozen=True)
class Ask:
    """A run of documents, as a loader is asked for it.

    wanted: places in `part.numbers` of the documents whose ids are to come. None: the lengths of all are to come, and
      the loader keeps the ids until they are asked for.
    """

    part: Part
    wanted: Int[np.ndarray, " k"] | None

    @property
    def key(self) -> Key:
        return self.part.source, self.part.numbers.tobytes(), self.part.skip

    @property
    def num_documents(self) -> int:
        """How many are to be read for it, at most."""
        return len(self.part.numbers) if self.wanted is None else len(self.wanted)


@dataclasses.dataclass(frozen=True)
class Found:
    """What one `Ask` is told: the lengths of all, or of those whose ids lie in the payload."""

    lengths: Int[np.ndarray, " n"]
    ids_bytes: int
    dtype: str
    skipped: tuple[tuple[int, str], ...]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Answer:
    """Of a loader. Where `failed` or `stuck` is set there is nothing else in it.

    failed: source and message.
    stuck: source, document (-1: none yet) and `file:number` that it has been at for longer than `data.read_timeout_s`;
      the process `pid` then ends itself.
    """

    pid: int
    found: tuple[Found, ...] = ()
    memory_bytes: int = 0
    documents: int = 0
    failed: tuple[int, str] | None = None
    stuck: tuple[int, int, str] | None = None


@dataclasses.dataclass
class _Kept:
    read: Read
    starts: Int64[np.ndarray, " n_and_end"]
    taken: set[int] = dataclasses.field(default_factory=set)


class RayLoader:
    """The actor.

    Args:
      constructors: how many will take each run; what all have taken is let go of.
      names: of all loaders and standbys, for a trainer that has found one of them.
    """

    def __init__(
        self,
        setups: tuple[SourceSetup, ...],
        surroundings: Surroundings,
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
        self._kept: collections.OrderedDict[Key, _Kept] = collections.OrderedDict()
        self._kept_bytes = 0
        self._documents = 0
        self._at = (0, -1, -1, 0.0)  # source, document, record, since: replaced as a whole, so two threads may see it
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "reader")

    def alive(self) -> tuple[int, str, tuple[str, ...]]:
        """Answers whatever else goes on: process id, node, and the names of all loaders."""
        import ray

        return os.getpid(), ray.get_runtime_context().get_node_id(), self._names

    def kept(self) -> tuple[int, int, list[str]]:
        """Documents read so far, bytes of ids kept, and which libraries are loaded that it has no use for."""
        heavy = [name for name in ("jax", "jaxlib", "flax", "orbax") if sys.modules.get(name) is not None]
        return self._documents, self._kept_bytes, heavy

    def read(self, who: int, asks: list[Ask], done: list[Key]) -> tuple[Answer, UInt8[np.ndarray, " bytes"]]:
        """Answers one request of constructor `who`; `done`: runs that it needs nothing more of."""
        for key in done:
            if (kept := self._kept.get(key)) is not None:
                kept.taken.add(who)
                if len(kept.taken) == self._constructors:
                    self._let_go(key)
        self._at = (asks[0].part.source, -1, -1, time.monotonic())
        working = self._reader.submit(self._answer, asks)
        while not concurrent.futures.wait([working], min(1.0, self._read_timeout_s / 4)).done:
            source, number, record, since_s = self._at
            if time.monotonic() - since_s > self._read_timeout_s:
                identity = "opening it" if record < 0 else self._loader.documents(source).identity_of(record)
                threading.Timer(_FAREWELL_S, os._exit, (1,)).start()  # once the answer has left; Ray starts another one
                return Answer(os.getpid(), stuck=(source, number, identity)), np.zeros(0, np.uint8)
        return working.result()

    def _answer(self, asks: list[Ask]) -> tuple[Answer, UInt8[np.ndarray, " bytes"]]:
        found: list[Found] = []
        payload: list[np.ndarray] = []
        for ask in asks:
            begun_s = time.perf_counter()
            try:
                read, ids = self._one(ask)
            except (ValueError, OSError) as error:
                return Answer(os.getpid(), failed=(ask.part.source, str(error))), np.zeros(0, np.uint8)
            seconds = time.perf_counter() - begun_s
            found.append(Found(read.lengths, ids.nbytes, ids.dtype.str, read.skipped, seconds))
            payload.append(np.ascontiguousarray(ids).view(np.uint8))
        return Answer(os.getpid(), tuple(found), resident_bytes(), self._documents), np.concatenate(payload)

    def _one(self, ask: Ask) -> tuple[Read, Integer[np.ndarray, " tokens"]]:
        kept = self._kept.get(ask.key)
        if ask.wanted is None:
            if kept is None:
                read = self._read(ask.part)
                kept = self._kept[ask.key] = _Kept(read, starts_of(read.lengths))
                self._kept_bytes += read.ids.nbytes
                while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
                    self._let_go(next(iter(self._kept)))
            return kept.read, kept.read.ids[:0]
        if kept is None:  # of a prepared source; or pushed out, or kept by a loader that is no more
            part = ask.part
            records = None if part.records is None else part.records[ask.wanted]
            read = self._read(dataclasses.replace(part, numbers=part.numbers[ask.wanted], records=records))
            return read, read.ids
        ids = [kept.read.ids[kept.starts[i] : kept.starts[i + 1]] for i in ask.wanted.tolist()]
        read = Read(kept.read.lengths[ask.wanted], np.concatenate(ids))
        return read, read.ids

    def _read(self, part: Part) -> Read:
        self._at = (part.source, -1, -1, time.monotonic())

        def watch(number: int, record: int) -> None:
            self._at = (part.source, number, record, time.monotonic())

        self._documents += len(part.numbers)
        documents = self._loader.documents(part.source)
        return documents.read(part.numbers, records=part.records, skip=part.skip, watch=watch)

    def _let_go(self, key: Any) -> None:
        self._kept_bytes -= self._kept.pop(key).read.ids.nbytes
