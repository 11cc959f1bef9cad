"""Reader of prepared indexes (`python -m jtrain.data prepare`): token ids and lengths of one source, by record number.

    OUT/command.txt          the command that wrote the indexes
    OUT/NAME/index.json      what the index was made of, counts, and the size of each file below; written last
    OUT/NAME/lengths.bin     uint32 tokens per record, zero-padded to a multiple of 16 records; then uint64 starts: the
                             first token of each block of 16 records, and the number of tokens at the end
    OUT/NAME/ids.bin         token ids of all records, one after another, uint8, uint16 or uint32
    OUT/NAME/units.jsonl     a line per shard (a few MB): its counts and the hashes of its ids and lengths
    OUT/NAME/skipped.jsonl   bad records that were left out, and why
    OUT/NAME/files.json      names and record counts of the source's files, so that the index is complete without them

The bytes do not depend on the number of worker processes, nor on how often the build was killed.
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

from jtrain.data.sources.source import field_of
from jtrain.errors import FileError, UserError

FORMAT = 1
INDEX, LENGTHS, IDS, SHARDS, SKIPPED = "index.json", "lengths.bin", "ids.bin", "units.jsonl", "skipped.jsonl"
FILES = "files.json"
COMMAND = "command.txt"
BLOCK = 16
"""Records per stored start: their lengths fill one cache line. 4.5 bytes per record; a start for each would take 12."""

_HASHED_WHOLE = (SHARDS, SKIPPED, FILES)
_THREADS = 4


class PreparedIndex:
    """Prepared index of one source. Opening it reads one page whatever its size, so every process can open its own.

    Lengths are memory-mapped, so processes share them. Ids are read instead: mapped pages would count as memory of the
    process until the kernel reclaims them. An open index holds one descriptor, that of the map.

    Attributes:
      folder: OUT/NAME.
      made_of: everything that decides which ids a record has: `corpus` (a fingerprint), `tokenizer` (its identity), and
        fields of the source.
      num_records, num_tokens: totals of the index.
      num_empty: records without text, 0 tokens each.
      num_skipped: bad records that were left out, 0 tokens each; see `skipped`.
      dtype: dtype of the ids.

    Raises:
      FileError: there is no index in `folder`.
      UserError: the index is damaged, or of another format version. Hashes are compared by `verify` only.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            body: dict[str, Any] = json.loads((folder / INDEX).read_bytes())
        except FileNotFoundError:
            raise FileError(f"{folder}: no prepared index there. Make it: {command(folder)}") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise self._damaged(f"{INDEX} is no JSON ({error})") from error
        if not isinstance(body, dict) or body.pop("digest", None) != digest(json.dumps(body, sort_keys=True).encode()):
            raise self._damaged(f"{INDEX} does not match its own digest")
        if body["format"] != FORMAT:
            raise UserError(
                f"{folder}: index format {body['format']}; this jtrain reads format {FORMAT}. "
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
        self._lengths = np.frombuffer(content, np.uint32, self.num_blocks * BLOCK)
        self._starts = np.frombuffer(content, np.int64, self.num_blocks + 1, offset=self._lengths.nbytes)
        self._ids_path = str(folder / IDS)  # a str, because building a Path takes longer than opening the file
        stat = os.stat(self._ids_path)
        self._ids_file = (stat.st_dev, stat.st_ino)

    def __len__(self) -> int:
        return self.num_records

    @property
    def num_blocks(self) -> int:
        """Number of blocks of 16 records, the last one not always full."""
        return -(-self.num_records // BLOCK)

    def __reduce__(self) -> tuple[type["PreparedIndex"], tuple[Path]]:
        return PreparedIndex, (self.folder,)

    def check(self, *, on_bad_record: Literal["fail", "skip"] = "skip", **made_of: str | int) -> None:
        """Refuses an index that was made of other data, or that skips bad records although `on_bad_record` is fail.

        Args:
          on_bad_record: `data.on_bad_record` of the run.
          made_of: expected values of entries of the attribute `made_of`; entries that are not given are not compared.

        Raises:
          UserError: the index does not fit; the message names the source, what differs, and the command to run.
        """
        differing = [
            f"{key}={self.made_of.get(key)!r}, now {here!r}"
            for key, here in made_of.items()
            if self.made_of.get(key) != here
        ]
        if differing:
            raise UserError(
                f"{field_of(self.folder.name)}: the prepared index {self.folder} is stale: it was made with "
                f"{'; '.join(differing)}. Make it again: {command(self.folder)}"
            )
        if on_bad_record == "fail" and self.num_skipped:
            record, why = next(iter(self.skipped.items()))
            raise UserError(
                f"{field_of(self.folder.name)}: the prepared index {self.folder} leaves out {self.num_skipped} bad "
                f"records, but data.on_bad_record='fail'. The first is record {record}: {why}"
            )

    def lengths(self, records: Int[np.ndarray, " n"]) -> Int32[np.ndarray, " n"]:
        """Returns the tokens of each record, begin and end ids included; 0 for empty and skipped records."""
        self._check_range(records, self.num_records, "records")
        return self._lengths[records].astype(np.int32)

    def token_starts(self, blocks: Int[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Returns the first token of each block of 16 records, counted from the first token of the source.

        Args:
          blocks: block numbers, in any order. The number of blocks is valid too: its start is `num_tokens`.
        """
        self._check_range(blocks, self.num_blocks + 1, "blocks")
        return self._starts[blocks].astype(np.int64)

    def read(self, records: Int[np.ndarray, " n"]) -> tuple[Int32[np.ndarray, " n"], UInt[np.ndarray, " tokens"]]:
        """Returns the tokens of each record, and the ids of all these records one after another.

        Raises:
          UserError: the index is damaged at one of the records.
          FileError: the index was removed or replaced since it was opened.
        """
        first, length = self._places(records)
        return length.astype(np.int32), self._read_ids(first, length)

    def read_spans(
        self, records: Int[np.ndarray, " n"], starts: Int[np.ndarray, " n"], ends: Int[np.ndarray, " n"]
    ) -> UInt[np.ndarray, " tokens"]:
        """Returns the ids of tokens starts[i] to ends[i] - 1 of record records[i], one span after another.

        Raises:
          IndexError: a span is not within its record.
          UserError: the index is damaged at one of the records.
          FileError: the index was removed or replaced since it was opened.
        """
        first, length = self._places(records)
        wrong = np.flatnonzero((starts < 0) | (ends < starts) | (ends > length))
        if len(wrong):
            i = int(wrong[0])
            span = f"tokens {starts[i]} to {ends[i]} of record {records[i]}"
            raise IndexError(f"{self.folder}: {span} asked for, which has {length[i]}")
        return self._read_ids(first + starts, np.asarray(ends - starts, np.int64))

    def _read_ids(self, start: Int64[np.ndarray, " n"], length: Int64[np.ndarray, " n"]) -> UInt[np.ndarray, " tokens"]:
        """Returns the ids of spans of tokens, counted from the first token of the source, one span after another."""
        end_byte = np.cumsum(length) * self.dtype.itemsize
        ids = np.empty(int(length.sum()), self.dtype)
        view, at = memoryview(ids.view(np.uint8)), 0
        file = self._open_ids()
        try:
            # Faster than gathering from a memory map: 0.7 M documents/s of 600 tokens each.
            for offset, end in zip((start * self.dtype.itemsize).tolist(), end_byte.tolist(), strict=True):
                if os.preadv(file, (view[at:end],), offset) != end - at:
                    raise self._damaged(f"{IDS} ends at byte {os.fstat(file).st_size}, too soon")
                at = end
        finally:
            os.close(file)
        return ids

    @functools.cached_property
    def skipped(self) -> dict[int, str]:
        """Bad records that were left out: record number -> reason, with file and place."""
        lines = (self.folder / SKIPPED).read_text(encoding="utf-8").splitlines()
        return {entry["record"]: entry["why"] for entry in map(json.loads, lines)}

    @functools.cached_property
    def names(self) -> list[str]:
        """Names of the source's files, relative to its folder, sorted."""
        return self._files["names"]

    @functools.cached_property
    def file_ends(self) -> Int64[np.ndarray, " files"]:
        """Number of records up to the end of each file."""
        return np.asarray(self._files["file_ends"], np.int64)

    def identity_of(self, record: int) -> str:
        """Returns `file:number` of a record, the number counted from 0 within the file."""
        file = int(np.searchsorted(self.file_ends, record, side="right"))
        return f"{self.names[file]}:{record - (int(self.file_ends[file - 1]) if file else 0)}"

    def verify(self) -> list[str]:
        """Reads the whole index and compares hashes, about 1 GB/s per core; returns one line per damage."""
        found = [
            f"{name} has other contents than were written"
            for name, want in self._hashes.items()
            if digest((self.folder / name).read_bytes()) != want
        ]
        if found:
            return found
        shards = [json.loads(line) for line in (self.folder / SHARDS).read_text().splitlines()]
        ends = np.cumsum([(shard["records"], shard["tokens"]) for shard in shards], axis=0).reshape(-1, 2).tolist()
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            for lines in pool.map(self._verify_shard, shards, ends):
                found += lines
        tokens = self._lengths.reshape(-1, BLOCK).sum(axis=1, dtype=np.int64)
        if not np.array_equal(np.append(np.zeros(1, np.int64), np.cumsum(tokens)), self._starts):
            found.append(f"{LENGTHS}: its starts are not the sums of its lengths")
        return found

    def _verify_shard(self, shard: dict[str, Any], end: list[int]) -> list[str]:
        record, token = end[0] - shard["records"], end[1] - shard["tokens"]
        found = []
        if digest(self._lengths[record : end[0]]) != shard["lengths"]:
            found.append(f"{LENGTHS}: records {record} to {end[0] - 1} have other lengths than were written")
        file = self._open_ids()
        try:
            size = self.dtype.itemsize
            content = os.pread(file, shard["tokens"] * size, token * size)
        finally:
            os.close(file)
        if digest(content) != shard["ids"]:
            found.append(f"{IDS}: records {record} to {end[0] - 1} have other ids than were written")
        return found

    def _places(self, records: Int[np.ndarray, " n"]) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Returns the first token and number of tokens of each record; raises UserError where the index is damaged."""
        self._check_range(records, self.num_records, "records")
        block, place = np.divmod(records, BLOCK)
        ends = np.cumsum(self._lengths.reshape(-1, BLOCK)[block], axis=1, dtype=np.int64)
        wrong = np.flatnonzero(self._starts[block] + ends[:, -1] != self._starts[block + 1])
        if len(wrong):
            raise self._damaged(f"{LENGTHS}: lengths and starts disagree at record {int(records[wrong[0]])}")
        length = self._lengths[records].astype(np.int64)
        return self._starts[block] + ends[np.arange(len(records)), place] - length, length

    def _check_range(self, numbers: Int[np.ndarray, " n"], count: int, what: str) -> None:
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= count):
            raise IndexError(f"{self.folder}: {what} {numbers.min()} to {numbers.max()} asked for, of {count}")

    def _open_ids(self) -> int:
        file = os.open(self._ids_path, os.O_RDONLY)
        stat = os.fstat(file)
        if (stat.st_dev, stat.st_ino) != self._ids_file:
            os.close(file)
            raise FileError(f"{self.folder} was made again while it was in use. Start the run again: it resumes.")
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

    def _damaged(self, what: str) -> UserError:
        folder = shlex.quote(str(self.folder))
        return UserError(
            f"{self.folder}: the prepared index is damaged: {what}. "
            f"Make it again: rm -r {folder} && {command(self.folder)}"
        )


def command(folder: Path) -> str:
    """Returns the command that makes the index in `folder`: as recorded in command.txt, else in its general form."""
    try:
        return (folder.parent / COMMAND).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return f"python -m jtrain.data prepare --config NAME --out {shlex.quote(str(folder.parent))}"


def digest(content: bytes | UInt32[np.ndarray, " n"]) -> str:
    """Returns the 128-bit blake2b hash of `content` in hex; 1.3 GB/s."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def seal(folder: Path, body: dict[str, Any]) -> str:
    """Returns the text of `index.json` for a folder that holds all other files of the index."""
    names = (LENGTHS, IDS, *_HASHED_WHOLE)
    body = {
        "format": FORMAT,
        **body,
        "bytes": {name: (folder / name).stat().st_size for name in names},
        "hashes": {name: digest((folder / name).read_bytes()) for name in _HASHED_WHOLE},
    }
    return json.dumps(body | {"digest": digest(json.dumps(body, sort_keys=True).encode())}, indent=1) + "\n"
