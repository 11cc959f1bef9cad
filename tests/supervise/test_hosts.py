"""Supervisors of several hosts over one folder: rounds, the processes of the others, and who has a process's
place.
"""

import json
from pathlib import Path

import pytest

from jtrain.runtime import lease
from jtrain.supervise import hosts
from jtrain.supervise.heart import Beat
from jtrain.supervise.hosts import Hosts, Round
from jtrain.supervise.verdict import Watched


def watched(name: str) -> Watched:
    return Watched(name, None, Beat(1, 2, 0, 7, "step", 0.5, 0.1, "", None), 0.25)


def test_the_first_fault_begins_a_round_and_all_wait_for_the_end_of_the_one_before(tmp_path: Path) -> None:
    first, second = (Hosts(tmp_path, process=process, processes=2) for process in (0, 1))
    assert first.newer_round() is None
    second.announce("process 1 died", final=None, save=True)
    second.announce("told once", final=75, save=False)
    news = first.newer_round()
    assert news is not None
    assert news == Round(2, "told once", 75, save=False)
    first.follow(news)
    first.wait_ended(timeout_s=0.0)
    second.wait_ended(timeout_s=60.0)  # returns, because the other one has ended
    assert (tmp_path / "supervise" / "ended-before-0").read_text() == "2"
    assert Hosts(tmp_path, process=0, processes=2).round == 2, "a supervisor that starts later takes part"


def test_a_supervisor_sees_what_the_others_tell_and_for_how_long_they_are_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (Hosts(tmp_path, process=process, processes=2) for process in (0, 1))
    assert first.other_processes() == []
    second.tell([watched("process 1 on b")])
    assert first.other_processes() == [watched("process 1 on b")]
    now_s = lease.time.monotonic() + 12.0
    monkeypatch.setattr(lease.time, "monotonic", lambda: now_s)
    [seen] = first.other_processes()
    assert seen.beat_age_s == pytest.approx(0.25 + 12.0 - 2.0, abs=0.5), "it beats every 2 s"


def test_a_supervisor_whose_place_was_taken_knows_by_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler has replaced its host, which comes back."""
    old = Hosts(tmp_path, process=1, processes=2)
    old.tell([watched("old")])
    assert old.replaced_by is None
    new = Hosts(tmp_path, process=1, processes=2)
    new.tell([])
    monkeypatch.setattr(hosts, "TELL_S", 0.0)  # it tells again at once
    old.tell([watched("old")])
    [record] = (tmp_path / "supervise" / "process-1").iterdir()
    assert record.name == "2"
    assert json.loads(record.read_text())["payload"] == []
    assert (old.replaced_by or "").startswith("process ")
    old.close()
    assert [path.name for path in (tmp_path / "supervise" / "process-1").iterdir()] == ["2"], "left alone"
    new.close()
