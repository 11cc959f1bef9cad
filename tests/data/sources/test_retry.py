"""Reads that fail for a moment are repeated, named and counted, and never become skipped documents."""

import contextlib
import errno
import io
import itertools
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from jtrain.data import PackedText, Source, open_dataset
from jtrain.data.loaders.messages import DataError
from jtrain.data.pretokenized import index_format, remote_files
from jtrain.data.pretokenized.reader import PreparedIndex
from jtrain.data.sources import retry
from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.formats import BadRecord
from jtrain.data.sources.retry import GaveUp
from jtrain.data.sources.storage import StoredFile, find_files
from jtrain.errors import FileError
from tests.data.pretokenized.test_reader import NUM_DOCUMENTS, make
from tests.data.sources.object_store import Store, web_store
from tests.data.sources.test_object_stores import parquet_bytes
from tests.data.writers import WRITERS, Write, write_array_record, write_jsonl, write_text

FAULTS: tuple[int | str, ...] = (503, "cut", 429, "less", 500, "reset")


@pytest.fixture
def web() -> Iterator[Store]:
    with web_store() as store:
        yield store


def every(corpus: Corpus) -> list[str | BadRecord]:
    return list(corpus.read(np.arange(len(corpus))))


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """Collects the lines about repeated reads."""
    lines: list[str] = []
    with retry.report_retries_to(retry.Retries(lambda line, wait_s: lines.append(line))):
        yield lines


@contextlib.contextmanager
def out_of_descriptors(times: int) -> Iterator[list[str]]:
    """Lets every opening of a file fail, for real, until `times` reads were repeated."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lines: list[str] = []

    def tell(line: str, wait_s: float) -> None:
        lines.append(line)
        if len(lines) == times:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def fail() -> None:
        raise retry.TransientError("the disk is away")

    # The type checker imports modules at the first call of each function on this path: no descriptor would be
    # left for that.
    with contextlib.suppress(GaveUp), retry.report_retries_to(retry.Retries(lambda line, wait_s: None)):
        retry.retried("a file", fail)
    with retry.report_retries_to(retry.Retries(tell)):
        # Of these three none becomes free. Of a higher limit one might: what earlier tests left is closed at
        # any time.
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            yield lines
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(params=WRITERS, ids=lambda write: write.__name__.removeprefix("write_"))
def write(request: pytest.FixtureRequest) -> Write:
    return request.param


@pytest.mark.usefixtures("no_waits")
def test_a_machine_without_descriptors_for_a_moment_loses_no_record(
    write: Write, texts: list[str], tmp_path: Path
) -> None:
    path = write(tmp_path, texts)
    corpus = Corpus(Source(path=str(path)), name="web", cache_dir=tmp_path.parent / "cache")
    assert every(corpus) == texts
    corpus.close()
    with out_of_descriptors(times=3) as lines:
        assert every(corpus) == texts
    assert len(lines) == 3
    corpus.close()
    with (
        out_of_descriptors(times=99),
        pytest.raises(GaveUp, match=r"\[Errno 24\] Too many open files, at 6 tries"),
    ):
        every(corpus)
    assert every(corpus) == texts


@pytest.mark.usefixtures("no_waits")
@pytest.mark.parametrize("eager_bytes", [None, 10], ids=["eager", "growing"])
def test_listing_and_opening_are_repeated_too(
    eager_bytes: int | None, texts: list[str], tmp_path: Path
) -> None:
    write_text(tmp_path, texts)
    with out_of_descriptors(times=4) as lines:
        corpus = Corpus(Source(path=str(tmp_path)), name="web", cache_dir=tmp_path, eager_bytes=eager_bytes)
    assert len(corpus.names) == len(texts)
    assert len(lines) == 4
    assert lines[0].startswith("data.sources.web.path=")
    corpus.forget(range(9))
    with out_of_descriptors(times=2) as lines:
        assert [corpus.count(n) for n in range(9)] == [1] * 9
        assert corpus[int(corpus.file_ends[7])] == texts[8]
    assert len(lines) == 2
    assert lines[0].startswith(
        f"{tmp_path}/doc0000.txt: [Errno 24] Too many open files; it is read again in 0 s"
    )


def test_an_error_of_the_kernel_is_known_through_every_reader_and_what_wraps_it() -> None:
    """Reading the first page of a process's memory is a real I/O error; a missing file is none that
    passes.
    """

    def read_by_python() -> None:
        with open("/proc/self/mem", "rb", 0) as file:
            file.read(1)

    def read_by_arrow() -> None:
        with pa.OSFile("/proc/self/mem") as file:
            file.read_at(1, 0)

    for read in (read_by_python, read_by_arrow):
        with pytest.raises(OSError, match="Input/output error") as found:
            read()
        assert found.value.errno == errno.EIO
        wrapped = FileError("a.parquet: row group 3 cannot be read")
        wrapped.__cause__ = found.value
        assert retry.transient_cause(wrapped) is found.value
    with pytest.raises(FileNotFoundError) as missing:
        Path("/proc/nowhere").read_bytes()
    assert retry.transient_cause(missing.value) is None
    assert retry.names_transient_error("INTERNAL: pread() failed: Input/output error (5)")
    assert not retry.names_transient_error("INVALID_ARGUMENT: the chunk is corrupt")


class FailingFile(io.FileIO):
    """Local file of which the next reads fail as on a broken disk."""

    failures = 0

    def readinto(self, buffer: Any, /) -> int | None:
        FailingFile.fail()
        return super().readinto(buffer)

    @staticmethod
    def fail() -> None:
        if FailingFile.failures:
            FailingFile.failures -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture
def broken_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sets how many reads of opened files fail, whether through the file or by its descriptor."""
    pread = os.pread

    def failing_pread(descriptor: int, length: int, offset: int, /) -> bytes:
        FailingFile.fail()
        return pread(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", failing_pread)
    monkeypatch.setattr(StoredFile, "open", lambda self: io.BufferedReader(FailingFile(self.location)))
    yield lambda failures: setattr(FailingFile, "failures", failures)
    FailingFile.failures = 0


@pytest.mark.usefixtures("no_waits")
@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_a_broken_disk_ends_the_run_under_both_policies_and_a_sick_one_changes_no_batch(
    policy: Any, texts: list[str], tmp_path: Path, broken_disk: Callable[[int], None], same_batch: Any
) -> None:
    path = write_jsonl(tmp_path, [text or "x" for text in texts])
    spec = PackedText(
        sources={"books": Source(path=str(path))},
        seq_len=64,
        global_batch=4,
        eval_fraction=0.0,
        engine="inline",
        on_bad_record=policy,
        cache_dir=str(tmp_path / "cache"),
    )
    dataset = open_dataset(spec, seed=0)
    want = list(itertools.islice(dataset.train_batches(), 300))
    with dataset.train_batches() as batches:
        for step in range(300):
            if step in (0, 150):  # the next two runs of chunks, whenever they are read
                broken_disk(3)
            same_batch(next(batches), want[step])
        assert batches.stats is not None
        assert (batches.stats.retries, batches.stats.skipped) == (6, 0)
        lines = [line for line in batches.take_messages() if "docs.jsonl" in line]
        assert len(lines) == 6
        assert lines[5].startswith("data: data.sources.books: ")
        assert lines[5].endswith(
            "docs.jsonl: [Errno 5] Input/output error; it is read again in 0 s (try 4 of 6)"
        )
        broken_disk(1 << 30)
        with pytest.raises(
            DataError, match=r"data\.sources\.books: .*docs\.jsonl: \[Errno 5\] Input/output error, at 6 tries over .*"
            r"none is left out for it\. See that the disk"
        ):  # fmt: skip
            list(itertools.islice(batches, 30))


@pytest.mark.usefixtures("no_waits")
def test_sizes_are_not_taken_for_those_of_bad_records(texts: list[str], tmp_path: Path) -> None:
    """ArrayRecord is sized by reading; a record of no size would have no chunks, and a run would never see
    it.
    """
    path = write_array_record(tmp_path, texts)
    corpus = Corpus(Source(path=str(path)), name="web", cache_dir=tmp_path / "cache")
    sizes = corpus.sizes(0, len(texts))
    with out_of_descriptors(times=2) as lines:
        again = corpus.sizes(0, len(texts))
    np.testing.assert_array_equal(again, sizes)
    assert len(lines) == 2
    with out_of_descriptors(times=99), pytest.raises(GaveUp):
        corpus.sizes(0, len(texts))


@pytest.mark.usefixtures("no_waits")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_store_that_fails_for_a_moment_loses_no_record(
    fault: int | str, web: Store, tmp_path: Path
) -> None:
    texts = [f"{i} " * 300 for i in range(100)]
    web.files["rows.parquet"] = parquet_bytes(texts)
    corpus = Corpus(Source(path=f"{web.url}/rows.parquet"), name="web", cache_dir=tmp_path)
    with listening() as lines:
        web.faults[:] = [fault] * 3
        assert every(corpus) == texts
        corpus.close()
        assert 1 <= len(lines) <= 3, "aiohttp itself repeats a request over a connection that was closed"
        web.faults[:] = [fault] * 99
        with pytest.raises(
            GaveUp, match=r"rows\.parquet: .*, at 6 tries over 0 s\. .* See that the disk, network or"
        ):
            every(corpus)


@pytest.mark.usefixtures("no_waits")
@pytest.mark.parametrize("fault", [503, "cut", "reset"])
@pytest.mark.parametrize("ranges", [True, False])
def test_a_copy_goes_on_where_it_was_or_begins_anew(
    fault: int | str, ranges: bool, web: Store, tmp_path: Path
) -> None:
    texts = [f"{i} " * 300 for i in range(100)]
    content = write_jsonl(tmp_path, texts).read_bytes()
    web.files["docs.jsonl"] = content
    web.ranges = ranges
    [file] = find_files(f"{web.url}/docs.jsonl", field="data.path")
    web.requests.clear()
    web.faults[:] = [fault] * 2
    corpus = Corpus(Source(path=file.location), name="web", cache_dir=tmp_path / "cache")
    assert every(corpus) == texts
    assert not web.faults


@pytest.mark.usefixtures("no_waits")
def test_a_store_that_is_away_is_not_taken_for_an_empty_one(web: Store) -> None:
    web.files["a.txt"] = b"x"
    web.refuse = 503
    with pytest.raises(GaveUp, match=r"data\.path='.*a\.txt': ClientResponseError: 503.*, at 6 tries"):
        find_files(f"{web.url}/a.txt", field="data.path")


@pytest.mark.usefixtures("no_waits")
def test_of_a_prepared_index_in_a_store_only_what_failed_is_fetched_again(
    web: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = PreparedIndex(make(tmp_path / "here"))
    for path in Path(local.location).iterdir():
        web.files[f"prepared/web/{path.name}"] = path.read_bytes()
    with listening() as lines:
        web.faults[:] = [503, 500]
        index = PreparedIndex(f"{web.url}/prepared/web", cache_dir=tmp_path / "cache")
        records = np.arange(NUM_DOCUMENTS)
        index.lengths(records)
        monkeypatch.setattr(remote_files, "REQUEST_BYTES", 500)
        web.requests.clear()
        web.faults[:] = [503, "less", "cut"]
        np.testing.assert_array_equal(index.read(records)[1], local.read(records)[1])
    assert len(lines) == 3
    ranges = [request.range for request in web.requests if request.path.endswith(index_format.IDS)]
    assert len(ranges) == len(set(ranges)) + 3 > 10
    web.faults[:] = ["less"] * 9999
    with pytest.raises(GaveUp, match=r"web/ids\.bin: \d+ of \d+ bytes from byte \d+ arrived, at 6 tries"):
        index.read(records)


@pytest.mark.usefixtures("no_waits")
def test_a_prepared_index_on_a_disk_is_read_again(tmp_path: Path) -> None:
    records = np.arange(NUM_DOCUMENTS)
    folder = make(tmp_path / "here")
    want = PreparedIndex(folder).read(records)[1]
    with out_of_descriptors(times=2) as lines:
        index = PreparedIndex(folder)
    with out_of_descriptors(times=1) as more:
        ids = index.read(records)[1]
    np.testing.assert_array_equal(ids, want)
    assert (len(lines), len(more)) == (2, 1)
    assert "ids.bin: [Errno 24] Too many open files" in more[0]


@pytest.mark.slow
def test_loaders_that_read_again_are_not_taken_for_hung_and_give_the_same_batches(
    web: Store, tmp_path: Path, same_batch: Any
) -> None:
    """Loader processes wait 0.1, 0.4 and 1.6 s here, the last one longer than a document may take."""
    web.files["rows.parquet"] = parquet_bytes([f"{i} " * 300 for i in range(100)])
    spec = PackedText(
        sources={"books": Source(path=f"{web.url}/rows.parquet")},
        seq_len=64,
        global_batch=4,
        eval_fraction=0.0,
        max_loaders=1,
        on_bad_record="skip",
        read_timeout_s=1.5,
        cache_dir=str(tmp_path / "cache"),
    )
    dataset = open_dataset(spec, seed=0)
    with dataset.train_batches(inline=True) as batches:
        want = list(itertools.islice(batches, 12))
    web.faults[:] = [503, 503, 503]
    with dataset.train_batches() as batches:
        for batch in want:
            same_batch(next(batches), batch)
        assert batches.stats is not None
        assert (batches.stats.retries, batches.stats.skipped) == (3, 0)
        said = batches.take_messages()
    assert not [line for line in said if "took over" in line]
    lines = [line for line in said if "rows.parquet: ClientResponseError: 503" in line]
    assert [line.rpartition("it is read again in ")[2] for line in lines] == [
        "0.1 s (try 2 of 6)",
        "0.4 s (try 3 of 6)",
        "1.6 s (try 4 of 6)",
    ]
    assert lines[0].startswith("data: data.sources.books: ")
