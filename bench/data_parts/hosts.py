"""Share of a run's documents that each of several hosts reads and tokenises, with real JAX processes.

Each process stands for a host: it has joined the others through JAX's coordination service, takes the rows
that it would feed, and reads with a constructor and loaders of its own. The baseline is a process that reads
everything, as every host had to before they divided the reading. What counts is documents and the seconds
that loaders spend on them: with more hosts than cores the clock on the wall says nothing. A digest of all
rows shows that the batches are the same.
"""

import hashlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.data_parts import files
from jtrain.bench import Row, row
from jtrain.data.dataset import open_dataset
from jtrain.errors import UserError

_WORKER = (
    "import sys; from bench.data_parts.hosts import read_as_host; "
    "read_as_host(*map(int, sys.argv[1:5]), *sys.argv[5:])"
)
_ARRAYS = ("token_BL", "target_BL", "position_BL", "segment_BL")


class HostReading(NamedTuple):
    """Documents that a process has read, and a digest of each of its rows.

    documents: chunks of documents that its loaders were asked for.
    read_s: seconds that they took.
    """

    documents: int
    read_s: float
    rows: dict[int, str]


def rows(*, hosts: int = 4, sources: int = 24, steps: int = 60) -> Iterator[Row]:
    """JSON lines, whose runs the hosts divide, and Parquet, whose row groups they divide.

    Raises:
      UserError: there are too few hosts, sources or steps.
    """
    for name, value, minimum in (("hosts", hosts, 2), ("sources", sources, 1), ("steps", steps, 1)):
        if value < minimum:
            raise UserError(f"--{name} {value} must be at least {minimum}.")
    for format in ("jsonl", "parquet"):
        folder = files.sources(format, num_sources=sources)
        # One process reads everything: the baseline, and the rows that the hosts must give together.
        [alone] = run_hosts(folder, hosts=1, steps=steps)
        parts = run_hosts(folder, hosts=hosts, steps=steps)
        joined = {number: digest for part in parts for number, digest in part.rows.items()}
        assert joined == alone.rows, "the hosts' rows are not those of one process"
        most_documents = max(part.documents for part in parts)
        # The slowest host counts, as all wait for it in a step.
        seconds = max(part.read_s for part in parts)
        label, bar = f"{format}, {hosts} hosts", f"<= {1.32 / hosts:g}"
        yield row(
            f"{label}: documents read by the host that reads most",
            most_documents,
            "",
            baseline=alone.documents,
            bar=bar,
        )
        yield row(f"{label}: seconds of reading, that host", seconds, "s", baseline=alone.read_s)


def run_hosts(folder: Path, *, hosts: int, steps: int) -> list[HostReading]:
    """Runs the processes to their end."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        # Free when it was asked for; the workers bind it a moment later.
        port = free.getsockname()[1]
    command = [sys.executable, "-c", _WORKER]
    processes = [
        subprocess.Popen(
            [*command, *map(str, (i, hosts, port, steps)), str(folder)], stdout=subprocess.PIPE, text=True
        )
        for i in range(hosts)
    ]
    # communicate, not wait: a full pipe would block a worker for ever.
    outputs = [process.communicate(timeout=900)[0] for process in processes]
    codes = [process.returncode for process in processes]
    assert not any(codes), codes
    readings = [json.loads(text.splitlines()[-1]) for text in outputs]
    return [
        HostReading(reading["documents"], reading["read_s"], dict(reading["rows"])) for reading in readings
    ]


def read_as_host(index: int, hosts: int, port: int, steps: int, folder: str) -> None:
    """Takes the batches of one host's rows, and prints what it has read."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    if hosts > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", hosts, index)
    from jtrain.runtime import multihost

    # About 800 documents per step, over all hosts.
    spec = files.mixture(Path(folder), seq_len=2048, global_batch=256)
    own_rows = np.array_split(np.arange(spec.global_batch), hosts)[index]
    digests = {int(number): hashlib.blake2b(digest_size=8) for number in own_rows}
    with open_dataset(spec, seed=0).train_batches(rows=own_rows) as batches:
        for _ in range(steps):
            batch = next(batches)
            for index_of_row, number in enumerate(own_rows.tolist()):
                for name in _ARRAYS:
                    digests[number].update(getattr(batch, name)[index_of_row].tobytes())
        stats = batches.stats
        # A collective, and so a barrier.
        multihost.gather(np.zeros(1))  # nobody leaves while another one still needs what it has read
    assert stats is not None
    reading: dict[str, Any] = {
        "documents": sum(loader.documents for loader in stats.loaders),
        "read_s": sum(loader.busy_s for loader in stats.loaders),
        "rows": [(number, digest.hexdigest()) for number, digest in digests.items()],
    }
    print(json.dumps(reading))
