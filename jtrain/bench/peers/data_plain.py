"""Plain readers of the data benchmarks: windows of a memory-mapped file of ids, and JSON lines read file by file.

Runs in jtrain's environment, but imports only numpy.

    python data_plain.py nanogpt FOLDER          random windows, each array stacked of converted pieces
    python data_plain.py windows FOLDER          the same windows, each copied once into one array
    python data_plain.py lines FOLDER            files in random order, lines in theirs: no mixture, no shuffle beyond

`nanogpt` builds a batch as nanoGPT's get_batch does: it converts and stacks the tokens, then the targets.
`windows` does the least work that a batch of int32 can take: tokens and targets are two views of one array.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from data_protocol import Batches, answer, draw, rows_of


def nanogpt(folder: str, rows: int, seq_len: int) -> Batches:
    """Batches of random windows, written as users write them."""
    ids = np.memmap(Path(folder) / "tokens.bin", np.uint16, "r")
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(0, len(ids) - seq_len, rows)
        tokens = np.stack([ids[i : i + seq_len].astype(np.int32) for i in starts])
        targets = np.stack([ids[i + 1 : i + 1 + seq_len].astype(np.int32) for i in starts])
        yield tokens, targets


def windows(folder: str, rows: int, seq_len: int) -> Batches:
    """Batches of random windows with one copy of each."""
    ids = np.memmap(Path(folder) / "tokens.bin", np.uint16, "r")
    rng = np.random.default_rng(0)
    while True:
        window = np.empty((rows, seq_len + 1), np.int32)
        for row, start in enumerate(rng.integers(0, len(ids) - seq_len, rows)):
            window[row] = ids[start : start + seq_len + 1]
        yield window[:, :-1], window[:, 1:]


def lines(folder: str, rows: int, seq_len: int) -> Batches:
    """Batches of JSON lines, tokenised as they come."""
    files = sorted(Path(folder).glob("*.jsonl"))

    def documents() -> Iterator[Any]:
        rng = random.Random(0)
        while True:
            for file in rng.sample(files, len(files)):
                with file.open("rb") as opened:
                    for line in opened:
                        yield json.loads(line)["text"].encode()

    return rows_of(documents(), rows, seq_len)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["nanogpt", "windows", "lines"])
    parser.add_argument("folder")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--seq-len", type=int, required=True)
    args = parser.parse_args()
    batches = {"nanogpt": nanogpt, "windows": windows, "lines": lines}[args.what](args.folder, args.rows, args.seq_len)
    next(batches)
    answer(filled=1.0)
    draw(batches)


if __name__ == "__main__":
    main()
