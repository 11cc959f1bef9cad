"""Two sources of JSON lines to prepare, and all bytes of what came of it."""

import json
from pathlib import Path

import numpy as np

from jtrain.data.pretokenized.shard import Recipe
from jtrain.data.sources.source import Source


def write_lines(folder: Path, *, lines: int) -> None:
    """Two sources, `web` and a smaller `book`, of JSON lines; `book` has a loss mask."""
    rng = np.random.default_rng(lines)
    for name, count in (("web", lines), ("book", lines // 3)):
        texts = [" ".join(rng.choice(["the", "cat", "sät", "on"], rng.integers(0, 40))) for _ in range(count)]
        records = [
            {"text": text, "mask": [[0, 2], [3, len(text)]] if len(text) > 3 else []} for text in texts
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def recipes_of(folder: Path, **more: object) -> list[Recipe]:
    """Of what `write_lines` wrote."""
    return [
        Recipe(
            name=name,
            source=Source(path=str(folder / f"{name}.jsonl"), mask_field="mask" if name == "book" else None),
            cache_dir=folder / "cache",
            **({"tokenizer": "bytes"} | more),  # pyright: ignore[reportArgumentType]
        )
        for name in ("web", "book")
    ]


def contents(out: Path) -> dict[str, bytes]:
    """Every file of all indexes, also hidden ones; the marks of killed processes, which are no part of it,
    left out.
    """
    files = [f for f in out.rglob("*") if f.is_file() and f.parent.name != ".hosts"]
    return {str(f.relative_to(out)): f.read_bytes() for f in files}
