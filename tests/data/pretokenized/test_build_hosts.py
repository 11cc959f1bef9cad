"""Several processes that prepare into one folder make the bytes that one makes, whichever of them die."""

import contextlib
import dataclasses
import io
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from jtrain.data.pretokenized import claims
from jtrain.data.pretokenized.build import prepare
from jtrain.data.pretokenized.claims import BuildProcess
from jtrain.errors import FileError
from tests.data.two_sources import contents, recipes_of, write_lines

SCRIPT = """
import sys
from pathlib import Path
from jtrain.data.pretokenized import claims, writer
from jtrain.data.pretokenized.build import prepare
from jtrain.data.sources.source import Source
from jtrain.data.pretokenized.shard import Recipe

folder, out, tokenizer, machine = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
if machine != "this":
    claims._machine = lambda: machine
    claims.BEAT_S, claims.STALE_S = 0.1, 2.0
recipes = [
    Recipe(
        name=name, source=Source(path=f"{folder}/{name}.jsonl", mask_field=mask), tokenizer=tokenizer,
        cache_dir=folder / "cache",
    )
    for name, mask in (("web", None), ("book", "mask"))
]
add = writer.IndexWriter.add
writer.IndexWriter.add = lambda self, shard: (print("made", self.recipe.name, shard, flush=True), add(self, shard))
prepare(recipes, out, workers=1, stream=sys.stderr, shard_bytes=1 << 14)
"""


@dataclasses.dataclass(frozen=True)
class Build:
    """Sources of some 80 shards in `folder`, the bytes that one undisturbed call makes, and the folder `out`."""

    folder: Path
    tokenizer: Path
    unbroken: dict[str, bytes]
    out: Path


@pytest.fixture(scope="module")
def sources(tokenizer_json: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder = tmp_path_factory.mktemp("sources")
    write_lines(folder, lines=9000)
    recipes = recipes_of(folder, tokenizer=str(tokenizer_json))
    prepare(recipes, folder / "unbroken", workers=1, stream=io.StringIO(), shard_bytes=1 << 14)
    return Build(folder, tokenizer_json, contents(folder / "unbroken"), folder)


@pytest.fixture
def build(sources: Build, tmp_path: Path) -> Build:
    return dataclasses.replace(sources, out=tmp_path / "out")


@contextlib.contextmanager
def start(build: Build, machine: str = "this") -> Iterator["subprocess.Popen[str]"]:
    """Starts a process that prepares; `machine` names the one that it believes to run on."""
    command = [sys.executable, "-c", SCRIPT, str(build.folder), str(build.out), str(build.tokenizer), machine]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until_it_made(process: "subprocess.Popen[str]", shards: int) -> None:
    """Waits until the process has made some shards."""
    assert process.stdout is not None
    for _ in range(shards):
        assert process.stdout.readline().startswith("made ")


@contextlib.contextmanager
def standing_still(process: "subprocess.Popen[str]") -> Iterator[None]:
    """Stops a process during the block; a stopped process is alive."""
    process.send_signal(signal.SIGSTOP)
    yield
    process.send_signal(signal.SIGCONT)


def finish(process: "subprocess.Popen[str]") -> list[str]:
    """Returns the shards that a process made, which must succeed."""
    said, erred = process.communicate(timeout=120)
    assert process.returncode == 0, erred
    assert re.search(r"web: 9,000 records, [\d,]+ tokens\.", erred), "each process tells that the whole is complete"
    return said.splitlines()


def test_two_processes_share_the_work_and_make_the_same_bytes(build: Build) -> None:
    with start(build) as one:
        until_it_made(one, 5)
        with standing_still(one), start(build) as other:
            until_it_made(other, 1)
            one.send_signal(signal.SIGCONT)
            made = finish(one), finish(other)
    assert min(map(len, made)) > 10, "both must have worked"
    shards = [line for lines in made for line in lines]
    assert len(shards) == len(set(shards)) > 50, "no shard was made twice"
    assert contents(build.out) == build.unbroken


@pytest.mark.parametrize("machines", [("this", "this"), ("one", "other")], ids=["one-machine", "two-machines"])
@pytest.mark.parametrize(
    "first", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["the-one-that-appends", "the-other"]
)
def test_a_killed_process_is_replaced_by_the_other(machines: tuple[str, str], first: bool, build: Build) -> None:
    """The process that comes first appends the shards; on another machine only its heartbeat tells that it is dead."""
    with start(build, machines[0]) as one:
        until_it_made(one, 5)
        with start(build, machines[1]) as other:
            with standing_still(one):  # or it might be done before the other begins
                until_it_made(other, 3)
            (one if first else other).kill()
            finish(other if first else one)
    assert contents(build.out) == build.unbroken


def test_a_process_that_stood_still_and_was_replaced_does_no_harm(build: Build) -> None:
    """Stops one until the other has taken over its work, or finished it."""
    with start(build, "one") as one:
        until_it_made(one, 5)
        with standing_still(one), start(build, "other") as other:
            partial = build.out / ".web.partial"
            end_s = time.monotonic() + 60
            while partial.exists() and "other" not in (BuildProcess(build.out).holder(partial / "writer.claim") or ""):
                assert time.monotonic() < end_s
                time.sleep(0.05)
            one.send_signal(signal.SIGCONT)
            finish(one)
            finish(other)
    assert contents(build.out) == build.unbroken


@pytest.mark.slow
def test_a_process_that_wakes_after_the_end_finds_the_index(build: Build) -> None:
    with start(build, "one") as one:
        until_it_made(one, 5)
        one.send_signal(signal.SIGSTOP)
        with start(build, "other") as other:
            finish(other)
        one.send_signal(signal.SIGCONT)
        finish(one)
    assert contents(build.out) == build.unbroken


def test_other_data_is_refused_while_a_process_is_at_work(build: Build) -> None:
    with start(build) as one:
        until_it_made(one, 3)
        message = r"out/\.web\.partial: another process is writing an index of other data there\. Wait until it ends"
        with standing_still(one), pytest.raises(FileError, match=message):  # or it might be done before
            prepare(recipes_of(build.folder), build.out, workers=1, stream=io.StringIO(), shard_bytes=1 << 14)
        finish(one)
    [row, _] = prepare(recipes_of(build.folder), build.out, workers=1, stream=io.StringIO(), shard_bytes=1 << 14)
    assert row.state == "made"


def test_a_claim_is_held_by_one_until_it_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with BuildProcess(tmp_path) as host:
        monkeypatch.setattr(claims, "_machine", lambda: "elsewhere")
        with BuildProcess(tmp_path) as other:
            path = tmp_path / "a.claim"
            assert (host.claim(path), other.claim(path), host.claim(path)) == (True, False, True)
            other.release(path)
            assert host.holder(path) == host.name
            host.release(path)
            assert (other.claim(path), host.claim(path)) == (True, False)
        assert host.claim(path), "whoever ends gives back"
    assert list(tmp_path.iterdir()) == []


def test_a_process_elsewhere_is_dead_when_it_has_not_counted_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the time it counts on, the other half it does not; the time is the test's own."""
    now_s = 0.0
    monkeypatch.setattr(claims, "time", types.SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(claims, "BEAT_S", 0.01)
    with BuildProcess(tmp_path) as host:
        monkeypatch.setattr(claims, "_machine", lambda: "elsewhere")
        with BuildProcess(tmp_path) as other:
            path, count = tmp_path / "a.claim", tmp_path / ".hosts" / other.name
            assert other.claim(path)
            for _ in range(5):
                assert not host.claim(path)
                now_s += claims.STALE_S
                seen = count.read_text()
                while count.read_text() == seen:
                    time.sleep(0.01)  # the beat of another host is a file that changes
            other._closed.set()
            assert other._thread is not None
            other._thread.join()
            assert not host.claim(path), "it has counted since the last look"
            now_s += claims.STALE_S - 1
            assert not host.claim(path)
            now_s += 1
            assert host.claim(path)
            assert host.holder(path) == host.name


def test_a_process_of_this_machine_is_dead_as_soon_as_it_is_gone(tmp_path: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
from jtrain.data.pretokenized.claims import BuildProcess
host = BuildProcess(Path({str(tmp_path)!r})).__enter__()
host.claim(Path({str(tmp_path / "a.claim")!r}))
print(host.name, flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    with BuildProcess(tmp_path) as host:
        assert host.is_alive(name) is True
        assert not host.claim(tmp_path / "a.claim")
        process.kill()
        process.communicate()
        assert host.is_alive(name) is False
        assert host.claim(tmp_path / "a.claim")
    assert list(tmp_path.iterdir()) == [], "what the dead one left is removed"


def test_an_empty_claim_is_taken_over_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process was killed between making the file and writing its name."""
    monkeypatch.setattr(claims, "STALE_S", 0.1)
    (tmp_path / "a.claim").touch()
    with BuildProcess(tmp_path) as host:
        assert not host.claim(tmp_path / "a.claim")
        time.sleep(0.2)
        assert host.claim(tmp_path / "a.claim")
        assert os.listdir(tmp_path / ".hosts") == [host.name]
