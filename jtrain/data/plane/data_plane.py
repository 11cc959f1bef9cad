"""Data plane in the trainer: starts the constructor process with its loaders, and receives its batches."""

import contextlib
import dataclasses
import pickle
import socket
import threading
import time
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from jtrain.data.constructor.collate import ARRAYS
from jtrain.data.constructor.constructor import (
    INLINE_RUNS_BYTES,
    BatchStats,
    Constructor,
    ConstructorSetup,
    DataState,
)
from jtrain.data.constructor.process import ProcessSetup, Slots, slot_bytes
from jtrain.data.loaders.forkserver import Child, Forkserver
from jtrain.data.loaders.inline import InlinePool
from jtrain.data.loaders.messages import DataError
from jtrain.data.loaders.shared_memory import SharedMemory
from jtrain.data.planner.planner import LoadingPlan
from jtrain.runtime.lease import Watch
from jtrain.runtime.link import Peers

MOST_RESTARTS = 3
"""Restarts of a constructor in a row, without a batch in between, before the run fails."""

SILENCE_S = 60.0
"""Silence after which a constructor is replaced; it sends a heartbeat every second."""


@dataclasses.dataclass(frozen=True)
class Delivered:
    """Batch as host arrays of this process's rows, with its state and statistics.

    arrays: copies that no other process writes to.
    plan: None unless everything runs in this process.
    """

    arrays: dict[str, Int[np.ndarray, "rows L"]]
    state: DataState
    stats: BatchStats
    plan: LoadingPlan | None = None


@runtime_checkable
class Plane(Protocol):
    """Source of batches for the trainer."""

    def take(self) -> Delivered:
        """Returns the next batch. Raises StopIteration after the last one, DataError if the stream cannot continue."""
        ...

    def said(self) -> list[str]:
        """Returns the log lines since the last call: takeovers, decisions of the autoscaler."""
        ...

    def close(self) -> None: ...


class InlinePlane:
    """Data plane in the caller's thread: `data.engine=inline`."""

    def __init__(self, setup: ConstructorSetup, state: DataState | None) -> None:
        self._pool = InlinePool(setup.sources)
        setup = dataclasses.replace(setup, sources=self._pool.setups, all_runs_bytes=INLINE_RUNS_BYTES)
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
        return [*self._pool.said(), *said]

    def close(self) -> None:
        self._pool.close()


class ProcessPlane:
    """Data plane of processes: a forkserver, a constructor and its loaders.

    A constructor or forkserver that dies is restarted from the state of the last batch taken, so the stream is
    unchanged. `close` ends every process, and so does any end of this process, even a kill.

    Args:
      peers: socket of this process's constructor, and where those of the other processes are (`runtime.link.meet`):
        they divide the reading. None: this process reads everything itself.
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
        peers: tuple[socket.socket, Peers] | None = None,
    ) -> None:
        self._setup = ProcessSetup(
            constructor=setup,
            max_loaders=max_loaders,
            shadows=shadows,
            read_timeout_s=read_timeout_s,
            slots=slots,
            state=state,
            peers=None if peers is None else peers[1],
        )
        self._listening = None if peers is None else peers[0]
        self._state = state
        self._preload = preload
        self._said: list[str] = []
        self._deaths = 0
        self._ended = self._closed = False
        self._taking = threading.Lock()  # `take` runs on the prefetch thread, `close` on the trainer's
        self._forkserver: Forkserver | None = None
        self._start()

    def _start(self) -> None:
        """Starts a constructor that continues after the last batch taken."""
        setup = dataclasses.replace(self._setup, state=self._state)
        shape = {"rows": len(setup.constructor.rows), "seq_len": setup.constructor.planner.seq_len}
        for attempt in (1, 2):
            if self._forkserver is None:
                self._forkserver = Forkserver(preload=self._preload)
            self._slab = SharedMemory.create(setup.slots * slot_bytes(**shape))
            self._slots = Slots(self._slab, slots=setup.slots, **shape)
            try:
                with self._forkserver.client.socket_for_child() as door:
                    listening = () if self._listening is None else (self._listening.fileno(),)
                    descriptors = (door.fileno(), self._slab.descriptor, *listening)
                    self._child: Child = self._forkserver.client.start("constructor", "jtrain-constr", descriptors)
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
        heard = Watch()
        while True:
            try:
                if not self._child.connection.poll(1.0):
                    if heard.silent_s > SILENCE_S:
                        self._restart(f"was silent for {SILENCE_S:g} s")
                        heard = Watch()
                    continue
                kind, *rest = self._child.connection.recv()
            except (EOFError, ConnectionError):
                self._restart("died")
                heard = Watch()
                continue
            heard = Watch()
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
                with contextlib.suppress(ConnectionError):  # it died after this batch; the next call notices
                    self._child.connection.send(("free", slot))
                self._state, self._deaths = pickle.loads(state), 0
                return Delivered(arrays, self._state, stats)

    def said(self) -> list[str]:
        said, self._said = self._said, []
        return said

    def pids(self) -> list[int]:
        """Returns the process ids of the forkserver and its children."""
        assert self._forkserver is not None
        children = Path(f"/proc/{self._forkserver.pid}/task/{self._forkserver.pid}/children").read_text()
        return [self._forkserver.pid, *map(int, children.split())]

    def close(self) -> None:
        self._closed = True
        if self._forkserver is not None:
            self._child.kill()  # ends a `take` that waits for it
        with self._taking:
            if self._forkserver is not None:
                self._child.close()
                self._drop_slots()
                self._forkserver.close()
                self._forkserver = None
                if self._listening is not None:
                    self._listening.close()

    def _drop_slots(self) -> None:
        self._slab.close()
        del self._slab, self._slots  # the memory mapping of `_slots` has its own file descriptor

    def _restart(self, why: str) -> None:
        if self._closed:
            raise DataError("the data plane is closed")
        self._deaths += 1
        if self._deaths > MOST_RESTARTS:
            raise DataError(
                f"the data constructor {why} {self._deaths} times in a row without making a batch. See stderr."
            )
        self._child.kill()
        self._child.close()
        self._drop_slots()
        begun_s = time.perf_counter()
        self._start()
        milliseconds = (time.perf_counter() - begun_s) * 1e3
        step = 0 if self._state is None else self._state.planner.step
        self._said.append(
            f"data: the constructor {why}; a new one continues from step {step} after {milliseconds:.0f} ms"
        )
