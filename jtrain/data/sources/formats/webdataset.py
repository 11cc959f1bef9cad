"""WebDataset tar files: consecutive members with one name and different suffixes form a sample."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int

from jtrain.data.sources.cache import NumberTable
from jtrain.data.sources.formats.masked_text import TextFields
from jtrain.data.sources.formats.record import SKIP, BadRecord, Records, text_of_json
from jtrain.data.sources.storage import StoredFile
from jtrain.errors import UserError

_BLOCK = 512

_MOST_NAME_BYTES = 1 << 20
"""Longest header that holds the next member's name: it is read into memory, and Linux has names of 4,096
bytes."""

_MOST_LENGTH_DIGITS = 20
"""Bytes of an extended header's record that are searched for the end of its length."""

_MOST_NAMED = 20
"""Suffixes that a message lists."""


class TarFile(Records):
    """WebDataset file with one document per sample: the member with the suffix `fields.text`, such as `txt`.

    Opening reads all headers; for files above 1 MiB the positions found are kept in the cache folder.

    Raises:
      UserError: the file is not a tar file, is cut short, or has no member with that suffix.
    """

    __slots__ = ("_fields", "_file", "_key", "_spans", "_suffix")

    def __init__(self, file: StoredFile, fields: TextFields, *, cache_dir: Path) -> None:
        self._file = file
        self._fields = fields
        # `json.text` is the field `text` of the member .json; other dots belong to the suffix.
        self._suffix, self._key = (
            ("json", fields.text[5:]) if fields.text.startswith("json.") else (fields.text, "")
        )
        kind = f"{self._suffix.replace('/', '_')}.samples"
        self._spans = NumberTable(file, kind, self._index, cache_dir)

    def __len__(self) -> int:
        return len(self._spans)

    sizes_need_reading = False

    def sizes(self, first: int, end: int) -> Int[np.ndarray, " n"]:
        """Returns the size of each sample's text member."""
        return self._spans.span(first, end)[:, 1]

    def read(self, records: list[int]) -> list[str | BadRecord]:
        texts: list[str | BadRecord] = []
        with self._file.open() as file:
            for record, (start, size) in zip(records, self._spans.rows(records), strict=True):
                # The member's header, for its name, lies in the block before its bytes.
                file.seek(abs(start) - _BLOCK)
                name = _printable(_name(file.read(_BLOCK)))
                if start < 0:
                    texts.append(
                        self._bad_record(record, f"{name} and what follows hold no member .{self._suffix}")
                    )
                    continue
                content = file.read(size)
                if self._suffix == "json":
                    texts.append(self._text_in_json(record, name, content))
                    continue
                try:
                    texts.append(content.decode("utf-8"))
                except UnicodeDecodeError as error:
                    texts.append(
                        self._bad_record(
                            record, f"{name} is not UTF-8 at byte {error.start} ({error.reason})"
                        )
                    )
        return texts

    def _text_in_json(self, record: int, name: str, content: bytes) -> str | BadRecord:
        if not self._key:
            return self._bad_record(
                record,
                f"{name} is JSON, whose source is no text. Set {self._fields.config_path}.text_field to "
                "'json.' and the field of its text, such as 'json.text'",
            )
        fields = dataclasses.replace(self._fields, text=self._key)
        label = f"{self._file.label}, sample {record}, {name}"
        return text_of_json(content, fields, label=label, way_out="Mend it")

    def _bad_record(self, record: int, reason: str) -> BadRecord:
        return BadRecord(f"{self._file.label}, sample {record}: {reason}. Mend it, {SKIP}")

    def _index(self) -> Int[np.ndarray, "records 2"]:
        """Returns start and size of each sample's text; without text, -start of its first member, and 0."""
        spans: list[tuple[int, int]] = []
        suffixes: set[str] = set()
        last_name = None
        for name, suffix, start, size in self._members():
            suffixes.add(suffix)
            # Samples are told apart by adjacent members alone: the same name further on is another sample.
            if name != last_name:
                spans.append((-start, 0))
                last_name = name
            # In place of the entry of the first member, so that the sample keeps its number.
            if suffix.lower() == self._suffix.lower():
                spans[-1] = (start, size)
        if spans and self._suffix.lower() not in {suffix.lower() for suffix in suffixes}:
            suffix_names = [f".{_printable(suffix)}" for suffix in sorted(suffixes)[:_MOST_NAMED]]
            omitted = [f"and {len(suffixes) - _MOST_NAMED:,} more"] if len(suffixes) > _MOST_NAMED else []
            raise UserError(
                f"{self._file.label}: no member ends in .{self._suffix}; suffixes: "
                f"{', '.join(suffix_names + omitted)}. Set {self._fields.config_path}.text_field to one of "
                "them, without its dot."
            )
        return np.asarray(spans, np.int64).reshape(-1, 2)

    def _members(self) -> Iterator[tuple[str, str, int, int]]:
        """Yields sample name, suffix, first byte and size of each member that belongs to a sample."""
        position, long_name = 0, ""
        with self._file.open() as file:
            while position < self._file.size_bytes:
                file.seek(position)
                header = file.read(_BLOCK)
                # The end mark is two blocks of zeros; the first one is enough.
                if header == bytes(_BLOCK):
                    return
                start = position + _BLOCK
                try:
                    # Bytes 124 to 135 hold the size, 148 to 155 the checksum.
                    size = _number(header[124:136])
                    # The checksum field itself counts as 8 spaces.
                    checksum = sum(header) - sum(header[148:156]) + 8 * ord(" ")
                    if len(header) < _BLOCK or _number(header[148:156]) != checksum:
                        raise UserError("the header's checksum is wrong")
                    if start + size > self._file.size_bytes:
                        raise UserError(f"its {size:,} bytes go beyond the end of the file")
                    # The next member's long name, by GNU and by POSIX.
                    if (kind := header[156:157]) in (b"L", b"x"):
                        if size > _MOST_NAME_BYTES:
                            raise UserError(
                                f"a name of {size:,} bytes; names have at most {_MOST_NAME_BYTES:,}"
                            )
                        content = file.read(size)
                        long_name = _gnu_name(content) if kind == b"L" else _posix_name(content)
                except ValueError as error:
                    raise UserError(
                        f"{self._file.label}: not a whole tar file: at byte {position:,}, {error}. Replace "
                        f"it, or leave it out of {self._fields.config_path}.path."
                    ) from error
                # Members are padded to whole blocks.
                position = start + -(-size // _BLOCK) * _BLOCK
                # Regular files: by POSIX, by the old format, and contiguous ones.
                if kind in (b"0", b"\0", b"7"):
                    folder, _, name = (long_name or _name(header)).rpartition("/")
                    long_name = ""
                    stem, dot, suffix = name.partition(".")
                    # WebDataset's rules: names without suffix and stems like `__key__` belong to no sample.
                    if dot and stem and not (stem.startswith("__") and stem.endswith("__")):
                        yield f"{folder}/{stem}" if folder else stem, suffix, start, size
                # A folder or link takes the long name before it; the next member has its own.
                elif kind not in (b"L", b"x", b"g"):
                    long_name = ""
        raise UserError(
            f"{self._file.label}: the tar file ends without its end mark: cut short. Replace it, or leave "
            f"it out of {self._fields.config_path}.path."
        )


def _number(field: bytes) -> int:
    """Parses octal digits, or GNU's binary form for larger numbers; refuses the sign that `int` takes."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:])
    # An empty field is 0.
    digits = field.strip(b" \0") or b"0"
    if digits.strip(b"01234567"):
        raise UserError(f"{digits!r} is no octal number")
    return int(digits, 8)


def _name(header: bytes) -> str:
    name = header[:100].rstrip(b"\0").decode("utf-8", "surrogateescape")
    # A ustar header has a field for the folder of a name that is longer than 100 bytes.
    prefix = (
        header[345:500].rstrip(b"\0").decode("utf-8", "surrogateescape")
        if header[257:263] == b"ustar\0"
        else ""
    )
    return f"{prefix}/{name}" if prefix else name


def _printable(name: str) -> str:
    """Returns a name for messages, without bytes that are not UTF-8 and without control characters."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in name)


def _gnu_name(content: bytes) -> str:
    return content.rstrip(b"\0").decode("utf-8", "surrogateescape")


def _posix_name(content: bytes) -> str:
    """Returns `path` of records `length key=value`, each with a line feed; empty if there is no path."""
    while content:
        digits, space, _ = content[:_MOST_LENGTH_DIGITS].partition(b" ")
        length = int(digits) if space and digits.isdigit() else 0
        if not len(digits) < length <= len(content):
            raise UserError(f"a record of its extended header has no valid length: {content[:40]!r}")
        # Behind the space, and without the line feed.
        key, _, value = content[len(digits) + 1 : length - 1].partition(b"=")
        if key == b"path":
            return value.decode("utf-8", "surrogateescape")
        content = content[length:]
    return ""
