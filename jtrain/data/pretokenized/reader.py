"""Reader of prepared indexes: token ids and lengths of one source, by record number; see `index_format`."""

import functools
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Int, Int32, Int64, UInt

from jtrain.data.loss_mask import NO_RUNS, runs_of_spans
from jtrain.data.pretokenized.adopted import AdoptedIds
from jtrain.data.pretokenized.index_files import LocalFiles, open_files, refuse_misfit
from jtrain.data.pretokenized.index_format import (
    BLOCK,
    COMMAND,
    FILES,
    FORMAT,
    IDS,
    INDEX,
    LENGTHS,
    MASKS,
    PLACES,
    SKIPPED,
    digest,
)
from jtrain.data.pretokenized.verification import Verification
from jtrain.data.sources.file_parts import FileParts, part_names
from jtrain.data.sources.formats.masked_text import MaskFields
from jtrain.data.sources.source import field_of, identity_of
from jtrain.errors import FileError, UserError


class PreparedIndex:
    """Prepared index of one source. Opening reads one page whatever its size, so each process opens its own.

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
        # Before anything can fail: messages name `command`, which asks whether the index is adopted.
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
            raise self._damage_error(f"{INDEX} is no JSON ({error})") from error
        # The digest is of the body without it; nothing in the file is trusted before they match.
        if not isinstance(body, dict) or body.pop("digest", None) != digest(
            json.dumps(body, sort_keys=True).encode()
        ):
            raise self._damage_error(f"{INDEX} does not match its own digest")
        with refuse_misfit(self._damage_error):
            # Before any other entry, since their names belong to the format.
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
            # All sizes in one call, which asks a store for them together; only `verify` reads the contents.
            for name, size in zip(self._sizes, files.sizes_bytes(list(self._sizes)), strict=True):
                if size != self._sizes[name]:
                    raise self._damage_error(
                        f"{name} is missing"
                        if size is None
                        else f"{name} has {size} bytes, {self._sizes[name]} were written"
                    )
            table = functools.partial(files.table, LENGTHS, size_bytes=self._sizes[LENGTHS])
            # Three views of one file: lengths by record, the same by block, and the starts behind them.
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
                runs = files.table(
                    PLACES, np.int64, (self._sizes[PLACES] // 8,), offset=0, size_bytes=self._sizes[PLACES]
                )
                # Last, since the file table needs the hashes and the number of records above.
                self._adopted = AdoptedIds(self.location, adopted, self._file_table, runs, self.dtype)

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

    # A process that receives the index opens it itself: maps and descriptors cannot be pickled.
    def __reduce__(self) -> tuple[type["PreparedIndex"], tuple[str, Path | None]]:
        return PreparedIndex, (self.location, self._cache_dir)

    def check(self, *, on_bad_record: Literal["fail", "skip"] = "skip", **made_of: str | int) -> None:
        """Refuses an index of other data, or one that skips bad records although `on_bad_record` is fail.

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
            f"{key}={self.made_of[key]!r}, now {current!r}"
            for key, current in made_of.items()
            # An entry that the index lacks counts as equal.
            if self.made_of.get(key, current) != current
        ]
        if differing:
            raise UserError(
                f"{field_of(self.name)}: the prepared index {self.location} is stale: it was made with "
                f"{'; '.join(differing)}. Make it again: {self.command}"
            )
        if on_bad_record == "fail" and self.num_skipped:
            record, reason = next(iter(self.skipped.items()))
            raise UserError(
                f"{field_of(self.name)}: the prepared index {self.location} leaves out {self.num_skipped} "
                f"bad records, but data.on_bad_record='fail'. The first is record {record}: {reason}"
            )

    def check_mask(self, mask: MaskFields | None) -> None:
        """Raises UserError if the index was made with another loss mask than `mask`, None included."""
        if mask is not None and "adopted" in self.made_of:
            has_labels = "labels" in self.made_of
            raise UserError(
                f"{field_of(self.name)}: the adopted index {self.location} holds ids "
                f"{'whose loss mask is in their labels' if has_labels else 'without a loss mask'}, but "
                f"{mask} "
                f"is set. Prepare the text that {field_of(self.name)}.path names, or remove {mask.setting}."
            )
        index_mask, run_mask = (
            self.made_of.get("mask", "no loss mask"),
            "no loss mask" if mask is None else str(mask),
        )
        if index_mask != run_mask:
            raise UserError(
                f"{field_of(self.name)}: the prepared index {self.location} is stale: it was made with "
                f"{index_mask}, now {run_mask}. Make it again: {self.command}"
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
        first, length = self._locate(records)
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
        """Returns the index in `mapped_ids` of token starts[i] of records[i]; raises as `read_spans`."""
        first, length = self._locate(records)
        invalid = np.flatnonzero((starts < 0) | (ends < starts) | (ends > length))
        if len(invalid):
            i = int(invalid[0])
            span = f"tokens {starts[i]} to {ends[i]} of record {records[i]}"
            raise IndexError(f"{self.location}: {span} asked for, which has {length[i]}")
        return first + starts

    @property
    def has_mask(self) -> bool:
        """True if some token is not learned."""
        # An index without a loss mask has no such file; an empty one holds no runs.
        return bool(self._sizes.get(MASKS))

    @functools.cached_property
    def mapped_ids(self) -> UInt[np.ndarray, " tokens"] | None:
        """Ids of all records in a memory map; None for an index that is remote or adopted, or has a loss
        mask.

        Raises:
          FileError: the index was removed or replaced since it was opened.
        """
        # With a loss mask the rows need the runs too, which a plain map of ids does not give.
        if not isinstance(self._files, LocalFiles) or self._adopted is not None or self.has_mask:
            return None
        size = self._sizes[IDS]
        return self._files.table(IDS, self.dtype, (size // self.dtype.itemsize,), offset=0, size_bytes=size)

    def ignored(
        self, records: Int[np.ndarray, " n"], starts: Int[np.ndarray, " n"], ends: Int[np.ndarray, " n"]
    ) -> Int32[np.ndarray, "runs 3"]:
        """Returns the runs of the ids of `read_spans` that are not learned; none without a loss mask."""
        if not self.has_mask:
            return NO_RUNS
        first, _ = self._locate(records)
        return runs_of_spans(self._masks, first + starts, first + ends)

    @functools.cached_property
    def _masks(self) -> Int64[np.ndarray, "runs 2"]:
        """All runs, in a memory map; those of a remote index are fetched whole."""
        # Two int64 per run, 16 bytes.
        shape = self._sizes[MASKS] // 16, 2
        if isinstance(self._files, LocalFiles):
            return self._files.table(MASKS, np.int64, shape, offset=0, size_bytes=self._sizes[MASKS])
        return np.frombuffer(self._files.content(MASKS), np.int64).reshape(shape)

    def _read_ids(
        self, start: Int64[np.ndarray, " n"], length: Int64[np.ndarray, " n"]
    ) -> UInt[np.ndarray, " tokens"]:
        """Returns the ids of spans of tokens, one after another; starts count from the first token."""
        if self._adopted is not None:
            return self._adopted.read(start, length)
        size = self.dtype.itemsize
        try:
            return self._files.read(IDS, start * size, length * size).view(self.dtype)
        except EOFError as error:
            raise self._damage_error(f"{IDS} {error}") from None

    @functools.cached_property
    def skipped(self) -> dict[int, str]:
        """Bad records that were left out: record number -> reason, with file and place."""
        lines = self._files.content(SKIPPED).decode().splitlines()
        return {entry["record"]: entry["why"] for entry in map(json.loads, lines)}

    @functools.cached_property
    def names(self) -> Sequence[str]:
        """Names of the source's files relative to its folder, sorted; of large ones, of their parts."""
        return self._names_of(self._file_table)

    @property
    def num_files(self) -> int:
        """Number of the source's files."""
        return len(self._file_table["names"])

    @functools.cached_property
    def file_ends(self) -> Int64[np.ndarray, " names"]:
        """Number of records up to the end of each of `names`."""
        return np.asarray(self._file_table["file_ends"], np.int64)

    def identity_of(self, record: int) -> str:
        """Returns `file:number` of a record, the number counted from 0 within the file."""
        return identity_of(self.names, self.file_ends, record)

    def verify(self) -> list[str]:
        """Reads the whole index and compares hashes, about 1 GB/s per core; returns one line per damage."""
        tables = self._lengths, self._block_lengths, self._starts
        reads = self._read_range, self._ids_name
        return Verification(self._files, self._hashes, self.num_blocks, *tables, *reads).run()

    def _read_range(self, first: int, end: int) -> UInt[np.ndarray, " tokens"]:
        """Returns the ids of tokens `first` to `end` - 1 of the source."""
        if self._adopted is not None:
            return self._adopted.read_range(first, end)
        return self._read_ids(np.asarray([first]), np.asarray([end - first]))

    def _ids_name(self, token: int) -> str:
        """Returns the name of the file that holds the id of a token."""
        return IDS if self._adopted is None else self._adopted.name_at(token)

    def _locate(
        self, records: Int[np.ndarray, " n"]
    ) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Returns the first token and number of tokens of each record; raises UserError for damaged ones.

        Lengths 5, 7 and 2 with start 100 give ends 105, 112 and 114, so record 1 begins at 112 - 7 = 105.
        """
        self._check_range(records, self.num_records, "records")
        block, row = np.divmod(records, BLOCK)
        ends = np.cumsum(self._block_lengths[block], axis=1, dtype=np.int64)
        # Two sources for each position, so damage of either shows before wrong ids are read.
        wrong_rows = np.flatnonzero(self._starts[block] + ends[:, -1] != self._starts[block + 1])
        if len(wrong_rows):
            raise self._damage_error(
                f"{LENGTHS}: lengths and starts disagree at record {int(records[wrong_rows[0]])}"
            )
        length = self._lengths[records].astype(np.int64)
        return self._starts[block] + ends[np.arange(len(records)), row] - length, length

    def _check_range(self, numbers: Int[np.ndarray, " n"], count: int, label: str) -> None:
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= count):
            raise IndexError(
                f"{self.location}: {label} {numbers.min()} to {numbers.max()} asked for, of {count}"
            )

    @functools.cached_property
    def _file_table(self) -> dict[str, Any]:
        content = self._files.content(FILES)
        # Names decide which records are held out: checked at each first use, not by `verify` alone.
        if digest(content) != self._hashes[FILES]:
            raise self._damage_error(f"{FILES} has other contents than were written")
        with refuse_misfit(self._damage_error, FILES):
            table: dict[str, Any] = json.loads(content)
            if (
                len(self._names_of(table)) != len(table["file_ends"])
                or max(table["file_ends"], default=0) < self.num_records
            ):
                raise ValueError("too few files for its records")
        return table

    def _names_of(self, table: dict[str, Any]) -> Sequence[str]:
        # Parts take a microsecond per file to make, which a source without stripes need not pay.
        return part_names(FileParts.from_json(table)) if "stripe_bytes" in table else table["names"]

    def _damage_error(self, damage: str) -> UserError:
        if isinstance(self._files, LocalFiles):
            way_out = f"Make it again: rm -r {shlex.quote(self.location)} && {self.command}"
        else:
            way_out = f"Copy it there again, or make it again: {self.command}"
        return UserError(f"{self.location}: the prepared index is damaged: {damage}. {way_out}")


def command(location: str) -> str:
    """Returns the command that makes the index at `location`, from command.txt or in its general form."""
    # One command.txt per folder of indexes: one call prepares all sources.
    out = location.rpartition("/")[0] or "."
    try:
        return open_files(out, None).content(COMMAND).decode().strip()
    except (OSError, UnicodeDecodeError):
        return f"python -m jtrain.data prepare --config NAME --out {shlex.quote(out)}"
