"""Leases: one holder at a time, numbers that grow, dead holders that are found out, and one that lost it."""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from jtrain.runtime import lease
from jtrain.runtime.lease import Lease, LeaseHeld, LeaseLost, Rival
from jtrain.runtime.lease_stores import Entry, FolderStore, MessageStore


@contextlib.contextmanager
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Context of a process of another machine."""
    with monkeypatch.context() as patch:
        patch.setattr(lease, "this_machine", lambda: "elsewhere")
        yield


def quiet(*_: object) -> None:
    """Hears nothing."""


def test_a_lease_is_held_by_one_until_it_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holder has a higher number, also after a release."""
    one = Lease(FolderStore(tmp_path / "a"))
    with elsewhere(monkeypatch):
        other = Lease(FolderStore(tmp_path / "a"))
    assert (one.try_take(), other.try_take(), one.try_take()) == (True, False, True)
    assert FolderStore(tmp_path / "a").read().number == 1
    one.release()
    assert (other.try_take(), one.try_take()) == (True, False)
    assert FolderStore(tmp_path / "a").read().number == 2
    other.release()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["2.released"]


def test_a_holder_elsewhere_is_dead_when_its_record_was_not_written_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both clocks have to say so, the file server's and that of the process that watches; here they are the
    test's.
    """
    now_s, age_s, beats = 0.0, 0.0, itertools.count()
    monkeypatch.setattr(lease.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(FolderStore, "age_s", lambda self, entry: age_s)
    monkeypatch.setattr(lease, "WATCH_S", 10.0)
    with elsewhere(monkeypatch):
        holder = Lease(FolderStore(tmp_path), beat_s=0.0, payload=lambda: next(beats))
    assert holder.try_take()
    rival = Rival(FolderStore(tmp_path))
    assert rival.is_alive() is None, "not yet known"
    for _ in range(3):
        now_s += 100.0
        version = rival.entry.version
        while FolderStore(tmp_path).read().version == version:
            holder.beat()  # until the clock of files has moved
        assert rival.is_alive() is True
        assert rival.entry.holder is not None
    age_s = 1000.0
    assert rival.is_alive() is None, "an old record, but watched for no time: the server's clock may be wrong"
    now_s += 11.0
    age_s = 59.0
    assert rival.is_alive() is None, "watched for long, but written a moment ago"
    age_s = 60.0
    assert rival.is_alive() is False
    age_s = -4 * 3600.0
    assert rival.is_alive() is None, "the server's clock was set back since"
    now_s += 110.0
    assert rival.is_alive() is False, "nobody has beaten for two minutes of this process"
    taker = Lease(FolderStore(tmp_path), beat_s=0.0)
    taker.seize(rival.entry)
    assert FolderStore(tmp_path).read().number == 2
    now_s += 100.0
    with pytest.raises(LeaseLost, match=r"taken over by process \d+ on host"):
        holder.check()


def test_a_state_that_was_judged_before_another_one_took_over_takes_nothing(tmp_path: Path) -> None:
    first = Lease(FolderStore(tmp_path), beat_s=0.0)
    assert first.seize()
    judged = FolderStore(tmp_path).read()
    assert Lease(FolderStore(tmp_path), beat_s=0.0).seize(judged)
    late = Lease(FolderStore(tmp_path), beat_s=0.0)
    assert not late.seize(judged)
    assert not late.is_held
    assert FolderStore(tmp_path).read().number == 2


def test_a_living_holder_is_named_with_its_payload(tmp_path: Path) -> None:
    holder = Lease(FolderStore(tmp_path), beat_s=0.0, payload=lambda: {"phase": "step", "step": 7})
    holder.take(watching=quiet, taken_over=quiet)
    with pytest.raises(LeaseHeld, match=r"in use by process \d+ on host \S+, since 20") as held:
        Lease(FolderStore(tmp_path)).take(watching=quiet, taken_over=quiet)
    entry = FolderStore(tmp_path).read()
    assert entry.holder == held.value.holder
    assert entry.payload == {"phase": "step", "step": 7}


def test_a_process_id_that_is_used_again_is_another_holder(tmp_path: Path) -> None:
    record = {"holder": dataclasses.asdict(lease.this_holder()), "payload": None}
    record["holder"]["started"] = "1"
    assert FolderStore(tmp_path).create(Entry(0, None), json.dumps(record).encode())
    assert Rival(FolderStore(tmp_path)).is_alive() is False


def test_a_lease_told_by_messages_ends_with_the_watcher() -> None:
    """A watcher that does not read now loses nothing; one that is gone is noticed once."""
    answers: list[type[OSError] | None] = [None, BlockingIOError, BrokenPipeError]
    lost: list[str] = []

    def send(record: bytes) -> None:
        if (error := answers.pop(0)) is not None:
            raise error

    holder = Lease(MessageStore(send), beat_s=0.0, on_lost=lambda: lost.append("lost"))
    assert holder.seize()
    holder.beat()
    assert holder.is_held
    holder.beat()
    holder.beat()
    assert (holder.is_held, lost, answers) == (False, ["lost"], [])
