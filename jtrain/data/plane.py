"""The data plane as the trainer holds it: one constructor process, its loaders behind it, and batches that arrive."""

import contextlib
import dataclasses
import pickle
import threading
import time
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from jtrain.data.constructor import BatchStats, Constructor, ConstructorSetup, DataState
from jtrain.data.constructor_process import ProcessSetup, Slots, slot_bytes
from jtrain.data.forkserver import Child, Forkserver
from jtrain.data.inline_pool import InlinePool
from jtrain.data.planner import LoadingPlan
from jtrain.data.rows import ARRAYS
from jtrain.data.runs import DataError
from jtrain.data.slab import Slab

MOST_RESTARTS = 3
"""Constructors in a row that may die without a batch in between."""

SILENCE_S = 60.0
"""A constructor says each second that it is alive; after so long without a word it is replaced."""


@dataclasses.dataclass(frozen=True)
class Delivered:
    """A batch as host arrays of this process's rows, nobody else's, and what goes with it; `plan` where it is known."""

    arrays: dict[str, Int[np.ndarray, "rows L"]]
    state: DataState
    stats: BatchStats
    plan: LoadingPlan | None = None


@runtime_checkable
class Plane(Protocol):
    """Where batches come from."""

    def take(self) -> Delivered:
        """The next batch. Raises StopIteration after the last one, DataError where the stream cannot go on."""
        ...

    def said(self) -> list[str]:
        """What happened since the last call, for people: takeovers, decisions of the autoscaler."""
        ...

    def close(self) -> None: ...


class InlinePlane:
    """Everything in the caller's thread: `data.engine=inline`."""

    def __init__(self, setup: ConstructorSetup, state: DataState | None) -> None:
        self._pool = InlinePool(setup.sources)
        self._constructor = Constructor(setup, self._pool, state)
        self._shape = (len(setup.rows), setup.planner.seq_len)

    def take(self) -> Delivered:
        arrays = {name: np.empty(self._shape, np.int32) for name in ARRAYS}
        while True:
            self._constructor.advance()
            if (built := self._constructor.fill(arrays)) is not None:
                return Delivered(arrays, built.state, built.stats, built.plan)
            if self._constructor.ended:
                raise StopIteration

    def said(self) -> list[str]:
        said, self._constructor.said = self._constructor.said, []
        return said

    def close(self) -> None:
        self._pool.close()


class ProcessPlane:
    """A forkserver, a constructor and its loaders.

    A constructor that dies is started anew from the state of the last batch that was taken, so the stream goes on as
    if nothing had happened; so is a forkserver. Closing it ends every process; so does the end of this one, however
    it comes.
    """

    def __init__(
        self,
        setup: ConstructorSetup,
        state: DataState | None,
        *,
        max_loaders: int,
        shadows: int,
        read_timeout_s: float,
        slots: int,
        preload: tuple[str, ...],
    ) -> None:
        self._setup = ProcessSetup(
            constructor=setup,
            max_loaders=max_loaders,
            shadows=shadows,
            read_timeout_s=read_timeout_s,
            slots=slots,
            state=state,
        )
        self._state = state
        self._preload = preload
        self._said: list[str] = []
        self._deaths = 0
        self._ended = self._closed = False
        self._taking = threading.Lock()  # `take` runs on the prefetch thread, `close` on the trainer's
        self._forkserver: Forkserver | None = None
        self._start()

    def _start(self) -> None:
        """A constructor that goes on behind the last batch taken."""
        setup = dataclasses.replace(self._setup, state=self._state)
        shape = {"rows": len(setup.constructor.rows), "seq_len": setup.constructor.planner.seq_len}
        for attempt in (1, 2):
            if self._forkserver is None:
                self._forkserver = Forkserver(preload=self._preload)
            self._slab = Slab.create(setup.slots * slot_bytes(**shape))
            self._slots = Slots(self._slab, slots=setup.slots, **shape)
            try:
                with self._forkserver.door.another() as door:
                    descriptors = (door.fileno(), self._slab.descriptor)
                    self._child: Child = self._forkserver.door.start("constructor", "jtrain-constr", descriptors)
                self._child.connection.send(setup)
                return
            except ConnectionError:
                self._drop_slots()
                self._forkserver.close()
                self._forkserver = None
                if attempt == 2:
                    raise

    def take(self) -> Delivered:
        with self._taking:
            return self._take()

    def _take(self) -> Delivered:
        if self._ended:
            raise StopIteration
        heard_s = time.monotonic()
        while True:
            try:
                if not self._child.connection.poll(1.0):
                    if time.monotonic() - heard_s > SILENCE_S:
                        self._restart(f"has said nothing for {SILENCE_S:g} s")
                        heard_s = time.monotonic()
                    continue
                kind, *rest = self._child.connection.recv()
            except (EOFError, ConnectionError):
                self._restart("died")
                heard_s = time.monotonic()
                continue
            heard_s = time.monotonic()
            if kind == "say":
                self._said.append(rest[0])
            elif kind == "end":
                self._ended = True
                raise StopIteration
            elif kind == "failed":
                raise DataError(rest[0])
            elif kind == "batch":
                slot, state, stats = rest
                arrays = {name: array.copy() for name, array in self._slots.arrays(slot).items()}
                with contextlib.suppress(ConnectionError):  # it died with the batch complete; the next call finds out
                    self._child.connection.send(("free", slot))
                self._state, self._deaths = pickle.loads(state), 0
                return Delivered(arrays, self._state, stats)

    def said(self) -> list[str]:
        said, self._said = self._said, []
        return said

    def pids(self) -> list[int]:
        """The forkserver and everything below it."""
        assert self._forkserver is not None
        children = Path(f"/proc/{self._forkserver.pid}/task/{self._forkserver.pid}/children").read_text()
        return [self._forkserver.pid, *map(int, children.split())]

    def close(self) -> None:
        self._closed = True
        if self._forkserver is not None:
            self._child.kill()  # a `take` that waits for it ends
        with self._taking:
            if self._forkserver is not None:
                self._child.close()
                self._drop_slots()
                self._forkserver.close()
                self._forkserver = None

    def _drop_slots(self) -> None:
        self._slab.close()
        del self._slab, self._slots  # a mapping holds a descriptor of its own

    def _restart(self, why: str) -> None:
        if self._closed:
            raise DataError("the data plane is closed")
        self._deaths += 1
        if self._deaths > MOST_RESTARTS:
            raise DataError(f"the data constructor {why}, {self._deaths} times in a row, without a batch. See stderr.")
        self._child.kill()
        self._child.close()
        self._drop_slots()
        begun_s = time.perf_counter()
        self._start()
        milliseconds = (time.perf_counter() - begun_s) * 1e3
        step = 0 if self._state is None else self._state.planner.step
        self._said.append(f"data: the constructor {why}; another one goes on from step {step}, {milliseconds:.0f} ms")
