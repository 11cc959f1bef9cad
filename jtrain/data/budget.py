"""What the data plane of a host will take, known before anything starts: processes, threads, descriptors, memory."""

import dataclasses
import sys

from jtrain.data.constructor_process import slot_bytes
from jtrain.data.dataset import SLOTS, TextDataset
from jtrain.data.pool import IN_FLIGHT

_MIB = 1 << 20
_ARROW_THREADS, _ARRAY_RECORD_THREADS = 2, 66
"""Threads that the libraries start in a loader at the first read, whatever they are told."""

_RAY_MIB = 140
"""An actor before it opens a source, nearly all of it Ray's own."""

_PYTHON_MIB, _ARROW_MIB, _ARRAY_RECORD_MIB, _TOKENIZER_MIB = 16, 40, 12, 30


@dataclasses.dataclass(frozen=True)
class Share:
    """What the processes of one role take, each: at most, except for memory, which is an estimate."""

    role: str
    processes: int
    threads: int
    descriptors: int
    memory_mib: int


@dataclasses.dataclass(frozen=True)
class Budget:
    """All roles of a host. It grows with sources plus loaders, never with their product."""

    shares: tuple[Share, ...]

    def total(self, field: str) -> int:
        """Of `threads`, `descriptors` or `memory_mib`, over all processes; or of `processes`."""
        if field == "processes":
            return sum(share.processes for share in self.shares)
        return sum(share.processes * getattr(share, field) for share in self.shares)

    def line(self) -> str:
        """For the plan of a run."""
        if not self.shares:
            return "data plane: in the trainer (data.engine=inline)"
        loaders = sum(share.processes for share in self.shares if share.role == "loader")
        most = f"at most {self.total('threads')} threads and {self.total('descriptors')} descriptors, "
        return (
            f"data plane: 1 constructor, up to {loaders} loaders, {self.total('processes')} processes in all, "
            f"{most if self.total('threads') else ''}about {self.total('memory_mib')} MiB"
        )


def budget(dataset: TextDataset, *, rows: int) -> Budget:
    """The budget of one host that holds `rows` rows of each batch.

    With `data.engine` inline there is no process besides the trainer.
    """
    spec, sources = dataset.spec, dataset.documents
    if spec.engine == "inline":
        return Budget(())
    if spec.engine == "ray":  # threads and descriptors are Ray's own
        roles = (("constructor", 1), ("loader", spec.num_loaders()), ("standby", spec.shadows))
        return Budget(tuple(Share(role, count, 0, 0, _RAY_MIB) for role, count in roles))
    loaders, shadows = spec.num_loaders(), spec.shadows
    prepared = len(sources) if spec.prepared is not None else 0
    arrow = "pyarrow" in sys.modules and not prepared  # opening the sources has imported what they need
    array_record = "array_record" in sys.modules and not prepared
    threads = 1 + arrow * _ARROW_THREADS + array_record * _ARRAY_RECORD_THREADS
    kinds = sum(d.setup.tokenizer != "bytes" for d in sources) > 0 and not prepared
    base = _PYTHON_MIB + arrow * _ARROW_MIB + array_record * _ARRAY_RECORD_MIB + kinds * _TOKENIZER_MIB
    decoded = sum(min(int(d.corpus.group_bytes.sum()), 2 * d.setup.window_bytes) for d in sources) * arrow
    documents = [max(1, d.corpus.size_bytes // max(1, len(d))) for d in sources]
    ahead = spec.lookahead_steps * spec.global_batch * spec.seq_len * 4 + IN_FLIGHT * sum(documents) * 16
    slots = SLOTS * slot_bytes(rows, spec.seq_len)
    # A loader maps one file for each open source at most (line starts of JSON lines, lengths and ids if prepared).
    loader_descriptors = 8 + 2 * len(sources)
    children = 1 + loaders + shadows
    share = -(-(decoded + ahead) // loaders // _MIB)
    return Budget(
        (
            Share("forkserver", 1, 1 + arrow * _ARROW_THREADS, 12 + 2 * children, _PYTHON_MIB),
            Share("constructor", 1, 2, 16 + 4 * (children) + 2 * prepared, _PYTHON_MIB + -(-(slots + ahead) // _MIB)),
            Share("loader", loaders, threads, loader_descriptors, base + share),
            Share("standby", shadows, threads, loader_descriptors, _PYTHON_MIB),
        )
    )
