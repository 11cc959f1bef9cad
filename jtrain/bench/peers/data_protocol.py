"""Protocol of the data benchmarks' peers: a line of JSON when ready, then one for each line of standard input.

The scripts beside this module import it in their own environments, so it uses only the standard library.
"""

import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any


def weights_of(num_sources: int) -> list[float]:
    """Mixture weights that every peer is given."""
    return [1.0 + i % 7 for i in range(num_sources)]


def answer(**values: object) -> None:
    """Prints one line of JSON."""
    print(json.dumps(values), flush=True)


def draw(iterator: Iterator[Any]) -> None:
    """Draws, for each line of standard input, as many batches as the line says."""
    for line in sys.stdin:
        start = time.perf_counter()
        samples = tokens = 0
        for batch in itertools.islice(iterator, int(line)):
            samples += len(batch)
            tokens += sum(len(sample) for sample in batch)
        answer(wall_s=time.perf_counter() - start, samples=samples, tokens=tokens)


def consumers(count: int, batches_of: Callable[[str, int, int], Iterator[Any]], args: Any) -> None:
    """Starts processes that each draw `args.batches` and keep their data until standard input ends.

    Processes are started by spawn, as Grain starts its workers, and as torch does where CUDA is in use.
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
