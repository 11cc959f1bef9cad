"""A source of documents as the config declares it, and all its records as one numbered sequence."""

import concurrent.futures
import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float, Int, UInt64

from jtrain.data.formats import BadRecord, Records, open_file
from jtrain.data.formats.arrow import saved_dataset_files
from jtrain.data.formats.parquet import shared_cache
from jtrain.data.storage import find_files

Format = Literal["auto", "text", "jsonl", "parquet", "arrayrecord", "webdataset", "arrow", "grain"]

DECODED_CACHE_BYTES = 1 << 30
"""Decoded Parquet text kept in memory, per process: all its sources share it."""

_REMOTE_OPENERS = 16
"""Remote files opened at a time: each waits for a round trip or two."""

_RUN_RECORDS = 512
"""Records read at a time by `Corpus.read`: enough that a row group is looked up once, few enough to hold as text."""


ONE_SOURCE = "data"
"""The name of the one source that `data.path` is."""


def field_of(name: str) -> str:
    """The config path of a source, for messages."""
    return "data" if name == ONE_SOURCE else f"data.sources.{name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Documents from one place, with a share in the mixture.

    path: a file, a folder, a glob (`**` for any depth), `stdlib` (the Python standard library's own source text), or a
      URL of one of the first three: s3://, gs://, hf://, http(s)://, file://, or another scheme that fsspec knows. For
      format grain, `module:function` that gives a `grain.MapDataset` of str.
    weight: its share in the mixture, against those of the others; zero is legal.
    format: `auto` goes by each file's suffix: .jsonl, .parquet, .arrayrecord, .tar (WebDataset), .arrow, each also with
      .gz or .zst behind it; any other is text, one file one document. A folder that Hugging Face's `save_to_disk` wrote
      is known by its state.json.
    text_field: JSON key, column, or suffix of the tar's members (such as txt). Of an ArrayRecord it counts where
      records are JSON objects; empty, the record itself is the text whatever it looks like.
    tokenizer: None for that of data.tokenizer.
    text_piece_bytes: a text file longer than this is read as several documents, so that one big file can be shuffled
      too. Raise it for contexts that long.
    """

    path: str
    weight: float = 1.0
    format: Format = "auto"
    text_field: str = "text"
    tokenizer: str | None = None
    text_piece_bytes: int = 1 << 16

    def check(self, name: str) -> None:
        """Raises ValueError for a value that cannot be, as `data.sources.NAME.FIELD`."""
        field = field_of(name)
        if not self.path:
            raise ValueError(f"{field}.path is empty. Set it to a file, a folder, a glob, a URL or 'stdlib'.")
        if self.format not in get_args(Format):
            raise ValueError(f"{field}.format={self.format!r} must be one of {', '.join(get_args(Format))}.")
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(f"{field}.weight={self.weight} must be a number, zero or more.")
        if self.text_piece_bytes < 16:
            raise ValueError(f"{field}.text_piece_bytes={self.text_piece_bytes} must be at least 16.")


class Corpus:
    """All records of one source, numbered file after file in the order of their names; random access.

    Between reads a file costs some hundred bytes and no descriptor, a Parquet file 16 bytes per row group more.

    Attributes:
      source: as declared.
      name: of the source.
      names: of the files, relative to the folder searched: their identities.
      file_ends: how many records there are up to the end of each file.
      size_bytes: of all files as they are stored.

    Raises:
      FileNotFoundError, ValueError, OSError: nothing to read there, or not as it should be; or all of it is empty.
    """

    def __init__(
        self, source: Source, *, name: str, cache_dir: Path, decoded_cache_bytes: int = DECODED_CACHE_BYTES
    ) -> None:
        source.check(name)
        self.source = source
        self.name = name
        field = field_of(name)
        if source.format == "grain":
            from jtrain.data.formats.graindataset import GrainDataset

            self.names, self._sizes = [source.path], [0]
            self._records: list[Records] = [GrainDataset(source.path, field=field)]
        else:
            files = find_files(source.path, field=f"{field}.path")
            if source.format in ("auto", "arrow"):
                files = saved_dataset_files(files, field=f"{field}.path={source.path!r}") or files
            self.names = [file.name for file in files]
            self._sizes = [max(file.size_bytes, 0) for file in files]
            open_one = functools.partial(
                open_file,
                format=source.format,
                text_field=source.text_field,
                text_piece_bytes=source.text_piece_bytes,
                field=field,
                cache_dir=cache_dir,
                groups=shared_cache(decoded_cache_bytes),
            )
            if len(files) > 1 and files[0].is_remote:
                with concurrent.futures.ThreadPoolExecutor(min(_REMOTE_OPENERS, len(files))) as pool:
                    self._records = list(pool.map(open_one, files))
            else:
                self._records = [open_one(file) for file in files]
        self.size_bytes = sum(self._sizes)
        counts = [len(records) for records in self._records]
        self.file_ends: Int[np.ndarray, " files"] = np.cumsum(counts, dtype=np.int64)
        if not len(self):
            raise ValueError(
                f"{field}.path={source.path!r}: {len(self.names)} files, all of them empty (first: {self.names[0]}). "
                f"Set {field}.path to files with text in them."
            )

    @functools.cached_property
    def group_starts(self) -> Int[np.ndarray, " groups_and_end"]:
        """Number of the first record of each Parquet row group or other file, and of all records at the end."""
        firsts = (self.file_ends - self._counts).tolist()
        starts = [r.group_starts[:-1] + first for r, first in zip(self._records, firsts, strict=True)]
        return np.append(np.concatenate(starts), len(self))

    @functools.cached_property
    def group_bytes(self) -> Int[np.ndarray, " groups"]:
        """What reading any record of the group brings into memory, decoded: 0 where records are read one by one."""
        return np.concatenate([records.group_bytes for records in self._records])

    @property
    def _counts(self) -> Int[np.ndarray, " files"]:
        return np.diff(self.file_ends, prepend=0)

    def __len__(self) -> int:
        return int(self.file_ends[-1])

    def __getitem__(self, record: int) -> str:
        """The text of a record. Raises BadRecord; OSError, naming the file, where that is gone or cut short."""
        file, number = self._place(record)
        return self._records[file][number]

    def read(self, records: Int[np.ndarray, " records"]) -> Iterator[str | BadRecord]:
        """Texts in the order asked; a bad record in its place. What lies together is read together.

        A record of a file, or of a row group, that cannot be read is a bad one as well, with what the file says of it:
        which records are bad does not depend on what else is asked for.
        """
        for start in range(0, len(records), _RUN_RECORDS):
            run = records[start : start + _RUN_RECORDS]
            if len(self._records) == 1:
                yield from _read_or_why(self._records[0], run.tolist())
                continue
            files = np.searchsorted(self.file_ends, run, side="right")
            numbers = run - (self.file_ends - self._counts)[files]
            texts: list[str | BadRecord] = [""] * len(run)
            for file in sorted(set(files.tolist())):
                places = np.flatnonzero(files == file)
                read = _read_or_why(self._records[file], numbers[places].tolist())
                for place, text in zip(places.tolist(), read, strict=True):
                    texts[place] = text
            yield from texts

    def identity_of(self, record: int) -> str:
        """`name:number`, the number counted from 0 in its file."""
        file, number = self._place(record)
        return f"{self.names[file]}:{number}"

    def _place(self, record: int) -> tuple[int, int]:
        file = int(np.searchsorted(self.file_ends, record, side="right"))
        return file, int(record - self.file_ends[file] + len(self._records[file]))

    def split_positions(self, records: Int[np.ndarray, " records"]) -> Float[np.ndarray, " records"]:
        """A number in [0, 1) for each of these records, from its identity alone (file name and number in the file).

        Records below `data.eval_fraction` are held out: adding files or changing the seed moves none of them.
        """
        files = np.searchsorted(self.file_ends, records, side="right")
        number = records - (self.file_ends - self._counts)[files]
        mixed = splitmix64(self._file_keys[files] ^ splitmix64(number.astype(np.uint64)))
        return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53

    @functools.cached_property
    def _file_keys(self) -> UInt64[np.ndarray, " files"]:
        keys = [int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) for name in self.names]
        return np.asarray(keys, np.uint64)

    def fingerprint(self) -> str:
        """Changes with any file's name, size or number of records; not with the folder or the time of a copy."""
        digest = hashlib.blake2b(digest_size=8)
        for name, size, count in zip(self.names, self._sizes, self._counts.tolist(), strict=True):
            digest.update(f"{name}\0{size}\0{count}\n".encode())
        return digest.hexdigest()

    def close(self) -> None:
        """Lets go of decoded row groups and open readers; reading afterwards fetches them again."""
        for records in self._records:
            records.close()


def _read_or_why(file: Records, numbers: list[int]) -> list[str | BadRecord]:
    """As `Records.read`, where an OSError is a BadRecord for each record that meets it when it is read by itself."""
    try:
        return file.read(numbers)
    except OSError as error:
        if len(numbers) == 1:
            return [BadRecord(str(error))]
    # Once more in parts: one record, or those of one row group, which is decoded once for all of them.
    group = np.searchsorted(file.group_starts, numbers, side="right") - 1
    part = np.where(file.group_bytes[group] > 0, group, len(file.group_bytes) + np.arange(len(numbers)))
    texts: list[str | BadRecord] = [""] * len(numbers)
    for one in np.unique(part).tolist():
        places = np.flatnonzero(part == one).tolist()
        wanted = [numbers[place] for place in places]
        try:
            found = file.read(wanted)
        except OSError as error:
            found = [BadRecord(str(error)) for _ in wanted]
        for place, text in zip(places, found, strict=True):
            texts[place] = text
    return texts


def splitmix64(x: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """A hash of each number: every input bit moves every output bit (Steele, Lea and Flood 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
