"""Reads what `python -m jtrain.data prepare` wrote: the ids and lengths of one source, by record number.

    OUT/command.txt          the command that wrote all of it
    OUT/NAME/index.json      what it was made of, counts, the size of each file below; written last
    OUT/NAME/lengths.bin     uint32 tokens per record, zeros up to a multiple of 16; then uint64 starts: the token at
                             which each 16 records begin, and the number of tokens at the end
    OUT/NAME/ids.bin         the ids of all records, one after another, uint8, uint16 or uint32
    OUT/NAME/units.jsonl     hashes of a few MB of ids and their lengths each
    OUT/NAME/skipped.jsonl   the bad records that were left out, and why
    OUT/NAME/files.json      names and record counts of the source's files: the index stands alone on other machines

The same bytes whoever wrote it, with how many processes and however often it was killed in between.
"""

import concurrent.futures
import functools
import hashlib
import json
import mmap
import os
import shlex
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Int, Int32, Int64, UInt, UInt32

from jtrain.data.source import field_of

FORMAT = 1
INDEX, LENGTHS, IDS, UNITS, SKIPPED = "index.json", "lengths.bin", "ids.bin", "units.jsonl", "skipped.jsonl"
FILES = "files.json"
COMMAND = "command.txt"
BLOCK = 16
"""Records per stored start: their lengths are one cache line. 4.5 bytes per record, where a start for each takes 12."""

_HASHED_WHOLE = (UNITS, SKIPPED, FILES)
_THREADS = 4


class Prepared:
    """The prepared index of one source. Opening it reads a page, however large it is; every process may do so.

    Lengths are mapped, so processes share them; ids are read, not mapped: a map's pages would count as the process's
    memory until somebody else wants them. One descriptor (the map's).

    Attributes:
      folder: OUT/NAME.
      made_of: what decides which ids a record has: `corpus` (a fingerprint), `tokenizer` (its identity), and fields of
        the source.
      num_records, num_tokens: in all.
      num_empty, num_skipped: records without text; and bad ones left out (see `skipped`). Both have no tokens.
      dtype: of the ids.

    Raises:
      FileNotFoundError: there is no index in `folder`.
      ValueError: it is damaged, or of another format. Hashes are not compared: `verify` does that.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            body: dict[str, Any] = json.loads((folder / INDEX).read_bytes())
        except FileNotFoundError:
            raise FileNotFoundError(f"{folder}: no prepared index there. Make it: {command(folder)}") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise self._damaged(f"{INDEX} is no JSON ({error})") from error
        if not isinstance(body, dict) or body.pop("digest", None) != digest(json.dumps(body, sort_keys=True).encode()):
            raise self._damaged(f"{INDEX} does not match its own digest")
        if body["format"] != FORMAT:
            raise ValueError(
                f"{folder}: an index of format {body['format']}, and this jtrain reads format {FORMAT}. "
                f"Make it again: {command(folder)}"
            )
        self.made_of: dict[str, str | int] = body["made_of"]
        self.num_records: int = body["records"]
        self.num_tokens: int = body["tokens"]
        self.num_empty: int = body["empty"]
        self.num_skipped: int = body["skipped"]
        self.dtype = np.dtype(body["dtype"])
        self._hashes: dict[str, str] = body["hashes"]
        self._sizes: dict[str, int] = body["bytes"]
        for name in self._sizes:
            self._expect_size(name)
        with open(folder / LENGTHS, "rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        blocks = -(-self.num_records // BLOCK)
        self._lengths = np.frombuffer(content, np.uint32, blocks * BLOCK)
        self._starts = np.frombuffer(content, np.int64, blocks + 1, offset=self._lengths.nbytes)
        self._ids_path = str(folder / IDS)  # a Path takes longer to become one than the file to be opened
        stat = os.stat(self._ids_path)
        self._ids_file = (stat.st_dev, stat.st_ino)

    def __len__(self) -> int:
        return self.num_records

    def __reduce__(self) -> tuple[type["Prepared"], tuple[Path]]:
        return Prepared, (self.folder,)

    def check(self, *, on_bad_record: Literal["fail", "skip"] = "skip", **made_of: str | int) -> None:
        """Refuses an index that was made of something else, or that leaves out what must not be left out.

        Args:
          made_of: as the attribute; what is not given is not compared.

        Raises:
          ValueError: naming the source, what differs, and the command to run.
        """
        differing = [
            f"{key}={self.made_of.get(key)!r}, now {here!r}"
            for key, here in made_of.items()
            if self.made_of.get(key) != here
        ]
        if differing:
            raise ValueError(
                f"{field_of(self.folder.name)}: the prepared index {self.folder} is stale: it was made with "
                f"{'; '.join(differing)}. Make it again: {command(self.folder)}"
            )
        if on_bad_record == "fail" and self.num_skipped:
            record, why = next(iter(self.skipped.items()))
            raise ValueError(
                f"{field_of(self.folder.name)}: the prepared index {self.folder} leaves out {self.num_skipped} bad "
                f"records, but data.on_bad_record='fail'. The first is record {record}: {why}"
            )

    def lengths(self, records: Int[np.ndarray, " n"]) -> Int32[np.ndarray, " n"]:
        """Tokens of each record, borders counted; 0 where there are none."""
        self._check_range(records)
        return self._lengths[records].astype(np.int32)

    def read(self, records: Int[np.ndarray, " n"]) -> tuple[Int32[np.ndarray, " n"], UInt[np.ndarray, " tokens"]]:
        """Tokens of each record, and the ids of all of them one after another.

        Raises:
          ValueError: the index is damaged there.
          OSError: it was removed, or another one was put in its place since it was opened.
        """
        start, length = self._places(records)
        end_byte = np.cumsum(length) * self.dtype.itemsize
        ids = np.empty(int(length.sum()), self.dtype)
        view, at = memoryview(ids.view(np.uint8)), 0
        file = self._open_ids()
        try:
            # Quicker than to gather from a map: 0.7 M documents/s of 600 tokens each.
            for offset, end in zip((start * self.dtype.itemsize).tolist(), end_byte.tolist(), strict=True):
                if os.preadv(file, (view[at:end],), offset) != end - at:
                    raise self._damaged(f"{IDS} ends at byte {os.fstat(file).st_size}, too soon")
                at = end
        finally:
            os.close(file)
        return length.astype(np.int32), ids

    @functools.cached_property
    def skipped(self) -> dict[int, str]:
        """Number of each bad record that was left out -> why, with file and place."""
        lines = (self.folder / SKIPPED).read_text(encoding="utf-8").splitlines()
        return {entry["record"]: entry["why"] for entry in map(json.loads, lines)}

    @functools.cached_property
    def names(self) -> list[str]:
        """Of the source's files, relative, sorted."""
        return self._files["names"]

    @functools.cached_property
    def file_ends(self) -> Int64[np.ndarray, " files"]:
        """Records up to the end of each file."""
        return np.asarray(self._files["file_ends"], np.int64)

    def identity_of(self, record: int) -> str:
        """`name:number`, the number counted from 0 in its file."""
        file = int(np.searchsorted(self.file_ends, record, side="right"))
        return f"{self.names[file]}:{record - (int(self.file_ends[file - 1]) if file else 0)}"

    def verify(self) -> list[str]:
        """Reads all of it and compares hashes, about 1 GB/s and core; a line for each damage, none if it is whole."""
        found = [
            f"{name} has other contents than were written"
            for name, want in self._hashes.items()
            if digest((self.folder / name).read_bytes()) != want
        ]
        if found:
            return found
        units = [json.loads(line) for line in (self.folder / UNITS).read_text().splitlines()]
        ends = np.cumsum([(unit["records"], unit["tokens"]) for unit in units], axis=0).reshape(-1, 2).tolist()
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            for lines in pool.map(self._verify_unit, units, ends):
                found += lines
        tokens = self._lengths.reshape(-1, BLOCK).sum(axis=1, dtype=np.int64)
        if not np.array_equal(np.append(np.zeros(1, np.int64), np.cumsum(tokens)), self._starts):
            found.append(f"{LENGTHS}: its starts are not the sums of its lengths")
        return found

    def _verify_unit(self, unit: dict[str, Any], end: list[int]) -> list[str]:
        record, token = end[0] - unit["records"], end[1] - unit["tokens"]
        found = []
        if digest(self._lengths[record : end[0]]) != unit["lengths"]:
            found.append(f"{LENGTHS}: records {record} to {end[0] - 1} have other lengths than were written")
        file = self._open_ids()
        try:
            size = self.dtype.itemsize
            content = os.pread(file, unit["tokens"] * size, token * size)
        finally:
            os.close(file)
        if digest(content) != unit["ids"]:
            found.append(f"{IDS}: records {record} to {end[0] - 1} have other ids than were written")
        return found

    def _places(self, records: Int[np.ndarray, " n"]) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """First token and number of tokens of each record. Raises ValueError where lengths and starts disagree."""
        self._check_range(records)
        block, place = np.divmod(records, BLOCK)
        ends = np.cumsum(self._lengths.reshape(-1, BLOCK)[block], axis=1, dtype=np.int64)
        wrong = np.flatnonzero(self._starts[block] + ends[:, -1] != self._starts[block + 1])
        if len(wrong):
            raise self._damaged(f"{LENGTHS}: lengths and starts disagree at record {int(records[wrong[0]])}")
        length = self._lengths[records].astype(np.int64)
        return self._starts[block] + ends[np.arange(len(records)), place] - length, length

    def _check_range(self, records: Int[np.ndarray, " n"]) -> None:
        if len(records) and (records.min() < 0 or records.max() >= self.num_records):
            raise IndexError(f"{self.folder}: records {records.min()} to {records.max()} asked of {self.num_records}")

    def _open_ids(self) -> int:
        file = os.open(self._ids_path, os.O_RDONLY)
        stat = os.fstat(file)
        if (stat.st_dev, stat.st_ino) != self._ids_file:
            os.close(file)
            raise OSError(f"{self.folder} was made again while it was in use. Start the run again: it resumes.")
        return file

    @functools.cached_property
    def _files(self) -> dict[str, Any]:
        content = (self.folder / FILES).read_bytes()
        if digest(content) != self._hashes[FILES]:
            raise self._damaged(f"{FILES} has other contents than were written")
        return json.loads(content)

    def _expect_size(self, name: str) -> None:
        try:
            here = (self.folder / name).stat().st_size
        except FileNotFoundError:
            raise self._damaged(f"{name} is missing") from None
        if here != self._sizes[name]:
            raise self._damaged(f"{name} has {here} bytes, {self._sizes[name]} were written")

    def _damaged(self, what: str) -> ValueError:
        folder = shlex.quote(str(self.folder))
        return ValueError(
            f"{self.folder}: the prepared index is damaged: {what}. "
            f"Make it again: rm -r {folder} && {command(self.folder)}"
        )


def command(folder: Path) -> str:
    """The command that makes the index in `folder` (again): as it was given, if one was, else its general form."""
    try:
        return (folder.parent / COMMAND).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return f"python -m jtrain.data prepare --config NAME --out {shlex.quote(str(folder.parent))}"


def digest(content: bytes | UInt32[np.ndarray, " n"]) -> str:
    """blake2b of 128 bits in hex: 1.3 GB/s."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def seal(folder: Path, body: dict[str, Any]) -> str:
    """The text of `index.json` for the files that lie in `folder`, complete but for it."""
    names = (LENGTHS, IDS, *_HASHED_WHOLE)
    body = {
        "format": FORMAT,
        **body,
        "bytes": {name: (folder / name).stat().st_size for name in names},
        "hashes": {name: digest((folder / name).read_bytes()) for name in _HASHED_WHOLE},
    }
    return json.dumps(body | {"digest": digest(json.dumps(body, sort_keys=True).encode())}, indent=1) + "\n"
