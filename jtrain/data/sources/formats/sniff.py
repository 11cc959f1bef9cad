"""Sniff of a file's first bytes: content that is plainly of another format than the file's is refused."""

import re

from jtrain.data.sources.formats.suffix import COMPRESSIONS
from jtrain.data.sources.storage import StoredFile
from jtrain.errors import UserError

_HEAD_BYTES = 512
_SIGNATURES = {
    "gzip": (b"\x1f\x8b",),
    # The 16 others are skippable frames, with which some writers begin a file.
    "zstd": (b"\x28\xb5\x2f\xfd", *(bytes([n]) + b"\x2a\x4d\x18" for n in range(0x50, 0x60))),
    "bzip2": tuple(b"BZh%d1AY&SY" % level for level in range(1, 10)),
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
    "PDF": "Extract its text first",
    "Parquet": "Name it .parquet",
    "Arrow": "Name it .arrow",
    "tar": "Name it .tar",
    "UTF-16 text": "Convert it to UTF-8",
    "a Git LFS pointer": "Fetch the file that it stands for: git lfs pull",
    "a JSON array": "Name it .json",
    "an HTML page": "Download it again: this is a page of the server",
    "binary data": "Convert it to text",
}
# Formats that are themselves among the signatures, or a file of theirs would be refused.
_SIGNATURE_OF_FORMAT = {"parquet": "Parquet", "arrow": "Arrow", "webdataset": "tar"}
_ARRAY_OF_OBJECTS = re.compile(rb"\s*\[\s*(\{|$)")
_BINARY = {"parquet", "arrow", "webdataset", "arrayrecord"}


def check_content(file: StoredFile, *, kind: str, field: str) -> None:
    """Refuses a local file that begins like a format other than `kind`; an empty file passes.

    Raises:
      UserError: names the file, what it begins like, and what to do.
    """
    head = _head(file)
    detected = _detect_format(head, kind)
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
