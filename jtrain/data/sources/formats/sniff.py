"""Sniff of a file's first bytes: content that is plainly of another format than the file's is refused."""

import dataclasses
import json
import re

from jtrain.data.sources.cache import decompressed
from jtrain.data.sources.formats.suffix import COMPRESSIONS, format_of, split_suffix
from jtrain.data.sources.storage import StoredFile
from jtrain.errors import UserError

_HEAD_BYTES = 512

_LINES_HEAD_BYTES = 1 << 16
"""Bytes that are searched for JSON lines."""

_MOST_LINES, _MOST_SUFFIXES = 4, 32
"""Lines of a file, and suffixes of a source, that are looked at for JSON lines."""

_SIGNATURES = {
    "gzip": (b"\x1f\x8b",),
    # The 16 others are skippable frames, with which some writers begin a file.
    "zstd": (b"\x28\xb5\x2f\xfd", *(bytes([n]) + b"\x2a\x4d\x18" for n in range(0x50, 0x60))),
    "bz2": tuple(b"BZh%d1AY&SY" % level for level in range(1, 10)),
    "xz": (b"\xfd7zXZ\x00",),
    "7z": (b"7z\xbc\xaf\x27\x1c",),
    "zip": (b"PK\x03\x04", b"PK\x05\x06"),
    "PDF": (b"%PDF-",),
    "Parquet": (b"PAR1",),
    "Arrow": (b"ARROW1\0\0",),
    "UTF-16 text": (b"\xff\xfe", b"\xfe\xff"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/",),
}
_WAYS_OUT = {
    "gzip": "Let its name end in .gz, behind the suffix of its format",
    "zstd": "Let its name end in .zst, behind the suffix of its format",
    "bz2": "Let its name end in .bz2, behind the suffix of its format",
    "xz": "Let its name end in .xz, behind the suffix of its format",
    "PDF": "Extract its text first",
    "Parquet": "Name it .parquet",
    "Arrow": "Name it .arrow",
    "tar": "Name it .tar",
    "UTF-16 text": "Convert it to UTF-8",
    "a Git LFS pointer": "Fetch the file that it stands for: git lfs pull",
    "a JSON array": "Name it .json",
    "JSON lines": "Name it .jsonl, or name the source in data.sources with format='jsonl' or 'text'",
    "an HTML page": "Download it again: this is a page of the server",
    "binary data": "Convert it to text",
}
# Formats that are themselves among the signatures, or a file of theirs would be refused.
_SIGNATURE_OF_FORMAT = {"parquet": "Parquet", "arrow": "Arrow", "webdataset": "tar"}
_ARRAY_OF_OBJECTS = re.compile(rb"\s*\[\s*(\{|$)")
_BINARY = {"parquet", "arrow", "webdataset", "arrayrecord"}


def with_kinds(files: list[StoredFile], *, text_field: str, field: str) -> list[StoredFile]:
    """Returns local files with their kind set where the suffix tells no format and the content is JSON lines.

    All files of a suffix are JSON lines if the first one that is not empty is: a folder may have 100,000. One
    that is otherwise is refused when it is opened.

    Args:
      text_field: first field that is read, which a line has that is longer than what is looked at.
      field: config path of the source.
    """
    by_suffix: dict[tuple[str, str | None], list[int]] = {}
    for number, file in enumerate(files):
        if not file.is_remote and format_of(file.name, field=f"{field}.path")[0] == "text":
            by_suffix.setdefault(split_suffix(file.name, field=f"{field}.path"), []).append(number)
    kinds = [file.kind for file in files]
    # Every part of a text may have a suffix of its own, such as a date.
    for (_, compression), numbers in list(by_suffix.items())[:_MOST_SUFFIXES]:
        full = [number for number in numbers if files[number].size_bytes]
        # The first alone: files that join a run sort behind it, and must not change what the others are.
        if full and _are_json_lines(_lines_head(files[full[0]], compression), text_field):
            for number in numbers:
                kinds[number] = "jsonl"
    return [
        file if kind is None else dataclasses.replace(file, kind=kind)
        for file, kind in zip(files, kinds, strict=True)
    ]


def _lines_head(file: StoredFile, compression: str | None) -> bytes:
    """Returns the first bytes of a file, decompressed; none if it cannot be read, which opening it says."""
    try:
        with file.open() as raw:
            return (decompressed(raw, compression) if compression else raw).read(_LINES_HEAD_BYTES)
    except Exception:  # codecs raise errors of many types
        return b""


def _are_json_lines(head: bytes, text_field: str) -> bool:
    """True if the first lines are objects; one with that field, if there is only one line."""
    lines = head.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if len(lines) == 1 and len(head) >= _LINES_HEAD_BYTES:
        return lines[0].startswith(b"{") and json.dumps(text_field).encode() in head
    # The last line may be cut; one after the end of the file is empty.
    if len(head) >= _LINES_HEAD_BYTES:
        lines.pop()
    lines = [line for line in lines if line.strip()][:_MOST_LINES]
    try:
        values = [json.loads(line) for line in lines if line.startswith(b"{")]
    except (ValueError, RecursionError):
        return False
    # A text may be one object, such as a file of settings; the field to train on tells it from a record.
    has_more = len(lines) > 1 or len(head) >= _LINES_HEAD_BYTES
    return len(values) == len(lines) > 0 and (has_more or text_field in values[0])


def check_content(file: StoredFile, *, kind: str, field: str, is_declared: bool = True) -> None:
    """Refuses a local file that begins like a format other than `kind`; an empty file passes.

    Args:
      is_declared: True if `kind` is what the user says, so that JSON lines may be text.

    Raises:
      UserError: names the file, what it begins like, and what to do.
    """
    head = _head(file)
    detected = _detect_format(head, kind)
    if detected is None and kind == "text" and not is_declared and head.startswith(b"{"):
        detected = "JSON lines" if _are_json_lines(_lines_head(file, None), "text") else None
    # An unknown begin passes: most text has none to be known by.
    if detected in (None, _SIGNATURE_OF_FORMAT.get(kind)):
        return
    way_out = _WAYS_OUT.get(detected, "Decompress it")
    raise UserError(
        f"{file.label}: read as {kind}, but it begins like {detected} ({head[:12]!r}). {way_out}, or leave "
        f"it out of {field}.path."
    )


def check_compression(file: StoredFile, *, compression: str, field: str) -> None:
    """Refuses a local file that is named as compressed and is not; an empty file passes.

    Raises:
      UserError: names the file and what it begins with.
    """
    head = _head(file)
    if head and not head.startswith(_SIGNATURES[compression]):
        suffix = next(suffix for suffix, codec in COMPRESSIONS.items() if codec == compression)
        detected = _detect_format(head, "")
        way_out = _WAYS_OUT.get(detected or "", f"If it was decompressed before, drop {suffix} from its name")
        raise UserError(
            f"{file.label}: not a whole {compression} file: it "
            f"begins{f' like {detected}' if detected else ''} with {head[:12]!r}. {way_out}, or leave it out "
            f"of {field}.path."
        )


def _head(file: StoredFile) -> bytes:
    with file.open() as handle:
        return handle.read(_HEAD_BYTES)


def _detect_format(head: bytes, kind: str) -> str | None:
    for name, signatures in _SIGNATURES.items():
        if head.startswith(signatures):
            return name
    # The magic of a tar header lies at byte 257, after name, mode, sizes and checksum.
    if head[257:262] == b"ustar":
        return "tar"
    # A page is a fine text; in place of records it is a server's error page.
    if kind != "text" and head.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")):
        return "an HTML page"
    if kind == "jsonl" and _ARRAY_OF_OBJECTS.match(head):
        return "a JSON array"
    # UTF-8 text has no zero bytes in practice, and binary formats have them at once.
    if kind not in _BINARY and b"\0" in head:
        return "binary data"
    return None
