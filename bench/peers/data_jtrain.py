"""jtrain's side of the data benchmarks.

Runs in jtrain's environment.

    python data_jtrain.py consumers FOLDER --hosts 4 --global-batch 32 --seq-len 8192 --batches 40
    python data_jtrain.py mixing FOLDER --prepared FOLDER --engine inline --global-batch 64 --seq-len 8192

`consumers` starts a trainer per emulated host, each with the rows of its own ranks, by spawn. A trainer has JAX anyway:
importing it is no part of the data's memory, but importing jtrain.data and opening the data is. The first answer gives
the process ids before, then a line of standard input has jtrain.data imported, and the next one opens the data.
"""

import dataclasses
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from data_protocol import Batches, answer, arguments, draw


def trainer(args: Any, host: int, ready: Any, steps: Any, first: Any, done: Any, end: Any) -> None:
    """Opens every source, draws its batches, and keeps its data until the end."""
    import jax  # noqa: F401, a trainer has it, and its memory counts

    ready.release()
    steps[0].wait()
    import jtrain.data.dataset
    from bench.data_sources import mixture

    spec = mixture(Path(args.folder), seq_len=args.seq_len, global_batch=args.global_batch)
    rows = np.array_split(np.arange(args.global_batch), args.hosts)[host]
    ready.release()
    steps[1].wait()
    with jtrain.data.dataset.open_dataset(spec, seed=0).train_batches(rows=rows) as batches:
        next(batches)
        first.release()
        for _ in range(args.batches - 1):
            next(batches)
        done.release()
        end.wait()


def consumers(args: Any) -> None:
    """Starts the trainers, then reports when all have their first batch and when all have every batch."""
    context = multiprocessing.get_context("spawn")
    ready, first, done = (context.Semaphore(0) for _ in range(3))
    steps, end = (context.Event(), context.Event()), context.Event()
    processes = [
        context.Process(target=trainer, args=(args, host, ready, steps, first, done, end)) for host in range(args.hosts)
    ]
    for process in processes:
        process.start()
    for step in steps:
        for _ in processes:
            ready.acquire()
        answer(trainers=[process.pid for process in processes])
        sys.stdin.readline()
        start = time.perf_counter()
        step.set()
    for _ in processes:
        first.acquire()
    first_batch_s = time.perf_counter() - start
    for _ in processes:
        done.acquire()
    answer(first_batch_s=first_batch_s, all_s=time.perf_counter() - start)
    sys.stdin.read()
    end.set()
    for process in processes:
        process.join()


def mixing(args: Any) -> None:
    """Draws packed rows, with `mallopt` as the training loop sets it on a CPU."""
    from bench.data_sources import mixture
    from jtrain.data.dataset import open_dataset
    from jtrain.runtime.malloc import keep_freed_memory

    keep_freed_memory()
    spec = mixture(Path(args.folder), seq_len=args.seq_len, global_batch=args.global_batch)
    spec = dataclasses.replace(spec, prepared=args.prepared or None, engine=args.engine)
    with open_dataset(spec, seed=0).train_batches() as batches:
        first = next(batches)
        filled = np.count_nonzero(first.segment_BL) / first.segment_BL.size

        def pairs() -> Batches:
            for batch in batches:
                yield batch.token_BL, batch.target_BL

        answer(filled=filled)
        draw(pairs())


def main() -> None:
    """Runs the command line."""
    args = arguments("what", "folder", prepared="", engine="inline", hosts=1, global_batch=0, seq_len=0, batches=40)
    {"consumers": consumers, "mixing": mixing}[args.what](args)


if __name__ == "__main__":
    main()
