"""MosaicML streaming's side of the data benchmarks: one stream per source, mixed by proportion, shuffled.

Runs in the peers' environment, which setup.sh makes.

    python data_mosaicml.py write PARQUET_FOLDER FOLDER --seq-len 8192
    python data_mosaicml.py mixing FOLDER --rows 64 --seq-len 8192

Samples are rows of ids, written before: documents joined and cut, as llm-foundry prepares text. Two bytes per id.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from data_protocol import Batches, answer, arguments, draw, weights_of
from streaming import MDSWriter, Stream, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

EPOCH_SAMPLES = 1 << 20


def write(parquet: str, folder: str, seq_len: int) -> None:
    """Writes a folder of MDS shards for each Parquet file; what does not fill a last row is left out."""
    import pyarrow.parquet

    for file in sorted(Path(parquet).glob("*.parquet")):
        texts = pyarrow.parquet.read_table(file)["text"].to_pylist()
        ids = np.frombuffer(b"".join(b"\0" + text.encode() + b"\0" for text in texts), np.uint8).astype(np.uint16)
        with MDSWriter(out=f"{folder}/{file.stem}", columns={"tokens": f"ndarray:uint16:{seq_len + 1}"}) as out:
            for start in range(0, len(ids) - seq_len, seq_len):
                out.write({"tokens": ids[start : start + seq_len + 1]})


def collated(samples: list[dict[str, Any]]) -> Any:
    """Rows of one token more than they train on."""
    return np.stack([sample["tokens"] for sample in samples]).astype(np.int32)


def mixing(folder: str, rows: int) -> Batches:
    """Batches drawn in this process: workers would take cores of their own, and on one core they only add to it."""
    clean_stale_shared_memory()
    sources = sorted(Path(folder).iterdir())
    streams = [
        Stream(local=str(source), proportion=weight)
        for source, weight in zip(sources, weights_of(len(sources)), strict=True)
    ]
    dataset = StreamingDataset(
        streams=streams, shuffle=True, batch_size=rows, num_canonical_nodes=1, epoch_size=1 << 20
    )
    while True:
        for window in torch.utils.data.DataLoader(dataset, batch_size=rows, collate_fn=collated, drop_last=True):
            yield window[:, :-1], window[:, 1:]


def main() -> None:
    """Runs the command line."""
    args = arguments("what", "folder", "out", rows=0, seq_len=0)
    if args.what == "write":
        write(args.folder, args.out, args.seq_len)
        return
    batches = mixing(args.folder, args.rows)
    next(batches)
    answer(filled=1.0)
    draw(batches)


if __name__ == "__main__":
    main()
