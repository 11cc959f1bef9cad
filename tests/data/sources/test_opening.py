"""Lines in the log while a source takes long to open, from a web server that answers slowly."""

import contextlib
import functools
import http.server
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jtrain.data import PackedText, Source, open_dataset, open_sets
from jtrain.data.loaders import process_pool as pools
from jtrain.data.loaders.forkserver import Forkserver
from jtrain.data.loaders.messages import RequestPart
from jtrain.data.sources import opening
from jtrain.data.sources.opening import Opened
from tests.data.sources.object_store import gs_store

FILES = 36


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Thirty-six files of about 8 KB."""
    (tmp_path / "served").mkdir()
    for file in range(FILES):
        lines = [json.dumps({"text": f"{file}.{i} " + "word " * 60}) + "\n" for i in range(25)]
        (tmp_path / "served" / f"{file:02}.jsonl").write_text("".join(lines))
    return tmp_path / "served"


@contextlib.contextmanager
def slow_server(folder: Path, *, delay_s: float) -> Iterator[str]:
    """Serves a folder with its listing, each file after a pause, one after another; yields its address."""
    turn = threading.Lock()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.endswith(".jsonl"):
                with turn:
                    time.sleep(delay_s)  # the slow server
            super().do_GET()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))
    )
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/*.jsonl"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def spec(url: str, folder: Path, **fields: Any) -> PackedText:
    fields = {"seq_len": 64, "global_batch": 4, "max_loaders": 1, **fields}
    return PackedText(path=url, cache_dir=str(folder.parent / "cache"), **fields)


def files_of(lines: list[str]) -> list[int]:
    """Returns the number of open files that each line gives, of all there are."""
    counts = [
        line.split(" files,")[0].rpartition(": ")[2].split(" of ") for line in lines if " files," in line
    ]
    assert all(int(of) == FILES for _, of in counts), lines
    return [int(done) for done, _ in counts]


def test_the_trainer_says_how_far_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "FIRST_LINE_AFTER_S", 0.1)
    monkeypatch.setattr(opening, "LINE_EVERY_S", 0.1)
    said: list[str] = []
    with slow_server(folder, delay_s=0.02) as url:
        dataset = open_dataset(spec(url, folder), seed=0, say=said.append)
        counts = files_of(said)
        assert len(counts) > 2
        assert counts == sorted(counts)
        assert 0 <= counts[0] < counts[-1] <= FILES
        assert all(line.startswith("data: opening data: ") and line.endswith(" s so far") for line in said)
        assert " files, 0.0 MiB, " not in said[-1]
        assert " MiB, " in said[-1], "this server does not tell sizes"
        said.clear()
        monkeypatch.setattr(opening, "FIRST_LINE_AFTER_S", 3600.0)
        open_dataset(spec(url, folder), seed=0, say=said.append)
        assert said == [], "what does not take long is not said"
    del dataset
    assert not [thread for thread in threading.enumerate() if thread.name == "data-opening"]


def test_a_held_out_set_says_it_under_its_own_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "FIRST_LINE_AFTER_S", 0.1)
    said: list[str] = []
    (folder.parent / "train.txt").write_text("train " * 1000)
    data = spec(str(folder.parent / "train.txt"), folder, eval_fraction=0.0)
    dataset = open_dataset(data, seed=0, say=said.append)
    with slow_server(folder, delay_s=0.02) as url:
        open_sets({"web": Source(path=url)}, data, dataset.setups, dataset.say)
    assert said
    assert all(line.startswith("data: opening eval.sets.web: ") for line in said)


def test_a_failure_ends_the_lines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "LINE_EVERY_S", 0.01)
    (folder / "05.jsonl").write_text("no json")
    (folder / "06.jsonl").write_text('{"text": 1}\n')
    with pytest.raises(ValueError, match="none of the first 2 records tried"):
        open_dataset(spec(str(folder / "0[56].jsonl"), folder), seed=0, say=lambda line: None)
    assert not [thread for thread in threading.enumerate() if thread.name == "data-opening"]


def test_a_loader_tells_the_pool_how_far_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "FIRST_LINE_AFTER_S", 0.1)
    monkeypatch.setattr(pools, "LINE_EVERY_S", 0.1)
    said: list[str] = []
    forkserver = Forkserver()
    with slow_server(folder, delay_s=0.03) as url:
        setups = spec(url, folder).setups(seed=0)
        placement = {"loader-0": (0,)}
        options = {"placement": placement, "standbys": 0, "read_timeout_s": 60.0}
        pool = pools.ProcessPool(setups, forkserver.client, say=said.append, **options)
        pool.request([RequestPart(0, np.arange(8))])
        end_s = time.monotonic() + 60
        while not pool.collect():
            assert time.monotonic() < end_s
            time.sleep(0.01)  # between two looks at real processes
    pool.close()
    forkserver.close()
    counts = files_of(said)
    assert len(counts) > 2
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    assert all(line.startswith("data: loader-0 is opening data: ") for line in said)


@pytest.mark.slow
def test_a_window_that_takes_long_is_said_in_the_log_of_a_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is patched here: the loader opens a window for more than two seconds while the trainer
    waits.
    """
    turn = threading.Lock()
    with gs_store(monkeypatch) as store:
        store.files.update({file.name: file.read_bytes() for file in folder.iterdir()})
        content = store.content

        def slowly(name: str, request: Any) -> Any:
            with turn:
                time.sleep(0.2)  # the slow store
            return content(name, request)

        store.content = slowly
        dataset = open_dataset(
            spec(store.url, folder, shuffle_window_bytes=1 << 17, eval_fraction=0.0), seed=0
        )
        assert dataset.streams[0].num_documents is None
        with dataset.train_batches() as batches:
            next(batches)
            lines = [line for line in batches.take_messages() if "is opening" in line]
    assert lines
    assert re.fullmatch(
        r"data: loader-0 is opening data: \d+ of 1\d files, 0.\d of 0.1 MiB, \d s so far", lines[0]
    )


def test_lines_say_what_is_known() -> None:
    assert Opened().line("opening web", 3.2) == "data: opening web: 3 s so far"
    known = Opened(1, 1200, 3 << 20, 5 << 30).line("opening web", 12.0)
    assert known == "data: opening web: 1 of 1,200 files, 3.0 of 5,120.0 MiB, 12 s so far"
    assert Opened(1, 12, 3 << 20, 0).line("opening web", 12.0).endswith("1 of 12 files, 3.0 MiB, 12 s so far")


def test_bytes_of_a_large_file_count_while_it_is_searched(tmp_path: Path) -> None:
    """One file of a whole corpus would otherwise stay at nothing until it is open."""
    with (tmp_path / "a.jsonl").open("w") as file:
        for _ in range(1500):
            file.write(json.dumps({"text": "x" * 100_000}) + "\n")
    told: list[Opened] = []

    class Kept(opening.Opening):
        def changed(self) -> None:
            told.append(self.so_far)

    from jtrain.data.sources.corpus import Corpus

    size = (tmp_path / "a.jsonl").stat().st_size
    Corpus(Source(path=str(tmp_path / "a.jsonl")), name="a", cache_dir=tmp_path / "cache", opening=Kept())
    assert [found.size_bytes for found in told] == [*range(0, size, 1 << 24), size, size]
    assert [found.files for found in told] == [*[0] * (len(told) - 1), 1]
