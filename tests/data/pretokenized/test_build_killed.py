"""Prepared indexes are the same bytes however often the build was killed or the disk was full."""

import contextlib
import dataclasses
import io
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from jtrain.data.pretokenized.build import prepare
from jtrain.data.pretokenized.reader import PreparedIndex
from tests.data.two_sources import contents, recipes_of, write_lines

SCRIPT = """
import os, shutil, signal, sys
from pathlib import Path
from jtrain.cli.run import run
from jtrain.data.pretokenized import writer
from jtrain.data.pretokenized.build import prepare
from jtrain.data.pretokenized.build_process import BuildProcess
from jtrain.data.sources.source import Source
from jtrain.data.pretokenized.shard import Recipe

folder, tokenizer, instant, shard_bytes = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
recipes = [
    Recipe(
        name=name, source=Source(path=f"{folder}/{name}.jsonl", mask_field=mask), tokenizer=tokenizer,
        cache_dir=folder / "cache",
    )
    for name, mask in (("web", None), ("book", "mask"))
]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

write, rename, unlink = BuildProcess.write_whole, Path.rename, Path.unlink
if instant == "while-appending":
    writer._copy = lambda source, target, size: (target.write(source.read(size // 2)), target.flush(), die())
elif instant == "appended-but-not-noted":
    BuildProcess.write_whole = lambda one, path, text: die() if "state.json" in path.name else write(one, path, text)
elif instant == "noted-but-not-removed":
    Path.unlink = lambda path, **kw: die() if path.name.endswith(".unit") else unlink(path, **kw)
elif instant == "while-removing":
    rmtree = shutil.rmtree
    def remove_plan(path, **kw):
        if not path.name.endswith(".partial"):
            return rmtree(path, **kw)
        (path / "plan.json").unlink(missing_ok=True)
        die()
    shutil.rmtree = remove_plan
elif instant == "planned":
    BuildProcess.write_whole = lambda self, path, text: (write(self, path, text), path.name == "plan.json" and die())
elif instant == "not-yet-planned":
    BuildProcess.write_whole = lambda self, path, text: die() if path.name == "plan.json" else write(self, path, text)
elif instant == "not-yet-sealed":
    BuildProcess.write_whole = lambda self, path, text: die() if path.name == "index.json" else write(self, path, text)
elif instant == "sealed-but-not-in-place":
    Path.rename = lambda path, to: die() if path.name.endswith(".partial") else rename(path, to)
elif instant == "limited":
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))

def main():
    prepare(recipes, folder / "out", workers=2, stream=sys.stdout, shard_bytes=shard_bytes)
    return 0

sys.exit(run(main))
"""

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
    command = [sys.executable, "-c", SCRIPT, str(folder), tokenizer, instant, str(shard_bytes)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """Returns the output of a process that must succeed."""
    said, erred = process.communicate(timeout=120)
    assert process.returncode == 0, erred
    return said, erred


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
        *((instant, 1) for instant in INSTANTS if instant != "appended-but-not-noted"),
        ("appended-but-not-noted", 2),
        *(
            pytest.param(instant, 2, marks=pytest.mark.slow)
            for instant in INSTANTS
            if instant != "appended-but-not-noted"
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


@pytest.mark.parametrize("kills", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_random_kills_change_no_byte_and_leave_no_worker(
    kills: int, tokenizer_json: Path, tmp_path: Path
) -> None:
    """SIGKILL reaches the parent alone; its workers, in the middle of their shards, exit by themselves."""
    write_lines(tmp_path, lines=12_000)
    rng = random.Random(kills)
    unfinished = watched = 0
    for _ in range(kills):
        process = start(tmp_path, tokenizer=str(tokenizer_json), shard_bytes=1 << 14)
        while process.poll() is None and not any((tmp_path / "out").glob(".*.partial")):
            time.sleep(0.01)  # how long a start takes depends on the machine; what is killed must be at work
        time.sleep(rng.uniform(0.0, 0.4))
        workers = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
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


@pytest.mark.parametrize("shard_bytes", [2048, 1 << 20])
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
