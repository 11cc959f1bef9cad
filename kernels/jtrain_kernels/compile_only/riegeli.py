"""Reader of serialised XLA executables: nested Riegeli files, whose records are compressed with Snappy.

Reads only the variants that XLA writes: simple chunks (not transposed), uncompressed or Snappy. Source:
riegeli's doc/riegeli_records_file_format.md and snappy's format_description.txt.
"""

import struct
from collections.abc import Iterator

from jtrain_kernels.errors import UserError

_SIGNATURE = bytes.fromhex("83af70d10d884a3f")  # hash of the first block's header
_KINDS = (b"s", b"m", b"p", b"r", b"t")  # signature, metadata, padding, simple, transposed
_BLOCK, _BLOCK_HEADER, _CHUNK_HEADER = 65536, 24, 40


def records(program: bytes) -> Iterator[bytes]:
    """Contents of the chunks in `program`, also of files nested in records; the records of a chunk are one
    item.

    Bytes after a file, which records of JAX 0.11 contain, are an item of their own.

    Raises:
      UserError: the compression is another one, or the stream is damaged.
    """
    start = program.find(_SIGNATURE)
    if start < 0:
        yield program
        return
    blocks = range(start, len(program), _BLOCK)
    chunks = b"".join(program[at + _BLOCK_HEADER : at + _BLOCK] for at in blocks)
    at = 0
    while at + _CHUNK_HEADER <= len(chunks):
        size = struct.unpack_from("<Q", chunks, at + 8)[0]
        kind, data = chunks[at + 24 : at + 25], chunks[at + _CHUNK_HEADER :][:size]
        if kind == b"r":
            yield from records(_values(data))
        elif at and kind not in _KINDS:
            place = at // (_BLOCK - _BLOCK_HEADER) * _BLOCK + at % (_BLOCK - _BLOCK_HEADER) + _BLOCK_HEADER
            yield from records(program[start + place :])
            return
        elif kind != b"s":
            raise UserError(f"an executable's chunk of kind {kind!r} cannot be read; simple ones (b'r') can.")
        at += _CHUNK_HEADER + size


def _values(data: bytes) -> bytes:
    """Concatenated records of a simple chunk."""
    sizes, at = _varint(data, 1)
    values = data[at + sizes :]
    compression = data[:1]
    if compression == b"\0":
        return values
    if compression != b"s":
        raise UserError(
            f"an executable's chunk of compression {compression!r} cannot be read; Snappy (b's') can."
        )
    _, at = _varint(values, 0)  # the size, which Snappy's data repeats
    return snappy(values[at:])


def snappy(data: bytes) -> bytes:
    """Decompresses `data`.

    Raises:
      UserError: the result does not have the declared size.
    """
    size, at = _varint(data, 0)
    out = bytearray()
    while at < len(data):
        tag = data[at]
        at += 1
        kind = tag & 3
        if kind == 0:
            length = tag >> 2
            if length >= 60:
                width = length - 59
                length = int.from_bytes(data[at : at + width], "little")
                at += width
            out += data[at : at + length + 1]
            at += length + 1
            continue
        if kind == 1:
            length, back = (tag >> 2 & 7) + 4, tag >> 5 << 8 | data[at]
            at += 1
        else:
            width = 2 * (kind - 1)
            length, back = (tag >> 2) + 1, int.from_bytes(data[at : at + width], "little")
            at += width
        piece = out[-back:][:length]
        out += (piece * (length // len(piece) + 1))[:length]  # a copy may overlap its own output
    if len(out) != size:
        raise UserError(f"an executable's records are {len(out)} bytes, not {size}: the stream is damaged.")
    return bytes(out)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Variable-length number (seven bits per byte) at `at`, and the position after it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
