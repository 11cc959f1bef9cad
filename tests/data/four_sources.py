"""Four sources of JSON lines, a spec that mixes them, and what a stream of them comes to."""

import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.data import PackedText, Source
from jtrain.layout.constants import IGNORE
from jtrain.layout.dims import Batch

NAMES = ("web", "code", "books", "chat")

PRODUCTION: dict[str, Any] = dict(seq_len=2560, global_batch=16)
"""A batch of 40,960 tokens: rows are filled 32,768 tokens at a time, 12 of these."""


def write(folder: Path) -> Path:
    """Documents of 1 to 300 bytes, a file for each source; `chat` has a loss mask."""
    rng = np.random.default_rng(1)
    for i, name in enumerate(NAMES):
        # Samples are no longer than a row: what is left out of longer ones is counted as skipped.
        most = 50 if name == "chat" else 30 + 80 * i
        texts = [f"{name}{n}:" + "x" * int(rng.integers(0, most)) for n in range(300)]
        lines = [json.dumps({"text": text, "mask": [[2, 4], [5, len(text)]]}) + "\n" for text in texts]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def spec(folder: Path, **fields: Any) -> PackedText:
    masks = {"chat": "mask"}
    sources = {
        name: Source(path=str(folder / f"{name}.jsonl"), weight=1.0 + i, mask_field=masks.get(name))
        for i, name in enumerate(NAMES)
    }
    fields = {
        "sources": sources,
        "seq_len": 64,
        "global_batch": 16,
        "max_loaders": 2,
        "packing": "best_fit",
        **fields,
    }
    return PackedText(**{"eval_fraction": 0.05, "cache_dir": str(folder / "cache"), **fields})


def documents(folder: Path) -> dict[bytes, list[int]]:
    """Targets of every document by its ids, which begin and end with 0; of `chat` only what its mask says."""
    found = {}
    for name in NAMES:
        for line in (folder / f"{name}.jsonl").read_text().splitlines():
            record = json.loads(line)
            spans = record["mask"] if name == "chat" else [[0, len(record["text"])]]
            learned = {i for start, end in spans for i in range(start, end)}
            ids = [0, *record["text"].encode(), 0]
            learned |= {len(record["text"])}  # the end, which belongs to the last part
            targets = [ids[i + 1] if i in learned else IGNORE for i in range(len(ids) - 1)]
            found[bytes(ids)] = [*targets, IGNORE]
    return found


def assert_collated(batch: Batch, of: dict[bytes, list[int]]) -> None:
    """Rows are whole documents of `of`, one after another, and padding; nothing else in any of the four
    arrays.
    """
    for row in range(len(batch.token_BL)):
        token = batch.token_BL[row].astype(np.uint8).tobytes()
        want: list[list[int]] = [[], [], [], []]
        for number in range(1, int(batch.segment_BL[row].max()) + 1):
            length = int((batch.segment_BL[row] == number).sum())
            ids = token[len(want[0]) : len(want[0]) + length]
            for array, values in zip(want, (ids, of[ids], range(length), [number] * length), strict=True):
                array += values
        arrays = (batch.token_BL, batch.target_BL, batch.position_BL, batch.segment_BL)
        for array, values, padding in zip(arrays, want, (0, IGNORE, 0, 0), strict=True):
            np.testing.assert_array_equal(array[row], values + [padding] * (len(array[row]) - len(values)))


def digest(batches: Iterator[Any], count: int) -> str:
    found = hashlib.blake2b(digest_size=8)
    for batch in itertools.islice(batches, count):
        for name in ("token_BL", "target_BL", "position_BL", "segment_BL"):
            found.update(getattr(batch, name).tobytes())
    return found.hexdigest()
