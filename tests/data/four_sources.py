"""Four sources of JSON lines, a spec that mixes them, and what a stream of them comes to."""

import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.data import PackedText, Source

NAMES = ("web", "code", "books", "chat")


def write(folder: Path) -> Path:
    """Documents of 1 to 300 bytes, a file for each source; `chat` has a loss mask."""
    rng = np.random.default_rng(1)
    for i, name in enumerate(NAMES):
        texts = [f"{name}{n}:" + "x" * int(rng.integers(0, 30 + 80 * i)) for n in range(300)]
        lines = [json.dumps({"text": text, "mask": [[2, 4], [5, len(text)]]}) + "\n" for text in texts]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def spec(folder: Path, **fields: Any) -> PackedText:
    masks = {"chat": "mask"}
    sources = {
        name: Source(path=str(folder / f"{name}.jsonl"), weight=1.0 + i, mask_field=masks.get(name))
        for i, name in enumerate(NAMES)
    }
    fields = {"sources": sources, "seq_len": 64, "global_batch": 16, "max_loaders": 2, "packing": "best_fit", **fields}
    return PackedText(**{"eval_fraction": 0.05, "cache_dir": str(folder / "cache"), **fields})


def digest(batches: Iterator[Any], count: int) -> str:
    found = hashlib.blake2b(digest_size=8)
    for batch in itertools.islice(batches, count):
        for name in ("token_BL", "target_BL", "position_BL", "segment_BL"):
            found.update(getattr(batch, name).tobytes())
    return found.hexdigest()
