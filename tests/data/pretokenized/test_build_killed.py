"""Prepared indexes are the same bytes however often the build was killed or the disk was full."""

import contextlib
import dataclasses
import io
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from jtrain.data.pretokenized.build import prepare
from jtrain.data.pretokenized.reader import PreparedIndex
from tests.data.two_sources import contents, recipes_of, write_lines
from tests.processes import program

INSTANTS = (
    "not-yet-planned",
    "planned",
    "while-appending",
    "appended-but-not-noted",
    "noted-but-not-removed",
    "not-yet-sealed",
    "sealed-but-not-in-place",
)


def start(
    folder: Path, *, tokenizer: str = "bytes", instant: str = "none", shard_bytes: int = 2048
) -> "subprocess.Popen[str]":
    """Starts a process that prepares and dies at that instant."""
    command = program(__file__, "build_and_die", folder, tokenizer, instant, shard_bytes)
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """Returns the output of a process that must succeed."""
    said, erred = process.communicate(timeout=120)
    assert process.returncode == 0, erred
    return said, erred


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Processes that it has started and that live; none if it has ended itself."""
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file in `folder`, by name; files that go meanwhile are left out."""
    bytes_by_name: dict[str, int] = {}
    for path in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):
            bytes_by_name[path.name] = path.stat().st_size
    return bytes_by_name


def no_worker_left(workers: list[psutil.Process]) -> bool:
    """True if all processes go; the limit is long because the machine may be busy."""
    _, alive = psutil.wait_procs(workers, timeout=120)
    return not alive


@pytest.fixture
def unbroken(tmp_path: Path) -> dict[str, bytes]:
    """Index that an undisturbed call makes of 600 lines."""
    write_lines(tmp_path, lines=600)
    prepare(recipes_of(tmp_path), tmp_path / "unbroken", workers=1, stream=io.StringIO(), shard_bytes=2048)
    return contents(tmp_path / "unbroken")


@pytest.mark.parametrize(
    ("instant", "kills"),
    [
        ("while-appending", 1),
        ("appended-but-not-noted", 2),
        *(
            pytest.param(instant, kills, marks=pytest.mark.slow)
            for instant in INSTANTS
            for kills in (1, 2)
            if (instant, kills) != ("while-appending", 1) and instant != "appended-but-not-noted"
        ),
    ],
)
def test_a_kill_at_this_instant_changes_no_byte(
    instant: str, kills: int, unbroken: dict[str, bytes], tmp_path: Path
) -> None:
    """Kills the build at each place where the order of writes matters, also twice in a row."""
    for _ in range(kills):
        process = start(tmp_path, instant=instant)
        process.communicate(timeout=300)
        assert process.returncode == -signal.SIGKILL
    finish(start(tmp_path))
    assert contents(tmp_path / "out") == unbroken


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_random_kills_change_no_byte_and_leave_no_worker(
    kills: int, tokenizer_json: Path, tmp_path: Path
) -> None:
    """SIGKILL reaches the parent alone; its workers, in the middle of their shards, exit by themselves."""
    write_lines(tmp_path, lines=12_000)
    rng = random.Random(kills)
    unfinished = watched = 0
    # The first one is killed as soon as it is at work: on a slow machine later ones may end before their kill.
    for wait_s in [0.0, *(rng.uniform(0.0, 0.4) for _ in range(kills - 1))]:
        sizes_before = sizes(tmp_path / "out")
        process = start(tmp_path, tokenizer=str(tokenizer_json), shard_bytes=1 << 14)
        workers: list[psutil.Process] = []
        # How long a start takes depends on the machine; files of the process before are no work of this one.
        while process.poll() is None and not (workers and sizes(tmp_path / "out") != sizes_before):
            time.sleep(0.01)
            workers = workers_of(process)
        time.sleep(wait_s)
        workers = workers_of(process) or workers
        process.kill()
        process.communicate()
        assert no_worker_left(workers)
        watched += len(workers)
        unfinished += any((tmp_path / "out").glob(".*.partial"))
    assert unfinished, "some kill must have met a write, or this proves nothing"
    assert watched, "some kill must have met a worker"
    finish(start(tmp_path, tokenizer=str(tokenizer_json), shard_bytes=1 << 14))
    killed = contents(tmp_path / "out")
    again = recipes_of(tmp_path, tokenizer=str(tokenizer_json))
    prepare(again, tmp_path / "unbroken", workers=2, stream=io.StringIO(), shard_bytes=1 << 14)
    assert killed == contents(tmp_path / "unbroken")


@contextlib.contextmanager
def killer_of_workers(at_most: int) -> Iterator[list[int]]:
    """Kills up to `at_most` workers of this process as soon as they are seen."""
    killed: list[int] = []
    done = threading.Event()

    def kill() -> None:
        while not done.is_set() and len(killed) < at_most:
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):
                    if (
                        child.pid not in killed
                        and len(killed) < at_most
                        and "shard.serve" in " ".join(child.cmdline())
                    ):
                        child.kill()
                        killed.append(child.pid)
            time.sleep(0.01)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        done.set()
        thread.join()


def test_workers_killed_alone_are_replaced(unbroken: dict[str, bytes], tmp_path: Path) -> None:
    stream = io.StringIO()
    with killer_of_workers(at_most=2) as killed:
        prepare(recipes_of(tmp_path), tmp_path / "out", workers=2, stream=stream, shard_bytes=2048)
    assert len(killed) == 2
    assert re.search(
        r"a worker died \(SIGKILL\) on records 0 to \d+ of web; doing it again", stream.getvalue()
    )
    assert contents(tmp_path / "out") == unbroken


@pytest.mark.parametrize(("name", "field"), [("web", "data.sources.web"), ("data", "data")])
def test_a_shard_that_kills_every_worker_is_named(name: str, field: str, tmp_path: Path) -> None:
    write_lines(tmp_path, lines=100)
    recipe = dataclasses.replace(recipes_of(tmp_path)[0], name=name)
    message = (
        rf"^{field}: 3 workers died \(SIGKILL\) on records 0 to 99 of {name}\. .*lower --workers.*goes "
        r"on where"
    )
    with killer_of_workers(at_most=99), pytest.raises(OSError, match=message):
        prepare([recipe], tmp_path / "out", workers=1, stream=io.StringIO())


@pytest.mark.parametrize("shard_bytes", [pytest.param(2048, marks=pytest.mark.slow), 1 << 20])
def test_a_full_disk_is_one_message_and_the_next_call_goes_on(shard_bytes: int, tmp_path: Path) -> None:
    """A limit on file sizes stands in for the disk: writes fail the same way, in the parent or in a
    worker.
    """
    write_lines(tmp_path, lines=600)
    process = start(tmp_path, instant="limited", shard_bytes=shard_bytes)
    _, erred = process.communicate(timeout=300)
    assert process.returncode == 2
    assert re.fullmatch(
        r"error: --out \S+/out: the disk is full, or a limit on the size of files is reached \(.*\); [\d,]+ "
        r"MiB are free\. Make room and run the same command again: it goes on where this one stopped\.\n",
        erred,
    )
    assert not list((tmp_path / "out").rglob("*.tmp"))
    finish(start(tmp_path, shard_bytes=shard_bytes))
    prepare(
        recipes_of(tmp_path), tmp_path / "unbroken", workers=1, stream=io.StringIO(), shard_bytes=shard_bytes
    )
    assert contents(tmp_path / "out") == contents(tmp_path / "unbroken")


def test_after_a_full_disk_what_was_done_is_not_done_again(
    unbroken: dict[str, bytes], tmp_path: Path
) -> None:
    process = start(tmp_path, instant="limited")
    process.communicate(timeout=300)
    assert process.returncode == 2
    said, _ = finish(start(tmp_path))
    assert (found := re.search(r"web: goes on after (\d+) of 600 records", said))
    assert int(found[1]) > 100
    assert contents(tmp_path / "out") == unbroken


def test_an_unfinished_index_of_something_else_is_not_gone_on_with(tmp_path: Path) -> None:
    write_lines(tmp_path, lines=600)
    process = start(tmp_path, instant="noted-but-not-removed")
    process.communicate(timeout=300)
    [state] = (tmp_path / "out").glob(".*.partial/*.state.json")
    name = state.parent.name.split(".")[1]
    (tmp_path / f"{name}.jsonl").write_text('{"text": "new", "mask": []}\n' * 600)
    stream = io.StringIO()
    prepare(recipes_of(tmp_path), tmp_path / "out", workers=1, stream=stream, shard_bytes=2048)
    assert f"{name}: an unfinished index of other data was there; starting afresh." in stream.getvalue()
    assert PreparedIndex(tmp_path / "out" / name).num_tokens == 600 * 5


def test_an_index_of_something_else_is_removed_whole_even_if_its_removal_was_killed(tmp_path: Path) -> None:
    write_lines(tmp_path, lines=600)
    start(tmp_path, instant="noted-but-not-removed").communicate(timeout=300)
    [state] = (tmp_path / "out").glob(".*.partial/*.state.json")
    name = state.parent.name.split(".")[1]
    (tmp_path / f"{name}.jsonl").write_text('{"text": "new", "mask": []}\n' * 600)
    process = start(tmp_path, instant="while-removing")
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    assert state.exists(), "the kill must leave a part of the old index"
    prepare(recipes_of(tmp_path), tmp_path / "out", workers=1, stream=io.StringIO(), shard_bytes=2048)
    assert PreparedIndex(tmp_path / "out" / name).num_tokens == 600 * 5


def test_a_shard_that_lost_its_middle_with_the_machine_is_made_again(
    unbroken: dict[str, bytes], tmp_path: Path
) -> None:
    """Shards are not synced, so after a power cut one may have holes in it."""
    process = start(tmp_path, instant="while-appending")
    process.communicate(timeout=300)
    units = sorted((tmp_path / "out").glob(".*.partial/*.unit"))
    assert units
    content = bytearray(units[0].read_bytes())
    content[100:200] = bytes(100)
    units[0].write_bytes(content)
    finish(start(tmp_path))
    assert contents(tmp_path / "out") == unbroken
