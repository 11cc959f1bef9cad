"""Data plane with real processes: the stream is the same whichever process dies, and no process is left
behind.
"""

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jtrain.data import BatchIterator, PackedText, Source, open_dataset
from jtrain.data.inspect.resource_estimate import budget
from jtrain.data.loaders.forkserver import Forkserver
from jtrain.data.loaders.messages import ChunkRun, DataError, RequestPart
from jtrain.data.loaders.process_pool import ProcessPool
from jtrain.data.plane.data_plane import ProcessPlane
from tests.data.conftest import assert_same_batch
from tests.data.descriptors import descriptors
from tests.data.four_sources import NAMES, PRODUCTION, assert_collated, digest, documents, spec
from tests.processes import program


def plane_of(batches: BatchIterator) -> ProcessPlane:
    assert isinstance(batches.plane, ProcessPlane)
    return batches.plane


def role(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):  # the second one if it ends between opening and reading
        return ""


def alive(pid: int) -> bool:
    """True if the process runs; a zombie that nobody reaps (a container without an init) does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 120
    while left := [(pid, role(pid)) for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def segments_of(pids: list[int]) -> set[str]:
    """Returns the named shared memory that these processes hold; other processes of the machine have their
    own.
    """
    found: set[str] = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.add(os.readlink(link))
        found.update(line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return {name for name in found if name.startswith("/dev/shm/")}


@pytest.mark.parametrize(
    ("unit", "packing"),
    [
        ("rows", "best_fit"),
        pytest.param("tokens", "concat", marks=pytest.mark.slow),
        pytest.param("tokens", "first_fit", marks=pytest.mark.slow),
        pytest.param("rows", "concat", marks=pytest.mark.slow),
        pytest.param("tokens", "best_fit", marks=pytest.mark.slow),
        pytest.param("rows", "first_fit", marks=pytest.mark.slow),
    ],
)
def test_loader_processes_give_the_stream_of_one_thread(folder: Path, packing: str, unit: str) -> None:
    """Batches that are filled in several blocks, as in production; rows of whole documents are as written."""
    dataset = open_dataset(spec(folder, packing=packing, mixture_unit=unit, **PRODUCTION), seed=0)
    with dataset.train_batches(inline=True) as batches:
        want = list(itertools.islice(batches, 2))
    if packing == "best_fit":
        of = documents(folder)
        for batch in want:
            assert_collated(batch, of)
    with dataset.train_batches() as batches:
        for batch in want:
            assert_same_batch(next(batches), batch)
        assert batches.stats is not None
        assert set(batches.stats.tokens(dataset.names)) == set(NAMES)


def test_whatever_is_killed_at_whatever_step_the_stream_is_the_same(folder: Path) -> None:
    """Kills loaders, standbys, constructors and forkservers; afterwards no process is left."""
    dataset = open_dataset(spec(folder, shadows=1), seed=0)
    with dataset.train_batches(inline=True) as batches:
        want = digest(batches, 150)
    before, segments = descriptors(), segments_of([os.getpid()])
    random_kill, killed, seen = random.Random(0), [], set()
    victims = itertools.cycle(("loader", "standby", "constr", "data"))

    def with_kills(batches: BatchIterator) -> Iterator[Any]:
        for step, batch in enumerate(batches):
            yield batch
            pids = plane_of(batches).pids()
            seen.update(pids)
            if step % 12 == 5:
                victim = next(victims)
                pid = random_kill.choice([pid for pid in pids if victim in role(pid)] or pids)
                killed.append(role(pid))
                os.kill(pid, signal.SIGKILL)

    with dataset.train_batches() as batches:
        assert digest(with_kills(batches), 150) == want
        said = "\n".join(batches.take_messages())
        seen.update(plane_of(batches).pids())
    assert len(killed) >= 12
    assert len({name.rstrip("0123456789") for name in killed}) >= 3, killed
    assert "took over" in said or "another one" in said
    wait_until_gone(list(seen))
    assert descriptors() <= before
    assert segments_of([os.getpid()]) <= segments


def test_a_killed_trainer_takes_every_process_with_it(folder: Path) -> None:
    """This includes a loader that is stuck inside a read."""
    process = subprocess.Popen(
        program(__file__, "train_until_killed", folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    pids = json.loads(process.stdout.readline())
    assert len(pids) >= 5
    assert all(alive(pid) for pid in pids)
    segments = segments_of([process.pid, *pids])
    # It cannot see the end of the data.
    os.kill(next(pid for pid in pids if "loader" in role(pid)), signal.SIGSTOP)
    process.kill()
    process.communicate()
    wait_until_gone(pids)
    assert not [name for name in segments if Path(name).exists()]


def test_signals_to_the_whole_group_do_not_stop_the_data(folder: Path) -> None:
    """Ctrl-C and Slurm's SIGTERM reach every process; only the trainer decides when to stop, and reads until
    then.
    """
    with open_dataset(spec(folder), seed=0).train_batches() as batches:
        next(batches)
        pids = plane_of(batches).pids()
        for pid in pids:
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        digest(batches, 30)
        assert plane_of(batches).pids() == pids
        assert not [line for line in batches.take_messages() if "died" in line]


def test_no_process_of_the_data_plane_can_import_jax(folder: Path) -> None:
    """The test reads their memory maps; jaxlib alone would take over 100 MB in each."""
    with open_dataset(spec(folder), seed=0).train_batches() as batches:
        next(batches)
        for pid in plane_of(batches).pids():
            assert "jaxlib" not in Path(f"/proc/{pid}/maps").read_text(), role(pid)


@pytest.fixture
def trap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PackedText]:
    """Adds a fifth source in which reading one record hangs or kills its loader."""

    def make(act: str, **fields: Any) -> PackedText:
        armed = folder / "armed"
        monkeypatch.setenv("TRAP", str(armed))
        plain = spec(folder, **fields)
        sources = {
            **plain.sources,
            "trap": Source(path=f"tests.data.grain_sources:{act}", format="grain", weight=5.0),
        }
        armed.touch()
        return spec(folder, sources=sources, eval_fraction=0.0, **fields)

    return make


@pytest.mark.parametrize(
    ("act", "timeout_s", "what"),
    [("hanging", 2.0, "has not moved for 2 s"), ("killing", 60.0, "died")],
    ids=["hang", "die"],
)
def test_a_document_that_takes_its_loader_along_is_named(
    trap: Callable[..., PackedText], act: str, timeout_s: float, what: str
) -> None:
    """A standby takes over first; if the same document kills it too, the document is named."""
    with (
        open_dataset(trap(act, read_timeout_s=timeout_s), seed=0).train_batches() as batches,
        pytest.raises(
            DataError, match=rf"a loader {what}.* at data\.sources\.trap, document \d+ \(.*:77\), again"
        ),
    ):
        digest(batches, 400)
    assert any("standby-0 took over" in line for line in batches.take_messages())


@pytest.mark.parametrize(
    ("act", "timeout_s"),
    [pytest.param("hanging", 2.0, marks=pytest.mark.slow), ("killing", 60.0)],
    ids=["hang", "die"],
)
def test_a_document_that_takes_its_loader_along_is_skipped_where_that_is_the_policy(
    trap: Callable[..., PackedText], act: str, timeout_s: float
) -> None:
    dataset = open_dataset(trap(act, read_timeout_s=timeout_s, on_bad_record="skip", epochs=1), seed=0)
    with dataset.train_batches() as batches:
        trap_tokens = 0
        for _ in batches:
            assert batches.stats is not None
            trap_tokens += batches.stats.tokens(dataset.names).get("trap", 0)
        assert batches.stats is not None
        assert batches.stats.skipped == 1
        assert batches.state()["skipped"] == {"trap": 1}
    want = sum(len(f"document {n} ") + 42 for n in range(200) if n != 77)
    assert trap_tokens == want, "every other document once, and nothing else lost"


def test_a_bad_record_stops_the_run_with_its_place_or_is_skipped_and_counted(folder: Path) -> None:
    lines = (folder / "code.jsonl").read_text().splitlines()
    lines[120] = lines[120][:10]
    (folder / "code.jsonl").write_text("\n".join(lines) + "\n")
    with (
        open_dataset(spec(folder, eval_fraction=0.0), seed=0).train_batches() as batches,
        pytest.raises(
            DataError, match=r"data\.sources\.code: .*code\.jsonl, line 121: no JSON.*on_bad_record='skip'"
        ),
    ):
        digest(batches, 400)
    dataset = open_dataset(spec(folder, eval_fraction=0.0, on_bad_record="skip", epochs=2), seed=0)
    with dataset.train_batches() as batches:
        half = None
        for step, _ in enumerate(batches):
            half = batches.state() if step == 20 else half
        state = batches.state()
    assert state["skipped"] == {"code": 2}, "once each epoch"
    with dataset.train_batches(half) as batches:
        for _ in batches:
            pass
        assert batches.state() == state, "the count goes on where it was saved"


def test_a_file_that_vanishes_is_named(folder: Path) -> None:
    dataset = open_dataset(spec(folder), seed=0)
    (folder / "books.jsonl").unlink()
    with (
        dataset.train_batches() as batches,
        pytest.raises(DataError, match=r"data\.sources\.books.*books\.jsonl"),
    ):
        digest(batches, 10)


def test_files_that_changed_after_the_run_opened_them_are_refused_by_a_loader_that_opens_them_later(
    folder: Path,
) -> None:
    """Another number of records means another permutation, so the stream would silently change."""
    dataset = open_dataset(spec(folder), seed=0)
    with (folder / "chat.jsonl").open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    with (
        dataset.train_batches() as batches,
        pytest.raises(DataError, match=r"data\.sources\.chat: its files changed since the run opened them"),
    ):
        digest(batches, 10)


def test_skipped_documents_are_named(folder: Path) -> None:
    lines = (folder / "web.jsonl").read_text().splitlines()
    lines[100:112] = ["no"] * 12
    (folder / "web.jsonl").write_text("\n".join(lines) + "\n")
    dataset = open_dataset(spec(folder, eval_fraction=0.0, on_bad_record="skip", epochs=1), seed=0)
    for inline in (True, False):
        with dataset.train_batches(inline=inline) as batches:
            list(batches)
            named = [line for line in batches.take_messages() if "left out" in line]
            assert len(named) == 11, "ten by name, and that there are more"
            assert "web.jsonl, line 1" in named[0]
            assert batches.state()["skipped"] == {"web": 12}


def test_a_loader_that_is_let_go_and_dies_at_the_same_time_leaves_nothing(folder: Path) -> None:
    """The autoscaler gives back a working loader that then dies; its death must not be handled twice."""
    forkserver = Forkserver()
    setups = spec(folder).setups(seed=0)
    before = descriptors()
    pool = ProcessPool(
        setups,
        forkserver.client,
        placement={"loader-0": (0, 1), "loader-1": (2, 3)},
        standbys=1,
        read_timeout_s=60.0,
        say=lambda text: None,
    )
    pool.request([RequestPart(2, np.arange(64))])
    pool.place({"loader-0": (0, 1, 2, 3)})
    os.kill(pool.loaders["loader-1"].child.pid, signal.SIGKILL)
    found: list[ChunkRun] = []
    deadline = time.monotonic() + 120
    while sum(len(run.numbers) for run in found) < 64 or "loader-1" in pool.loaders:
        found += pool.collect()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert sorted(int(number) for run in found for number in run.numbers) == list(range(64))
    pool.close()
    del found
    assert descriptors() <= before
    forkserver.close()


def test_sources_may_come_and_go_where_parquet_is_shuffled_in_windows(folder: Path) -> None:
    """A window is a share of data.shuffle_window_bytes; sources of the saved run keep their windows."""
    for name in ("a", "b", "c"):
        texts = [f"{name}{i} " + "z" * 900 for i in range(400)]
        pq.write_table(pa.table({"text": texts}), folder / f"{name}.parquet", row_group_size=20)
    sources = {name: Source(path=str(folder / f"{name}.parquet")) for name in ("a", "b")}
    fields = {"eval_fraction": 0.0, "shuffle_window_bytes": 1 << 17, "mixture_unit": "samples"}
    first = open_dataset(spec(folder, sources=sources, **fields), seed=0)
    with first.train_batches(inline=True) as batches:
        digest(batches, 10)
        state = json.loads(json.dumps(batches.state()))
    more = {**sources, "c": Source(path=str(folder / "c.parquet"))}
    second = open_dataset(spec(folder, sources=more, **fields), seed=0)
    with second.train_batches(state, inline=True) as batches:
        assert any("source c is new" in line for line in batches.take_messages())
        digest(batches, 10)
        assert batches.state()["sources"]["a"] == state["sources"]["a"]


def test_a_constructor_that_keeps_dying_is_an_error_and_no_loop(folder: Path) -> None:
    with open_dataset(spec(folder), seed=0).train_batches() as batches:
        next(batches)
        plane = plane_of(batches)

        def die_at_once() -> None:
            start()
            plane._child.kill()

        start = plane._start
        plane._start = die_at_once
        plane._child.kill()
        with pytest.raises(DataError, match=r"constructor died 4 times in a row without making a batch"):
            digest(batches, 100)


def test_threads_and_descriptors_stay_within_the_printed_budget(folder: Path) -> None:
    dataset = open_dataset(spec(folder, shadows=2), seed=0)
    printed = budget(dataset, rows=16)
    assert f"{printed.total('processes')} processes" in printed.line()
    with dataset.train_batches() as batches:
        digest(batches, 40)
        pids = plane_of(batches).pids()
        assert len(pids) <= printed.total("processes")
        threads = sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids)
        descriptors = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
        assert threads <= printed.total("threads")
        assert descriptors <= printed.total("descriptors")
