"""WebDataset's side of the data benchmarks: RandomMix over one tar per source, each through a shuffle buffer.

Runs in the peers' environment, which setup.sh makes.

    python data_webdataset.py mixing FOLDER
"""

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import webdataset
from data_protocol import answer, draw, weights_of

SHUFFLED = 100
"""Documents in each source's shuffle buffer."""


def batches(folder: str, batch: int) -> Iterator[Any]:
    """Endless batches, each a list of int32 arrays."""
    sources = [
        webdataset.WebDataset(str(tar), shardshuffle=False).repeat().shuffle(SHUFFLED)
        for tar in sorted(Path(folder).glob("*.tar"))
    ]
    mixed = iter(webdataset.RandomMix(sources, weights_of(len(sources))))
    while True:
        yield [np.frombuffer(sample["txt"], np.uint8).astype(np.int32) for sample in itertools.islice(mixed, batch)]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["mixing"])
    parser.add_argument("folder")
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    start = time.perf_counter()
    iterator = batches(args.folder, args.batch)
    next(iterator)
    answer(first_batch_s=time.perf_counter() - start)
    draw(iterator)


if __name__ == "__main__":
    main()
