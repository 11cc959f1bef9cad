"""Leases in object stores: moto's S3 and a server that speaks Google's API, both on the loopback interface."""

import concurrent.futures
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jtrain.checkpoint import Checkpoints, CheckpointSpec, files, folders
from jtrain.errors import UserError
from jtrain.runtime import lease, stores
from jtrain.runtime.lease import Lease, LeaseHeld, LeaseLost
from jtrain.runtime.lease_stores import ObjectStore
from jtrain.runtime.stores import workdir_path
from jtrain.runtime.workdir_lock import WorkdirLock
from jtrain.train.store_mirror import StoreMirror
from tests.data.sources.object_store import Store, gs_store, s3_store
from tests.runtime.test_lease import elsewhere, quiet


@pytest.fixture(scope="module", params=["gs", pytest.param("s3", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    serve = {"gs": gs_store, "s3": s3_store}[request.param]
    with pytest.MonkeyPatch.context() as monkeypatch, serve(monkeypatch) as store:
        yield store


@pytest.fixture
def workdir(store: Store, request: pytest.FixtureRequest) -> Path:
    """Folder of this test alone in the store."""
    return workdir_path(f"{store.url}/{request.node.originalname}")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder of another machine is gone after a fifth of a second without a beat."""
    monkeypatch.setattr(lease, "STALE_S", 0.2)
    monkeypatch.setattr(lease, "WATCH_S", 0.1)


def one_and_another(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Lease, Lease]:
    """Returns leases on one record of two processes, on two machines; nothing beats by itself."""
    one = Lease(ObjectStore(workdir / "lease.json"), beat_s=0.0)
    with elsewhere(monkeypatch):
        other = Lease(ObjectStore(workdir / "lease.json"), beat_s=0.0)
    return one, other


def write_without_an_answer(place: Path) -> None:
    """Writes a holder's record again, as a beat does whose answer is lost: it does not know the version."""
    data, version = stores.read_version(place)
    assert data is not None
    assert stores.replace_version(place, data.replace(b'"writes": 1', b'"writes": 7'), version)


def test_a_lease_is_held_by_one_until_it_is_given_back(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers grow with each holder; a beat changes none."""
    one, other = one_and_another(workdir, monkeypatch)
    assert (one.try_take(), other.try_take(), one.number) == (True, False, 1)
    one.beat()
    one.check(confirm=True)
    assert not other.try_take()
    one.release()
    assert (other.try_take(), one.try_take(), other.number) == (True, False, 2)
    other.release()
    assert ObjectStore(workdir / "lease.json").read().is_free


def test_of_many_that_take_it_at_once_one_gets_it(workdir: Path) -> None:
    """All have judged the same state; the store decides."""
    rivals = [Lease(ObjectStore(workdir / "lease.json"), beat_s=0.0) for _ in range(8)]
    judged = ObjectStore(workdir / "lease.json").read()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        has_it = list(pool.map(lambda rival: rival.seize(judged), rivals))
    assert sum(has_it) == 1
    newest = ObjectStore(workdir / "lease.json").read()
    assert newest.number == 1
    assert newest.holder == rivals[has_it.index(True)].holder


@pytest.mark.usefixtures("impatient")
def test_a_holder_that_stood_still_learns_who_has_it(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the other one has released it by then."""
    one, other = one_and_another(workdir, monkeypatch)
    assert one.try_take()
    gone: list[str] = []
    other.take(watching=quiet, taken_over=gone.append)
    assert "which has not touched it for" in gone[0]
    other.release()
    with pytest.raises(LeaseLost, match=re.escape(f"taken over by {other.holder}")):
        one.check()
    assert ObjectStore(workdir / "lease.json").read().number == 2


@pytest.mark.usefixtures("impatient")
def test_a_holder_that_beats_is_not_replaced(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long ago its clock says that it is, since only changes count."""
    one, other = one_and_another(workdir, monkeypatch)
    assert one.try_take()
    assert other._rival.is_alive() is None, "not yet known"
    one.beat()
    with pytest.raises(LeaseHeld, match="in use by process"):
        other.take(watching=quiet, taken_over=quiet)


def test_an_answer_that_was_lost_loses_nothing(workdir: Path) -> None:
    """The write has landed, but its holder does not know the new version; or somebody removed the object."""
    place = workdir / "lease.json"
    holder = Lease(ObjectStore(place), beat_s=0.0)
    assert holder.try_take()
    write_without_an_answer(place)
    holder.beat()
    holder.check(confirm=True)
    place.unlink()
    holder.check(confirm=True)
    assert ObjectStore(place).read().number == 1


def test_a_store_that_is_away_is_no_loss_until_another_may_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats fail in silence; what cannot be undone waits until the store answers."""
    with gs_store(monkeypatch) as store:
        holder = Lease(ObjectStore(workdir_path(f"{store.url}/run") / "lease.json"), beat_s=0.0)
        assert holder.try_take()
        store.refuse = 403
        holder.check(confirm=True)
        monkeypatch.setattr(lease, "STALE_S", 0.0)
        holder.check()
        with pytest.raises(TimeoutError, match=r"nobody could be asked for \d+ s who holds the lease"):
            holder.check(confirm=True)
        monkeypatch.setattr(lease, "STALE_S", 60.0)
        store.refuse = None
        holder.check(confirm=True)


def test_what_no_lease_wrote_is_named(workdir: Path) -> None:
    """Its way out is followed: the object is deleted."""
    place = workdir / "lock" / "lease.json"
    place.write_text("mine")
    with pytest.raises(UserError, match=r"lease.json is no record of a lease: .*4 bytes.*delete the object"):
        WorkdirLock(workdir, say=print).__enter__()
    place.unlink()
    with WorkdirLock(workdir, say=print) as lock:
        assert lock.number == 1


def test_a_workdir_in_a_store_has_one_run(workdir: Path) -> None:
    second = WorkdirLock(workdir, say=print)
    in_use = pytest.raises(UserError, match=r"--workdir \S+ is in use by another run: process \d+ on host")
    with WorkdirLock(workdir, say=print), in_use:
        second.__enter__()
    with second:
        assert second.number == 2


def test_a_store_that_refuses_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with gs_store(monkeypatch) as store:
        store.refuse = 403
        with pytest.raises(UserError, match=r"--workdir gs://corpus/run cannot be used .*credentials"):
            WorkdirLock(workdir_path(f"{store.url}/run"), say=print).__enter__()


@pytest.mark.usefixtures("impatient")
def test_a_save_after_the_loss_touches_nothing_of_the_other_run(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step folders of both have the same names: neither the commit nor the clean-up of the loser may
    happen.
    """
    monkeypatch.setattr(lease, "BEAT_S", 3600.0)  # the loser stands still: nothing beats

    def state(step: int) -> dict[str, Any]:
        return {"w": jnp.full((8,), step, jnp.float32)}

    with WorkdirLock(workdir, say=print) as lost, Checkpoints(workdir, CheckpointSpec()) as checkpoints:
        checkpoints.lock = lost
        checkpoints.save(1, state(1), {}, "seed: int = 1\n")
        checkpoints.wait()
        said: list[str] = []
        checkpoints.say = said.append
        with elsewhere(monkeypatch), WorkdirLock(workdir, say=quiet) as lock:
            with Checkpoints(workdir, CheckpointSpec()) as others:
                others.lock = lock
                others.save(2, state(22), {"whose": "other"}, "seed: int = 1\n")
                others.wait()
            checkpoints.save(3, state(3), {}, "seed: int = 1\n")
            checkpoints.wait_for_save()
            assert "cannot take the checkpoint of step 3 (LeaseLost: the lock of --workdir" in said[0]
            # The loser would have removed what it wrote of step 3, and what others wrote there.
            assert not folders.has_file(workdir / "checkpoints" / "3", files.MANIFEST)
            assert folders.sizes(workdir / "checkpoints" / "3")
        found = [files.read_manifest(workdir / "checkpoints" / str(step)) for step in (1, 2)]
        assert [manifest.lease for manifest in found] == [1, 2]
        checkpoints.lock = None


def test_an_object_that_was_removed_and_taken_by_another_is_the_others(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers begin anew in a new object: the holder counts, not its number."""
    one, other = one_and_another(workdir, monkeypatch)
    assert one.try_take()
    (workdir / "lease.json").unlink()
    assert other.try_take()
    assert (one.number, other.number) == (1, 1)
    with pytest.raises(LeaseLost, match=re.escape(f"taken over by {other.holder}")):
        one.check(confirm=True)
    other.check(confirm=True)


def test_a_release_after_an_answer_was_lost_frees_it(workdir: Path) -> None:
    place = workdir / "lease.json"
    holder = Lease(ObjectStore(place), beat_s=0.0)
    assert holder.try_take()
    write_without_an_answer(place)
    holder.release()
    assert ObjectStore(place).read().is_free
    with pytest.raises(OSError, match="given back"):
        holder.check(confirm=True)


def test_a_first_write_whose_answer_was_lost_is_the_holders(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client repeats the request, which meets the record that the first one wrote."""
    replace = stores.replace_version

    def repeated(*arguments: Any, **named: Any) -> bytes | None:
        replace(*arguments, **named)
        return replace(*arguments, **named)

    holder = Lease(ObjectStore(workdir / "lease.json"), beat_s=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(stores, "replace_version", repeated)
        assert holder.try_take()
    holder.check(confirm=True)
    assert holder.number == 1


def test_steps_do_not_wait_for_a_store_that_the_beats_ask_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    with gs_store(monkeypatch) as store:
        holder = Lease(ObjectStore(workdir_path(f"{store.url}/run") / "lease.json"), beat_s=0.0)
        assert holder.try_take()
        store.refuse = 403
        now_s = time.monotonic() + lease.STALE_S
        monkeypatch.setattr(lease.time, "monotonic", lambda: now_s)
        holder.beat()  # as the thread does
        asked = len(store.requests)
        holder.check()
        assert len(store.requests) == asked
        now_s += lease.STALE_S
        holder.check()
        assert len(store.requests) > asked


def test_a_run_that_lost_its_workdir_copies_no_file_there(
    workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 3600.0)
    with WorkdirLock(workdir, say=quiet) as lost, StoreMirror(workdir, tmp_path / "local") as mirror:
        mirror.fetch()
        mirror.lock = lost
        (mirror.local / "metrics.jsonl").write_text("mine\n")
        mirror.copy()
        (mirror.local / "metrics.jsonl").write_text("mine, later\n")
        with elsewhere(monkeypatch):
            assert Lease(ObjectStore(workdir / "lock" / "lease.json"), beat_s=0.0).seize()
        (workdir / "metrics.jsonl").write_text("the other run's\n")
    assert (workdir / "metrics.jsonl").read_text() == "the other run's\n"
