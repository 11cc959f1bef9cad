"""Plain readers of the data benchmarks: windows of a memory-mapped file of ids, and JSON lines read file by file.

Runs in jtrain's environment, but imports only numpy.

    python data_plain.py nanogpt FOLDER          random windows, each array stacked of converted pieces
    python data_plain.py windows FOLDER          the same windows, each copied once into one array
    python data_plain.py lines FOLDER            files in random order, lines in theirs: no mixture, no shuffle beyond
    python data_plain.py documents FOLDER        the memory-mapped documents, shuffled, in rows of four arrays
    python data_plain.py packed-lines FOLDER     `lines`, in rows of four arrays

`nanogpt` builds a batch as nanoGPT's get_batch does: it converts and stacks the tokens, then the targets.
`windows` does the least work that a batch of int32 can take: tokens and targets are two views of one array.
The last two give what a step on packed documents needs, as jtrain does: tokens; targets, none at the end of a document;
positions and segment numbers. They mix no sources.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from data_protocol import Batches, answer, arguments, draw, rows_of


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
    return rows_of(_texts(folder), rows, seq_len)


def _texts(folder: str) -> Iterator[bytes]:
    files = sorted(Path(folder).glob("*.jsonl"))
    rng = random.Random(0)
    while True:
        for file in rng.sample(files, len(files)):
            with file.open("rb") as opened:
                for line in opened:
                    yield json.loads(line)["text"].encode()


def packed_lines(folder: str, rows: int, seq_len: int) -> Batches:
    """Rows of the documents of JSON lines."""
    return _packed((np.frombuffer(b"\0%b\0" % text, np.uint8) for text in _texts(folder)), rows, seq_len)


def documents(folder: str, rows: int, seq_len: int) -> Batches:
    """Rows of the documents of the flat file, in random order."""
    ids = np.asarray(np.memmap(Path(folder) / "tokens.bin", np.uint16, "r"))  # slices of np.memmap itself are slow
    borders = np.flatnonzero(ids == 0)  # an id before each document and one behind
    starts, ends = borders[::2].tolist(), (borders[1::2] + 1).tolist()
    rng = random.Random(0)

    def shuffled() -> Iterator[Any]:
        while True:
            for i in rng.sample(range(len(starts)), len(starts)):
                yield ids[starts[i] : ends[i]]

    return _packed(shuffled(), rows, seq_len)


def _packed(documents: Iterator[Any], rows: int, seq_len: int) -> Batches:
    """Joins documents and cuts them into rows; each array is written once, piece by piece."""
    count = np.arange(seq_len, dtype=np.int32)
    left = next(documents)
    while True:
        tokens, targets, positions, segments = (np.empty((rows, seq_len), np.int32) for _ in range(4))
        for token, target, position, segment in zip(tokens, targets, positions, segments, strict=True):
            at = number = 0
            while at < seq_len:
                end = min(at + len(left), seq_len)
                number += 1
                token[at:end] = left[: end - at]
                target[at : end - 1] = token[at + 1 : end]
                target[end - 1] = -1
                position[at:end] = count[: end - at]
                segment[at:end] = number
                left = left[end - at :] if end - at < len(left) else next(documents)
                at = end
        yield tokens, targets


_READERS = {
    "nanogpt": nanogpt,
    "windows": windows,
    "lines": lines,
    "documents": documents,
    "packed-lines": packed_lines,
}


def main() -> None:
    """Runs the command line."""
    args = arguments("what", "folder", rows=0, seq_len=0)
    batches = _READERS[args.what](args.folder, args.rows, args.seq_len)
    next(batches)
    answer(filled=1.0)
    draw(batches)


if __name__ == "__main__":
    main()
