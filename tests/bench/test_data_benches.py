"""The data benchmarks, small: the same code on 6 sources, so that a command of theirs that breaks is found
here.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from bench import data
from bench.data_parts import (
    files,
    first_batch,
    hosts,
    memory,
    mixing,
    order,
    planner,
    programs,
    resume,
    scaling,
)
from bench.data_parts.memory import LoaderFigures
from bench.data_parts.programs import Program, Usage
from jtrain.bench import Options, checkpoint, meets_bar
from jtrain.data import open_dataset
from jtrain.data.inspect.order_report import OrderReport, measure_order
from jtrain.data.inspect.topics import compare_topics
from jtrain.data.mixture.schedule import Constant
from jtrain.errors import UserError
from tests.processes import program

FIVE = files.SHORT._replace(documents=5)


@pytest.fixture(autouse=True)
def own_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the benchmarks keep between runs, they keep for these tests only."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.getbasetemp()))


def test_all_formats_hold_the_same_documents_and_are_written_once() -> None:
    """306 x 400 lengths as published, and the text of a small one from three formats."""
    lengths = files.lengths_of(306)
    assert (lengths.min(), lengths.max()) == (16, 8192)
    assert 640 < lengths.mean() < 690
    parquet, records, tar = (
        files.sources(format, num_sources=2, corpus=FIVE) for format in ("parquet", "arrayrecord", "tar")
    )
    texts = pyarrow.parquet.read_table(parquet / "0001.parquet")["text"].to_pylist()
    assert [len(text) for text in texts] == files.lengths_of(2, FIVE)[1].tolist()

    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(str(records / "0001.arrayrecord"))
    assert [record.decode() for record in reader.read_all()] == texts
    reader.close()
    listed = subprocess.run(["tar", "-xOf", str(tar / "0001.tar")], capture_output=True, check=True).stdout
    assert listed.decode() == "".join(texts)

    lines = (files.sources("jsonl", num_sources=2, corpus=FIVE) / "0001.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == texts
    ids = np.fromfile(files.sources("bin", num_sources=2, corpus=FIVE) / "tokens.bin", np.uint16)
    assert ids.astype(np.uint8).tobytes().decode().endswith("".join(f"\0{text}\0" for text in texts))

    before_ns = (parquet / "0000.parquet").stat().st_mtime_ns
    assert files.sources("parquet", num_sources=2, corpus=FIVE) == parquet
    assert (parquet / "0000.parquet").stat().st_mtime_ns == before_ns


def test_without_the_peers_a_benchmark_says_how_to_get_them() -> None:
    """An interpreter that lacks one of them is refused too."""
    with pytest.raises(ValueError, match=r"no interpreter that has them was given\. Make one with `sh bench"):
        programs.peer_python(None)
    with pytest.raises(ValueError, match=r"cannot import them all"):
        programs.peer_python(sys.executable)


def test_saves_are_compared_with_a_torch_that_is_there() -> None:
    """The rows of torch need an interpreter that has it; without one they are left out."""
    given = Options(torch_python="/bin/false", saves=1, sizes=["small"], folder=None)
    with pytest.raises(UserError, match=r"/bin/false cannot import it\. Make an environment .* are left out"):
        list(checkpoint.run(given))


def test_a_peer_that_dies_is_an_error() -> None:
    """Not a wait without end."""
    with (
        programs.reader(None, "resume", "grain", "nowhere") as program,
        pytest.raises(RuntimeError, match=r"it ended, exit code 1: .*readers.py resume grain nowhere"),
    ):
        program.answer()


def test_a_tree_of_processes_is_measured_whole() -> None:
    """A child's child counts, with its memory, and CPU time goes on."""
    with subprocess.Popen(program(__file__, "start_a_busy_child"), stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            pids = programs.tree(process.pid)
            assert len(pids) == 2
            used = programs.usage(pids)
            assert used.processes == 2
            assert used.pss_mib > programs.usage(pids[:1]).pss_mib + 32
            before_s = programs.cpu_s(pids)
            while programs.cpu_s(pids) <= before_s:
                time.sleep(0.01)  # the kernel counts in ticks
        finally:
            for pid in reversed(programs.tree(process.pid)):
                os.kill(pid, 9)


def test_a_trainer_grows_by_what_it_allocates_and_maps(tmp_path: Path) -> None:
    """32 MiB of its own and 16 MiB of a file that it maps count; 8 MiB of a file mapped before do not."""
    for name, mib in {"before": 8, "after": 16}.items():
        (tmp_path / name).write_bytes(b"x" * (mib << 20))
    command = program(__file__, "map_files", tmp_path / "before", tmp_path / "after")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        trainers = programs.Trainers([process.pid])
        assert trainers.grown_mib() == pytest.approx(0, abs=0.5)
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        assert trainers.grown_mib() == pytest.approx(48, abs=1.5)
        process.stdin.write("\n")


@pytest.mark.slow
def test_memory_of_two_consumers() -> None:
    """Grain's open every source each, ours do not; nothing stays behind."""
    folder = files.sources("parquet", num_sources=6)
    theirs = memory.peer_consumers(None, "grain", folder, consumers=2, batches=2)
    assert theirs.usage.fds > 2 * 6
    assert theirs.usage.pss_mib > 2 * 50
    ours = memory.our_consumers(folder, hosts=1, consumers=2, batches=2)
    assert ours.first_batch_s > 0
    assert ours.usage.pss_mib > 20 + ours.trainer_imports_mib
    assert ours.trainer_imports_mib > 1
    assert not [pid for pid in programs.tree(os.getpid()) if _is_python(pid)]


def _is_python(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended meanwhile
        return False
    return pid != os.getpid() and b"readers.py" in command


def test_the_bars_of_memory_are_the_issues() -> None:
    """13.5x less memory, imports included, and 20x sooner; the row without the peer's imports has no bar."""

    def met(ours_mib: float, ours_s: float) -> list[bool | None]:
        ours = LoaderFigures(ours_s, Usage(ours_mib, 4, 4, 4))
        theirs = LoaderFigures(20.0, Usage(13500.0, 32, 64, 10000))
        imports = LoaderFigures(1.0, Usage(3500.0, 32, 32, 100))
        rows = memory.rows_of("x", ours, theirs, imports)
        assert rows[1]["baseline"] == 10000.0
        return [meets_bar(row) for row in rows]

    assert met(999.0, 0.9) == [True, None, True, None, None, None]
    assert met(1001.0, 1.1) == [False, None, False, None, None, None]


@pytest.mark.slow
def test_mixed_reading_runs_beside_the_peers_of_this_environment() -> None:
    """Every program gives whole rows on one core: ids of each turn are a multiple of a batch."""
    cores = os.sched_getaffinity(0)
    with ExitStack() as stack:
        readers = mixing.open_readers(stack, None, 6, files.SHORT)
        assert len(readers) == 11
        for one in readers.values():
            one.take(0.1)
            assert len(os.sched_getaffinity(one.program.pid)) == 1
            assert one.filled > 0.99
            assert one.ids > 0
            assert round(one.ids / one.filled) % (mixing.ROWS * files.ROW_TOKENS) == 0
    assert os.sched_getaffinity(0) == cores


def test_the_bars_of_mixed_reading() -> None:
    """The medians of interleaved turns count: at least as fast as a memmap and a plain reader, four times
    Grain.
    """
    with subprocess.Popen(["true"], text=True) as process:
        ended = Program(process, ["true"])

    def program(*ids_per_s: float) -> mixing.Turns:
        return mixing.Turns(ended, 1.0, 2.0, list(ids_per_s), ids=sum(ids_per_s), cpu_s=2.0)

    programs = {
        "jtrain, prepared": program(9.0, 10.0, 99.0),
        "jtrain, ArrayRecord": program(8.0),
        "memmap as in nanoGPT": program(1.0, 10.0, 11.0),
        "Grain MapDataset.mix": program(2.1),
    }
    memmap, grain, memmap_cpu, grain_cpu, *starts = mixing.rows_of(programs, "short documents")
    assert (memmap["value"], memmap["baseline"], meets_bar(memmap)) == (10.0, 10.0, True)
    assert (grain["value"], grain["baseline"], meets_bar(grain)) == (8.0, 2.1, False)
    assert (memmap_cpu["value"], memmap_cpu["baseline"]) == (59.0, 11.0)
    assert (grain_cpu["bar"], memmap_cpu["bar"]) == (None, None)
    assert [start["value"] for start in starts] == [2.0] * 4


@pytest.mark.slow
def test_resuming_late_takes_what_resuming_early_takes() -> None:
    """The late state says step 1,000,000, and both give a batch."""
    folder = files.sources("parquet", num_sources=6)
    states = resume.states_of(folder)
    assert [states[step]["planner"]["step"] for step in states] == [resume.EARLY, resume.LATE]
    cursor = {step: state["planner"]["sources"]["source_001"][0] for step, state in states.items()}
    assert cursor[resume.LATE] > 1000 * cursor[resume.EARLY] > 0
    for state in states.values():
        assert 0 < resume.our_resume_s(folder, state) < 60
    arrayrecord = files.sources("arrayrecord", num_sources=6)
    assert resume.peer_resume_s(None, "grain", arrayrecord, resume.LATE) > 0


def test_a_slow_source_slows_steps_until_it_is_scaled() -> None:
    """What step times say; and that the trainer runs."""
    found = scaling.steps_of([1.0] * 9, [1.0] * 3 + [2.0] * 6 + [1.05] * 21)
    assert (found.before_s, found.after_s, found.slowest_s) == (1.0, 1.05, 2.0)
    assert 3 < found.steps_until_back <= 9
    assert scaling.steps_of([1.0] * 9, [1.0] * 9).steps_until_back == 0
    step_s = scaling.our_steps(Constant(dict.fromkeys(scaling.NAMES, 1.0)), "slow", 3)
    assert len(step_s) == 3
    assert min(step_s) >= scaling.STEP_S


def test_the_order_of_long_documents_meets_its_bars(tmp_path: Path) -> None:
    """The made corpus, small, in its three forms; each of them is the same documents."""
    tokens = set()
    for name, spec in order.long_corpora(tmp_path, documents=256, size=4_000):
        dataset = open_dataset(spec, seed=0)
        (stream,) = dataset.streams
        tokens.add(len(stream.read_chunks(stream.chunks_of(np.arange(256))).ids))
        rows = order.order_rows(name, measure_order(dataset, 100))
        assert [meets_bar(row) for row in rows] == [True, True, True, None]
    assert tokens == {256 * (4_000 + 2)}


def test_drift_beyond_a_chunk_has_a_bar() -> None:
    """The bar is on what chunks do not explain, half of the drift here."""
    drift = np.asarray([0.3, 0.02])
    report = OrderReport(
        steps=2, rows=1, seq_len=8, documents_per_step=1.0, overlap={}, autocorrelation={}, row_correlation=0.0,
        effective_rows=1.0, drift=drift, drift_beyond_a_chunk=drift / 2, sources=(), fill=1.0, pieces_per_row=1.0,
        cut_chunks_per_step=0.0, topics=compare_topics(np.ones((2, 256), np.int64), np.ones((2, 256), np.int64)),
    )  # fmt: skip
    rows = order.drift_rows("mixture", report, (1, 2))
    assert [row["value"] for row in rows] == pytest.approx([15, 30, 1, 2])
    assert [meets_bar(row) for row in rows] == [False, None, False, None]


def test_a_made_up_index_of_terabytes_gives_batches(tmp_path: Path) -> None:
    """Its ids are holes, so it takes no room."""
    spec = first_batch.prepared_index(tmp_path / "index", 1.0)
    ids = tmp_path / "index" / "data" / "ids.bin"
    assert (ids.stat().st_size, ids.stat().st_blocks) == (10**12, 0)
    assert first_batch.first_batch_s(dataclasses.replace(spec, engine="inline")) > 0


@pytest.mark.slow
def test_hosts_read_a_part_each() -> None:
    """Two real JAX processes and one; the rows' digests are compared by the benchmark itself."""
    folder = files.sources("jsonl", num_sources=2, corpus=FIVE._replace(documents=60))
    [alone] = hosts.run_hosts(folder, hosts=1, steps=2)
    parts = hosts.run_hosts(folder, hosts=2, steps=2)
    assert {**parts[0].rows, **parts[1].rows} == alone.rows
    assert len(alone.rows) == 256
    # The shares of so few steps are those of how far each reads ahead.
    assert min(part.documents for part in parts) > 0


@pytest.mark.parametrize(("option", "value", "least"), [("hosts", 1, 2), ("sources", 0, 1), ("steps", 0, 1)])
def test_hosts_refuse_what_measures_nothing(option: str, value: int, least: int) -> None:
    given = {"hosts": 2, "sources": 2, "steps": 2, option: value}
    with pytest.raises(UserError, match=f"--{option} {value} must be at least {least}"):
        list(data.run(Options(only=["hosts"], **given)))


def test_planned_rows_are_full_and_balanced() -> None:
    """A step of each packing and of each number of ranks: shares of a row, and costs over the mean."""
    rows = list(data.run(Options(only=["planner"], sources=24, steps=1)))
    assert len(rows) == 4 * len(planner.PACKINGS) + 2 * len(planner.BALANCED)
    shares = [row["value"] for row in rows if row["unit"] == "share"]
    assert all(0.9 < share <= 1 for share in shares if share is not None)
    assert all((row["value"] or 0) >= 1 for row in rows if row["unit"] == "ratio")
