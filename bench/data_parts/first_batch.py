"""Seconds from opening a corpus to its first batch: 5 GB of JSON lines, 100,000 files, 10 TB prepared.

From the call that opens the source to the batch, with every process that this starts; what the trainer
imports is loaded before. The corpora are made up: files of repeated lines whose pages are dropped from the
kernel's cache before each round, and an index whose 10 TB of ids are a file of holes. Each is beside a corpus
of the same form and a thousandth (JSON lines, index) or a hundredth (files) of the size.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jtrain.bench import Row, row
from jtrain.data.dataset import PackedText, open_dataset
from jtrain.data.pretokenized import index_format
from jtrain.data.pretokenized.index_format import BLOCK

GB, TB = 10**9, 10**12
LINE = (
    json.dumps({"text": "some words of a text that is long enough to be a document of its own " * 30}) + "\n"
)
DOCUMENT_TOKENS = 500_000
"""Tokens of each document of the made-up index."""


def rows(*, scale: float = 1.0, rounds: int = 3, folder: Path | None = None) -> Iterator[Row]:
    """Large and small take turns, and the fastest of the rounds counts.

    Args:
      scale: factor of the large sizes.
      rounds: openings of each corpus.
      folder: for 6 GB of files; by default a temporary folder.
    """
    with tempfile.TemporaryDirectory(dir=folder) as folder_made:
        for form, make, full, small in (
            ("JSON lines, GB", json_lines, 5.0, 0.005),
            ("text files, thousands", text_files, 100.0, 1.0),
            ("prepared index, TB", prepared_index, 10.0, 0.01),
        ):
            sizes = full * scale, small
            specs = [
                make(Path(folder_made) / f"{form.split()[0]}{number}", size)
                for number, size in enumerate(sizes)
            ]
            seconds = [[first_batch_s(spec) for spec in specs] for _ in range(rounds)]
            # The fastest: other work on the machine only ever slows one down.
            large_s, small_s = (min(column) for column in zip(*seconds, strict=True))
            yield row(f"{form}: {sizes[0]:g}", large_s, "s", bar="<= 2")
            yield row(f"{form}: {sizes[0]:g} against {sizes[1]:g}", large_s, "s", baseline=small_s)


def first_batch_s(spec: PackedText) -> float:
    """Returns the seconds from `open_dataset` to the first batch, with nothing of the corpus in memory."""
    # Line starts of JSON lines are cached there: without this the second round would not search the file.
    shutil.rmtree(spec.cache_dir, ignore_errors=True)
    for file in Path(spec.prepared or spec.path or "").rglob("*"):
        # Files below 2 MiB (blocks are of 512 bytes) would take longer to drop than to read.
        if file.is_file() and file.stat().st_blocks > 1 << 12:
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start_s = time.perf_counter()
    with open_dataset(spec, seed=0).train_batches() as batches:
        next(batches)
        return time.perf_counter() - start_s


def json_lines(folder: Path, gigabytes: float) -> PackedText:
    """Writes one file of lines of 2 KB."""
    folder.mkdir()
    block, remaining_bytes = LINE * 500, int(gigabytes * GB)
    with open(folder / "corpus.jsonl", "w") as file:
        while remaining_bytes > 0:
            remaining_bytes -= file.write(block)
        file.flush()
        # Pages that are not written yet cannot be dropped from the kernel's cache.
        os.fsync(file.fileno())
    return _spec(folder, path=str(folder))


def text_files(folder: Path, thousands: float) -> PackedText:
    """Writes files of 1 KB, a thousand to a folder."""
    for number in range(int(thousands * 1000)):
        inner = folder / f"{number // 1000:04}"
        inner.mkdir(parents=True, exist_ok=True)
        (inner / f"{number % 1000:03}.txt").write_text(f"file {number} " * 90)
    return _spec(folder, path=str(folder))


def prepared_index(folder: Path, terabytes: float) -> PackedText:
    """Writes an index of uint16 ids that are all holes."""
    index = folder / "data"
    index.mkdir(parents=True)
    # 2 bytes per id.
    records = max(int(terabytes * TB) // 2 // DOCUMENT_TOKENS, 32)
    blocks = -(-records // BLOCK)
    lengths = np.zeros(blocks * BLOCK, "<u4")
    lengths[:records] = DOCUMENT_TOKENS
    starts = np.append(0, np.cumsum(lengths.reshape(-1, BLOCK).sum(axis=1, dtype=np.int64)))
    (index / index_format.LENGTHS).write_bytes(lengths.tobytes() + starts.astype("<i8").tobytes())
    with open(index / index_format.IDS, "wb") as file:
        # A file of holes: 10 TB of zeros that take no space.
        file.truncate(records * DOCUMENT_TOKENS * 2)
    for name in (index_format.SHARDS, index_format.SKIPPED):
        (index / name).touch()
    (index / index_format.FILES).write_text(json.dumps({"names": ["made up"], "file_ends": [records]}))
    made_of = {"corpus": "made up", "tokenizer": "bytes"}
    counts = {"records": records, "tokens": records * DOCUMENT_TOKENS, "empty": 0, "skipped": 0}
    (index / index_format.INDEX).write_text(
        index_format.seal(index, {"made_of": made_of, "dtype": "uint16", **counts})
    )
    return _spec(folder, path="nowhere", prepared=str(folder))


def _spec(folder: Path, *, path: str, prepared: str | None = None) -> PackedText:
    cache_dir = str(folder.with_name(f"{folder.name}-cache"))
    return PackedText(path=path, prepared=prepared, seq_len=1024, global_batch=64, cache_dir=cache_dir)
