"""Grain's side of the data benchmarks: documents of many sources, mixed, as int32 arrays of byte tokens.

Runs in jtrain's environment, but does not import jtrain. With jax installed, `import grain` imports jax, also in every
worker process that Grain spawns.

    python data_grain.py consumers FOLDER --consumers 32 --batches 40     each opens every source (Parquet)
    python data_grain.py mixing FOLDER --rows 64 --seq-len 8192           one process, MapDataset.mix (ArrayRecord)
    python data_grain.py resume FOLDER --step 1000000                     the same from a saved state
    python data_grain.py scaling --slow-weight 0.3 --slow-s 0.01          one source that is slow to read

`consumers` stand for the workers of 32 ranks under Grain: processes started by spawn, each with all sources open, since
`mp_prefetch` slices the indices of the mixture and not the sources.
"""

import ctypes
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from data_protocol import answer, arguments, consumers, draw, rows_of, weights_of


def parquet_batches(folder: str, seed: int, batch: int) -> Iterator[Any]:
    """Batches by `IterDataset.mix`, the only mixture that Grain has for Parquet."""
    import grain
    import pyarrow.parquet  # noqa: F401
    from grain import experimental

    files = sorted(Path(folder).glob("*.parquet"))
    sources = [experimental.RepeatIterDataset(experimental.ParquetIterDataset(str(file))) for file in files]
    mixed = grain.IterDataset.mix(sources, weights=weights_of(len(files)))
    ids = mixed.map(lambda record: np.frombuffer(record["text"].encode(), np.uint8).astype(np.int32))

    def batches() -> Iterator[Any]:
        yield from ids.seed(seed).batch(batch, batch_fn=list)

    return batches()


def arrayrecord_mixture(folder: str) -> Any:
    """Endless records by `MapDataset.mix`, Grain's fastest: every source shuffled."""
    import grain

    files = sorted(Path(folder).glob("*.arrayrecord"))
    sources = [
        grain.MapDataset.source(grain.sources.ArrayRecordDataSource(str(file)))
        .seed(number)
        .shuffle()
        .repeat(reseed_each_epoch=True)
        for number, file in enumerate(files)
    ]
    return grain.MapDataset.mix(sources, weights=weights_of(len(files)))


def arrayrecord_batches(folder: str, batch: int) -> Any:
    """Batches of documents, without threads (no gain here)."""
    import grain

    ids = arrayrecord_mixture(folder).map(lambda record: np.frombuffer(record, np.uint8).astype(np.int32))
    return iter(ids.batch(batch, batch_fn=list).to_iter_dataset(grain.ReadOptions(0, 0)))


def mixing(args: Any) -> None:
    """Draws rows in one process."""
    import grain

    records = iter(arrayrecord_mixture(args.folder).to_iter_dataset(grain.ReadOptions(0, 0)))
    batches = rows_of(records, args.rows, args.seq_len)
    next(batches)
    answer(filled=1.0)
    draw(batches)


def resume(args: Any) -> None:
    """Times a resume from Grain's first call to the first batch after `step`."""
    import grain.sources  # noqa: F401

    start = time.perf_counter()
    iterator = arrayrecord_batches(args.folder, args.batch)
    iterator.set_state(iterator.get_state() | {"next_index": args.step})
    next(iterator)
    answer(first_batch_s=time.perf_counter() - start)
    assert iterator.get_state()["next_index"] == args.step + 1, iterator.get_state()


class Slowly:
    """Source whose documents take `seconds` each to read, holding the interpreter's lock as decoding would."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._usleep = ctypes.PyDLL(None).usleep  # PyDLL: calls with the lock held

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Any:
        self._usleep(int(1e6 * self.seconds))
        return np.zeros(256, np.int32)

    def __getstate__(self) -> float:
        return self.seconds

    def __setstate__(self, seconds: float) -> None:
        self.__init__(seconds)


def scaling(args: Any) -> None:
    """Runs the steps of a trainer whose accelerator takes `step_s`, with a slow last source; each line is a count."""
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # Grain 0.2.18's workers read a flag
    quick = [grain.MapDataset.source(Slowly(args.quick_s)) for _ in range(args.sources - 1)]
    shares = [(1 - args.slow_weight) / len(quick)] * len(quick) + [args.slow_weight]
    mixed = grain.MapDataset.mix([*quick, grain.MapDataset.source(Slowly(args.slow_s))], weights=shares)
    batches = mixed.shuffle(0).repeat().batch(args.batch, batch_fn=list).to_iter_dataset(grain.ReadOptions(1, 4))
    workers = grain.MultiprocessingOptions(num_workers=args.workers, per_worker_buffer_size=4)
    iterator = iter(batches.mp_prefetch(workers))
    next(iterator)
    answer(ready=True)
    for line in sys.stdin:
        step_s = []
        for _ in range(int(line)):
            start = time.perf_counter()
            next(iterator)
            time.sleep(args.step_s)
            step_s.append(time.perf_counter() - start)
        answer(step_s=step_s)


def main() -> None:
    """Runs the command line."""
    args = arguments(
        "what", "folder", consumers=1, batches=40, batch=64, rows=64, seq_len=8192, step=0, sources=8, slow_weight=0.0,
        slow_s=0.0, quick_s=0.0, step_s=0.0, workers=1,
    )  # fmt: skip
    if args.what == "consumers":
        consumers(args.consumers, parquet_batches, args)
    else:
        {"mixing": mixing, "resume": resume, "scaling": scaling}[args.what](args)


if __name__ == "__main__":
    main()
