"""Mixed reading of 306 sources on one core, in ids/s, beside MosaicML, a memmap, Grain, WebDataset and a plain reader.

    python -m jtrain.bench data_mixing --torch-python T/bin/python

Every program gives batches of 64 rows of 8192 byte tokens and their targets, int32, from the same documents, and is
compared with jtrain reading the same form: prepared ids (MosaicML's MDS, a flat memory-mapped file), ArrayRecord
(Grain), tars (WebDataset), JSON lines (a plain reader). All but the memmap and the plain reader mix the 306 sources by
the same weights and shuffle. jtrain also fills positions and segment numbers, and leaves out the targets between
documents: so do the two programs whose rows have "four arrays", and no others. Writing and preparing is not timed.

Each program is one process, jtrain with `engine="inline"`; all are pinned to the same core and take turns of the same
length. A figure is the median of the turns. Once with short documents (mean 660 ids), once with documents that exceed
a row (mean 29,000). The time to the first batch, from the start of the process, imports included, has rows of its own.
"""

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

from bench import data_sources
from bench.data_memory import cpu_s, tree
from bench.data_sources import PEER_PYTHON, Corpus, Format, Peer, peer, peer_python
from jtrain.bench import Options, Row, option, row

ROWS = 64
"""Rows of a batch, of `data_sources.ROW_TOKENS` each."""
SETTLE_S = 0.5
"""Between turns: a program that reads ahead has filled its buffers by then, and takes no time from the next."""
WARM_S = 1.0
"""Drawn before the first turn: files are open and buffers full."""


class Pair(NamedTuple):
    """Form of the files, the peer's program, and the ratio to reach."""

    format: str
    peer: str
    bar: str | None


PAIRS = (
    Pair("prepared", "MosaicML MDS, prepared", ">= 1"),
    Pair("prepared", "memmap as in nanoGPT", ">= 1"),
    Pair("prepared", "memmap, shuffled documents in rows of four arrays", ">= 1"),
    Pair("prepared", "memmap, one copy per row", None),
    Pair("ArrayRecord", "Grain MapDataset.mix", ">= 4"),
    Pair("tar", "WebDataset RandomMix", None),
    Pair("JSON lines", "plain reader", ">= 1"),
    Pair("JSON lines", "plain reader, rows of four arrays", ">= 1"),
)


OPTIONS = (
    PEER_PYTHON,
    option("--sources", type=int, default=data_sources.NUM_SOURCES, help="(default: %(default)s)"),
    option("--rounds", type=int, default=7, help="turns of each program (default: %(default)s)"),
    option("--seconds", type=float, default=2.0, help="of each turn (default: %(default)s)"),
)


@dataclasses.dataclass
class Program:
    """A reader that is open and warm.

    filled: share of its rows that is tokens.
    ids_per_s: of each turn, by the clock.
    cpu_s: of all turns, all processes.
    """

    peer: Peer
    filled: float
    first_batch_s: float
    ids_per_s: list[float] = dataclasses.field(default_factory=list)
    ids: float = 0.0
    cpu_s: float = 0.0

    def turn(self, seconds: float) -> None:
        """Draws batches for that long, and counts."""
        before_s = cpu_s(tree(self.peer.pid))
        told = self.peer.ask(str(seconds))
        self.cpu_s += cpu_s(tree(self.peer.pid)) - before_s
        self.ids += told["ids"] * self.filled
        self.ids_per_s.append(told["ids"] * self.filled / told["wall_s"])


def run(args: Options) -> list[Row]:
    """One table for each corpus."""
    python = peer_python(args)
    rows = []
    for name, corpus in {"short documents": data_sources.SHORT, "long documents": data_sources.LONG}.items():
        commands = ours(args.sources, corpus) | theirs(python, args.sources, corpus)
        with one_core(), ExitStack() as stack:
            programs = {name: stack.enter_context(started(*command)) for name, command in commands.items()}
            for _ in range(args.rounds):
                for program in programs.values():
                    time.sleep(SETTLE_S)
                    program.turn(args.seconds)
        rows += rows_of(programs, f"{name}, {args.sources} sources")
    return rows


def rows_of(programs: dict[str, Program], where: str) -> list[Row]:
    """Ratios with their bars; the same by CPU time, which other work on the machine changes less; start-up."""
    rows = []
    pairs = [pair for pair in PAIRS if pair.peer in programs]
    for pair in pairs:
        a, b = (statistics.median(programs[name].ids_per_s) for name in (f"jtrain, {pair.format}", pair.peer))
        rows.append(row(f"{where}: {pair.format} against {pair.peer}", a, "ids/s", baseline=b, bar=pair.bar))
    for pair in pairs:
        a, b = (programs[name].ids / programs[name].cpu_s for name in (f"jtrain, {pair.format}", pair.peer))
        rows.append(row(f"{where}: the same per second of CPU time, against {pair.peer}", a, "ids/s", baseline=b))
    if (apart := programs.get(PROCESSES)) is not None:
        rows.append(row(f"{where}: {PROCESSES}", statistics.median(apart.ids_per_s), "ids/s"))
    return rows + [row(f"{where}: first batch, {n}", p.first_batch_s, "s") for n, p in programs.items()]


PROCESSES = "jtrain, prepared, with its loader processes on the same core"

type Command = tuple[str | None, str, tuple[object, ...]]
"""Interpreter (None: this one), script of `peers/`, and arguments."""


def ours(num_sources: int, corpus: Corpus) -> dict[str, Command]:
    """Our programs by name."""
    records = data_sources.sources("arrayrecord", num_sources=num_sources, corpus=corpus)
    spec = data_sources.mixture(records, seq_len=data_sources.ROW_TOKENS, global_batch=ROWS)
    index = data_sources.prepared(spec, records)
    folders: dict[str, Format] = {"ArrayRecord": "arrayrecord", "tar": "tar", "JSON lines": "jsonl"}
    arguments = {
        "jtrain, prepared": (records, "--prepared", index),
        PROCESSES: (records, "--prepared", index, "--engine", "processes"),
    } | {
        f"jtrain, {name}": (data_sources.sources(format, num_sources=num_sources, corpus=corpus),)
        for name, format in folders.items()
    }
    shape = ("--global-batch", ROWS, "--seq-len", data_sources.ROW_TOKENS)
    return {name: (None, "data_jtrain", ("mixing", *rest, *shape)) for name, rest in arguments.items()}


def theirs(python: str | None, num_sources: int, corpus: Corpus) -> dict[str, Command]:
    """The peers' programs by name; without an interpreter for the others, those that run in ours."""

    def folder(format: Format) -> object:
        return data_sources.sources(format, num_sources=num_sources, corpus=corpus, peer=python)

    shape = ("--rows", ROWS, "--seq-len", data_sources.ROW_TOKENS)
    found: dict[str, Command] = {
        "memmap as in nanoGPT": (None, "data_plain", ("nanogpt", folder("bin"), *shape)),
        "memmap, shuffled documents in rows of four arrays": (None, "data_plain", ("documents", folder("bin"), *shape)),
        "memmap, one copy per row": (None, "data_plain", ("windows", folder("bin"), *shape)),
        "plain reader": (None, "data_plain", ("lines", folder("jsonl"), *shape)),
        "plain reader, rows of four arrays": (None, "data_plain", ("packed-lines", folder("jsonl"), *shape)),
        "Grain MapDataset.mix": (None, "data_grain", ("mixing", folder("arrayrecord"), *shape)),
    }
    if python is not None:
        found["MosaicML MDS, prepared"] = (python, "data_mosaicml", ("mixing", folder("mds"), *shape))
        found["WebDataset RandomMix"] = (python, "data_webdataset", ("mixing", folder("tar"), *shape))
    return found


@contextlib.contextmanager
def started(python: str | None, script: str, arguments: tuple[object, ...]) -> Iterator[Program]:
    """A program after its first batch, and warm."""
    start_s = time.perf_counter()
    with peer(python, script, *arguments) as running:
        filled = running.answer()["filled"]
        program = Program(running, filled, time.perf_counter() - start_s)
        running.ask(str(WARM_S))
        yield program


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Pins this process, and with it what it starts, to one of its cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
