"""Corpora of the data benchmarks: the same documents of many text sources in seven forms, written once.

306 sources of 400 documents, the number of sources that OVERLORD's navit_data has (arXiv:2504.09844). A
document holds 16 to 8192 characters, one token each for the byte tokenizer; lengths are lognormal, median 318
and mean about 660. `LONG` has documents of 16 K characters in the median, most of which exceed a row. The
files stay in the user's folder for temporary files, so only the first benchmark that needs them waits for
them.
"""

import contextlib
import ctypes
import getpass
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from bench.peers import protocol

if TYPE_CHECKING:
    import grain

    from jtrain.data.dataset import PackedText

NUM_SOURCES = 306


class MadeUpCorpus(NamedTuple):
    """Documents of each source: their number, the median of their lengths and the longest, in characters."""

    documents: int
    median: int
    longest: int


SHORT = MadeUpCorpus(documents=400, median=318, longest=8192)
LONG = MadeUpCorpus(documents=12, median=16384, longest=1 << 17)

ROW_GROUP = 200
"""Documents of a Parquet row group: 133 KB. Usual are 64 MB and more, of which every open file holds one."""

READERS = Path(protocol.__file__).with_name("readers.py")
"""Script of all readers, jtrain's and the peers'."""

ROW_TOKENS = 8192
"""Tokens of a row in the mixed reading; an MDS sample holds one more, for the last target."""

type Format = Literal["parquet", "arrayrecord", "tar", "jsonl", "bin", "mds"]

QUICK_S, SLOW_S = 0.001, 0.010
"""To read a document of the sources `quick` and `slow`."""
DOCUMENT_CHARACTERS = 255
"""Of all of theirs: a row holds a fixed number of them."""

_POOL_BYTES = 8 << 20
_VERSION = 3  # of what is written: another one is written anew


def sources(
    format: Format,
    *,
    num_sources: int = NUM_SOURCES,
    corpus: MadeUpCorpus = SHORT,
    peer: str | None = None,
    folder: Path | None = None,
) -> Path:
    """The folder with one file (mds: a folder; bin: one file in all) per source, written unless it exists.

    Args:
      format: of the files. `bin` is the flat file of nanoGPT and Megatron: uint16 ids of one document after
        another. `mds` holds rows of ids, as llm-foundry prepares them: documents joined, then cut.
      num_sources: how many.
      corpus: documents of each source.
      peer: an interpreter that has mosaicml-streaming; only mds needs one.
      folder: where to keep them; by default below the user's folder for temporary files.
    """
    target = (
        (folder or data_folder())
        / f"sources-{_VERSION}"
        / f"{num_sources}x{corpus.documents}x{corpus.median}"
        / format
    )
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Written beside the target, then renamed: a benchmark that is killed leaves no half corpus.
    unfinished = Path(tempfile.mkdtemp(prefix=f"{format}-", dir=target.parent))
    try:
        if format == "mds":  # its package only writes from Parquet: one generator
            assert peer is not None
            parquet = sources("parquet", num_sources=num_sources, corpus=corpus, folder=folder)
            options = ("--out", str(unfinished), "--seq-len", str(ROW_TOKENS))
            subprocess.run([peer, str(READERS), "write", "mosaicml", str(parquet), *options], check=True)
        else:
            lengths, pool = lengths_of(num_sources, corpus), _pool()
            for source in range(num_sources):
                _WRITERS[format](
                    unfinished / f"{source:04}.{format}", texts_of(source, lengths[source], pool)
                )
        with contextlib.suppress(OSError):  # another process was quicker: its files are the same
            unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def data_folder() -> Path:
    """Folder in which the benchmarks' data stays between runs."""
    return Path(tempfile.gettempdir()) / f"jtrain-bench-{getpass.getuser()}"


def lengths_of(num_sources: int, corpus: MadeUpCorpus = SHORT) -> Int[np.ndarray, "sources documents"]:
    """Characters of every document: lognormal, clipped to [16, corpus.longest]."""
    # 1.243: the mean is exp(1.243^2 / 2) = 2.2 times the median, and a little less after clipping.
    lengths = np.random.default_rng(0).lognormal(
        np.log(corpus.median), 1.243, (num_sources, corpus.documents)
    )
    return np.clip(lengths, 16, corpus.longest).astype(np.int64)


def texts_of(source: int, lengths: Int[np.ndarray, " documents"], pool: str) -> list[str]:
    """The documents of one source: random stretches of the pool of words."""
    start = np.random.default_rng((1, source)).integers(0, len(pool) - lengths.max(), len(lengths))
    return [pool[s : s + n] for s, n in zip(start.tolist(), lengths.tolist(), strict=True)]


def mixture(folder: Path, *, seq_len: int, global_batch: int) -> "PackedText":
    """Data config that a user would write for all files of a folder, with the weights of the peers."""
    from jtrain.data.dataset import PackedText
    from jtrain.data.sources.source import Source

    files = sorted(folder.iterdir())
    # From the protocol that the peers import too: one home for the weights.
    weights = np.asarray(protocol.weights_of(len(files)))
    # an ArrayRecord's record is the text itself; in a tar, txt is the members' suffix
    field = {".parquet": "text", ".jsonl": "text", ".tar": "txt", ".arrayrecord": ""}[files[0].suffix]
    return PackedText(
        sources={
            f"source_{number:03}": Source(path=str(file), weight=weight, text_field=field)
            for number, (file, weight) in enumerate(
                zip(files, (weights / weights.sum()).tolist(), strict=True)
            )
        },
        seq_len=seq_len,
        global_batch=global_batch,
        mixture_unit="samples",
        eval_fraction=0.0,
        # A row group at a time, as a window is never smaller. The peers shuffle no Parquet.
        shuffle_window_bytes=1 << 20,
    )


def prepare_index(spec: "PackedText", folder: Path) -> Path:
    """The prepared index of a mixture, beside its files; made if missing."""
    from jtrain.data.pretokenized.build import prepare
    from jtrain.data.pretokenized.shard import Recipe

    out = folder.with_name(f"{folder.name}-prepared")
    recipes = [
        Recipe(
            name=name, source=source, tokenizer=spec.tokenizer, cache_dir=Path(spec.cache_dir).expanduser()
        )
        for name, source in spec.named_sources.items()
    ]
    prepare(recipes, out, workers=os.cpu_count() or 1, stream=io.StringIO())
    return out


def _pool() -> str:
    """Text that compresses about as text does: words of a vocabulary of 20,000, the frequent ones first."""
    rng = np.random.default_rng(2)
    letters = np.frombuffer(b"etaoinshrdlucmfwypvbgkqjxz", np.uint8)
    words = [
        letters[np.minimum(rng.geometric(0.12, size) - 1, 25)].tobytes().decode()
        for size in rng.integers(2, 11, 20_000).tolist()
    ]
    # Zipf's law, as in natural text: it then compresses about as well.
    rank = np.minimum(rng.zipf(1.2, _POOL_BYTES // 5) - 1, len(words) - 1)
    return " ".join([words[r] for r in rank.tolist()])[:_POOL_BYTES]


def _write_parquet(path: Path, texts: Sequence[str]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": list(texts)}), path, row_group_size=ROW_GROUP)


def _write_arrayrecord(path: Path, texts: Sequence[str]) -> None:
    """One document per record, each to be read by itself."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for text in texts:
        writer.write(text.encode())
    writer.close()


def _write_tar(path: Path, texts: Sequence[str]) -> None:
    with tarfile.open(path, "w") as tar:
        for number, text in enumerate(texts):
            info = tarfile.TarInfo(f"{path.stem}-{number:06}.txt")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))


def write_jsonl(path: Path, texts: Sequence[str]) -> None:
    """One document per line."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def _append_bin(path: Path, texts: Sequence[str]) -> None:
    """Appends the ids to the one file of all sources, a zero before and behind each document."""
    ids = b"".join(b"\0" + text.encode() + b"\0" for text in texts)
    with path.with_name("tokens.bin").open("ab") as file:
        file.write(np.frombuffer(ids, np.uint8).astype(np.uint16).tobytes())


_WRITERS: dict[Format, Callable[[Path, Sequence[str]], None]] = {
    "parquet": _write_parquet,
    "arrayrecord": _write_arrayrecord,
    "tar": _write_tar,
    "jsonl": write_jsonl,
    "bin": _append_bin,
}


class SlowTexts:
    """Texts that take `seconds` each to read with the interpreter's lock held, like decoding on one core."""

    def __init__(self, seconds: float) -> None:
        self._us = int(1e6 * seconds)
        self._usleep = ctypes.PyDLL(None).usleep  # PyDLL: calls with the interpreter's lock held

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> str:
        self._usleep(self._us)
        return f"{index:{DOCUMENT_CHARACTERS}}"

    def __getstate__(self) -> int:
        return self._us

    def __setstate__(self, us: int) -> None:
        self.__init__(us / 1e6)


def quick() -> "grain.MapDataset[str]":
    """A source: `bench.data_parts.files:quick`."""
    return _slow_dataset(QUICK_S)


def slow() -> "grain.MapDataset[str]":
    """A source: `bench.data_parts.files:slow`."""
    return _slow_dataset(SLOW_S)


def _slow_dataset(seconds: float) -> "grain.MapDataset[str]":
    import grain  # lazy: 0.9 s

    return grain.MapDataset.source(SlowTexts(seconds))
