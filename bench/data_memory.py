"""Memory and time to the first batch of 32 consumers of 306 Parquet sources, beside Grain and torchdata.

    python -m jtrain.bench data_memory --torch-python T/bin/python

Consumers are the ranks of 4 hosts with 8 accelerators each, all on this machine. Under Grain and torch every consumer
has a loader of its own, which opens every source; ours has one constructor per host. What counts is the proportional
set size (PSS: pages shared by n processes count 1/n in each) of every process that loads data: loaders, constructors,
forkservers, shadows. Of ours, what a trainer grows by when it imports jtrain.data and opens its data counts too; JAX,
which a trainer has anyway, does not. Needs 16 GB for the baselines.

Imports count on both sides in the rows with a bar. The row below each takes the peer's own imports off its figure (the
memory of as many consumers that import and open nothing), and nothing off ours.
"""

import dataclasses
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench import data_sources
from bench.data_sources import PEER_PYTHON, peer, peer_python
from jtrain.bench import Options, Row, option, row

BATCH, BATCHES = 64, 40
"""Samples per batch, and batches per consumer: 8 samples of the average source, 2 of the rarest."""
ROWS, SEQ_LEN = 1, 8192
"""Of ours per consumer and batch: 61 samples on average."""


OPTIONS = (
    PEER_PYTHON,
    option("--consumers", type=int, default=32, help="ranks with a loader of their own (default: 32)"),
    option("--hosts", type=int, default=4, help="hosts that they are spread over (default: 4)"),
    option("--sources", type=int, default=data_sources.NUM_SOURCES, help="(default: %(default)s)"),
)


@dataclasses.dataclass(frozen=True)
class Usage:
    """What some processes hold at one moment."""

    pss_mib: float
    processes: int
    threads: int
    fds: int


@dataclasses.dataclass(frozen=True)
class Measured:
    """One loader's figures: from the start of its first process to the last consumer's first batch, and after all."""

    first_batch_s: float
    usage: Usage


@dataclasses.dataclass(frozen=True)
class Ours(Measured):
    """Ours, and what of its memory the trainers' imports of jtrain.data take."""

    trainer_imports_mib: float


def run(args: Options) -> list[Row]:
    """Ours first, then each baseline, one after the other: together they would not fit."""
    python = peer_python(args)
    folder = data_sources.sources("parquet", num_sources=args.sources)
    ours = our_consumers(folder, hosts=args.hosts, consumers=args.consumers)
    rows = []
    for name, (interpreter, script) in {
        "Grain mix": (None, "data_grain"),
        "torch StatefulDataLoader": (python, "data_torch"),
    }.items():
        theirs = peer_consumers(interpreter, script, folder, consumers=args.consumers)
        imports = peer_consumers(interpreter, script, folder, consumers=args.consumers, batches=0)
        rows += rows_of(f"{args.consumers} consumers, {args.sources} sources, against {name}", ours, theirs, imports)
        what = f"of {name}'s memory, what importing it {args.consumers} times takes"
        rows.append(row(what, imports.usage.pss_mib, "MiB"))
    what = f"of ours, what importing jtrain.data in {args.hosts} trainers takes"
    rows.append(row(what, ours.trainer_imports_mib, "MiB"))
    return rows


def rows_of(what: str, ours: Measured, theirs: Measured, imports: Measured) -> list[Row]:
    """Both bars, and the counts beside them. The bars are on ours / theirs: 13.5x less, 20x sooner."""
    a, b = ours.usage, theirs.usage
    opened_mib = b.pss_mib - imports.usage.pss_mib
    return [
        row(f"memory (PSS), {what}", a.pss_mib, "MiB", baseline=b.pss_mib, bar=f"<= {1 / 13.5:.4f}"),
        row(f"the same with the peer's imports taken off, {what}", a.pss_mib, "MiB", baseline=opened_mib),
        row(f"time to first batch, {what}", ours.first_batch_s, "s", baseline=theirs.first_batch_s, bar="<= 0.05"),
        row(f"processes, {what}", float(a.processes), "", baseline=float(b.processes)),
        row(f"threads, {what}", float(a.threads), "", baseline=float(b.threads)),
        row(f"open files, {what}", float(a.fds), "", baseline=float(b.fds)),
    ]


def our_consumers(folder: Path, *, hosts: int, consumers: int, batches: int = BATCHES) -> Ours:
    """One constructor per host, whose batch holds the rows of its consumers, until each had all its batches.

    Args:
      folder: the Parquet files.
      hosts: trainers, each a process.
      consumers: ranks over all hosts; each has as many tokens in a batch as the peers' consumers.
      batches: of each.
    """
    settings = {"hosts": hosts, "global-batch": consumers * ROWS, "seq-len": SEQ_LEN, "batches": batches}
    arguments = [text for key, value in settings.items() for text in (f"--{key}", value)]
    with peer(None, "data_jtrain", "consumers", folder, *arguments) as program:
        trainers = program.answer()["trainers"]
        before = Trainers(trainers)
        program.ask("import")
        imports_mib = before.grown_mib()
        first_batch_s = program.ask("open")["first_batch_s"]
        below = {pid for trainer in trainers for pid in tree(trainer)} - set(trainers)
        used = settled(below, seconds=1.0)
        used = dataclasses.replace(used, pss_mib=used.pss_mib + before.grown_mib())
        return Ours(first_batch_s, used, imports_mib)


def peer_consumers(
    python: str | None, script: str, folder: Path, *, consumers: int, batches: int = BATCHES
) -> Measured:
    """Loaders that each open every source, after each has drawn all its batches.

    Args:
      python: the peer's interpreter; None for this one.
      script: of `peers/`.
      folder: the Parquet files.
      consumers: how many.
      batches: of each; with 0 they import what they need and open nothing.
    """
    arguments = ("consumers", folder, "--consumers", consumers, "--batches", batches, "--batch", BATCH)
    with peer(python, script, *arguments) as program:
        answer = program.answer()
        # The process that started them stands for the trainer.
        return Measured(answer["first_batch_s"], settled(set(tree(program.pid)) - {program.pid}, seconds=1.0))


def usage(pids: Iterable[int]) -> Usage:
    """Memory, threads and open files."""
    pids = list(pids)
    threads = sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids)
    fds = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
    return Usage(sum(_smaps(pid)["Pss"] for pid in pids) / 1024, len(pids), threads, fds)


def _smaps(pid: int) -> dict[str, int]:
    """KiB by name, such as Pss, Pss_Anon and Pss_Shmem."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}


class Trainers:
    """Memory of trainers before they open their data, to tell how much they grow by.

    Pages of files that a trainer had mapped before, such as JAX's libraries, are left out: how many other processes
    share them changes all the time, and on a machine in use with every program that starts.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._files = {pid: set(_file_kib(pid)) for pid in pids}
        self._anonymous_kib = {pid: _smaps(pid)["Pss_Anon"] for pid in pids}

    def grown_mib(self) -> float:
        """What they own now beyond then, with shared memory, and with pages of the files mapped since."""
        grown_kib = 0
        for pid, known in self._files.items():
            smaps = _smaps(pid)
            grown_kib += smaps["Pss_Anon"] + smaps["Pss_Shmem"] - self._anonymous_kib[pid]
            grown_kib += sum(kib for path, kib in _file_kib(pid).items() if path not in known)
        return grown_kib / 1024


def _file_kib(pid: int) -> dict[str, int]:
    """Page cache by the path of the mapped file, shared pages divided; without pages that are the process's own."""
    found: dict[str, int] = {}
    path = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if not words[0].endswith(":"):  # a mapping: addresses, rights, offset, device, inode, path
            path = words[5] if len(words) == 6 else ""
        elif path.startswith("/") and not path.startswith(("/dev/", "/memfd:")) and words[0] in ("Pss:", "Anonymous:"):
            found[path] = found.get(path, 0) + int(words[1]) * (1 if words[0] == "Pss:" else -1)
    return found


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # after the name, which may hold anything: state, parent
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for at in found:
        found += children.get(at, [])
    return found


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds that the processes have used so far, user and system, without children that have ended."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def settled(pids: Iterable[int], *, seconds: float) -> Usage:
    """The largest use in that time: a pipeline that refills its buffers must not be caught while they are empty."""
    end = time.monotonic() + seconds
    largest = usage(pids)
    while time.monotonic() < end:
        time.sleep(0.1)
        largest = max(largest, usage(pids), key=lambda used: used.pss_mib)
    return largest
