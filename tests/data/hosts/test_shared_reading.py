"""Hosts that divide the reading: real constructors, loaders and connections; the batches are those of one
thread.

The trainers of all hosts live in this process here. Real JAX processes meet in
`tests/data/loaders/test_processes.py`.
"""

import json
import os
import shutil
import signal
import socket
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jtrain.data import PackedText, open_dataset
from jtrain.data.dataset import TextDataset
from jtrain.data.plane.data_plane import ProcessPlane
from tests.data.conftest import assert_same_batch
from tests.data.four_sources import PRODUCTION, spec
from tests.data.hosts.conftest import Start, documents_read, joined, pids_of

HOSTS = 4


@pytest.mark.parametrize(
    ("packing", "count"),
    [
        ("concat", 2),
        pytest.param("concat", HOSTS, marks=pytest.mark.slow),
        pytest.param("best_fit", HOSTS, marks=pytest.mark.slow),
    ],
)
def test_each_host_reads_its_share_of_the_stream_of_one_thread(
    folder: Path, packing: str, count: int, start: Start
) -> None:
    """Four sources, one with a loss mask: the same rows, and an even part of the documents on each host.

    Each host has 40,960 tokens of a batch, more than are filled at a time.
    """
    dataset = open_dataset(spec(folder, packing=packing, **PRODUCTION | {"global_batch": 16 * count}), seed=0)
    with dataset.train_batches(inline=True) as alone:
        want = [next(alone) for _ in range(2)]
        all_documents = documents_read(alone)
    hosts = start([dataset] * count)
    for batch in want:
        assert_same_batch(joined([next(one) for one in hosts]), batch)
    for one in hosts:
        assert documents_read(one) <= 1.32 / count * all_documents
        assert one.state() == hosts[0].state()


def test_hosts_go_on_from_the_state_of_one_process_and_back(folder: Path, start: Start) -> None:
    dataset = open_dataset(spec(folder), seed=0)
    with dataset.train_batches(inline=True) as alone:
        want = [next(alone) for _ in range(12)]
    with dataset.train_batches(inline=True) as alone:
        for _ in range(4):
            next(alone)
        state = alone.state()
    hosts = start([dataset] * 2, state)
    for batch in want[4:8]:
        assert_same_batch(joined([next(one) for one in hosts]), batch)
    with dataset.train_batches(hosts[1].state(), inline=True) as alone:
        for batch in want[8:]:
            assert_same_batch(next(alone), batch)


@pytest.mark.slow
def test_hosts_share_a_corpus_that_is_opened_as_it_is_read(tmp_path: Path, start: Start) -> None:
    """Windows of JSON lines: each host opens them by the anchors that the others have found."""
    rng = np.random.default_rng(0)
    for part in range(12):
        texts = [f"{part}.{n} " + "y" * int(rng.integers(0, 900)) for n in range(40)]
        (tmp_path / f"{part:02}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )
    fields = {"seq_len": 64, "global_batch": 16, "eval_fraction": 0.05, "shuffle_window_bytes": 1 << 16}
    dataset = open_dataset(
        PackedText(path=str(tmp_path), cache_dir=str(tmp_path / "cache"), **fields), seed=0
    )
    assert dataset.streams[0].num_documents is None, "it is not opened whole"
    with dataset.train_batches(inline=True) as alone:
        want = [next(alone) for _ in range(300)]  # more than an epoch
        all_documents = documents_read(alone)
    hosts = start([dataset] * 3)
    for batch in want:
        assert_same_batch(joined([next(one) for one in hosts]), batch)
    assert max(map(documents_read, hosts)) <= 0.36 * all_documents
    state = hosts[1].state()
    with dataset.train_batches(state, inline=True) as one:
        after = next(one)
    assert_same_batch(joined([next(one) for one in hosts]), after)


def test_hosts_decode_each_row_group_once(tmp_path: Path, start: Start) -> None:
    """Eight groups of a Parquet file on three hosts, two loaders each: one epoch decodes eight groups in
    all.
    """
    texts = [f"{n} " + "z" * (n % 90) for n in range(800)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=100)
    fields = {"seq_len": 64, "global_batch": 6, "eval_fraction": 0.0, "epochs": 1, "max_loaders": 2}
    dataset = open_dataset(
        PackedText(path=str(tmp_path), cache_dir=str(tmp_path / "cache"), **fields), seed=0
    )
    with dataset.train_batches(inline=True) as alone:
        want = list(alone)
    hosts = start([dataset] * 3)
    for batch in want:
        assert_same_batch(joined([next(one) for one in hosts]), batch)
    decoded = [sum(loader.decoded for loader in one.stats.loaders) for one in hosts if one.stats is not None]
    assert sum(decoded) == 8
    assert min(decoded) > 0


def test_kills_change_no_batch(folder: Path, start: Start) -> None:
    """Constructors and loaders of some hosts die in turn; the others wait for them and ask again."""
    dataset = open_dataset(spec(folder), seed=0)
    with dataset.train_batches(inline=True) as alone:
        want = [next(alone) for _ in range(40)]
    # A trainer restarts its constructor when it takes a batch, and here it waits for the trainer before it.
    hosts = start([dataset] * HOSTS, silence_s=5.0)
    victims = {
        3: (1, "jtrain-constr"),
        8: (2, "jtrain-loader"),
        13: (0, "jtrain-constr"),
        20: (3, "jtrain-constr"),
    }
    for step, batch in enumerate(want):
        if step in victims:
            host, role = victims[step]
            for pid in pids_of(hosts[host], role):
                os.kill(pid, signal.SIGKILL)
        assert_same_batch(joined([next(one) for one in hosts]), batch)


@pytest.mark.slow
def test_the_part_of_a_host_that_is_gone_is_read_by_the_others(folder: Path, start: Start) -> None:
    """One host of two leaves: the other one says so, reads everything, and its rows stay the same."""
    dataset = open_dataset(spec(folder), seed=0)
    with dataset.train_batches(inline=True) as alone:
        want = [next(alone) for _ in range(30)]
    hosts = start([dataset] * 2, silence_s=2.0)
    for batch in want[:4]:
        assert_same_batch(joined([next(one) for one in hosts]), batch)
    hosts[1].close()
    half = len(want[0].token_BL) // 2
    for batch in want[4:]:
        np.testing.assert_array_equal(next(hosts[0]).token_BL, batch.token_BL[:half])
    [line] = [line for line in hosts[0].take_messages() if "process 1 at 127.0.0.1" in line]
    assert "reads its part of the data too" in line


def test_a_document_that_one_host_cannot_read_is_left_out_by_all(tmp_path: Path, start: Start) -> None:
    """Host 1 sees damaged lines where the others see good ones: what the reader of a run finds holds for
    all.
    """
    lines = [json.dumps({"text": f"{n}: " + "ab" * 20}) + "\n" for n in range(400)]
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "a.jsonl").write_text("".join(lines))
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    damaged = [line if n % 10 else "{" + "!" * (len(line) - 2) + "\n" for n, line in enumerate(lines)]
    (tmp_path / "bad" / "a.jsonl").write_text("".join(damaged))

    def opened(folder: str) -> TextDataset:
        fields = {
            "seq_len": 64,
            "global_batch": 8,
            "eval_fraction": 0.1,
            "on_bad_record": "skip",
            "max_loaders": 1,
        }
        return open_dataset(
            PackedText(path=str(tmp_path / folder), cache_dir=str(tmp_path / "c"), **fields), seed=0
        )

    hosts = start([opened("good"), opened("bad")])
    for _ in range(30):
        for one in hosts:
            next(one)
        assert hosts[0].state() == hosts[1].state()
    assert hosts[0].stats is not None
    assert 0 < hosts[0].stats.skipped < 60


def test_a_stranger_is_not_listened_to(folder: Path, start: Start) -> None:
    """A program that does not know the run's token gets a nonce and nothing else, and disturbs nobody."""
    dataset = open_dataset(spec(folder), seed=0)
    hosts = start([dataset] * 2)
    assert isinstance(hosts[0]._plane, ProcessPlane)
    assert hosts[0]._plane._listening is not None
    address = hosts[0]._plane._listening.getsockname()
    next(hosts[0])
    with socket.create_connection(address, timeout=300) as stranger:
        assert len(stranger.recv(64)) == 32
        stranger.sendall((1).to_bytes(4) + bytes(64))
        assert stranger.recv(64) == b""
    with dataset.train_batches(inline=True) as alone:
        for number in range(8):
            want = next(alone)
            got = [next(one) for one in hosts[number == 0 :]]
            if number:
                assert_same_batch(joined(got), want)
