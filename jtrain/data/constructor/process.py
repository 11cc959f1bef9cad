"""Data Constructor process: fills batches into shared memory, from loaders that it starts and scales."""

import collections
import dataclasses
import math
import pickle
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from jtrain.data.autoscaler.placement import Placement
from jtrain.data.autoscaler.policy import Autoscaler
from jtrain.data.constructor.batch_state import DataState
from jtrain.data.constructor.collate import RowArrays, name_words
from jtrain.data.constructor.constructor import Constructor, ConstructorSetup
from jtrain.data.loaders.forkserver import ForkserverClient
from jtrain.data.loaders.pool import Pool
from jtrain.data.loaders.process_pool import ProcessPool
from jtrain.data.loaders.shared_memory import HEADER_BYTES, SharedMemory
from jtrain.runtime.lease import Lease
from jtrain.runtime.lease_stores import MessageStore
from jtrain.runtime.link.meeting import Peers

SCALE_EVERY_S = 0.25
"""Shortest time between two updates of the autoscaler."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessSetup:
    """Settings of a constructor process: its work, and how to run its loaders.

    peers: the constructors of the other hosts, with which it divides the reading; None: it reads everything
      itself.
    """

    constructor: ConstructorSetup
    max_loaders: int
    standbys: int
    read_timeout_s: float
    slots: int
    state: DataState | None
    peers: Peers | None


class Slots:
    """Ring of batches in shared memory, filled by the constructor and read by the trainer."""

    def __init__(self, slab: SharedMemory, *, slots: int, shape: tuple[int, int, int]) -> None:
        words = np.frombuffer(slab.view(HEADER_BYTES, slots * slot_bytes(shape)), np.int32)
        self._words = words.reshape(slots, *shape)

    def arrays(self, slot: int) -> RowArrays:
        """Returns the arrays of one slot by name."""
        return name_words(self._words[slot])


def slot_bytes(shape: tuple[int, int, int]) -> int:
    """Returns the bytes of one batch of as many arrays, rows and columns."""
    return 4 * math.prod(shape)


def serve(connection: Connection, descriptors: list[int]) -> None:
    """Main loop of a constructor process: fills free slots until the connection ends.

    Receives `("free", slot)`. Sends, pickled: `("batch", slot, state, stats)`, where the state is pickled
    separately; `("end",)` after the last batch; `("say", text)` for the log; `("failed", message)`, and
    nothing after it; and `("alive",)` once a second.
    """
    setup: ProcessSetup = connection.recv()
    work = setup.constructor
    door = ForkserverClient(socket.socket(fileno=descriptors[0]))
    slots = Slots(SharedMemory(descriptors[1]), slots=setup.slots, shape=work.shape)
    free = collections.deque(range(setup.slots))

    # Two threads send: this one, and the lease's with `alive`.
    sending = threading.Lock()

    def send(message: tuple[Any, ...]) -> None:
        with sending:
            connection.send(message)

    def say(text: str) -> None:
        send(("say", text))

    # Its thread sends `alive`, because opening hundreds of remote sources may take minutes.
    Lease(MessageStore(lambda _: send(("alive",))), beat_s=1.0).seize()
    try:
        planner_spec, hosts = work.planner, 1 if setup.peers is None else len(setup.peers.addresses)
        scaler = Autoscaler(
            planner_spec.names,
            planner_spec.schedule,
            step_tokens=planner_spec.global_batch
            * planner_spec.seq_len
            // hosts,  # hosts divide the reading evenly
            unit=planner_spec.unit,
            max_loaders=setup.max_loaders,
        )
        # At the step of the saved state: shares, and so the needed loaders, may differ from step 0.
        placement, reasons = scaler.start(0 if setup.state is None else setup.state.planner.step)
        loaders = ProcessPool(
            work.sources,
            door,
            placement=_by_loader_name(placement),
            standbys=setup.standbys,
            read_timeout_s=setup.read_timeout_s,
            say=say,
            observe=lambda run: scaler.observe(
                run.source, read_s=run.read_s, tokens=len(run.ids), documents=len(run.numbers)
            ),
        )
        for line in reasons:
            say(line)
        constructor, pool = _constructor(setup, loaders, descriptors[2:], say)
        end_sent, updated_s, steps, starved_s = False, time.monotonic(), 0, 0.0
        while True:
            constructor.advance()
            while free and (built := constructor.fill(slots.arrays(free[0]))) is not None:
                state = pickle.dumps(built.state, protocol=pickle.HIGHEST_PROTOCOL)
                # Messages before the batch: the log tells of a left-out document no later than its step.
                for line in constructor.messages:
                    say(line)
                constructor.messages.clear()
                send(("batch", free.popleft(), state, built.stats))
                steps += 1
                # Measured here, per batch: without batches there is no rate to judge by.
                if (seconds := time.monotonic() - updated_s) > SCALE_EVERY_S:
                    planned_step = built.stats.step + work.lookahead_steps
                    new_placement, lines = scaler.update(
                        planned_step, steps=steps, seconds=seconds, wait_s=min(starved_s, seconds)
                    )
                    updated_s, steps, starved_s = time.monotonic(), 0, 0.0
                    # Placing stops and starts processes: only on a change.
                    if new_placement != placement:
                        placement = new_placement
                        pool.place(_by_loader_name(new_placement))
                    for line in lines:
                        say(line)
                # After each batch, which made room in the look-ahead: loaders must not idle meanwhile.
                constructor.advance()
            if constructor.has_ended and not end_sent:
                send(("end",))
                end_sent = True
            begun_s = time.monotonic()
            # The time-out bounds the time until `collect` notices a loader that hangs.
            readable = wait([connection, *pool.connections()], timeout=0.2)
            # All slots free: the trainer is waiting for data, and this process for its loaders.
            if len(free) == setup.slots:
                starved_s += time.monotonic() - begun_s
            while connection in readable and connection.poll():
                free.append(connection.recv()[1])
    except (ValueError, OSError) as error:
        # The trainer is gone: nobody to report to.
        if isinstance(error, ConnectionError):
            raise
        send(("failed", str(error)))
        connection.recv()  # waits for the trainer to close the connection


def _by_loader_name(placement: Placement) -> dict[str, tuple[int, ...]]:
    return {f"loader-{number}": sources for number, sources in placement.items()}


def _constructor(
    setup: ProcessSetup, pool: ProcessPool, listening: list[int], say: Callable[[str], None]
) -> tuple[Constructor, Pool]:
    """Returns the constructor and its pool: with other hosts, one of the loaders of all of them."""
    work = setup.constructor
    if setup.peers is None:
        return Constructor(work, pool, setup.state), pool
    # Imported here: asyncio takes 5 MB, which a run on one host need not pay.
    from jtrain.data.hosts.fetched_rows import FetchedRows
    from jtrain.data.hosts.peer_links import PeerLinks
    from jtrain.data.hosts.shared_pool import SharedPool

    links = PeerLinks(socket.socket(fileno=listening[0]), setup.peers)
    shared = SharedPool(work.sources, pool, links, say=say)
    return FetchedRows(work, shared, setup.state), shared
