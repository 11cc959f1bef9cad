"""Files of a run on disks that fill up, become read-only or hold garbage: records stay whole and in order."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jtrain.errors import FileError
from jtrain.telemetry import append_file
from jtrain.telemetry.append_file import AppendFile, keep_lines, parse_line
from jtrain.telemetry.goodput import EVENTS, FILE, Ledger, read_events
from jtrain.telemetry.metrics import drop_after, encode, read
from jtrain.train.bad_steps.decisions_file import read_decisions
from tests.small_disk import fill, small_disk


def records(count: int, start: int = 0) -> list[bytes]:
    """Lines of 1 kB: a page of a disk does not hold a whole number of them."""
    return [encode({"step": step, "text": "x" * 980}).encode() for step in range(start, start + count)]


def test_a_disk_that_fills_up_and_gets_room_again_has_every_record(tmp_path: Path) -> None:
    """One warning, one line when it is over; a half record is never left."""
    said: list[str] = []
    with small_disk(tmp_path / "disk", 256) as disk:
        file = AppendFile(disk / "metrics.jsonl", say=said.append)
        file.append(records(1)[0])
        filler = fill(disk, leave_bytes=8192)
        for record in records(20, start=1):
            file.append(record)
        assert len(said) == 1
        assert "metrics.jsonl cannot be written (No space left on device): training goes on" in said[0]
        content = (disk / "metrics.jsonl").read_bytes()
        assert content.endswith(b"\n")
        assert 1 < len(read(disk / "metrics.jsonl")) < 21, "some fitted"
        filler.unlink()
        file.append(records(1, start=21)[0])
        assert said[1:] == [f"{disk / 'metrics.jsonl'} is written again: all records are in it"]
        file.close()
        assert (disk / "metrics.jsonl").read_bytes() == b"".join(records(22))
        assert len(said) == 2


def test_what_is_lost_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory holds so much; the rest, and what still waits at the end, is said as a number."""
    said: list[str] = []
    with small_disk(tmp_path / "disk", 64) as disk:
        file = AppendFile(disk / "log", say=said.append)
        file.append(b"first\n" + b"." * 4089 + b"\n")  # a page that is full
        filler = fill(disk)
        monkeypatch.setattr(append_file, "KEPT_BYTES", 4000)
        for record in records(5):
            file.append(record)
        assert len(said) == 1
        filler.unlink()
        file.append(b"." * 4090 + b"last\n")
        assert said[1:] == [f"{disk / 'log'} is written again: 3 records are lost"]
        assert (disk / "log").read_bytes()[4096:] == b"".join(records(3))
        fill(disk)
        for record in records(3):  # the first fits into the last page
            file.append(record)
        file.close()
        assert said[-1].endswith(
            "2 records are lost, because it could not be written (No space left on device)"
        )
        assert len(said) == 4


def test_a_path_that_cannot_be_opened_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And once it can, everything is there."""
    (tmp_path / "log").mkdir()
    file = AppendFile(tmp_path / "log")
    file.append(b"1\n")
    assert "log cannot be written (Is a directory)" in capsys.readouterr().err
    (tmp_path / "log").rmdir()
    file.append(b"2\n")
    file.close()
    assert (tmp_path / "log").read_bytes() == b"1\n2\n"


@pytest.mark.parametrize("kind", ["a folder", "a pipe"])
def test_records_in_no_file_are_one_message(tmp_path: Path, kind: str) -> None:
    """A pipe would block the start for ever."""
    path = tmp_path / "metrics.jsonl"
    path.mkdir() if kind == "a folder" else os.mkfifo(path)
    with pytest.raises(
        FileError, match=f"metrics.jsonl is {kind}, but a run keeps its records .* Move it away"
    ):
        keep_lines(path, lambda line: True)
    with pytest.raises(FileError, match=f"is {kind}"):
        read_decisions(path, print)


def test_decisions_with_missing_keys_are_set_aside(tmp_path: Path) -> None:
    """One message, and the whole ones are kept: batches left out stay left out."""
    path, messages = tmp_path / "bad_steps.jsonl", []
    whole = '{"step": 7, "action": "repeats", "since": 8, "left_out": [7]}'
    damaged = (
        '{"action": "repeats"}',
        '{"step": 9, "action": "repeats", "since": 9}',
        '{"action": "went back"}',
        '{"step": 9, "action": "repeats", "since": "9", "left_out": [7]}',
        '{"step": true, "action": "found"}',
    )
    path.write_text("\n".join([whole, *damaged]) + "\n")
    assert read_decisions(path, messages.append) == ((7,), 8, [])
    assert len(messages) == 1
    assert path.read_text() == whole + "\n"


GARBAGE = (
    b"\x00" * 300 + b"\n",
    b"\xff\xfe\x80garbage\n",
    b'{"step": 3, "loss_n{"step": 4, "loss_nats": 1.0}\n',  # a line cut in the middle, and the next one
    b"[" * 100_000 + b"\n",
    b"\n",
    b"null\n",
    b'{"step": "3"}\n',
    b'{"step": true}\n',
    b'{"step": 1e999}\n',
    b'{"loss_nats": 2.0}\n',
    b'{"step": 9',
)


def test_bad_lines_are_set_aside_wherever_they_are(tmp_path: Path) -> None:
    """Good lines keep their bytes and order; a second time there is nothing to do."""
    path = tmp_path / "metrics.jsonl"
    good = records(len(GARBAGE), start=1)
    path.write_bytes(b"".join(line for pair in zip(good, GARBAGE, strict=True) for line in pair))
    assert [line["step"] for line in read(path)] == list(range(1, len(GARBAGE) + 1))
    assert drop_after(path, 7) == len(GARBAGE)
    assert path.read_bytes() == b"".join(good[:7])
    aside = tmp_path / "metrics.jsonl.damaged"
    assert aside.read_bytes() == b"".join(GARBAGE) + b"\n"
    inode = path.stat().st_ino
    assert drop_after(path, 7) == 0
    assert path.stat().st_ino == inode
    path.write_bytes(path.read_bytes() + b"more\n")
    assert drop_after(path, 7) == 1
    assert aside.read_bytes() == b"".join(GARBAGE) + b"\nmore\n"


@settings(max_examples=50)
@given(st.binary(max_size=200), st.integers(0, 40))
def test_any_bytes_anywhere_cost_at_most_the_lines_they_touch(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int
) -> None:
    path = tmp_path_factory.mktemp("noise") / "metrics.jsonl"
    good = [json.dumps({"step": step}).encode() + b"\n" for step in range(4)]
    whole = b"".join(good)
    path.write_bytes(whole[:at] + noise + whole[at:])
    keep_lines(path, lambda line: True if type(line.get("step")) is int else None)
    kept = path.read_bytes().splitlines(keepends=True)
    assert all(parse_line(line) is not None for line in kept)
    cut = at // len(good[0])
    assert [line for line in kept if line in good[:cut]][:cut] == good[:cut]
    assert kept[len(kept) - (3 - cut) :] == good[cut + 1 :] if cut < 3 else True


def test_goodput_goes_on_over_damaged_lines_and_full_disks(tmp_path: Path) -> None:
    """Seconds that could not be written are written later; bad lines are set aside; the sums fit the wall
    time.
    """
    said: list[str] = []
    with small_disk(tmp_path / "disk", 64) as disk:
        first = Ledger(disk, start_step=0, started_s=1000.0, say=said.append)
        first.write(1)
        filler = fill(disk)
        for step in range(2, 60):
            first.write(step)
        assert [text.partition(" cannot")[0] for text in said] == [
            f"warning: {disk / FILE}",
            f"warning: {disk / EVENTS}",
        ]
        filler.unlink()
        first.close()
        assert {text.partition(" is written")[0] for text in said[2:]} == {
            str(disk / FILE),
            str(disk / EVENTS),
        }
        (attempt,) = read_events(disk / EVENTS)
        assert attempt.last_step == 59
        lines = (disk / EVENTS).read_bytes().splitlines(keepends=True)
        assert len(lines) == 61
        bad = [b'{"event": "interval", "time_s": 3}\n', b'{"event": "interv{"event": "end"}\n', b"\x00\n"]
        (disk / EVENTS).write_bytes(bad[0] + b"".join(lines[:20]) + bad[1] + b"".join(lines[20:]) + bad[2])
        said.clear()
        second = Ledger(disk, start_step=59, started_s=attempt.end_s + 5.0, say=said.append)
        assert said == [f"warning: 3 lines of {disk / EVENTS} could not be read; moved to {EVENTS}.damaged"]
        summary = second.close()
        assert summary is not None
        assert sum(summary["categories"].values()) == pytest.approx(summary["wall_s"], abs=1e-5)
        assert summary["categories"]["idle"] >= 5.0
        assert (disk / f"{EVENTS}.damaged").read_bytes() == b"".join(bad)
        (disk / EVENTS).write_bytes(b"".join(lines[1:]))  # the start is lost
        (attempt,) = read_events(disk / EVENTS)
        assert attempt.last_step == 59
