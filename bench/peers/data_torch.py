"""torchdata's side of the data benchmarks: a StatefulDataLoader over an iterable that mixes many Parquet files.

Runs in the peers' environment, which setup.sh makes.

    python data_torch.py consumers FOLDER --consumers 32 --batches 40     each opens every source
    python data_torch.py resume FOLDER --step 1000                        the iterable has no state: it is read again

A consumer is one process, the loader inside it: a worker process on top would only add to it.
"""

import itertools
import random
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_protocol import answer, arguments, consumers, weights_of


def loader_of(folder: str, seed: int, batch: int) -> Any:
    """Loader as users write it: an iterator per source, and a weighted choice among them for each sample."""
    import numpy as np
    import pyarrow.parquet
    import torch

    warnings.filterwarnings(
        "ignore", message="'set_vital' is deprecated"
    )  # torchdata calls a function that torch retired
    from torchdata.stateful_dataloader import StatefulDataLoader

    def documents(file: Path) -> Iterator[Any]:
        while True:
            for rows in pyarrow.parquet.ParquetFile(file).iter_batches(64, columns=["text"]):
                for text in rows["text"]:
                    yield torch.from_numpy(np.frombuffer(text.as_py().encode(), np.uint8).astype(np.int32))

    class Mixture(torch.utils.data.IterableDataset):
        """Endless weighted mixture of all sources."""

        def __iter__(self) -> Iterator[Any]:
            sources = [documents(file) for file in sorted(Path(folder).glob("*.parquet"))]
            rng = random.Random(seed)
            cumulative = list(itertools.accumulate(weights_of(len(sources))))
            while True:
                yield next(rng.choices(sources, cum_weights=cumulative)[0])

    return StatefulDataLoader(Mixture(), batch_size=batch, collate_fn=list)


def batches_of(folder: str, seed: int, batch: int) -> Iterator[Any]:
    """Batches of one consumer."""
    return iter(loader_of(folder, seed, batch))


def resume(args: Any) -> None:
    """Times a resume from torchdata's first call to the first batch after `step`, reading all earlier batches again."""
    loader = loader_of(args.folder, 0, args.batch)  # imports
    next(iter(loader))
    state = loader.state_dict() | {"_num_yielded": args.step, "_sampler_iter_yielded": args.step}
    start = time.perf_counter()
    loader = loader_of(args.folder, 0, args.batch)
    loader.load_state_dict(state)
    next(iter(loader))
    answer(first_batch_s=time.perf_counter() - start)


def main() -> None:
    """Runs the command line."""
    args = arguments("what", "folder", consumers=1, batches=40, batch=64, step=0)
    if args.what == "consumers":
        consumers(args.consumers, batches_of, args)
    else:
        resume(args)


if __name__ == "__main__":
    main()
