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
        # Timed by itself: it waits for processes to start and files to open.
        next(batches)
        first_s = time.perf_counter() - begun_s
        begun_s = time.perf_counter()
        stats = [batches.stats for _ in itertools.islice(batches, steps - 1) if batches.stats is not None]
        seconds = time.perf_counter() - begun_s
        last_stats, messages = batches.stats, batches.take_messages()
    assert last_stats is not None
    figures = {
        "first_batch_s": first_s,
        "batches_per_s": len(stats) / seconds,
        "tokens_per_s": sum(int(batch_stats.tokens_by_source.sum()) for batch_stats in stats) / seconds,
        "fill": sum(batch_stats.fill for batch_stats in stats) / len(stats),
        "cost_spread": sum(batch_stats.spread(ranks) for batch_stats in stats) / len(stats),
        "data_ranks": ranks,
        "drift": last_stats.drift,
        "skipped": last_stats.skipped,
        "retries": last_stats.retries,
        "loader_memory_mib": {loader.name: loader.memory_bytes / 2**20 for loader in last_stats.loaders},
        "loader_documents": {loader.name: loader.documents for loader in last_stats.loaders},
    }
    return figures, messages
