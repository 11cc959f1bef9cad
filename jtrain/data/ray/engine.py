"""Data plane on Ray actors, `data.engine=ray`: loaders shared by all hosts, a constructor per trainer.

Each run of documents is read once for all hosts: every constructor requests it from the same loader and gets
the lengths, which is all that planning needs. A constructor fetches only the ids that its own rows need,
through Ray's object store. Planners do not communicate, because all of them compute the same plan.

Ownership: the loaders belong to process 0 and each constructor to its trainer, and Ray ends actors with their
owners. A loader that dies is restarted, on another node if its own is gone; until it is back a standby
answers for it.

`ray` is imported when a plane is created, because the import takes 1 s and 60 MB.
"""

import collections
import functools
import importlib.util
import logging
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int, Int32

from jtrain.data.constructor.batch_state import DataState
from jtrain.data.constructor.collate import ARRAYS
from jtrain.data.constructor.constructor import ConstructorSetup
from jtrain.data.constructor.fetched_rows import FetchedRows
from jtrain.data.loaders.messages import DataError
from jtrain.data.plane.data_plane import ConstructorReply, RestartedPlane
from jtrain.data.ray.actor_pool import RayPool
from jtrain.data.ray.loader_actor import ActorEnvironment, RayLoader
from jtrain.errors import UserError
from jtrain.runtime import multihost
from jtrain.runtime.retry import Backoff, retried

PATIENCE_S = 60.0
"""How long the other trainers wait for process 0 to start the loaders."""

_CLUSTER_FILE = Path("/tmp/ray/ray_current_cluster")
"""File in which `ray start` records the address of the cluster, on every node."""

BATCHES_AHEAD = 2
"""Batches requested from a constructor ahead of their use."""


class RayConstructor:
    """Ray actor of a Data Constructor, on the node of its trainer."""

    def __init__(
        self,
        setup: ConstructorSetup,
        state: DataState | None,
        surroundings: ActorEnvironment,
        actors: dict[str, Any],
        *,
        constructor_index: int,
        read_timeout_s: float,
    ) -> None:
        surroundings.enter()
        self._setup = setup
        self._state = state
        self._pool = RayPool(
            setup.sources, actors, constructor_index=constructor_index, read_timeout_s=read_timeout_s
        )
        self._rows: FetchedRows | None = None

    def alive(self) -> tuple[int, str]:
        """Returns process id and node."""
        import ray

        return os.getpid(), ray.get_runtime_context().get_node_id()

    def take(self) -> tuple[ConstructorReply, Int32[np.ndarray, "arrays rows L"]]:
        """Returns the next batch; after 1 s without one, a reply without a batch."""
        until_s = time.monotonic() + 1
        arrays = np.empty((len(ARRAYS), len(self._setup.rows), self._setup.planner.seq_len), np.int32)
        try:
            # Within this try: an error while sources are opened becomes a reply.
            if self._rows is None:
                self._rows = FetchedRows(self._setup, self._pool, self._state)
            while True:
                self._rows.advance()
                built = self._rows.fill(dict(zip(ARRAYS, arrays, strict=True)))
                if built is not None:
                    self._rows.advance()  # the next batch is prepared while this one is in transit
                    return ConstructorReply(
                        batch=(built.state, built.stats), messages=self._take_messages()
                    ), arrays
                if self._rows.has_ended or time.monotonic() > until_s:
                    return ConstructorReply(
                        has_ended=self._rows.has_ended, messages=self._take_messages()
                    ), arrays[:, :0]
                self._pool.wait(0.2)
        except (ValueError, OSError) as error:
            return ConstructorReply(failed=str(error), messages=self._take_messages()), arrays[:, :0]

    def _take_messages(self) -> tuple[str, ...]:
        messages = self._pool.take_messages()
        if self._rows is not None:
            messages, self._rows.messages = [*self._rows.messages, *messages], []
        return tuple(messages)


def trainers() -> dict[str, Any]:
    """Returns the arguments `run`, `process`, `processes` of `RayPlane`; all trainers call it together."""
    # Process 0 draws a random name, because two runs may share a cluster.
    words = multihost.from_process_zero(np.frombuffer(secrets.token_bytes(8), np.int32))
    return {
        "run": words.tobytes().hex(),
        "process": multihost.process_index(),
        "processes": multihost.process_count(),
    }


class RayPlane(RestartedPlane):
    """Data plane of one trainer whose loaders and constructor are Ray actors.

    Process 0 starts the loaders, evenly over the nodes of the cluster, and ends them when it closes. Every
    process starts its own constructor.

    Args:
      run: name that only the trainers of this run share.
      process, processes: index of this trainer and number of trainers.
      loaders, standbys: Source Loaders and standbys in all; the values of process 0 count.

    Raises:
      UserError: the package ray is missing, or this machine is not part of a cluster.
    """

    logs = "/tmp/ray/session_latest/logs on this host"
    _users: ClassVar[int] = 0
    _connected_here: ClassVar[bool] = False

    def __init__(
        self,
        setup: ConstructorSetup,
        state: DataState | None,
        *,
        run: str,
        process: int,
        processes: int,
        loaders: int,
        standbys: int,
        read_timeout_s: float,
    ) -> None:
        super().__init__(state)
        self._ray = _connect()
        self._setup = setup
        self._process = process
        self._read_timeout_s = read_timeout_s
        self._open_calls: collections.deque[list[Any]] = collections.deque()
        # One thread may take while another closes, and any call after ray.shutdown() would start a new
        # cluster.
        self._actors_lock = threading.Lock()
        # Set before anything can fail: `close` reads both.
        self._constructor: Any = None
        self._loaders: dict[str, Any] = {}
        try:
            if process == 0:
                self._loaders = self._start_loaders(f"jtrain-{run}", processes, loaders, standbys)
            else:
                self._loaders = self._find_loaders(f"jtrain-{run}")
            self._start()
        except BaseException:
            self.close()
            raise

    def _receive(self) -> tuple[ConstructorReply, dict[str, Int[np.ndarray, "rows L"]]] | None:
        call = self._oldest_call()
        try:
            reply, arrays = self._ray.get(call, timeout=1.0)
        except self._ray.exceptions.GetTimeoutError:
            return None
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.ObjectLostError) as error:
            raise ConnectionError(str(error)) from error
        self._open_calls.popleft()
        # Copied, because arrays in the object store do not outlive the connection to it.
        return reply, dict(zip(ARRAYS, arrays.copy(), strict=True))

    def actors(self) -> dict[str, tuple[int, str]]:
        """Returns process id and node of every loader and of this trainer's constructor."""
        everyone = {**self._loaders, "constructor": self._constructor}
        answers = self._ray.get([actor.alive.remote() for actor in everyone.values()])
        return {name: answer[:2] for name, answer in zip(everyone, answers, strict=True)}

    def close(self) -> None:
        with self._actors_lock:
            if self._closed:
                return
            self._closed = True
            own_actors = [] if self._constructor is None else [self._constructor]
            # Loaders end with process 0 alone: other trainers only found them.
            for actor in [*own_actors, *(self._loaders.values() if self._process == 0 else ())]:
                self._ray.kill(actor)
        with self._take_lock:
            self._open_calls.clear()
            RayPlane._users -= 1
            if RayPlane._connected_here and not RayPlane._users:
                RayPlane._connected_here = False
                self._ray.shutdown()

    def _start_loaders(self, space: str, processes: int, loaders: int, standbys: int) -> dict[str, Any]:
        nodes = sorted(node["NodeID"] for node in self._ray.nodes() if node["Alive"])
        names = (*(f"loader-{i}" for i in range(loaders)), *(f"standby-{i}" for i in range(standbys)))
        actor = _actor_class(self._ray, RayLoader)
        started = {}
        for i, name in enumerate(names):
            # The node is a preference: if it is gone, Ray takes another one.
            options = {"name": name, "namespace": space, "max_restarts": -1}
            started[name] = actor.options(
                **options, scheduling_strategy=_node_affinity(nodes[i % len(nodes)], soft=True)
            ).remote(
                self._setup.sources,
                ActorEnvironment.of_this_process(),
                constructors=processes,
                read_timeout_s=self._read_timeout_s,
                names=names,
            )
        return started

    def _find_loaders(self, space: str) -> dict[str, Any]:
        """Returns the loaders that process 0 has started; the first of them knows the names of the others."""
        patience = Backoff(0.1, factor=1.0, deadline_s=PATIENCE_S)
        loaders: dict[str, Any] = {}
        names: tuple[str, ...] = ("loader-0",)
        while missing := [name for name in names if name not in loaders]:
            find = functools.partial(self._ray.get_actor, missing[0], namespace=space)
            try:
                loaders[missing[0]] = retried(
                    find, patience, passes=lambda error: isinstance(error, ValueError)
                )
            except ValueError:
                raise DataError(
                    f"data.engine='ray': process 0 has not started {missing[0]} within {PATIENCE_S:g} s. See "
                    "its output; all processes must be in one Ray cluster (RAY_ADDRESS)."
                ) from None
            if len(loaders) == 1:
                names = self._ray.get(loaders["loader-0"].alive.remote())[2]
        return {name: loaders[name] for name in names}

    def _start(self) -> None:
        """Starts a constructor that continues after the last batch taken."""
        node = self._ray.get_runtime_context().get_node_id()
        with self._actors_lock:
            if self._closed:
                return
            actor = _actor_class(self._ray, RayConstructor).options(
                scheduling_strategy=_node_affinity(node, soft=False)
            )
            # Calls to the former constructor never return.
            self._open_calls.clear()
            self._constructor = actor.remote(
                self._setup,
                self._state,
                ActorEnvironment.of_this_process(),
                self._loaders,
                constructor_index=self._process,
                read_timeout_s=self._read_timeout_s,
            )

    def _oldest_call(self) -> list[Any]:
        """Requests batches ahead; returns the oldest request that has no answer."""
        while len(self._open_calls) < BATCHES_AHEAD:
            self._open_calls.append(self._constructor.take.options(num_returns=2).remote())
        return self._open_calls[0]

    def _restart(self) -> None:
        self._ray.kill(self._constructor)
        self._start()


def _connect() -> Any:
    """Imports ray and connects it to the cluster that this machine is part of; never starts a cluster."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(
            "data.engine='ray' needs the package ray: pip install 'jtrain[ray]'. Or set data.engine."
        )
    import ray

    address = os.environ.get("RAY_ADDRESS", "")
    if "://" in address or address == "local":
        raise UserError(
            f"RAY_ADDRESS={address}: data.engine='ray' needs a cluster that this machine is a node of. Run "
            "`ray start --address=HEAD:6379` here, and set RAY_ADDRESS=HEAD:6379."
        )
    # A user's script may have connected already; then it also disconnects.
    if not ray.is_initialized():
        try:
            _check_listening(address or (_CLUSTER_FILE.read_text() if _CLUSTER_FILE.exists() else ""))
            ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
        except ConnectionError as error:
            location = f" at RAY_ADDRESS={address}" if address else ""
            raise UserError(
                f"data.engine='ray' finds no running cluster{location}. Run `ray start --head` on one host "
                "and `ray start --address=HEAD:6379` on the others (launch/ray/README.md), or set "
                f"data.engine='processes'. {error}"
            ) from None
        RayPlane._connected_here = True
    RayPlane._users += 1
    return ray


def _check_listening(address: str) -> None:
    """Raises ConnectionError if nothing listens at `address`: ray.init would try for 2 minutes, then exit."""
    host, _, port = address.strip().rpartition(":")
    if not host:
        return  # ray.init finds the address itself
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError) as error:
        raise ConnectionError(f"{address.strip()}: {error}") from None


def _actor_class(ray: Any, kind: type) -> Any:
    """Returns `kind` as an actor class whose `alive` is answered while other calls run.

    It reserves almost no CPU in Ray, because the trainer beside it reserves none either. With exactly none,
    Ray 2.60 would ignore the requested node.
    """
    ray.method(concurrency_group="watch")(kind.alive)
    return ray.remote(num_cpus=0.001, concurrency_groups={"watch": 1})(kind)


def _node_affinity(node: str, *, soft: bool) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=soft)
