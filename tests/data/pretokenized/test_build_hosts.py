"""Several processes that prepare into one folder make the bytes that one makes, whichever of them die."""

import contextlib
import dataclasses
import io
import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jtrain.data.pretokenized.build import prepare
from jtrain.data.pretokenized.build_process import LOOK_S, BuildProcess
from jtrain.errors import FileError
from jtrain.runtime import lease
from tests.data.two_sources import contents, recipes_of, write_lines
from tests.processes import program


@dataclasses.dataclass(frozen=True)
class Build:
    """Sources of some 80 shards in `folder`, the bytes that one undisturbed call makes, and the folder
    `out`.
    """

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
    command = program(__file__, "build", build.folder, build.out, build.tokenizer, machine)
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
    assert re.search(r"web: 9,000 records, [\d,]+ tokens\.", erred), (
        "each process tells that the whole is complete"
    )
    return said.splitlines()


def test_two_processes_share_the_work_and_make_the_same_bytes(build: Build) -> None:
    with start(build) as one:
        until_it_made(one, 5)
        with standing_still(one), start(build) as other:
            until_it_made(other, 1)
            # What the first one has counted is out of date: it counts anew before its next shard.
            time.sleep(LOOK_S)
            one.send_signal(signal.SIGCONT)
            made = finish(one), finish(other)
    assert min(map(len, made)) > 10, "both must have worked"
    shards = [line for lines in made for line in lines]
    assert len(set(shards)) > 50
    assert len(shards) <= len(set(shards)) + 4, (
        "made twice is at most what was in work when the number changed"
    )
    number = {int(line.split()[-1]) % 2 for line in made[1][: len(made[1]) // 2]}
    assert len(number) == 1, "one of two processes makes every second shard"
    assert contents(build.out) == build.unbroken


@pytest.mark.parametrize(
    "machines",
    [pytest.param(("this", "this"), marks=pytest.mark.slow), ("one", "other")],
    ids=["one-machine", "two-machines"],
)
@pytest.mark.parametrize(
    "first", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["the-one-that-appends", "the-other"]
)
def test_a_killed_process_is_replaced_by_the_other(
    machines: tuple[str, str], first: bool, build: Build
) -> None:
    """The process that comes first appends the shards; on another machine only its heartbeat tells that it is
    dead.
    """
    with start(build, machines[0]) as one:
        until_it_made(one, 5)
        with start(build, machines[1]) as other:
            with standing_still(one):  # or it might be done before the other begins
                until_it_made(other, 3)
            (one if first else other).kill()
            finish(other if first else one)
    assert contents(build.out) == build.unbroken


@pytest.mark.slow
def test_a_process_that_stood_still_and_was_replaced_does_no_harm(build: Build) -> None:
    """Stops one until the other has taken over its work, or finished it."""
    with start(build, "one") as one:
        until_it_made(one, 5)
        with standing_still(one), start(build, "other") as other:
            partial = build.out / ".web.partial"
            states = sorted(partial.glob("*.state.json"))
            end_s = time.monotonic() + 60
            while partial.exists() and sorted(partial.glob("*.state.json")) == states:
                assert time.monotonic() < end_s
                time.sleep(0.05)  # until the other one appends
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
        message = (
            r"out/\.web\.partial: another process is writing an index of other data there\. Wait until "
            r"it ends"
        )
        with standing_still(one), pytest.raises(FileError, match=message):  # or it might be done before
            prepare(recipes_of(build.folder), build.out, workers=1, stream=io.StringIO(), shard_bytes=1 << 14)
        finish(one)
    [row, _] = prepare(
        recipes_of(build.folder), build.out, workers=1, stream=io.StringIO(), shard_bytes=1 << 14
    )
    assert row.state == "made"


PLAN = {"made_of": "a"}


def test_processes_of_a_source_count_each_other_by_their_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other sources and of other data do not count, nor one that has ended."""
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(BuildProcess(tmp_path)) for _ in range(4)]
        processes.sort(key=lambda process: process.name)
        for process in processes[:3]:
            process.begin("web", PLAN)
        processes[3].begin("book", PLAN)
        monkeypatch.setattr("jtrain.data.pretokenized.build_process.LOOK_S", -1.0)
        assert [process.share("web") for process in processes[:3]] == [(0, 3), (1, 3), (2, 3)]
        assert processes[3].share("book") == (0, 1)
        with pytest.raises(
            FileError, match=r"\.web\.partial: another process is writing an index of other data"
        ):
            processes[3].begin("web", {"made_of": "b"})
        processes[0].end("web")
        processes[0]._lease.beat()
        assert [process.share("web") for process in processes[1:3]] == [(0, 2), (1, 2)]
        processes[1].__exit__()
        assert processes[2].share("web") == (0, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_process_of_this_machine_is_dead_as_soon_as_it_is_gone(tmp_path: Path) -> None:
    process = subprocess.Popen(
        program(__file__, "hold_place", tmp_path, json.dumps(PLAN)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    with BuildProcess(tmp_path) as host:
        host.begin("web", PLAN)
        assert host.is_alive(name) is True
        assert host.share("web")[1] == 2
        process.kill()
        process.communicate()
        assert host.is_alive(name) is False
        assert host.share("web") == (0, 1)
    assert list(tmp_path.iterdir()) == [], "what the dead one left is removed"


def test_one_process_at_a_time_changes_the_folders_of_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BuildProcess(tmp_path) as host, host.changing_folders("web"):
        monkeypatch.setattr(lease, "POLL_S", 0.0)
        monkeypatch.setattr(
            lease.Lease, "try_take", lambda self, first=lease.Lease.try_take: first(self) or 1 / 0
        )
        with pytest.raises(ZeroDivisionError), host.changing_folders("web"):
            raise AssertionError("two are inside")
        with host.changing_folders("book"):
            pass
