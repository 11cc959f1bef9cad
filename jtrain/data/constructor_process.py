"""A Data Constructor as a process: batches into slots of shared memory, from loaders that it starts and scales."""

import collections
import contextlib
import dataclasses
import pickle
import socket
import threading
import time
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
from jaxtyping import Int

from jtrain.data.constructor import Constructor, ConstructorSetup, DataState
from jtrain.data.forkserver import Door
from jtrain.data.pool import ProcessPool
from jtrain.data.rows import ARRAYS
from jtrain.data.scaling import Scaling
from jtrain.data.slab import HEADER_BYTES, Slab

SCALE_EVERY_S = 0.25
"""How often the autoscaler looks at the run, at most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessSetup:
    """What a constructor process is told: its work, and how to run its loaders."""

    constructor: ConstructorSetup
    max_loaders: int
    shadows: int
    read_timeout_s: float
    slots: int
    state: DataState | None


class Slots:
    """A ring of batches in shared memory, filled by the constructor and read by the trainer."""

    def __init__(self, slab: Slab, *, slots: int, rows: int, seq_len: int) -> None:
        words = np.frombuffer(slab.view(HEADER_BYTES, slots * slot_bytes(rows, seq_len)), np.int32)
        self._words = words.reshape(slots, len(ARRAYS), rows, seq_len)

    def arrays(self, slot: int) -> dict[str, Int[np.ndarray, "rows L"]]:
        """The arrays of one slot, by name."""
        return dict(zip(ARRAYS, self._words[slot], strict=True))


def slot_bytes(rows: int, seq_len: int) -> int:
    """Of one batch."""
    return len(ARRAYS) * rows * seq_len * 4


def serve(connection: Connection, descriptors: list[int]) -> None:
    """A constructor process's life: batches into free slots, until the connection ends.

    Is sent `("free", slot)`. Sends, pickled: `("batch", slot, state, stats)`, the state pickled once more; `("end",)`
    after the last; `("say", text)`; `("failed", message)`, and then nothing; and `("alive",)` once a second.
    """
    setup: ProcessSetup = connection.recv()
    work = setup.constructor
    door = Door(socket.socket(fileno=descriptors[0]))
    slots = Slots(Slab(descriptors[1]), slots=setup.slots, rows=len(work.rows), seq_len=work.planner.seq_len)
    free = collections.deque(range(setup.slots))

    sending = threading.Lock()

    def send(message: tuple[Any, ...]) -> None:
        with sending:
            connection.send(message)

    def say(text: str) -> None:
        send(("say", text))

    def beat() -> None:
        """On a thread of its own: opening hundreds of remote sources may take minutes."""
        with contextlib.suppress(OSError):
            while True:
                time.sleep(1.0)
                send(("alive",))

    threading.Thread(target=beat, name="data-heartbeat", daemon=True).start()
    try:
        scaling = Scaling(work.planner, work.documents_bytes, max_loaders=setup.max_loaders)
        placement, why = scaling.start(0 if setup.state is None else setup.state.planner.step)
        pool = ProcessPool(
            work.sources,
            door,
            placement=placement,
            shadows=setup.shadows,
            read_timeout_s=setup.read_timeout_s,
            say=say,
            observe=scaling.observe,
        )
        for line in why:
            say(line)
        constructor = Constructor(work, pool, setup.state)
        ended, looked_s, steps, starved_s = False, time.monotonic(), 0, 0.0
        while True:
            constructor.advance()
            while free and (built := constructor.fill(slots.arrays(free[0]))) is not None:
                state = pickle.dumps(built.state, protocol=pickle.HIGHEST_PROTOCOL)
                for line in constructor.said:
                    say(line)
                constructor.said.clear()
                send(("batch", free.popleft(), state, built.stats))
                steps += 1
                if (seconds := time.monotonic() - looked_s) > SCALE_EVERY_S:
                    new, lines = scaling.after_step(
                        built.stats.step + work.lookahead_steps,
                        step_s=seconds / steps,
                        wait_s=starved_s / steps,
                        loaders=pool.states(),
                    )
                    looked_s, steps, starved_s = time.monotonic(), 0, 0.0
                    if new is not None:
                        pool.place(new)
                    for line in lines:
                        say(line)
                constructor.advance()
            if constructor.ended and not ended:
                send(("end",))
                ended = True
            begun_s = time.monotonic()
            ready = wait([connection, *pool.connections()], timeout=0.2)
            if len(free) == setup.slots:  # the trainer has nothing left to take
                starved_s += time.monotonic() - begun_s
            while connection in ready and connection.poll():
                free.append(connection.recv()[1])
    except (ValueError, OSError) as error:
        if isinstance(error, ConnectionError):
            raise
        send(("failed", str(error)))
        connection.recv()  # until it ends
