"""Memory and time to the first batch of 32 consumers of 306 Parquet sources, beside Grain and torchdata.

Consumers are the ranks of 4 hosts with 8 accelerators each, all on this machine. Under Grain and torch every
consumer has a loader of its own, which opens every source; ours has one constructor per host. What counts is
the proportional set size of every process that loads data: loaders, constructors, forkservers, standbys. Of
ours, what a trainer grows by when it imports jtrain.data and opens its data counts too; JAX, which a trainer
has anyway, does not. Needs 16 GB for the baselines.

Imports count on both sides in the rows with a bar. The row below each takes the peer's own imports off its
figure (the memory of as many consumers that import and open nothing), and nothing off ours.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from bench.data_parts import files
from bench.data_parts.programs import Trainers, Usage, largest_usage, peer_python, reader, tree
from jtrain.bench import Row, row

BATCH, BATCHES = 64, 40
"""Samples per batch, and batches per consumer: 8 samples of the average source, 2 of the rarest."""
ROWS, SEQ_LEN = 1, 8192
"""Of ours per consumer and batch: 61 samples on average."""


@dataclasses.dataclass(frozen=True)
class LoaderFigures:
    """One loader's figures: seconds until the last consumer's first batch, and its use after all batches.

    trainer_imports_mib: of ours, what the trainers' imports of jtrain.data take.
    """

    first_batch_s: float
    usage: Usage
    trainer_imports_mib: float = 0.0


def rows(
    *, torch_python: str | None = None, consumers: int = 32, hosts: int = 4, sources: int = files.NUM_SOURCES
) -> Iterator[Row]:
    """Yields rows of ours first, then of each baseline: together they would not fit into memory."""
    python = peer_python(torch_python)
    folder = files.sources("parquet", num_sources=sources)
    ours = our_consumers(folder, hosts=hosts, consumers=consumers)
    for name, interpreter, peer in (
        ("Grain mix", None, "grain"),
        ("torch StatefulDataLoader", python, "torch"),
    ):
        theirs = peer_consumers(interpreter, peer, folder, consumers=consumers)
        # batches=0: they import and open nothing, which leaves the memory of the imports alone.
        imports = peer_consumers(interpreter, peer, folder, consumers=consumers, batches=0)
        yield from rows_of(f"{consumers} consumers, {sources} sources, against {name}", ours, theirs, imports)
        yield row(
            f"of {name}'s memory, what importing it {consumers} times takes", imports.usage.pss_mib, "MiB"
        )
    yield row(
        f"of ours, what importing jtrain.data in {hosts} trainers takes", ours.trainer_imports_mib, "MiB"
    )


def rows_of(comparison: str, ours: LoaderFigures, theirs: LoaderFigures, imports: LoaderFigures) -> list[Row]:
    """Returns both bars and the counts beside them. The bars are on ours / theirs: 13.5x less, 20x sooner."""
    our_usage, peer_usage = ours.usage, theirs.usage
    opened_mib = peer_usage.pss_mib - imports.usage.pss_mib
    return [
        row(
            f"memory (PSS), {comparison}",
            our_usage.pss_mib,
            "MiB",
            baseline=peer_usage.pss_mib,
            bar=f"<= {1 / 13.5:.4f}",
        ),
        row(
            f"the same with the peer's imports taken off, {comparison}",
            our_usage.pss_mib,
            "MiB",
            baseline=opened_mib,
        ),
        row(
            f"time to first batch, {comparison}",
            ours.first_batch_s,
            "s",
            baseline=theirs.first_batch_s,
            bar="<= 0.05",
        ),
        row(f"processes, {comparison}", float(our_usage.processes), "", baseline=float(peer_usage.processes)),
        row(f"threads, {comparison}", float(our_usage.threads), "", baseline=float(peer_usage.threads)),
        row(f"open files, {comparison}", float(our_usage.fds), "", baseline=float(peer_usage.fds)),
    ]


def our_consumers(folder: Path, *, hosts: int, consumers: int, batches: int = BATCHES) -> LoaderFigures:
    """Figures of one constructor per host, whose batch holds the rows of its consumers.

    Args:
      folder: the Parquet files.
      hosts: trainers, each a process.
      consumers: ranks over all hosts; each has as many tokens in a batch as the peers' consumers.
      batches: of each.
    """
    sizes = dict(hosts=hosts, rows=consumers * ROWS, seq_len=SEQ_LEN, batches=batches)
    with reader(None, "trainers", "jtrain", folder, **sizes) as program:
        trainers = program.answer()["trainers"]
        trainers_before = Trainers(trainers)
        # Two steps, so that the memory of our imports has a row of its own.
        program.ask("import")
        imports_mib = trainers_before.grown_mib()
        first_batch_s = program.ask("open")["first_batch_s"]
        # Without the trainers: JAX's memory in them is not the data's.
        loader_pids = {pid for trainer in trainers for pid in tree(trainer)} - set(trainers)
        usage = largest_usage(loader_pids, seconds=1.0)
        # And what the trainers themselves have grown by, which is the data's.
        usage = dataclasses.replace(usage, pss_mib=usage.pss_mib + trainers_before.grown_mib())
        return LoaderFigures(first_batch_s, usage, imports_mib)


def peer_consumers(
    python: str | None, name: str, folder: Path, *, consumers: int, batches: int = BATCHES
) -> LoaderFigures:
    """Figures of loaders that each open every source, after each has drawn all its batches.

    Args:
      python: the peer's interpreter; None for this one.
      name: of the reader.
      folder: the Parquet files.
      consumers: how many.
      batches: of each; with 0 they import what they need and open nothing.
    """
    with reader(
        python, "consumers", name, folder, consumers=consumers, batches=batches, batch=BATCH
    ) as program:
        answer = program.answer()
        # The process that started them stands for the trainer.
        usage = largest_usage(set(tree(program.pid)) - {program.pid}, seconds=1.0)
        return LoaderFigures(answer["first_batch_s"], usage)
