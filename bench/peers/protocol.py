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
    """Mixture weights that everyone is given: unequal, but none so small that a short run leaves its source
    closed.
    """
    return [1.0 + i % 7 for i in range(num_sources)]


def answer(**values: object) -> None:
    """Prints one line of JSON."""
    print(json.dumps(values), flush=True)


def rows_of(documents: Iterator[bytes], rows: int, seq_len: int) -> Batches:
    """Batches of the documents' bytes, joined with a zero before and behind each document, and cut into
    rows.
    """
    import numpy as np

    count = rows * seq_len + 1
    held = bytearray()
    for document in documents:
        held += b"\0"
        held += document
        held += b"\0"
        while len(held) >= count:
            ids = np.frombuffer(bytes(held[:count]), np.uint8).astype(np.int32)
            yield ids[:-1].reshape(rows, seq_len), ids[1:].reshape(rows, seq_len)
            del held[: count - 1]


def draw(batches: Batches) -> None:
    """Draws batches for as many seconds as each line of standard input says, and answers with the ids they
    held.
    """
    for line in sys.stdin:
        start, wanted_s, ids = time.perf_counter(), float(line), 0
        while (wall_s := time.perf_counter() - start) < wanted_s:
            ids += next(batches)[0].size
        answer(wall_s=wall_s, ids=ids)


def consumers(batches_of: Callable[[str, int, int], Iterator[Any]], args: Any) -> None:
    """Starts processes that each draw `args.batches` and keep their data until standard input ends.

    Processes are started by spawn, as Grain starts its workers, and as torch does where CUDA is in use.
    """
    context = multiprocessing.get_context("spawn")
    first, done, end = context.Semaphore(0), context.Semaphore(0), context.Event()
    start = time.perf_counter()
    processes = [
        context.Process(target=_consume, args=(batches_of, seed, args, first, done, end))
        for seed in range(args.consumers)
    ]
    for process in processes:
        process.start()
    keep(processes, first, done, end, since_s=start)


def keep(processes: Sequence[Any], first: Any, done: Any, end: Any, *, since_s: float) -> None:
    """Answers once all processes have drawn their batches; keeps their data until standard input ends.

    Args:
      first, done: semaphores that each process releases after its first batch and after its last.
      end: event that ends the processes.
      since_s: moment from which the answer counts the seconds to the last process's first batch.
    """
    for _ in processes:
        first.acquire()
    first_batch_s = time.perf_counter() - since_s
    for _ in processes:
        done.acquire()
    answer(first_batch_s=first_batch_s)
    sys.stdin.read()
    end.set()
    for process in processes:
        process.join()


def _consume(
    batches_of: Callable[[str, int, int], Iterator[Any]],
    seed: int,
    args: Any,
    first: Any,
    done: Any,
    end: Any,
) -> None:
    batches = batches_of(
        args.folder, seed, args.batch
    )  # imports everything, opens nothing before the first batch
    for number in range(args.batches):
        next(batches)
        if number == 0:
            first.release()
    if not args.batches:
        first.release()
    done.release()
    end.wait()
