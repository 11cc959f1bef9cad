"""Samples/s per core of reading 306 mixed sources, beside Grain, WebDataset and MosaicML streaming.

    python -m jtrain.bench data_mixing --torch-python T/bin/python

Ours are read from a prepared index, as MosaicML's are from MDS, and in a second program from the same ArrayRecord as
Grain's; with `mallopt` as the training loop sets it on a CPU. Everybody's documents come in random order, in the same
proportions, as int32 arrays of byte tokens; ours are packed into rows besides. Per core means: per second of CPU time,
over all processes of a loader, from its first measured batch to its last. The programs take turns on the same machine.
Each peer is in the form it was fastest in: Grain's MapDataset.mix of ArrayRecord without threads, WebDataset's
RandomMix of tars, MosaicML's streams with and without worker processes.
"""

import argparse
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack

from jtrain.bench import Row, data_sources, row
from jtrain.bench.data_memory import cpu_s, tree
from jtrain.bench.data_sources import Draw, Peer, add_peer_argument, peer, peer_python
from jtrain.data.dataset import open_dataset
from jtrain_kernels.host_memory import keep_freed_memory

BATCH, BATCHES = 64, 50
SETTLE_S = 3.0
"""Between turns: the one before has read ahead by then, and takes no time from the next."""

_GRAIN = "Grain MapDataset.mix"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add_peer_argument(parser)
    parser.add_argument("--sources", type=int, default=data_sources.NUM_SOURCES, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each program")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each turn")


@dataclasses.dataclass
class Program:
    """A loader that is open and warm.

    draw: draws that many batches, returns their samples.
    pids: all its processes.
    """

    draw: Draw
    pids: Callable[[], Iterable[int]]
    samples: int = 0
    start_cpu_s: float = 0.0
    cpu_s: float = 0.0
    best_per_s: float = 0.0

    def turn(self, seconds: float) -> None:
        """Draws, and counts. CPU time counts from the first turn on, so that reading ahead between turns counts too.

        As long for each program: after a wait everybody's memory and files are cold for a while.
        """
        if not self.samples:
            self.start_cpu_s = cpu_s(self.pids())
        start_s, samples = time.perf_counter(), 0
        while (passed_s := time.perf_counter() - start_s) < seconds:
            samples += self.draw(BATCHES)
        self.best_per_s = max(self.best_per_s, samples / passed_s)
        self.samples += samples
        self.cpu_s = cpu_s(self.pids()) - self.start_cpu_s

    @property
    def per_cpu_s(self) -> float:
        """Samples per second of CPU time."""
        return self.samples / self.cpu_s


def run(args: argparse.Namespace) -> list[Row]:
    """Interleaved turns of all; the bars are on samples per CPU second."""
    python = peer_python(args)
    with ExitStack() as stack:
        programs = {"jtrain": stack.enter_context(our_program(args.sources, prepared=True))}
        programs |= {name: stack.enter_context(made) for name, made in peer_programs(python, args.sources).items()}
        for _ in range(args.rounds):
            for program in programs.values():
                time.sleep(SETTLE_S)
                program.turn(args.seconds)
    with our_program(args.sources, prepared=False) as raw:  # alone: its trainer is this process, too
        for _ in range(args.rounds):
            raw.turn(args.seconds)
    programs["jtrain, ArrayRecord"] = raw
    return rows_of(programs, args.sources)


def rows_of(programs: dict[str, Program], num_sources: int) -> list[Row]:
    """Ours against each, and what each does by the clock."""
    ours = programs["jtrain"].per_cpu_s
    peers = {name: program for name, program in programs.items() if not name.startswith("jtrain")}
    ours_raw = programs["jtrain, ArrayRecord"].per_cpu_s
    best = max(peers, key=lambda name: peers[name].per_cpu_s)
    what = f"{num_sources} sources mixed, per second of CPU time"
    return [
        row(what, ours, "samples/s", bar=">= 4e4"),
        row(f"{what}, against the best peer ({best})", ours, "samples/s", baseline=peers[best].per_cpu_s, bar=">= 3"),
        row(f"{what}, from ArrayRecord, against Grain", ours_raw, "samples/s", baseline=peers[_GRAIN].per_cpu_s),
        *(row(f"{what}, against {n}", ours, "samples/s", baseline=p.per_cpu_s) for n, p in peers.items()),
        *(row(f"by the clock, all processes, {n}", p.best_per_s, "samples/s") for n, p in programs.items()),
    ]


@contextlib.contextmanager
def our_program(num_sources: int, *, prepared: bool) -> Iterator[Program]:
    """Our loaders and one constructor, and the trainer, which is this process."""
    keep_freed_memory()
    folder = data_sources.sources("arrayrecord", num_sources=num_sources)
    spec = data_sources.mixture(folder, seq_len=8192, global_batch=64)
    if prepared:
        spec = dataclasses.replace(spec, prepared=str(data_sources.prepared(spec, folder)))
    before = set(tree(os.getpid()))
    with open_dataset(spec, seed=0).train_batches() as batches:
        next(batches)
        roots = set(tree(os.getpid())) - before

        def drawn() -> int:
            return int(batches.cursors.sum())

        def draw(count: int) -> int:
            """As many steps as hold the samples of so many batches of the peers."""
            first = drawn()
            while drawn() - first < count * BATCH:
                next(batches)
            return drawn() - first

        draw(50)
        yield Program(draw, lambda: [os.getpid(), *{pid for root in roots for pid in tree(root)}])


def peer_programs(python: str | None, num_sources: int) -> Mapping[str, contextlib.AbstractContextManager[Program]]:
    """The peers by name; without an interpreter for the others, Grain alone."""
    grain = data_sources.sources("arrayrecord", num_sources=num_sources)
    found = {_GRAIN: _program(None, "data_grain", grain)}
    if python is not None:
        tar = data_sources.sources("tar", num_sources=num_sources)
        mds = data_sources.sources("mds", num_sources=num_sources, peer=python)
        found["WebDataset RandomMix"] = _program(python, "data_webdataset", tar)
        found["MosaicML streaming"] = _program(python, "data_mosaicml", mds)
        found["MosaicML streaming, 2 workers"] = _program(python, "data_mosaicml", mds, "--workers", 2)
    return found


@contextlib.contextmanager
def _program(python: str | None, script: str, *arguments: object) -> Iterator[Program]:
    with peer(python, script, "mixing", *arguments, "--batch", BATCH) as program:
        program.answer()
        yield Program(_draw(program), lambda: tree(program.pid))


def _draw(program: Peer) -> Draw:
    def draw(batches: int) -> int:
        return program.ask(str(batches))["samples"]

    draw(50)  # warm: buffers are full, every file is open
    return draw
