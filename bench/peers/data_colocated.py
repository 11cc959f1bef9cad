"""Colocated baseline of data_end_to_end: every rank mixes, tokenises and packs for itself, with Grain.

Runs in jtrain's environment, but does not import jtrain.

    python data_colocated.py FOLDER TOKENIZER --ranks 8 --context 1 --seq-len 32768 --rows 2 --linear-s 0.75

A rank is a process. Ranks that share a sequence (`--context` of them) each read the same documents. The
accelerator is emulated: the rank sleeps as long as its rows would take, by tokens and attention, and then waits for
all other ranks. Each line of standard input is a number of steps; the answer holds their seconds, and each rank's waits
for data.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from data_protocol import answer, arguments

LINEAR = 24576
"""Tokens whose attention costs as much as everything else: a 7B model's (verl's seqlen_balancing.py)."""


def rows_of(folder: str, tokenizer: str, shard: int, shards: int, seq_len: int) -> Iterator[Any]:
    """Rows of `seq_len` tokens with segment numbers, read ahead on a thread."""
    import grain
    from grain import experimental
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(tokenizer)
    end = np.zeros(1, np.int32)

    def tokenise(record: bytes) -> dict[str, Any]:
        ids = encoder.encode_batch_fast([record.decode()], add_special_tokens=False)[0].ids
        return {"tokens": np.concatenate([np.asarray(ids, np.int32), end])}

    files = sorted(Path(folder).glob("*.arrayrecord"))
    sources = [
        grain.MapDataset.source(grain.sources.ArrayRecordDataSource(str(file)))[shard::shards]
        .seed(number)
        .shuffle()
        .repeat(reseed_each_epoch=True)
        for number, file in enumerate(files)
    ]
    documents = grain.MapDataset.mix(sources).map(tokenise).to_iter_dataset(grain.ReadOptions(1, 16))
    packed = experimental.ConcatThenSplitIterDataset(documents, length_struct={"tokens": seq_len})
    return iter(experimental.ThreadPrefetchIterDataset(packed, prefetch_buffer_size=8))


def cost_of(segments: Any) -> float:
    """Cost of a row: its tokens, plus the square of the length of each document in it."""
    pieces = np.bincount(segments)[1:].astype(np.float64)
    return float((LINEAR * pieces + pieces**2).sum())


def rank(args: Any, number: int, together: Any, orders: Any, answers: Any) -> None:
    """Runs one rank for as many steps as each order says; an order of 0 ends it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rows = rows_of(args.folder, args.tokenizer, number // args.context, args.ranks // args.context, args.seq_len)
    second_per_cost = args.linear_s / (LINEAR * args.rows * args.seq_len)
    together.wait()
    while count := orders.get():
        step_s, wait_s, costs = [], [], []
        for _ in range(count):
            start = time.perf_counter()
            batch = [next(rows) for _ in range(args.rows)]
            wait_s.append(time.perf_counter() - start)
            costs.append(sum(cost_of(row["tokens_segment_ids"]) for row in batch) / args.context)
            time.sleep(second_per_cost * costs[-1])
            together.wait()
            step_s.append(time.perf_counter() - start)
        answers.put((number, step_s, wait_s, costs))


def main() -> None:
    """Starts the ranks, then passes each request to them."""
    args = arguments("folder", "tokenizer", ranks=0, context=0, seq_len=0, rows=0, linear_s=0.0)
    context = multiprocessing.get_context("spawn")
    together, answers = context.Barrier(args.ranks), context.SimpleQueue()
    orders = [context.SimpleQueue() for _ in range(args.ranks)]
    processes = [
        context.Process(target=rank, args=(args, number, together, order, answers))
        for number, order in enumerate(orders)
    ]
    for process in processes:
        process.start()
    answer(ready=True)
    for line in sys.stdin:
        for order in orders:
            order.put(int(line))
        told = sorted(answers.get() for _ in processes)
        answer(
            step_s=told[0][1],
            wait_s=[list(waits) for waits in zip(*(wait_s for _, _, wait_s, _ in told), strict=True)],
            costs=[list(costs) for costs in zip(*(cost for _, _, _, cost in told), strict=True)],
        )
    for order in orders:
        order.put(0)
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
