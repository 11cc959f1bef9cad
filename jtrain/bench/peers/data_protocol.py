"""What the data benchmarks' peers have in common: a line of JSON when ready, then one for each line of standard input.

Imported by the scripts beside it, in whatever environment they run: the standard library alone.
"""

import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any


def weights_of(num_sources: int) -> list[float]:
    """The mixture that all are given."""
    return [1.0 + i % 7 for i in range(num_sources)]


def answer(**values: object) -> None:
    """One line of JSON."""
    print(json.dumps(values), flush=True)


def draw(iterator: Iterator[Any]) -> None:
    """For each line, as many batches as it says."""
    for line in sys.stdin:
        start = time.perf_counter()
        samples = tokens = 0
        for batch in itertools.islice(iterator, int(line)):
            samples += len(batch)
            tokens += sum(len(sample) for sample in batch)
        answer(wall_s=time.perf_counter() - start, samples=samples, tokens=tokens)


def consumers(count: int, batches_of: Callable[[str, int, int], Iterator[Any]], args: Any) -> None:
    """Processes that each draw `args.batches`, then keep what they have until standard input ends.

    They are started by spawn: what Grain does for its workers, and torch where CUDA is in use.
    """
    context = multiprocessing.get_context("spawn")
    first, done, end = context.Semaphore(0), context.Semaphore(0), context.Event()
    start = time.perf_counter()
    processes = [
        context.Process(target=_consume, args=(batches_of, seed, args, first, done, end)) for seed in range(count)
    ]
    for process in processes:
        process.start()
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


def _consume(
    batches_of: Callable[[str, int, int], Iterator[Any]], seed: int, args: Any, first: Any, done: Any, end: Any
) -> None:
    batches = batches_of(args.folder, seed, args.batch)  # imports everything, opens nothing before the first batch
    for number in range(args.batches):
        next(batches)
        if number == 0:
            first.release()
    if not args.batches:
        first.release()
    done.release()
    end.wait()
