"""Estimate of the processes, threads, descriptors and memory of a host's data plane before it starts."""

import dataclasses
import sys

from jtrain.data.constructor.collate import ARRAYS
from jtrain.data.constructor.process import slot_bytes
from jtrain.data.dataset import SLOTS, TextDataset
from jtrain.data.loaders.process_pool import IN_FLIGHT

_MIB = 1 << 20
_ARROW_THREADS, _ARRAY_RECORD_THREADS = 2, 66
"""Threads that these libraries start in a loader at the first read, regardless of their settings."""

_PYTHON_MIB, _ARROW_MIB, _ARRAY_RECORD_MIB, _TOKENIZER_MIB = 16, 40, 12, 30


@dataclasses.dataclass(frozen=True)
class RoleUsage:
    """Resources of each process of one role: upper bounds of threads and descriptors, estimate of memory."""

    role: str
    processes: int
    threads: int
    descriptors: int
    memory_mib: int


@dataclasses.dataclass(frozen=True)
class Budget:
    """Resources of all roles of a host. They grow with sources plus loaders, never with their product."""

    roles: tuple[RoleUsage, ...]

    def total(self, field: str) -> int:
        """Returns the total `threads`, `descriptors` or `memory_mib` of all processes, or their number."""
        if field == "processes":
            return sum(role.processes for role in self.roles)
        return sum(role.processes * getattr(role, field) for role in self.roles)

    def line(self) -> str:
        """Returns one line for the plan of a run."""
        if not self.roles:
            return "data plane: in the trainer (data.engine=inline)"
        loaders = sum(role.processes for role in self.roles if role.role == "loader")
        return (
            f"data plane: 1 constructor, up to {loaders} loaders, {self.total('processes')} processes in "
            f"all, at most {self.total('threads')} threads and {self.total('descriptors')} descriptors, "
            f"about {self.total('memory_mib')} MiB"
        )


def budget(dataset: TextDataset, *, rows: int) -> Budget:
    """Estimates the resources of one host that fills `rows` rows of each batch.

    With `data.engine=inline` there is no process besides the trainer.
    """
    spec, sources = dataset.spec, dataset.streams
    if spec.engine == "inline":
        return Budget(())
    loaders, standbys = spec.num_loaders(), spec.shadows
    prepared = len(sources) if spec.prepared is not None else 0
    # Opening the sources has imported the libraries that they need.
    arrow = "pyarrow" in sys.modules and not prepared
    array_record = "array_record" in sys.modules and not prepared
    threads = 1 + arrow * _ARROW_THREADS + array_record * _ARRAY_RECORD_THREADS
    has_tokenizer = sum(stream.setup.tokenizer != "bytes" for stream in sources) > 0 and not prepared
    base_mib = (
        _PYTHON_MIB + arrow * _ARROW_MIB + array_record * _ARRAY_RECORD_MIB + has_tokenizer * _TOKENIZER_MIB
    )
    # Growing corpora decode nothing ahead: their files are opened window by window.
    corpora = [stream.corpus for stream in sources if stream.corpus is not None and stream.corpus.is_open]
    # Two windows per source at most are held decoded, and no more than the source has.
    decoded_bytes = (
        sum(min(int(corpus.group_bytes.sum()), 2 * sources[0].setup.window_bytes) for corpus in corpora)
        * arrow
    )
    document_bytes = [max(1, corpus.size_bytes // len(corpus)) for corpus in corpora]
    # int32 ids of the steps ahead, and the documents in flight in loaders.
    lookahead_bytes = (
        spec.lookahead_steps * spec.global_batch * spec.seq_len * 4 + IN_FLIGHT * sum(document_bytes) * 16
    )
    slots_bytes = SLOTS * slot_bytes((len(ARRAYS) + spec.has_weights, rows, spec.seq_len))
    # A loader maps few files per open source (line starts of JSON lines, or lengths and ids of a prepared
    # source).
    loader_descriptors = 8 + 2 * len(sources)
    children = 1 + loaders + standbys
    # Rounded up: what is decoded and read ahead is divided among the loaders.
    share_mib = -(-(decoded_bytes + lookahead_bytes) // loaders // _MIB)
    return Budget(
        (
            RoleUsage("forkserver", 1, 1 + arrow * _ARROW_THREADS, 12 + 2 * children, _PYTHON_MIB),
            RoleUsage(
                "constructor",
                1,
                2,
                16 + 4 * children + 2 * prepared,
                _PYTHON_MIB - (-(slots_bytes + lookahead_bytes) // _MIB),
            ),
            RoleUsage("loader", loaders, threads, loader_descriptors, base_mib + share_mib),
            RoleUsage("standby", standbys, threads, loader_descriptors, _PYTHON_MIB),
        )
    )
