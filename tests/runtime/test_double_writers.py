"""Two hosts that want to write to one workdir: four stores, six timings, and never both writing."""

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jtrain.runtime import lease
from jtrain.runtime.lease import Lease, LeaseHeld, LeaseLost
from jtrain.runtime.lease_stores import Entry, FolderStore, LeaseStore, ObjectStore
from jtrain.runtime.stores import workdir_path
from tests.data.sources.object_store import gs_store, s3_store
from tests.runtime.test_lease import elsewhere, quiet

HOUR_S = 3600.0


class OtherClock(FolderStore):
    """A folder of a file server whose clock is an hour ahead of what it wrote."""

    def age_s(self, entry: Entry) -> float:
        return super().age_s(entry) + HOUR_S


class Partition:
    """Store that one host does not reach while `is_open`."""

    def __init__(self, store: LeaseStore) -> None:
        self._store = store
        self.is_open = False

    def reached(self) -> LeaseStore:
        """Returns the store, if there is a way to it."""
        if self.is_open:
            raise OSError("no route to host")
        return self._store

    def read(self) -> Entry:
        return self.reached().read()

    def create(self, old: Entry, content: bytes) -> Entry | None:
        return self.reached().create(old, content)

    def swap(self, own: Entry, content: bytes) -> Entry | None:
        return self.reached().swap(own, content)

    def delete(self, own: Entry) -> None:
        self.reached().delete(own)

    def age_s(self, entry: Entry) -> float:
        return self.reached().age_s(entry)


class Writer:
    """Host that writes what it may: each write asks for the lease first, as a commit does."""

    def __init__(self, store: LeaseStore, log: list[tuple[str, int]], name: str) -> None:
        self.partition = Partition(store)
        self.lease = Lease(self.partition, beat_s=0.0)
        self.name, self._log = name, log
        self.why = ""

    def write(self) -> bool:
        """Writes once if the lease allows it."""
        try:
            self.lease.check(confirm=True)
        except (LeaseLost, OSError) as error:
            self.why = str(error)
            return False
        self._log.append((self.name, self.lease.number or 0))
        return True

    def take(self) -> bool:
        """Takes the lease as a run does at its start."""
        try:
            self.lease.take(watching=quiet, taken_over=quiet)
        except LeaseHeld as error:
            self.why = str(error)
            return False
        return True


STORES = ("folder", "folder-other-clock", "gs", pytest.param("s3", marks=pytest.mark.slow))


@pytest.fixture(params=STORES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], LeaseStore]]:
    """Makes one host's view of the same record."""
    if request.param == "folder":
        yield lambda: FolderStore(tmp_path)
    elif request.param == "folder-other-clock":
        yield lambda: OtherClock(tmp_path)
    else:
        with contextlib.ExitStack() as stack:
            monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
            store = stack.enter_context({"gs": gs_store, "s3": s3_store}[request.param](monkeypatch))
            path = workdir_path(f"{store.url}/run") / "lease.json"
            yield lambda: ObjectStore(path)


class Hosts:
    """Two hosts on different machines; whoever watches gives the other time to `act`."""

    def __init__(self, place: Callable[[], LeaseStore], monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, int]] = []
        self.first = Writer(place(), self.log, "first")
        with elsewhere(monkeypatch):
            self.second = Writer(place(), self.log, "second")
        self.act: Callable[[], object] = lambda: None
        real = lease.time

        def sleep(seconds: float) -> None:
            self.act()
            real.sleep(seconds / 10)

        # A beat between two looks is certain then, however busy this machine is.
        patched = types.SimpleNamespace(monotonic=real.monotonic, sleep=sleep)
        monkeypatch.setattr(lease, "time", patched)
        monkeypatch.setattr(lease, "STALE_S", 0.4)
        monkeypatch.setattr(lease, "WATCH_S", 0.2)

    def take_over(self) -> None:
        """The second host takes the lease of a first one that does not beat, and writes."""
        assert self.first.take()
        assert self.first.write()
        self.act = lambda: None
        assert self.second.take()
        assert self.second.write()

    def assert_lost(self) -> None:
        """The first stops at once, and says who has it."""
        assert not self.first.write()
        self.first.lease.beat()
        assert self.first.lease.is_lost, "after one beat at most"
        assert f"taken over by {self.second.lease.holder}" in self.first.why


def together(hosts: Hosts) -> None:
    """Both have judged the free record, and start at the same instant."""
    start, has_it = threading.Barrier(2), {}
    judged = {writer.name: writer.partition.read() for writer in (hosts.first, hosts.second)}

    def begin(writer: Writer) -> None:
        start.wait()
        has_it[writer.name] = writer.lease.seize(judged[writer.name])
        for _ in range(5):
            if has_it[writer.name]:
                writer.write()

    threads = [threading.Thread(target=begin, args=(writer,)) for writer in (hosts.first, hosts.second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(has_it.values()) == [False, True]
    assert len(hosts.log) == 5


def late(hosts: Hosts) -> None:
    """The second starts while the first beats and writes."""
    assert hosts.first.take()
    hosts.act = hosts.first.write
    assert not hosts.second.take()
    assert f"in use by {hosts.first.lease.holder}" in hosts.second.why
    assert hosts.first.write()
    assert {name for name, _ in hosts.log} == {"first"}


def killed(hosts: Hosts) -> None:
    """The first is gone without a word, and the second follows."""
    hosts.take_over()
    assert [name for name, _ in hosts.log] == ["first", "second"]


def paused(hosts: Hosts) -> None:
    """The first stands still, and wakes while the second writes."""
    hosts.take_over()
    hosts.assert_lost()
    assert hosts.second.write()


def partitioned(hosts: Hosts) -> None:
    """The first does not reach the store for longer than a holder may be silent, and wants to write all the
    time; then it reaches it again.
    """
    assert hosts.first.take()
    hosts.first.partition.is_open = True
    written_before = len(hosts.log)
    hosts.act = hosts.first.lease.beat
    assert hosts.second.take()
    assert not hosts.first.write(), "nobody tells who has it"
    assert hosts.second.write()
    hosts.first.partition.is_open = False
    hosts.assert_lost()
    assert {name for name, _ in hosts.log[written_before:]} == {"second"}


def handed_over(hosts: Hosts) -> None:
    """The first gives the lease back, in the middle of the second's watch, and tries to write once more."""
    assert hosts.first.take()
    assert hosts.first.write()
    hosts.act = hosts.first.lease.release
    assert hosts.second.take()
    assert hosts.second.write()
    assert not hosts.first.write()
    assert "given back" in hosts.first.why


TIMINGS = (together, late, killed, paused, partitioned, handed_over)


@pytest.mark.parametrize("timing", TIMINGS, ids=lambda timing: timing.__name__)
def test_two_hosts_never_both_write(
    timing: Callable[[Hosts], None], place: Callable[[], LeaseStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes has the highest number so far: no write of an older holder follows one of a newer."""
    hosts = Hosts(place, monkeypatch)
    timing(hosts)
    numbers = [number for _, number in hosts.log]
    assert numbers, "somebody wrote"
    assert numbers == sorted(numbers)
    assert len(set(hosts.log)) == len(set(numbers)), "no two hosts with one number"
