"""Throughput of the data plane without a trainer, with its memory and the balance of its rows."""

import itertools
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jtrain.data.dataset import TextDataset


def measure_throughput(dataset: "TextDataset", steps: int, *, ranks: int) -> tuple[dict[str, Any], list[str]]:
    """Reads batches as fast as possible; returns figures by name, and the log lines of the data plane.

    Args:
      steps: number of batches, two at least: the first one is timed by itself.
      ranks: data ranks, over which the spread of the cost is measured.
    """
    begun_s = time.perf_counter()
    with dataset.train_batches() as batches:
        next(batches)
        first_s = time.perf_counter() - begun_s
        begun_s = time.perf_counter()
        stats = [batches.stats for _ in itertools.islice(batches, steps - 1) if batches.stats is not None]
        seconds = time.perf_counter() - begun_s
        last, said = batches.stats, batches.said()
    assert last is not None
    figures = {
        "first_batch_s": first_s,
        "batches_per_s": len(stats) / seconds,
        "tokens_per_s": sum(int(one.tokens_by_source.sum()) for one in stats) / seconds,
        "fill": sum(one.fill for one in stats) / len(stats),
        "cost_spread": sum(one.spread(ranks) for one in stats) / len(stats),
        "data_ranks": ranks,
        "drift": last.drift,
        "skipped": last.skipped,
        "retries": last.retries,
        "loader_memory_mib": {loader.name: loader.memory_bytes / 2**20 for loader in last.loaders},
        "loader_documents": {loader.name: loader.documents for loader in last.loaders},
    }
    return figures, said
