"""WebDataset's side of the data benchmarks: RandomMix over one tar per source, each through a shuffle buffer.

Runs in the peers' environment, which setup.sh makes.

    python data_webdataset.py mixing FOLDER --rows 64 --seq-len 8192
"""

from collections.abc import Iterator
from pathlib import Path

import webdataset
from data_protocol import answer, arguments, draw, rows_of, weights_of

SHUFFLED = 100
"""Documents in each source's shuffle buffer."""


def documents(folder: str) -> Iterator[bytes]:
    """Endless documents of all sources."""
    sources = [
        webdataset.WebDataset(str(tar), shardshuffle=False).repeat().shuffle(SHUFFLED)
        for tar in sorted(Path(folder).glob("*.tar"))
    ]
    for sample in webdataset.RandomMix(sources, weights_of(len(sources))):
        yield sample["txt"]


def main() -> None:
    """Runs the command line."""
    args = arguments("what", "folder", rows=0, seq_len=0)
    batches = rows_of(documents(args.folder), args.rows, args.seq_len)
    next(batches)
    answer(filled=1.0)
    draw(batches)


if __name__ == "__main__":
    main()
