"""Corpus of a source: all its records as one numbered sequence, opened at once or as they are read."""

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from jtrain.data.sources.corpus_files import CHECKED_FILES, CorpusFiles
from jtrain.data.sources.data_files import files_of
from jtrain.data.sources.file_parts import FileParts, evenly_spread, part_names, stripe_bytes
from jtrain.data.sources.formats import BadRecord, open_file, sniff
from jtrain.data.sources.formats.long_lines import TextPart
from jtrain.data.sources.formats.masked_text import MaskFields, TextFields
from jtrain.data.sources.formats.record import SKIP
from jtrain.data.sources.formats.row_group_cache import shared_cache
from jtrain.data.sources.formats.suffix import format_of
from jtrain.data.sources.formats.text import JsonLines
from jtrain.data.sources.opening import Opening
from jtrain.data.sources.read_records import read_or_mark_bad
from jtrain.data.sources.retry import NeverSkipped, retried
from jtrain.data.sources.source import Source, field_of, identity_of
from jtrain.data.sources.storage import STDLIB
from jtrain.errors import UserError

DECODED_CACHE_BYTES = 1 << 30
"""Decoded Parquet text that a process keeps in memory, over all its sources."""

GAP = 1 << 32
"""Numbers of records that a file has where its number of records is not known yet."""

_MOST_EAGER_FILES = 4096
"""Most files of a source that are opened before the first step."""

_OPENED_WHOLE = {"parquet", "arrayrecord", "grain"}
"""Formats that are opened before the first step whatever their size: opening reads a few KB of each file."""

_FIRST_RECORDS = 8
"""First records of a file of which one must be good in some file of the source."""

_FIRST_BYTES = 1 << 16
"""Bytes of these that are read of a long one."""

_RUN_RECORDS = 512
"""Records that `Corpus.read` reads at a time: enough to look up a row group once, few enough to hold as
text."""


class Corpus:
    """All records of one source with random access, numbered through its files in the order of their names.

    Between reads a file takes some hundred bytes and no descriptor; a Parquet file takes 16 more bytes per
    row group.

    A corpus above `eager_bytes` is not opened: its files are when they are read, and since their numbers of
    records are not known, records are numbered with gaps; each file has `GAP` numbers. Its large files count
    as several, one for each stripe (`FileParts`).

    With `num_files` only so many files are taken, the first by name: files may be added while a run reads the
    others.

    Attributes:
      source: the source as declared.
      files: the files, opened or not.
      name: name of the source.
      names: names of the files relative to the folder searched, which are their identities.
      file_ends: number of records up to the end of each file; with gaps, `GAP` times the number of files.
      is_open: False for a corpus whose files are opened when they are read.
      size_bytes: total size of the files as stored.
      left_out: line about the files of a folder that are not data; empty if there are none.

    Raises:
      UserError: the files are not in the declared format, no first record can be read, or all files are
        empty.
      FileError: nothing is there, or it cannot be read.
    """

    def __init__(
        self,
        source: Source,
        *,
        name: str,
        cache_dir: Path,
        decoded_cache_bytes: int = DECODED_CACHE_BYTES,
        eager_bytes: int | None = None,
        num_files: int | None = None,
        opening: Opening | None = None,
        mask: MaskFields | None = None,
    ) -> None:
        source.check(name)
        self.source = source
        self.mask = mask or source.mask
        self.name, self.left_out = name, ""
        field = field_of(name)
        if source.format == "grain":
            from jtrain.data.sources.formats.graindataset import GrainDataset

            self.is_open = True
            self.files = CorpusFiles.of_dataset(source.path, GrainDataset(source.path, field=field))
            self.names = part_names(self.files.stored)
        else:
            files, self.left_out = files_of(source, field=field)
            total = sum(max(file.size_bytes, 0) for file in files)
            # Checks the compression of every name as well, before any file is opened.
            if source.format == "auto" and source.path != STDLIB:
                first_field = TextFields(source.text_field, field, self.mask).read[0].partition(".")[0]
                files = sniff.with_kinds(files, text_field=first_field, field=field)
            kinds = {file.kind or format_of(file.name, field=f"{field}.path")[0] for file in files}
            kinds = kinds if source.format == "auto" else {source.format}
            # Opening a JSON lines file reads all of it for line ends, so a large source skips it.
            is_large = eager_bytes is not None and (total > eager_bytes or len(files) > _MOST_EAGER_FILES)
            self.is_open = not is_large or bool(kinds & _OPENED_WHOLE)
            stripes = [0 if self.is_open else stripe_bytes(file, source) for file in files]
            # Only now: `num_files` counts parts where the corpus has parts.
            parts = FileParts(files, stripes, num_parts=num_files)
            self.names = part_names(parts)
            open_records = functools.partial(
                open_file,
                format=source.format,
                fields=TextFields(source.text_field, field, self.mask),
                text_piece_bytes=source.text_piece_bytes,
                cache_dir=cache_dir,
                groups=shared_cache(decoded_cache_bytes),
            )
            self.files = CorpusFiles(
                parts, open_records, is_lazy=not self.is_open, opening=opening or Opening()
            )
        # The files of an open corpus are open by now, so their records can be counted.
        self.size_bytes = int(self.files.sizes.sum())
        counts = [len(records) for records in self.files] if self.is_open else [GAP] * len(self.files)
        self.file_ends: Int[np.ndarray, " files"] = np.cumsum(counts, dtype=np.int64)
        # With gaps the number of records is always positive; only the bytes tell an empty source.
        if not len(self) or not (self.is_open or self.size_bytes):
            raise UserError(
                f"{field}.path={source.path!r}: {len(self.names)} files, all of them empty (first: "
                f"{self.names[0]}). Set {field}.path to files with text in them."
            )
        if source.format != "grain":
            self._check_first_records(field)

    def open(self, numbers: Sequence[int]) -> None:
        """Opens files by number, several at a time; files that are open already cost nothing."""
        self.files.open(numbers)

    def forget(self, numbers: Sequence[int]) -> None:
        """Drops what is known of files, which are opened again when they are read."""
        self.files.forget(numbers)

    @property
    def num_files(self) -> int:
        """Number of files; `names` has the parts of large ones one by one."""
        stored = self.files.stored
        return int(stored.file_of(np.asarray([len(stored) - 1]))[0]) + 1

    def count(self, number: int) -> int:
        """Returns the number of records in a file."""
        return len(self.files[number])

    def records_before(self, file: int) -> int:
        """Returns the number of records in the files before one; with gaps, of their numbers."""
        return int(self.file_ends[file - 1]) if file else 0

    def file_sizes(self) -> Int[np.ndarray, " files"]:
        """Returns the bytes of each file as stored."""
        return self.files.sizes

    def _check_first_records(self, field: str) -> None:
        """Refuses a source of which no file has a good record among its first: its format or text field is
        wrong.

        One bad record among good ones is left to `data.on_bad_record`. The columns of Parquet and Arrow were
        checked when the files were opened.
        """
        numbers = range(len(self.files)) if self.is_open else sorted(self.files.checked)
        files = {n: self.files[n] for n in numbers if self.files.sizes[n]}
        checkable = [n for n, file in files.items() if len(file) and not file.checks_columns]
        # A file with checked columns proves the declared format right, whatever the other files hold.
        if not checkable or len(checkable) < sum(len(file) > 0 for file in files.values()):
            return
        bad_records: list[BadRecord] = []
        tried_files = evenly_spread(len(checkable), CHECKED_FILES)
        for number in [checkable[n] for n in tried_files]:
            file = files[number]
            for record in range(min(len(file), _FIRST_RECORDS)):
                first = self.records_before(number) + record
                [text] = self.beginnings(np.asarray([first], np.int64), _FIRST_BYTES)
                # Closed after each record: an ArrayRecord reader would stay open, with a descriptor.
                file.close()
                if not isinstance(text, BadRecord):
                    return
                bad_records.append(text)
        raise UserError(
            f"{field}.path={self.source.path!r}: none of the first {len(bad_records):,} records tried in "
            f"{len(tried_files):,} of its {len(self.files):,} files can be read, so the format or "
            f"{self.source.fields_at(field)} is wrong. The first: "
            f"{str(bad_records[0]).replace(f', {SKIP}', '.')}"
        )

    @functools.cached_property
    def group_starts(self) -> Int[np.ndarray, " groups_and_end"]:
        """First record of each Parquet row group or other file, then the number of records."""
        # Each file's own starts count from 0; its last one is the start of the next file.
        firsts = (self.file_ends - self._counts).tolist()
        starts = [r.group_starts[:-1] + first for r, first in zip(self.files, firsts, strict=True)]
        return np.append(np.concatenate(starts), len(self))

    @property
    def first_groups(self) -> Int[np.ndarray, " files_and_end"]:
        """First group of each file, then the number of groups."""
        return np.cumsum([0, *(len(records.group_bytes) for records in self.files)])

    @functools.cached_property
    def group_bytes(self) -> Int[np.ndarray, " groups"]:
        """Bytes decoded into memory to read any record of each group; 0 if records are read one by one."""
        return np.concatenate([records.group_bytes for records in self.files])

    @property
    def sizes_need_reading(self) -> bool:
        """True if the sizes of some records are only known by reading them; for an open corpus."""
        return self.first_of_unknown_sizes is not None

    @property
    def first_of_unknown_sizes(self) -> int | None:
        """First file with such records; None if there is none."""
        return next((n for n, records in enumerate(self.files) if records.sizes_need_reading), None)

    def stored_names(self, first: int, end: int) -> list[str]:
        """Returns the names of the files to which files `first` to `end` - 1, or these parts, belong."""
        stored = self.files.stored
        return [stored.files[n].name for n in sorted(set(stored.file_of(np.arange(first, end)).tolist()))]

    def file_bounds(self) -> list[tuple[int, int]]:
        """Returns the first record of each file, and the first one of the next file."""
        ends = self.file_ends.tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def sizes(self, start: int, end: int) -> Int[np.ndarray, " n"]:
        """Returns the UTF-8 bytes, or a few more, of the texts of records `start` to `end` - 1, all in one
        file.

        Records that cannot be read have size 0; reading them then says why.

        Raises:
          NeverSkipped: as in `read`.
        """
        if start == end:
            return np.empty(0, np.int64)
        file, number = self._locate_one(start)
        records = self.files[file]
        try:
            return retried(self.files.label(file), lambda: records.sizes(number, number + end - start))
        except NeverSkipped:
            raise
        except OSError:
            # A group that cannot be decoded takes all its rows along, so asking row by row is in vain.
            if end - start == 1 or (records.group_bytes > 0).any():
                return np.zeros(end - start, np.int64)
        return np.concatenate([self.sizes(record, record + 1) for record in range(start, end)])

    def hold(self, record: int) -> object:
        """Returns what is decoded to read a record: while it lives, its group is not decoded again; or
        None.
        """
        file, number = self._locate_one(record)
        try:
            return self.files[file].hold(number)
        except OSError:
            return None  # reading its records says why

    def stored_bytes(self) -> Int[np.ndarray, " groups"]:
        """Returns the bytes of each group: decoded ones where groups are decoded, otherwise those of its
        file.
        """
        parts = []
        for records, size in zip(self.files, self.files.sizes.tolist(), strict=True):
            parts.append(np.where(records.group_bytes > 0, records.group_bytes, size))
        return np.concatenate(parts)

    @property
    def _counts(self) -> Int[np.ndarray, " files"]:
        return np.diff(self.file_ends, prepend=0)

    def __len__(self) -> int:
        return int(self.file_ends[-1])

    def __getitem__(self, record: int) -> str:
        """Returns the text of a record; raises BadRecord, or FileError if the file is gone or cut short."""
        file, number = self._locate_one(record)
        return retried(self.files.label(file), lambda: self.files[file][number])

    def read(self, records: Int[np.ndarray, " records"]) -> Iterator[str | BadRecord]:
        """Yields the texts in the given order, with a BadRecord in place of each bad record.

        Records of the same file are read together. Each record of a file or row group that cannot be read is
        bad, with the file's error as its reason: which records are bad does not depend on the other records
        requested.

        Raises:
          NeverSkipped: a file's copy or index is gone, or an error that may pass did not pass.
        """
        # In runs, so that the texts of a run are yielded before those of the next are read.
        for start in range(0, len(records), _RUN_RECORDS):
            run = records[start : start + _RUN_RECORDS]
            # Skips the grouping by file for the most frequent case.
            if len(self.files) == 1:
                yield from read_or_mark_bad(self.files[0], run.tolist(), self.files.label(0))
                continue
            # Reads file by file, and puts each text back at its position in the run.
            files, numbers = self.locate(run)
            texts: list[str | BadRecord] = [""] * len(run)
            for file in sorted(set(files.tolist())):
                positions = np.flatnonzero(files == file)
                read = read_or_mark_bad(self.files[file], numbers[positions].tolist(), self.files.label(file))
                for position, text in zip(positions.tolist(), read, strict=True):
                    texts[position] = text
            yield from texts

    def parts(
        self, records: Int[np.ndarray, " n"], spans: list[tuple[int, int]], *, min_bytes: int = 0
    ) -> list[TextPart | None]:
        """Returns the bytes of a span of each text, or more; None if the text is read as a whole, like those
        below `min_bytes`.
        """
        parts_of_texts: list[TextPart | None] = [None] * len(records)
        files, numbers = self.locate(records)
        for file in sorted(set(files.tolist())):
            positions = np.flatnonzero(files == file).tolist()
            with contextlib.suppress(OSError):  # `read` tries again, and has the message
                if isinstance(lines := self.files[file], JsonLines):
                    spans_of_file = [spans[position] for position in positions]
                    parts = lines.parts(numbers[positions].tolist(), spans_of_file, min_bytes=min_bytes)
                    for position, part in zip(positions, parts, strict=True):
                        parts_of_texts[position] = part
        return parts_of_texts

    def beginnings(self, records: Int[np.ndarray, " n"], num_bytes: int) -> Iterator[str | BadRecord]:
        """Yields each text, or at least `num_bytes` of a long one; see `read`."""
        for record in records.tolist():
            numbers = np.asarray([record], np.int64)
            [part] = self.parts(numbers, [(0, num_bytes)], min_bytes=2 * num_bytes)
            yield next(self.read(numbers)) if part is None else part.content.decode("utf-8")

    @functools.cached_property
    def identities(self) -> tuple[Sequence[str], Int[np.ndarray, " files"]]:
        """Names that identify the records, with the number of records up to the end of each.

        They are the files' names, but each stripe of a large file has one of its own, so that a record has
        the same identity whether the file was read as a whole before or not.
        """
        parts, ends = self.identity_parts
        return (self.names if parts is self.files.stored else part_names(parts)), ends

    @functools.cached_property
    def identity_parts(self) -> tuple[FileParts, Int[np.ndarray, " parts"]]:
        """Parts of files that the names of `identities` are of, with the records up to the end of each."""
        if not self.is_open or self.source.format == "grain":
            return self.files.stored, self.file_ends
        # Every part is a file here; `num_files` may leave out the last ones.
        files = self.files.stored.files[: len(self.files)]
        parts = FileParts(files, [stripe_bytes(file, self.source) for file in files])
        return parts, parts.record_ends(self.files)

    def identity_of(self, record: int) -> str:
        """Returns `file:number` of a record, the number counted from 0 within the file or its part."""
        return identity_of(*self.identities, record)

    def locate(self, records: Int[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        """Returns the file of each record, and its number there."""
        # side="right" steps over empty files, whose end equals that of the file before.
        files = np.searchsorted(self.file_ends, records, side="right")
        return files, records - np.where(files > 0, self.file_ends[files - 1], 0)

    def _locate_one(self, record: int) -> tuple[int, int]:
        file = int(np.searchsorted(self.file_ends, record, side="right"))
        return file, int(record - (self.file_ends[file - 1] if file else 0))

    def fingerprint(self, files: Sequence[int] | None = None) -> str:
        """Returns a hash of the files' names, sizes and numbers of records; folder and time stamps do not
        count.

        Args:
          files: the numbers of the files that count; None: all.
        """
        # Not the contents, which may be terabytes: names, sizes and counts tell nearly all changes.
        counts, stored = self._counts, self.files.stored
        numbers = np.arange(len(self.files)) if files is None else np.asarray(files, np.int64)
        # One line for all stripes of a file, which have the same count.
        file_numbers = sorted(set(stored.file_of(numbers).tolist()))
        content = "".join(
            f"{file.name}\0{max(file.size_bytes, 0)}\0{counts[stored.starts[n]]}\n"
            for n, file in ((n, stored.files[n]) for n in file_numbers)
        )
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def close(self) -> None:
        """Frees decoded row groups and closes readers; a later read opens them again."""
        self.files.close()
