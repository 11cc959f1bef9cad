"""Protocol of the benchmarks' peers: a line of JSON when ready, then one for each line of standard input.

The scripts beside this module import it in their own environments, so it uses only the standard library.
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

Batches = Iterator[tuple[Any, ...]]
"""Tokens and targets, int32 arrays of rows x seq_len; jtrain's segment numbers come third."""


def arguments(*names: str, **defaults: Any) -> SimpleNamespace:
    """Values of this program's words: one each for `names`, then `--name value`, of the type of its default.

    Only the benchmarks call such a program, so a wrong word is a plain error.
    """
    count = next((number for number, word in enumerate(sys.argv) if word.startswith("--")), len(sys.argv))
    values = dict.fromkeys(names) | defaults | dict(zip(names, sys.argv[1:count], strict=False))
    for option, word in zip(sys.argv[count::2], sys.argv[count + 1 :: 2], strict=True):
        name = option.removeprefix("--").replace("-", "_")
        values[name] = type(defaults[name])(word)
    return SimpleNamespace(**values)


def weights_of(num_sources: int) -> list[float]:
    """Returns all readers' mixture weights: unequal, but large enough that a short run opens each source."""
    return [1.0 + i % 7 for i in range(num_sources)]


def answer(**values: object) -> None:
    """Prints one line of JSON."""
    print(json.dumps(values), flush=True)


def rows_of(documents: Iterator[bytes], rows: int, seq_len: int) -> Batches:
    """Yields batches of the documents' bytes, joined with a zero before and behind each, cut into rows."""
    import numpy as np

    # One id more than tokens, for the last target.
    count = rows * seq_len + 1
    buffer = bytearray()
    for document in documents:
        buffer += b"\0"
        buffer += document
        buffer += b"\0"
        while len(buffer) >= count:
            ids = np.frombuffer(bytes(buffer[:count]), np.uint8).astype(np.int32)
            yield ids[:-1].reshape(rows, seq_len), ids[1:].reshape(rows, seq_len)
            # The last target is the first token of the next batch.
            del buffer[: count - 1]


def draw(batches: Batches) -> None:
    """Draws batches for as many seconds as each line of standard input says, and answers with the ids they
    held.
    """
    for line in sys.stdin:
        start, limit_s, ids = time.perf_counter(), float(line), 0
        while (wall_s := time.perf_counter() - start) < limit_s:
            ids += next(batches)[0].size
        answer(wall_s=wall_s, ids=ids)


def consumers(batches_of: Callable[[str, int, int], Iterator[Any]], args: Any) -> None:
    """Starts processes that each draw `args.batches` and keep their data until standard input ends.

    Processes are started by spawn, as Grain starts its workers, and as torch does where CUDA is in use.
    """
    # The same for all peers, so that none shares memory with its parent by fork.
    context = multiprocessing.get_context("spawn")
    first_batches, all_batches, end = context.Semaphore(0), context.Semaphore(0), context.Event()
    start = time.perf_counter()
    processes = [
        context.Process(target=_consume, args=(batches_of, seed, args, first_batches, all_batches, end))
        for seed in range(args.consumers)
    ]
    for process in processes:
        process.start()
    keep(processes, first_batches, all_batches, end, since_s=start)


def keep(processes: Sequence[Any], first_batches: Any, all_batches: Any, end: Any, *, since_s: float) -> None:
    """Answers once all processes have drawn their batches; keeps their data until standard input ends.

    Args:
      first_batches, all_batches: semaphores that each process releases after its first batch and its last.
      end: event that ends the processes.
      since_s: moment from which the answer counts the seconds to the last process's first batch.
    """
    for _ in processes:
        first_batches.acquire()
    first_batch_s = time.perf_counter() - since_s
    for _ in processes:
        all_batches.acquire()
    answer(first_batch_s=first_batch_s)
    # Blocks until the parent closes the pipe, or dies.
    sys.stdin.read()
    end.set()
    for process in processes:
        process.join()


def _consume(
    batches_of: Callable[[str, int, int], Iterator[Any]],
    seed: int,
    args: Any,
    first_batches: Any,
    all_batches: Any,
    end: Any,
) -> None:
    # Imports everything; opens nothing before the first batch.
    batches = batches_of(args.folder, seed, args.batch)
    for number in range(args.batches):
        next(batches)
        if number == 0:
            first_batches.release()
    # Imports alone are measured: nothing to draw.
    if not args.batches:
        first_batches.release()
    all_batches.release()
    end.wait()
