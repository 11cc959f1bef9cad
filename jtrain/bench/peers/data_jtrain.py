"""jtrain's side of data_memory: one trainer per emulated host, each with the rows of its own ranks.

Runs in jtrain's environment.

    python data_jtrain.py FOLDER --hosts 4 --global-batch 160 --seq-len 8192 --batches 40

Trainers are processes started by spawn. Their imports before the data is opened count as the trainer's own memory, not
as the data's: the first answer gives the process ids, then a line of standard input opens the data.
"""

import argparse
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from data_protocol import answer


def trainer(args: argparse.Namespace, host: int, ready: Any, go: Any, first: Any, done: Any, end: Any) -> None:
    """Opens every source, draws its batches, and keeps its data until the end."""
    import jtrain.data.dataset
    from jtrain.bench.data_sources import mixture

    spec = mixture(Path(args.folder), seq_len=args.seq_len, global_batch=args.global_batch)
    rows = np.array_split(np.arange(args.global_batch), args.hosts)[host]
    ready.release()
    go.wait()
    with jtrain.data.dataset.open_dataset(spec, seed=0).train_batches(rows=rows) as batches:
        next(batches)
        first.release()
        for _ in range(args.batches - 1):
            next(batches)
        done.release()
        end.wait()


def main() -> None:
    """Starts the trainers, then reports when all have their first batch and when all have every batch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--batches", type=int, required=True)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ready, first, done = (context.Semaphore(0) for _ in range(3))
    go, end = context.Event(), context.Event()
    processes = [
        context.Process(target=trainer, args=(args, host, ready, go, first, done, end)) for host in range(args.hosts)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        ready.acquire()
    answer(trainers=[process.pid for process in processes])
    sys.stdin.readline()
    start = time.perf_counter()
    go.set()
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


if __name__ == "__main__":
    main()
