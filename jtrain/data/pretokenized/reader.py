"""Reader of prepared indexes (`python -m jtrain.data prepare`): token ids and lengths of one source, by
record number.

    OUT/command.txt          the command that wrote the indexes
    OUT/NAME/index.json      what the index was made of, counts, and the size of each file below; written last
    OUT/NAME/lengths.bin     uint32 tokens per record, zero-padded to a multiple of 16 records; then uint64 starts: the
                             first token of each block of 16 records, and the number of tokens at the end
    OUT/NAME/ids.bin         token ids of all records, one after another, uint8, uint16 or uint32
    OUT/NAME/units.jsonl     a line per shard (a few MB): its counts and the hashes of its ids and lengths
    OUT/NAME/skipped.jsonl   bad records that were left out, and why
    OUT/NAME/masks.bin       of a source with a loss mask: int64 start and end of each run of tokens not learned,
                             counted from the first token of the source
    OUT/NAME/files.json      names and record counts of the source's files, so that the index is complete without them

The bytes do not depend on the number of worker processes, nor on how often the build was killed.
"""

import concurrent.futures
import functools
import hashlib
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Int, Int32, Int64, UInt

from jtrain.data.loss_mask import NO_RUNS, runs_of_spans
from jtrain.data.pretokenized.adopted import AdoptedIds
from jtrain.data.pretokenized.index_files import LocalFiles, refuse_misfit
from jtrain.data.sources.formats.masked_text import MaskFields
from jtrain.data.sources.source import field_of, identity_of
from jtrain.errors import FileError, UserError

if TYPE_CHECKING:
    from jtrain.data.pretokenized.remote_files import RemoteFiles

FORMAT = 1
INDEX, LENGTHS, IDS, SHARDS, SKIPPED = "index.json", "lengths.bin", "ids.bin", "units.jsonl", "skipped.jsonl"
FILES, PLACES, MASKS = "files.json", "places.bin", "masks.bin"
COMMAND = "command.txt"
BLOCK = 16
"""Records per stored start: their lengths fill one cache line. 4.5 bytes per record; a start for each would
take 12."""

_HASHED_WHOLE = (SHARDS, SKIPPED, FILES, MASKS)
_THREADS = 4
_BLOCKS_AT_ONCE = 1 << 16


class PreparedIndex:
    """Prepared index of one source. Opening it reads one page whatever its size, so every process can open
    its own.

    Local lengths are memory-mapped, so processes share them, and remote ones are copied page by page into a
    file that the processes of a host share. Loaders read ids instead: mapped pages would count as their
    memory until the kernel reclaims them. An open local index holds one descriptor, that of the map, and
    another one if `mapped_ids` is used.

    Args:
      location: OUT/NAME, a folder or the URL of one.
      cache_dir: folder for the lengths of a remote index: at most 4.5 bytes per record. None:
        ~/.cache/jtrain.

    Attributes:
      location: the folder or URL.
      name: its last part, the name of the source.
      made_of: everything that decides which ids a record has: `corpus` (a fingerprint), `tokenizer` (its
        identity), and fields of the source; for an adopted index `adopted`, the layout of its files, instead
        of the latter.
      num_records, num_tokens: totals of the index.
      num_empty: records without text, 0 tokens each.
      num_skipped: bad records that were left out, 0 tokens each; see `skipped`.
      dtype: dtype of the ids.

    Raises:
      FileError: there is no index at `location`, or the files that it adopted moved or changed.
      UserError: the index is damaged, or of another format version. Hashes are compared by `verify` only.
    """

    def __init__(self, location: Path | str, cache_dir: Path | None = None) -> None:
        self._cache_dir = cache_dir
        self._adopted: AdoptedIds | None = None
        self._files = files = open_files(str(location), cache_dir)
        self.location = files.location
        self.name = self.location.rpartition("/")[2]
        try:
            content = files.content(INDEX)
        except FileNotFoundError:
            raise FileError(f"{self.location}: no prepared index there. Make it: {self.command}") from None
        try:
            body: dict[str, Any] = json.loads(content)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise self._damaged(f"{INDEX} is no JSON ({error})") from error
        if not isinstance(body, dict) or body.pop("digest", None) != digest(
            json.dumps(body, sort_keys=True).encode()
        ):
            raise self._damaged(f"{INDEX} does not match its own digest")
        with refuse_misfit(self._damaged):
            if body["format"] != FORMAT:
                raise UserError(
                    f"{self.location}: index format {body['format']}; this jtrain reads format {FORMAT}. "
                    f"Make it again: {self.command}"
                )
            self.made_of: dict[str, str | int] = body["made_of"]
            self.num_records: int = body["records"]
            self.num_tokens: int = body["tokens"]
            self.num_empty: int = body["empty"]
            self.num_skipped: int = body["skipped"]
            self.dtype = np.dtype(body["dtype"])
            self._hashes: dict[str, str] = body["hashes"]
            self._sizes: dict[str, int] = body["bytes"]
            for name, size in zip(self._sizes, files.sizes_bytes(list(self._sizes)), strict=True):
                if size != self._sizes[name]:
                    raise self._damaged(
                        f"{name} is missing"
                        if size is None
                        else f"{name} has {size} bytes, {self._sizes[name]} were written"
                    )
            table = functools.partial(files.table, LENGTHS, size_bytes=self._sizes[LENGTHS])
            self._lengths = table(np.uint32, (self.num_blocks * BLOCK,), offset=0)
            self._block_lengths = table(np.uint32, (self.num_blocks, BLOCK), offset=0)
            self._starts = table(np.int64, (self.num_blocks + 1,), offset=self.num_blocks * BLOCK * 4)
            if (adopted := body.get("adopted")) is not None:
                if not isinstance(files, LocalFiles):
                    raise UserError(
                        f"{self.location}: an adopted index refers to files of the machine where it was "
                        "made. Copy it to a local folder of a machine that has them, or make an index with "
                        "ids of its own by `prepare`."
                    )
                places = files.table(
                    PLACES, np.int64, (self._sizes[PLACES] // 8,), offset=0, size_bytes=self._sizes[PLACES]
                )
                self._adopted = AdoptedIds(self.location, adopted, self._file_table, places, self.dtype)

    def __len__(self) -> int:
        return self.num_records

    @property
    def command(self) -> str:
        """Command that makes the index."""
        return command(self.location) if self._adopted is None else self._adopted.command

    @property
    def num_blocks(self) -> int:
        """Number of blocks of 16 records, the last one not always full."""
        return -(-self.num_records // BLOCK)

    def __reduce__(self) -> tuple[type["PreparedIndex"], tuple[str, Path | None]]:
        return PreparedIndex, (self.location, self._cache_dir)

    def check(self, *, on_bad_record: Literal["fail", "skip"] = "skip", **made_of: str | int) -> None:
        """Refuses an index that was made of other data, or that skips bad records although `on_bad_record` is
        fail.

        Args:
          on_bad_record: `data.on_bad_record` of the run.
          made_of: expected values of entries of the attribute `made_of`. Only entries that are in both are
            compared: without the raw files there is no `corpus` to compare, and an adopted index has no
            `text_field`.

        Raises:
          UserError: the index does not fit; the message names the source, what differs, and the command to
            run.
        """
        differing = [
            f"{key}={self.made_of[key]!r}, now {here!r}"
            for key, here in made_of.items()
            if self.made_of.get(key, here) != here
        ]
        if differing:
            raise UserError(
                f"{field_of(self.name)}: the prepared index {self.location} is stale: it was made with "
                f"{'; '.join(differing)}. Make it again: {self.command}"
            )
        if on_bad_record == "fail" and self.num_skipped:
            record, why = next(iter(self.skipped.items()))
            raise UserError(
                f"{field_of(self.name)}: the prepared index {self.location} leaves out {self.num_skipped} "
                f"bad records, but data.on_bad_record='fail'. The first is record {record}: {why}"
            )

    def check_mask(self, mask: MaskFields | None) -> None:
        """Raises UserError if the index was made with another loss mask, or one was made and none is
        wanted.
        """
        if mask is not None and self._adopted is not None:
            raise UserError(
                f"{field_of(self.name)}: the adopted index {self.location} holds ids without a loss mask, "
                f"but {mask} is set. Prepare the text that {field_of(self.name)}.path names, or remove "
                f"{mask.setting}."
            )
        there, here = self.made_of.get("mask", "no loss mask"), "no loss mask" if mask is None else str(mask)
        if there != here:
            raise UserError(
                f"{field_of(self.name)}: the prepared index {self.location} is stale: it was made with "
                f"{there}, now {here}. Make it again: {self.command}"
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

    def read(
        self, records: Int[np.ndarray, " n"]
    ) -> tuple[Int32[np.ndarray, " n"], UInt[np.ndarray, " tokens"]]:
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
        return self._read_ids(self.places(records, starts, ends), np.asarray(ends - starts, np.int64))

    def places(
        self, records: Int[np.ndarray, " n"], starts: Int[np.ndarray, " n"], ends: Int[np.ndarray, " n"]
    ) -> Int64[np.ndarray, " n"]:
        """Returns the place of token starts[i] of record records[i] in `mapped_ids`; raises like
        `read_spans`.
        """
        first, length = self._places(records)
        wrong = np.flatnonzero((starts < 0) | (ends < starts) | (ends > length))
        if len(wrong):
            i = int(wrong[0])
            span = f"tokens {starts[i]} to {ends[i]} of record {records[i]}"
            raise IndexError(f"{self.location}: {span} asked for, which has {length[i]}")
        return first + starts

    @functools.cached_property
    def mapped_ids(self) -> UInt[np.ndarray, " tokens"] | None:
        """Ids of all records in a memory map; None for an index that is remote or adopted, or has a loss
        mask.

        Raises:
          FileError: the index was removed or replaced since it was opened.
        """
        if not isinstance(self._files, LocalFiles) or self._adopted is not None or self._sizes.get(MASKS):
            return None
        size = self._sizes[IDS]
        return self._files.table(IDS, self.dtype, (size // self.dtype.itemsize,), offset=0, size_bytes=size)

    def ignored(
        self, records: Int[np.ndarray, " n"], starts: Int[np.ndarray, " n"], ends: Int[np.ndarray, " n"]
    ) -> Int32[np.ndarray, "runs 2"]:
        """Returns the runs among the ids that `read_spans` returns which are not learned; none without a loss
        mask.
        """
        if not self._sizes.get(MASKS):
            return NO_RUNS
        first, _ = self._places(records)
        return runs_of_spans(self._masks, first + starts, first + ends)

    @functools.cached_property
    def _masks(self) -> Int64[np.ndarray, "runs 2"]:
        """All runs, in a memory map; those of a remote index are fetched whole."""
        shape = self._sizes[MASKS] // 16, 2
        if isinstance(self._files, LocalFiles):
            return self._files.table(MASKS, np.int64, shape, offset=0, size_bytes=self._sizes[MASKS])
        return np.frombuffer(self._files.content(MASKS), np.int64).reshape(shape)

    def _read_ids(
        self, start: Int64[np.ndarray, " n"], length: Int64[np.ndarray, " n"]
    ) -> UInt[np.ndarray, " tokens"]:
        """Returns the ids of spans of tokens, counted from the first token of the source, one span after
        another.
        """
        if self._adopted is not None:
            return self._adopted.read(start, length)
        size = self.dtype.itemsize
        try:
            return self._files.read(IDS, start * size, length * size).view(self.dtype)
        except EOFError as error:
            raise self._damaged(f"{IDS} {error}") from None

    @functools.cached_property
    def skipped(self) -> dict[int, str]:
        """Bad records that were left out: record number -> reason, with file and place."""
        lines = self._files.content(SKIPPED).decode().splitlines()
        return {entry["record"]: entry["why"] for entry in map(json.loads, lines)}

    @functools.cached_property
    def names(self) -> list[str]:
        """Names of the source's files, relative to its folder, sorted."""
        return self._file_table["names"]

    @functools.cached_property
    def file_ends(self) -> Int64[np.ndarray, " files"]:
        """Number of records up to the end of each file."""
        return np.asarray(self._file_table["file_ends"], np.int64)

    def identity_of(self, record: int) -> str:
        """Returns `file:number` of a record, the number counted from 0 within the file."""
        return identity_of(self.names, self.file_ends, record)

    def verify(self) -> list[str]:
        """Reads the whole index and compares hashes, about 1 GB/s per core; returns one line per damage."""
        found = [
            f"{name} has other contents than were written"
            for name, want in self._hashes.items()
            if digest(self._files.content(name)) != want
        ]
        if found:
            return found
        shards = [json.loads(line) for line in self._files.content(SHARDS).splitlines()]
        ends = (
            np.cumsum([(shard["records"], shard["tokens"]) for shard in shards], axis=0)
            .reshape(-1, 2)
            .tolist()
        )
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            for lines in pool.map(self._verify_shard, shards, ends):
                found += lines
        for first in range(0, self.num_blocks, _BLOCKS_AT_ONCE):
            blocks = np.arange(first, min(first + _BLOCKS_AT_ONCE, self.num_blocks))
            starts = self._starts[np.append(blocks, blocks[-1] + 1)]
            if not np.array_equal(self._block_lengths[blocks].sum(axis=1, dtype=np.int64), np.diff(starts)):
                return [*found, f"{LENGTHS}: its starts are not the sums of its lengths"]
        return found

    def _verify_shard(self, shard: dict[str, Any], end: list[int]) -> list[str]:
        record, token = end[0] - shard["records"], end[1] - shard["tokens"]
        found = []
        records = np.arange(record, end[0], dtype=np.int64)
        if digest(self._lengths[records]) != shard["lengths"]:
            found.append(f"{LENGTHS}: records {record} to {end[0] - 1} have other lengths than were written")
        if self._adopted is not None:
            ids = self._adopted.read_range(token, end[1])
        else:
            ids = self._read_ids(np.asarray([token]), np.asarray([shard["tokens"]]))
        if digest(ids) != shard["ids"]:
            where = IDS if self._adopted is None else self._adopted.name_at(token)
            found.append(f"{where}: tokens {token} to {end[1] - 1} have other ids than were written")
        return found

    def _places(
        self, records: Int[np.ndarray, " n"]
    ) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Returns the first token and number of tokens of each record; raises UserError where the index is
        damaged.
        """
        self._check_range(records, self.num_records, "records")
        block, place = np.divmod(records, BLOCK)
        ends = np.cumsum(self._block_lengths[block], axis=1, dtype=np.int64)
        wrong = np.flatnonzero(self._starts[block] + ends[:, -1] != self._starts[block + 1])
        if len(wrong):
            raise self._damaged(f"{LENGTHS}: lengths and starts disagree at record {int(records[wrong[0]])}")
        length = self._lengths[records].astype(np.int64)
        return self._starts[block] + ends[np.arange(len(records)), place] - length, length

    def _check_range(self, numbers: Int[np.ndarray, " n"], count: int, what: str) -> None:
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= count):
            raise IndexError(
                f"{self.location}: {what} {numbers.min()} to {numbers.max()} asked for, of {count}"
            )

    @functools.cached_property
    def _file_table(self) -> dict[str, Any]:
        content = self._files.content(FILES)
        if digest(content) != self._hashes[FILES]:
            raise self._damaged(f"{FILES} has other contents than were written")
        with refuse_misfit(self._damaged, FILES):
            table: dict[str, Any] = json.loads(content)
            if (
                len(table["names"]) != len(table["file_ends"])
                or max(table["file_ends"], default=0) < self.num_records
            ):
                raise ValueError("too few files for its records")
        return table

    def _damaged(self, what: str) -> UserError:
        if isinstance(self._files, LocalFiles):
            way_out = f"Make it again: rm -r {shlex.quote(self.location)} && {self.command}"
        else:
            way_out = f"Copy it there again, or make it again: {self.command}"
        return UserError(f"{self.location}: the prepared index is damaged: {what}. {way_out}")


def open_files(location: str, cache_dir: Path | None) -> "LocalFiles | RemoteFiles":
    """Returns the files of a folder, or of a URL; file:// is a folder."""
    location = location.removeprefix("file://")
    if "://" not in location:
        return LocalFiles(Path(location))
    from jtrain.data.pretokenized.remote_files import (
        RemoteFiles,
    )  # lazy: imports fsspec, which local files do not need

    return RemoteFiles(location, cache_dir)


def command(location: str) -> str:
    """Returns the command that makes the index at `location`: as in command.txt beside it, else in its
    general form.
    """
    out = location.rpartition("/")[0] or "."
    try:
        return open_files(out, None).content(COMMAND).decode().strip()
    except (OSError, UnicodeDecodeError):
        return f"python -m jtrain.data prepare --config NAME --out {shlex.quote(out)}"


def digest(content: bytes | UInt[np.ndarray, " n"]) -> str:
    """Returns the 128-bit blake2b hash of `content` in hex; 1.3 GB/s."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def seal(folder: Path, body: dict[str, Any]) -> str:
    """Returns the text of `index.json` for a folder that holds all other files of the index."""
    hashed = [name for name in _HASHED_WHOLE if (folder / name).exists()]
    names = [name for name in (LENGTHS, IDS, PLACES) if (folder / name).exists()] + hashed
    body = {
        "format": FORMAT,
        **body,
        "bytes": {name: (folder / name).stat().st_size for name in names},
        "hashes": {name: digest((folder / name).read_bytes()) for name in hashed},
    }
    return sign(body)


def sign(body: dict[str, Any]) -> str:
    """Returns the text of `index.json`: its body and the digest of it."""
    return json.dumps(body | {"digest": digest(json.dumps(body, sort_keys=True).encode())}, indent=1) + "\n"
