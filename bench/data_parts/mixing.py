"""Mixed reading of 306 sources on one core, in ids/s, beside MosaicML, memmaps, Grain, WebDataset, JSON.

Every reader gives batches of 64 rows of 8192 byte tokens and their targets, int32, from the same documents,
and is compared with jtrain reading the same form: prepared ids (MosaicML's MDS, a flat memory-mapped file),
ArrayRecord (Grain), tars (WebDataset), JSON lines (a plain reader). All but the memmap and the plain reader
mix the 306 sources by the same weights and shuffle. jtrain also fills positions and segment numbers, and
leaves out the targets between documents: so do the two readers whose rows have "four arrays", and no others.
Writing and preparing is not timed.

Each reader is one process, jtrain with `engine="inline"`; all are pinned to the same core and take turns of
the same length. A figure is the median of the turns. Once with short documents (mean 660 ids), once with
documents that exceed a row (mean 29,000). The time to the first batch, from the start of the process, imports
included, has rows of its own.
"""

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

from bench.data_parts import files
from bench.data_parts.files import Format, MadeUpCorpus
from bench.data_parts.programs import Program, cpu_s, peer_python, reader, tree
from jtrain.bench import Row, row

ROWS = 64
"""Rows of a batch, of `files.ROW_TOKENS` each."""
PAUSE_S = 0.5
"""Between turns: a reader that reads ahead fills its buffers here, and takes no time from the next turn."""
WARM_S = 1.0
"""Drawn before the first turn: files are open and buffers full."""


class PeerReader(NamedTuple):
    """A reader that jtrain is compared with.

    name: in the table.
    form: of the files, which jtrain reads too.
    reader: in `peers/readers.py`.
    format: of its own files.
    bar: on the ratio.
    is_foreign: True if it runs in the peers' environment.
    """

    name: str
    form: str
    reader: str
    format: Format
    bar: str | None = None
    is_foreign: bool = False


PEERS = (
    PeerReader("MosaicML MDS, prepared", "prepared", "mosaicml", "mds", ">= 1", is_foreign=True),
    PeerReader("memmap as in nanoGPT", "prepared", "memmap-nanogpt", "bin", ">= 1"),
    PeerReader(
        "memmap, shuffled documents in rows of four arrays", "prepared", "memmap-documents", "bin", ">= 1"
    ),
    PeerReader("memmap, one copy per row", "prepared", "memmap-windows", "bin"),
    PeerReader("Grain MapDataset.mix", "ArrayRecord", "grain", "arrayrecord", ">= 4"),
    PeerReader("WebDataset RandomMix", "tar", "webdataset", "tar", is_foreign=True),
    PeerReader("plain reader", "JSON lines", "json-lines", "jsonl", ">= 1"),
    PeerReader("plain reader, rows of four arrays", "JSON lines", "json-documents", "jsonl", ">= 1"),
)
OURS: dict[str, tuple[Format, dict[str, str]]] = {
    "jtrain, prepared": ("arrayrecord", {}),
    "jtrain, prepared, with its loader processes on the same core": ("arrayrecord", {"engine": "processes"}),
    "jtrain, ArrayRecord": ("arrayrecord", {}),
    "jtrain, tar": ("tar", {}),
    "jtrain, JSON lines": ("jsonl", {}),
}
"""Our readers: name -> format of its files, and options."""


@dataclasses.dataclass
class Turns:
    """A reader that is open and warm, and what it has given.

    filled: share of its rows that is tokens.
    ids_per_s: of each turn, by the clock.
    cpu_s: of all turns, all processes.
    """

    program: Program
    filled: float
    first_batch_s: float
    ids_per_s: list[float] = dataclasses.field(default_factory=list)
    ids: float = 0.0
    cpu_s: float = 0.0

    def take(self, seconds: float) -> None:
        """Draws batches for that long, and counts."""
        # The whole tree of processes: loaders' time counts too.
        before_s = cpu_s(tree(self.program.pid))
        reply = self.program.ask(seconds)
        self.cpu_s += cpu_s(tree(self.program.pid)) - before_s
        # Padding is no id that was read.
        self.ids += reply["ids"] * self.filled
        self.ids_per_s.append(reply["ids"] * self.filled / reply["wall_s"])


def rows(
    *,
    torch_python: str | None = None,
    sources: int = files.NUM_SOURCES,
    rounds: int = 7,
    seconds: float = 2.0,
) -> Iterator[Row]:
    """One table for each corpus; `rounds` turns of `seconds` each."""
    python = peer_python(torch_python)
    for name, corpus in {"short documents": files.SHORT, "long documents": files.LONG}.items():
        with ExitStack() as stack:
            turns = open_readers(stack, python, sources, corpus)
            # Turns, so that other work on the machine meets all readers alike.
            for _ in range(rounds):
                for turn in turns.values():
                    time.sleep(PAUSE_S)
                    turn.take(seconds)
            yield from rows_of(turns, f"{name}, {sources} sources")


def rows_of(turns: dict[str, Turns], location: str) -> Iterator[Row]:
    """Yields ratios with their bars, the same by CPU time (other work changes it less), and start-up."""
    pairs = [(peer, turns[f"jtrain, {peer.form}"], turns[peer.name]) for peer in PEERS if peer.name in turns]
    for peer, *both in pairs:
        # The median of the turns: one disturbed turn on either side changes nothing.
        ours, theirs = (statistics.median(turn.ids_per_s) for turn in both)
        yield row(
            f"{location}: {peer.form} against {peer.name}", ours, "ids/s", baseline=theirs, bar=peer.bar
        )
    for peer, *both in pairs:
        ours, theirs = (turn.ids / turn.cpu_s for turn in both)
        label = f"{location}: the same per second of CPU time, against {peer.name}"
        yield row(label, ours, "ids/s", baseline=theirs)
    for name, turn in turns.items():
        if "loader processes" in name:
            yield row(f"{location}: {name}", statistics.median(turn.ids_per_s), "ids/s")
    for name, turn in turns.items():
        yield row(f"{location}: first batch, {name}", turn.first_batch_s, "s")


def open_readers(
    stack: ExitStack, python: str | None, num_sources: int, corpus: MadeUpCorpus
) -> dict[str, Turns]:
    """Returns all readers by name, open until the stack ends, on one core; foreign ones with `python`."""

    def folder(format: Format) -> object:
        return files.sources(format, num_sources=num_sources, corpus=corpus, peer=python)

    records = files.sources("arrayrecord", num_sources=num_sources, corpus=corpus)
    # Preparing is not timed: a run does it once, before training.
    index = files.prepare_index(files.mixture(records, seq_len=files.ROW_TOKENS, global_batch=ROWS), records)
    shape = dict(rows=ROWS, seq_len=files.ROW_TOKENS)
    peers = [peer for peer in PEERS if python is not None or not peer.is_foreign]
    formats: list[Format] = [peer.format for peer in peers]
    # All files before the first reader is open: writing them on one core would take much longer.
    formats.extend(format for format, _ in OURS.values())
    folders = {format: folder(format) for format in formats}
    # From here on: readers inherit the core from this process.
    stack.enter_context(one_core())
    turns = {}
    for name, (format, options) in OURS.items():
        reader_options = options | ({"prepared": str(index)} if "prepared" in name else {})
        turns[name] = stack.enter_context(
            open_reader(None, "jtrain", folders[format], **shape, **reader_options)
        )
    for peer in peers:
        interpreter = python if peer.is_foreign else None
        turns[peer.name] = stack.enter_context(
            open_reader(interpreter, peer.reader, folders[peer.format], **shape)
        )
    return turns


@contextlib.contextmanager
def open_reader(python: str | None, name: str, folder: object, **options: object) -> Iterator[Turns]:
    """Yields a reader after its first batch, and warm."""
    start_s = time.perf_counter()
    with reader(python, "mixing", name, folder, **options) as program:
        filled = program.answer()["filled"]
        turns = Turns(program, filled, time.perf_counter() - start_s)
        # Reads and discards, so that no turn pays for opening files.
        program.ask(WARM_S)
        yield turns


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Pins this process, and with it what it starts, to one of its cores."""
    cores_before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores_before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores_before)
