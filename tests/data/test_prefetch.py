import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jtrain.data.plane.prefetch import Prefetch, place_tree, put_batch
from jtrain.data.planner.device_tree import ClientPlaceTree
from jtrain.layout.dims import Batch
from jtrain.layout.mesh import BATCH_AXES, MeshSpec, make_mesh


class Counting:
    """Source of batches in which batch k is filled with k; it ends or fails on request."""

    def __init__(self, *, fail_at: int = -1, end_at: int = -1) -> None:
        self.made = 0
        self.closed = False
        self.alive: list[weakref.ref[Any]] = []
        self._fail_at, self._end_at = fail_at, end_at

    def __next__(self) -> Batch:
        if self.made == self._fail_at:
            raise ValueError("data.path: a.jsonl, line 7: no JSON")
        if self.made == self._end_at:
            raise StopIteration
        array = np.full((8, 16), self.made, np.int32)
        self.alive.append(weakref.ref(array))
        self.made += 1
        return Batch(token_BL=array, target_BL=array, position_BL=array, segment_BL=array)

    stats = None

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        made = self.made
        return lambda: {"next": made}

    def take_messages(self) -> list[str]:
        return [f"made {self.made}"]

    def close(self) -> None:
        self.closed = True


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "data-prefetch"]


def random_batch() -> Batch:
    rng = np.random.default_rng(0)
    return Batch(*(rng.integers(0, 100, (16, 32)).astype(np.int32) for _ in range(4)))


MESHES = (
    {},
    {"data": 8},
    {"replica": 2, "data": 4},
    {"data": 2, "context": 2, "tensor": 2},
    {"stage": 2, "expert": 2, "context": 2},
)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_the_global_batch_is_the_same_on_any_mesh(
    axes: dict[str, int], emulated_devices: list[jax.Device], same_batch: Callable[[Batch, Batch], None]
) -> None:
    batch, spec = random_batch(), MeshSpec(**axes)
    mesh = make_mesh(spec, emulated_devices[: spec.size])
    with jax.transfer_guard("disallow"):
        placed = put_batch(batch, mesh)
    same_batch(placed, batch)
    rows = 16 // spec.batch_shards
    for array in jax.tree.leaves(placed):
        assert {shard.data.shape for shard in array.addressable_shards} == {(rows, 32 // spec.context)}


def emulated_places(mesh: jax.sharding.Mesh, processes: int, global_batch: int) -> ClientPlaceTree:
    """Returns the tree as if the devices of `mesh`, by their ids, were divided evenly among processes."""
    process = np.vectorize(lambda device: device.id * processes // mesh.size, otypes=[np.int64])(mesh.devices)
    tree = ClientPlaceTree(shape=dict(mesh.shape), process_of_device=process, global_batch=global_batch)
    return tree.distribute(*BATCH_AXES).broadcast_at("tensor", "stage", "context")


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize(
    "axes", [{"data": 4, "tensor": 2}, *MESHES[1:], {"context": 4, "tensor": 2}], ids=str
)
def test_a_process_builds_and_places_its_own_rows_only(
    axes: dict[str, int], processes: int, emulated_devices: list[jax.Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulates several processes: JAX asks each for blocks of the rows that the place tree lets it fetch, no
    others.

    The blocks of all processes together are the batch; processes fetch each row once.
    """
    mesh = make_mesh(MeshSpec(**axes), emulated_devices)
    place = emulated_places(mesh, processes, 16)
    token = random_batch().token_BL
    seen = np.zeros_like(token, bool)
    for process in range(processes):
        rows, asked = place.rows(process), set[int]()

        def blocks_of_one_process(
            shape: tuple[int, ...],
            sharding: jax.sharding.NamedSharding,
            callback: Callable[[Any], np.ndarray],
            process: int = process,
            asked: set[int] = asked,
        ) -> jax.Array:
            assert shape == (16, 32)
            for device, index in sharding.devices_indices_map(shape).items():
                if device.id * processes // 8 == process:
                    np.testing.assert_array_equal(callback(index), token[index])
                    asked.update(range(*index[0].indices(16)))
                    seen[index] = True
            return jax.device_put(np.zeros(shape, np.int32), sharding)

        monkeypatch.setattr(jax, "make_array_from_callback", blocks_of_one_process)
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        mine = token[rows]
        put_batch(Batch(mine, mine, mine, mine), mesh, place)
        assert sorted(asked) == rows.tolist()
    assert seen.all()
    assert sorted(row for process in range(processes) for row in place.rows(process).tolist()) == [*range(16)]


def test_the_rows_of_a_process_are_those_of_its_devices(emulated_devices: list[jax.Device]) -> None:
    """Here one process holds all rows; test_processes.py runs two real processes."""
    mesh = make_mesh(MeshSpec(replica=2, data=2, tensor=2), emulated_devices)
    assert place_tree(mesh, 16).rows(0).tolist() == [*range(16)]
    with pytest.raises(ValueError, match=r"data\.global_batch=18 does not split evenly"):
        place_tree(mesh, 18)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"data": 3}, r"data\.global_batch=16 .*data=3.*mesh\.data"),
        ({"context": 5}, r"data\.seq_len=32 .*context=5"),
    ],
    ids=["batch", "sequence"],
)
def test_a_batch_that_does_not_split_evenly_is_refused(
    axes: dict[str, int], message: str, emulated_devices: list[jax.Device]
) -> None:
    spec = MeshSpec(**axes)
    with pytest.raises(ValueError, match=message):
        put_batch(random_batch(), make_mesh(spec, emulated_devices[: spec.size]))


def test_prefetch_yields_batches_in_order_with_the_state_after_each() -> None:
    source = Counting(end_at=20)
    with Prefetch(source, lambda batch: batch, depth=3) as batches:
        seen = list(batches)
    assert [(int(f.batch.token_BL[0, 0]), f.state()) for f in seen] == [
        (k, {"next": k + 1}) for k in range(20)
    ]
    assert [fed.messages for fed in seen] == [[f"made {k + 1}"] for k in range(20)]
    assert all(fed.wait_ms >= 0 for fed in seen)
    assert source.closed
    assert threads() == []


def test_a_slow_consumer_never_makes_it_grow() -> None:
    """The test counts the live batches, including those being made."""
    source = Counting()
    with Prefetch(source, lambda batch: batch, depth=3) as batches:
        for taken in range(10):
            wait_until(lambda taken=taken: source.made == taken + 3)
            time.sleep(0.01)
            assert source.made == taken + 3
            assert sum(ref() is not None for ref in source.alive) <= 4
            next(batches)


def test_waiting_is_measured_where_the_source_is_slow_and_near_zero_where_it_is_not() -> None:
    """Each batch of the slow source is begun when somebody waits for it, those of the other one are ready."""
    source, started = Counting(), list[Prefetch]()

    def slow(batch: Batch) -> Batch:
        while not source.closed and not (started and vars(started[0]._changed)["_waiters"]):
            time.sleep(0.001)  # a condition does not tell that somebody waits for it
        time.sleep(0.05)
        return batch

    with Prefetch(source, slow, depth=1) as batches:
        started.append(batches)
        for _ in range(3):
            assert next(batches).wait_ms > 49
    source, waits = Counting(), []
    with Prefetch(source, lambda batch: batch, depth=2) as batches:
        for taken in range(20):
            wait_until(lambda taken=taken: len(batches._ready) == 2)
            waits.append(next(batches).wait_ms)
    assert np.median(waits) < 10, "a quarter of what the slow source takes, and less"


def test_an_error_reaches_the_consumer_after_the_batches_before_it() -> None:
    batches = Prefetch(Counting(fail_at=2), lambda batch: batch, depth=4)
    assert [next(batches).state()["next"] for _ in range(2)] == [1, 2]
    for _ in range(2):  # asking again raises the same error instead of ending or hanging
        with pytest.raises(ValueError, match=r"data\.path: a\.jsonl, line 7: no JSON"):
            next(batches)
    wait_until(lambda: threads() == [])
    batches.close()


def test_an_error_while_placing_reaches_the_consumer(emulated_devices: list[jax.Device]) -> None:
    mesh = make_mesh(MeshSpec(data=3), emulated_devices[:3])
    with (
        Prefetch(Counting(), lambda batch: put_batch(batch, mesh)) as batches,
        pytest.raises(ValueError, match=r"data\.global_batch=8 does not split evenly"),
    ):
        next(batches)
    assert threads() == []


def test_closing_joins_the_thread_and_lets_go_of_its_batches() -> None:
    source = Counting()
    batches = Prefetch(source, lambda batch: batch, depth=3)
    assert len(threads()) == 1
    wait_until(lambda: source.made == 3)
    batches.close()
    batches.close()
    assert threads() == []
    assert sum(ref() is not None for ref in source.alive) == 0
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)
