"""Runs read prepared and adopted indexes without any raw file, on the local disk or behind a URL."""

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from jtrain.data import PackedText, open_dataset
from jtrain.data.loaders import inline
from jtrain.data.loaders.inline import InlinePool
from jtrain.data.pretokenized.adopt import adopt
from jtrain.data.sources.source import Source
from jtrain.data.stream.source_setup import SourceSetup
from jtrain.layout.dims import Batch
from tests.data.pretokenized.foreign_writers import write_megatron
from tests.data.pretokenized.test_reader import make
from tests.data.sources.object_store import web_store


def batches(
    prepared: Path | str, cache_dir: Path, *, engine: Literal["processes", "inline"] = "inline"
) -> list[Batch]:
    """First steps of the source `web`, and its held-out text."""
    spec = PackedText(
        sources={"web": Source(path="nowhere/web.jsonl")},
        seq_len=64,
        global_batch=8,
        eval_fraction=0.1,
        prepared=str(prepared),
        cache_dir=str(cache_dir),
        engine=engine,
        max_loaders=2,
    )
    dataset = open_dataset(spec, seed=0)
    with dataset.train_batches() as iterator:
        return [*(next(iterator) for _ in range(20)), *(held.batch for held in dataset.held_out().batches())]


@pytest.mark.parametrize("engine", ["inline", "processes"])
def test_the_stream_behind_a_url_is_that_of_the_local_folder(
    engine: Literal["processes", "inline"], same_batch: Callable[[Batch, Batch], None], tmp_path: Path
) -> None:
    """The raw file is gone."""
    folder = shutil.copytree(make(tmp_path / "raw").parent, tmp_path / "prepared")
    shutil.rmtree(tmp_path / "raw")
    want = batches(folder, tmp_path / "cache")
    with web_store() as store:
        files = [path for path in folder.rglob("*") if path.is_file()]
        store.files.update({f"prepared/{path.relative_to(folder)}": path.read_bytes() for path in files})
        found = batches(f"{store.url}/prepared/", tmp_path / "cache", engine=engine)
        assert all(r.range for r in store.requests if r.method == "GET" and r.path.endswith(".bin"))
    assert len(found) == len(want) > 20
    for one, other in zip(found, want, strict=True):
        same_batch(one, other)


def test_the_stream_is_the_same_where_descriptors_are_few(
    same_batch: Callable[[Batch, Batch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a map each, open indexes could take more descriptors than a process may have: then ids are
    read.
    """
    folder = make(tmp_path / "raw").parent
    pools: list[InlinePool] = []
    create = InlinePool.__init__

    def noted(self: InlinePool, setups: tuple[SourceSetup, ...]) -> None:
        create(self, setups)
        pools.append(self)

    monkeypatch.setattr(InlinePool, "__init__", noted)
    mapped = batches(folder, tmp_path / "cache")
    monkeypatch.setattr(inline, "SPARE_DESCRIPTORS", 1 << 40)
    read = batches(folder, tmp_path / "cache")
    assert [pool.setups[0].map_ids for pool in pools] == [True, False]
    for one, other in zip(mapped, read, strict=True):
        same_batch(one, other)


def test_a_run_trains_on_adopted_files(tmp_path: Path) -> None:
    """Every document of the first steps is one of the Megatron files."""
    rng = np.random.default_rng(0)
    documents = [[0, *(int(i) for i in rng.integers(1, 200, rng.integers(20, 60))), 0] for _ in range(300)]
    (tmp_path / "theirs").mkdir()
    write_megatron(tmp_path / "theirs" / "a", documents, dtype="int32")
    adopt(
        str(tmp_path / "theirs"),
        tmp_path / "out",
        name="web",
        tokenizer="bytes",
        end_token=None,
        dtype=None,
        column=None,
        command="adopt!",
        stream=io.StringIO(),
    )
    known = {bytes(document) for document in documents}
    found = set()
    for batch in batches(tmp_path / "out", tmp_path / "cache"):
        for tokens, segments in zip(np.asarray(batch.token_BL), np.asarray(batch.segment_BL), strict=True):
            for segment in set(segments.tolist()) - {0}:
                text = bytes(tokens[segments == segment].tolist())
                if text[0] == text[-1] == 0 and len(text) > 1:
                    found.add(text)
    assert len(found) > 100
    assert found <= known
