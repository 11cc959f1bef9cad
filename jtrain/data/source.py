"""Where documents come from: `data.path` to files, and all their records as one numbered sequence."""

import bisect
import functools
import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int, UInt64

from jtrain.data.formats import JsonLines, ParquetFile, Records, RowGroupCache, TextFile

STDLIB = "stdlib"
"""As `data.path`: the Python standard library's own source text, a corpus that every machine has."""

_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
"""Installed packages; and tests, which some systems leave out and which hold files that are broken on purpose."""

_COMPRESSED = {".gz", ".zst", ".bz2", ".xz", ".zip", ".tar"}

ROW_GROUP_CACHE_BYTES = 1 << 30
"""Decoded Parquet text kept in memory, per process."""


def find_files(path: str) -> list[tuple[Path, str]]:
    """The files that `data.path` stands for, sorted, each with its name relative to the folder searched.

    A file; a folder, searched all the way down without hidden files; a glob, `**` for any depth; or `stdlib`. The
    relative name is the file's identity: the held-out split stays the same when the folder moves.

    Raises:
      FileNotFoundError: nothing is there.
      ValueError, OSError: a kind of file, or a folder, that cannot be read.
    """
    if "://" in path:
        raise ValueError(f"data.path={path!r}: only files on this machine can be read. Copy the data here first.")
    root = Path(sysconfig.get_paths()["stdlib"]) if path == STDLIB else Path(os.path.expanduser(path))
    if path == STDLIB:
        found = [f for f in _walk(root, skip=_NOT_STDLIB.__contains__) if f.suffix == ".py"]
        looked_for = f"*.py below {root}"
    elif root.is_dir():
        found = list(_walk(root, skip=lambda name: name.startswith(".")))
        looked_for = f"any file that is not hidden, below {root.absolute()}"
    elif root.exists():
        found, root, looked_for = [root], root.parent, str(root)
    elif glob.has_magic(path):
        looked_for = f"files that match {root.absolute()}"
        found = [Path(f) for f in set(glob.glob(str(root), recursive=True)) if not os.path.isdir(f)]
        magic = next(i for i, part in enumerate(root.parts) if glob.has_magic(part))
        root = Path(*root.parts[:magic])
    else:
        found, looked_for = [], str(root.absolute())
    if not found:
        raise FileNotFoundError(
            f"data.path={path!r}: nothing there; looked for {looked_for}. Set data.path to a file, a folder, a glob or "
            f"{STDLIB!r}."
        )
    named = sorted((os.path.relpath(f, root).replace(os.sep, "/"), f) for f in found)
    for _, file in named:
        if file.suffix in _COMPRESSED:
            raise ValueError(f"data.path={path!r}: {file} is compressed ({file.suffix}). Decompress it first.")
        if not file.is_file() or not os.access(file, os.R_OK):
            raise ValueError(f"data.path={path!r}: {file} cannot be read. Mend its permissions, or leave it out.")
    return [(file, name) for name, file in named]


def _walk(root: Path, *, skip: Callable[[str], bool]) -> Iterator[Path]:
    """Every file below `root`, in no order. Raises OSError for a folder that cannot be read."""

    def refuse(error: OSError) -> None:  # the default leaves the folder out in silence
        raise error

    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not skip(name)]
        yield from (Path(folder, file) for file in files if not skip(file))


class Corpus:
    """All records below `data.path`, numbered file after file in the order of their names; random access.

    A file's suffix says what it is: `.jsonl`, `.parquet`; any other is text, one file one document. Empty files hold
    none.

    Raises:
      FileNotFoundError, ValueError: nothing to read there, see `find_files`; or all of it is empty.
    """

    def __init__(self, path: str, *, text_field: str, text_piece_bytes: int) -> None:
        self.path = path
        cache = RowGroupCache(ROW_GROUP_CACHE_BYTES)

        def open_file(file: Path) -> Records:
            if file.suffix == ".jsonl":
                return JsonLines(file, field=text_field)
            if file.suffix == ".parquet":
                return ParquetFile(file, field=text_field, cache=cache)
            return TextFile(file, piece_bytes=text_piece_bytes)

        files = find_files(path)
        self.names = [name for _, name in files]
        self._sizes = [file.stat().st_size for file, _ in files]
        self.size_bytes = sum(self._sizes)
        self._records = [open_file(file) for file, _ in files]
        self._counts = np.asarray([len(records) for records in self._records], np.int64)
        self._ends = np.cumsum(self._counts).tolist()
        if not len(self):
            raise ValueError(
                f"data.path={path!r}: {len(files)} files, all of them empty (first: {files[0][0]}). "
                "Set data.path to files with text in them."
            )

    @functools.cached_property
    def group_starts(self) -> Int[np.ndarray, " groups_and_end"]:
        """Number of the first record of each Parquet row group or other file, and of all records at the end."""
        starts = [
            (r.group_starts[:-1] if isinstance(r, ParquetFile) else np.zeros(1, np.int64)) + end - len(r)
            for r, end in zip(self._records, self._ends, strict=True)
        ]
        return np.append(np.concatenate(starts), len(self))

    @functools.cached_property
    def group_bytes(self) -> Int[np.ndarray, " groups"]:
        """What reading any record of the group brings into memory, decoded: 0 where records are read one by one."""
        return np.concatenate(
            [r.group_bytes if isinstance(r, ParquetFile) else np.zeros(1, np.int64) for r in self._records]
        )

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> str:
        """The text of record `index`. Raises BadRecord, or OSError where its file is gone."""
        file = bisect.bisect_right(self._ends, index)
        return self._records[file][index - self._ends[file] + len(self._records[file])]

    def identity_of(self, index: int) -> str:
        """`name:number`, the number counted from 0 in its file."""
        file = bisect.bisect_right(self._ends, index)
        return f"{self.names[file]}:{index - self._ends[file] + len(self._records[file])}"

    def split_positions(self) -> Float[np.ndarray, " records"]:
        """A number in [0, 1) for each record, from its identity alone (file name and number in the file).

        Records below `data.eval_fraction` are held out: adding files or changing the seed moves none of them.
        """
        file_keys = np.asarray(
            [int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) for name in self.names], np.uint64
        )
        first = np.asarray(self._ends, np.int64) - self._counts
        number = np.arange(len(self), dtype=np.int64) - np.repeat(first, self._counts)
        mixed = splitmix64(np.repeat(file_keys, self._counts) ^ splitmix64(number.astype(np.uint64)))
        return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def fingerprint(self) -> str:
        """Changes with any file's name, size or number of records; not with the folder or the time of a copy."""
        digest = hashlib.blake2b(digest_size=8)
        for name, size, count in zip(self.names, self._sizes, self._counts.tolist(), strict=True):
            digest.update(f"{name}\0{size}\0{count}\n".encode())
        return digest.hexdigest()


def splitmix64(x: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """A hash of each number: every input bit moves every output bit (Steele, Lea and Flood 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
