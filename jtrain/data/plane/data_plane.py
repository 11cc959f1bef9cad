"""Data plane in the trainer: starts the constructor process with its loaders, and receives its batches."""

import abc
import contextlib
import dataclasses
import pickle
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.data.constructor.batch_state import BatchStats, DataState
from jtrain.data.constructor.collate import RowArrays, name_words
from jtrain.data.constructor.constructor import INLINE_RUNS_BYTES, Constructor, ConstructorSetup
from jtrain.data.constructor.process import ProcessSetup, Slots, slot_bytes
from jtrain.data.loaders.forkserver import Child, Forkserver
from jtrain.data.loaders.inline import InlinePool
from jtrain.data.loaders.messages import DataError
from jtrain.data.loaders.shared_memory import SharedMemory
from jtrain.data.planner.planner import LoadingPlan
from jtrain.runtime.lease import Watch

MOST_RESTARTS = 3
"""Restarts of a constructor in a row, without a batch in between, before the run fails."""

QUIET_S, SILENCE_S = 5.0, 60.0
"""Silences after which a constructor is named and replaced; it sends a heartbeat every second."""


@dataclasses.dataclass(frozen=True)
class Delivered:
    """Batch as host arrays of this process's rows, with its state and statistics.

    arrays: copies that no other process writes to.
    plan: None unless everything runs in this process.
    """

    arrays: RowArrays
    state: DataState
    stats: BatchStats
    plan: LoadingPlan | None = None


class Plane(abc.ABC):
    """Source of batches for the trainer."""

    @abc.abstractmethod
    def take(self) -> Delivered:
        """Returns the next batch. Raises StopIteration after the last one, DataError if the stream cannot
        continue.
        """

    @abc.abstractmethod
    def take_messages(self) -> list[str]:
        """Returns the log lines since the last call: takeovers, decisions of the autoscaler."""

    @abc.abstractmethod
    def close(self) -> None: ...


class InlinePlane(Plane):
    """Data plane in the caller's thread: `data.engine=inline`."""

    def __init__(self, setup: ConstructorSetup, state: DataState | None) -> None:
        self._pool = InlinePool(setup.sources)
        setup = dataclasses.replace(setup, sources=self._pool.setups, all_runs_bytes=INLINE_RUNS_BYTES)
        self._constructor = Constructor(setup, self._pool, state)
        self._shape = setup.shape

    def take(self) -> Delivered:
        # New arrays per batch: the caller keeps them, and may put them on devices later.
        arrays = name_words(np.empty(self._shape, np.int32))
        while True:
            self._constructor.advance()
            if (built := self._constructor.fill(arrays)) is not None:
                return Delivered(arrays, built.state, built.stats, built.plan)
            if self._constructor.has_ended:
                raise StopIteration

    def take_messages(self) -> list[str]:
        messages, self._constructor.messages = self._constructor.messages, []
        return [*self._pool.take_messages(), *messages]

    def close(self) -> None:
        self._pool.close()


class ProcessPlane(Plane):
    """Data plane of processes: a forkserver, a constructor and its loaders.

    A constructor that is lost is restarted from the state of the last batch taken: the stream is the same
    with and without restarts. A forkserver that dies is restarted as well. `close` ends every process, and so
    does any end of this process, even a kill.

    Args:
      preload: modules that the forkserver imports once for all loaders.
      listening: socket of this process's constructor, if it divides the reading with others.
      say: called with a line about a constructor that is silent; None: `take_messages` has it with the next
        batch.
    """

    def __init__(
        self,
        setup: ProcessSetup,
        *,
        preload: tuple[str, ...],
        listening: socket.socket | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._setup = setup
        self._state = setup.state
        self._listening = listening
        self._preload = preload
        self._messages: list[str] = []
        self._say = say or self._messages.append
        self._deaths = 0
        self._has_ended = self._closed = False
        # `take` runs on the prefetch thread, `close` on the trainer's.
        self._take_lock = threading.Lock()
        self._forkserver: Forkserver | None = None
        self._start()

    def take(self) -> Delivered:
        with self._take_lock:
            silence, is_named = Watch(), False
            while not (self._has_ended or self._closed):
                try:
                    message = self._receive()
                except ConnectionError:
                    self._replace("died")
                    silence = Watch()
                    continue
                # No message is no failure yet: opening remote sources may take minutes, with heartbeats.
                if message is None:
                    if silence.silent_s > QUIET_S and not is_named:
                        is_named = True
                        self._say(
                            f"data: the constructor, process {self._child.pid} of this host, gives no "
                            "sign of life: it is stopped, or the machine is overloaded. After "
                            f"{SILENCE_S:g} s another one takes its place"
                        )
                    if silence.silent_s > SILENCE_S:
                        self._replace(f"was silent for {SILENCE_S:g} s")
                        silence, is_named = Watch(), False
                    continue
                silence, is_named = Watch(), False
                match message:
                    case "say", text:
                        self._messages.append(text)
                    case ("end",):
                        self._has_ended = True
                    case "failed", text:
                        raise DataError(text)
                    case "batch", slot, state, stats:
                        return self._take_batch(slot, state, stats)
            raise StopIteration

    def take_messages(self) -> list[str]:
        messages = self._messages.copy()
        # Only what was copied: the prefetch thread may have added more by now.
        del self._messages[: len(messages)]
        return messages

    def _take_batch(self, slot: int, state: bytes, stats: BatchStats) -> Delivered:
        # A copy, as the slot goes back to the constructor below.
        arrays = {name: array.copy() for name, array in self._slots.arrays(slot).items()}
        # Suppressed: a constructor that died after this batch is noticed by the next call.
        with contextlib.suppress(ConnectionError):
            self._child.connection.send(("free", slot))
        # From here on a restart continues after this batch.
        self._state = pickle.loads(state)
        self._deaths = 0
        return Delivered(arrays, self._state, stats)

    def _replace(self, reason: str) -> None:
        # `close` kills the constructor: its death is no reason to start another.
        if self._closed:
            return
        self._deaths += 1
        if self._deaths > MOST_RESTARTS:
            raise DataError(
                f"the data constructor {reason} {self._deaths} times in a row without making a batch. See "
                "stderr."
            )
        begun_s = time.perf_counter()
        self._child.kill()
        self._child.close()
        self._drop_slots()
        if (peers := self._setup.peers) is not None:
            # The other hosts are up by now: one that does not answer is not waited for as at the start.
            peers = dataclasses.replace(peers, meeting_s=peers.silence_s)
            self._setup = dataclasses.replace(self._setup, peers=peers)
        self._start()
        step = 0 if self._state is None else self._state.planner.step
        milliseconds = (time.perf_counter() - begun_s) * 1e3
        self._messages.append(
            f"data: the constructor {reason}; another one goes on from step {step} "
            f"after {milliseconds:.0f} ms"
        )

    def _start(self) -> None:
        """Starts a constructor that continues after the last batch taken."""
        setup = dataclasses.replace(self._setup, state=self._state)
        shape = setup.constructor.shape
        # The forkserver may have died with its constructor: the second attempt starts a new one.
        for attempt in (1, 2):
            if self._forkserver is None:
                self._forkserver = Forkserver(preload=self._preload)
            # A new slab per constructor: a dying one may still write to the old slab.
            self._slab = SharedMemory.create(setup.slots * slot_bytes(shape))
            self._slots = Slots(self._slab, slots=setup.slots, shape=shape)
            try:
                with self._forkserver.client.socket_for_child() as door:
                    listening = () if self._listening is None else (self._listening.fileno(),)
                    descriptors = (door.fileno(), self._slab.descriptor, *listening)
                    self._child: Child = self._forkserver.client.start(
                        "constructor", "jtrain-constr", descriptors
                    )
                # The settings go by connection, as a forked child takes descriptors alone.
                self._child.connection.send(setup)
                return
            except ConnectionError:
                self._drop_slots()
                self._forkserver.close()
                self._forkserver = None
                if attempt == 2:
                    raise

    def _receive(self) -> tuple[Any, ...] | None:
        """Returns the constructor's next message (see `serve`); None after 1 s without one.

        Raises:
          ConnectionError: the constructor is gone.
        """
        try:
            return self._child.connection.recv() if self._child.connection.poll(1.0) else None
        except EOFError as error:
            raise ConnectionError from error

    def pids(self) -> list[int]:
        """Returns the process ids of the forkserver and its children."""
        assert self._forkserver is not None
        children = Path(f"/proc/{self._forkserver.pid}/task/{self._forkserver.pid}/children").read_text()
        return [self._forkserver.pid, *map(int, children.split())]

    def close(self) -> None:
        self._closed = True
        if self._forkserver is not None:
            self._child.kill()  # ends a `take` that waits for it
        # Waits for `take` to return, which the kill above brings about, before its objects are closed.
        with self._take_lock:
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
