"""MosaicML streaming's side of the data benchmarks: one stream per source, mixed by proportion, shuffled.

Runs in the peers' environment, which setup.sh makes.

    python data_mosaicml.py write PARQUET_FOLDER FOLDER
    python data_mosaicml.py mixing FOLDER --workers 2
"""

import argparse
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data_protocol import answer, draw, weights_of

# Before streaming is imported: streaming.vision needs torchvision, which a benchmark of text does not.
sys.modules["streaming.vision"] = types.ModuleType("streaming.vision")

from streaming import MDSWriter, Stream, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402


def write(parquet: str, folder: str) -> None:
    """Writes a folder of MDS shards for each Parquet file."""
    import pyarrow.parquet

    for file in sorted(Path(parquet).glob("*.parquet")):
        with MDSWriter(out=f"{folder}/{file.stem}", columns={"text": "str"}) as out:
            for text in pyarrow.parquet.read_table(file)["text"].to_pylist():
                out.write({"text": text})


class Tokens(StreamingDataset):
    """Dataset of byte tokens."""

    def __getitem__(self, at: Any) -> Any:
        return torch.from_numpy(np.frombuffer(super().__getitem__(at)["text"].encode(), np.uint8).astype(np.int32))


def mixing(folder: str, batch: int, workers: int) -> None:
    """Draws batches, with or without worker processes."""
    clean_stale_shared_memory()
    start = time.perf_counter()
    sources = sorted(Path(folder).iterdir())
    streams = [
        Stream(local=str(source), proportion=weight)
        for source, weight in zip(sources, weights_of(len(sources)), strict=True)
    ]
    dataset = Tokens(streams=streams, shuffle=True, batch_size=batch, num_canonical_nodes=1, epoch_size=1 << 24)
    iterator = iter(torch.utils.data.DataLoader(dataset, batch_size=batch, num_workers=workers, collate_fn=list))
    next(iterator)
    answer(first_batch_s=time.perf_counter() - start)
    draw(iterator)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["write", "mixing"])
    parser.add_argument("folder")
    parser.add_argument("out", nargs="?")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    if args.what == "write":
        write(args.folder, args.out)
    else:
        mixing(args.folder, args.batch, args.workers)


if __name__ == "__main__":
    main()
