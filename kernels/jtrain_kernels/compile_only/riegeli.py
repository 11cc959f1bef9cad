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
    """Contents of the chunks in `program`, also of files nested in records; one item per chunk.

    Bytes after a file, which records of JAX 0.11 contain, are an item of their own.

    Raises:
      UserError: the compression is another one, or the stream is damaged.
    """
    # The first file need not begin at byte 0 of an executable.
    start = program.find(_SIGNATURE)
    if start < 0:
        yield program
        return
    blocks = range(start, len(program), _BLOCK)
    # A block's header of 24 bytes may lie inside of a chunk, so blocks are joined without them.
    chunks = b"".join(program[block_start + _BLOCK_HEADER : block_start + _BLOCK] for block_start in blocks)
    offset = 0
    while offset + _CHUNK_HEADER <= len(chunks):
        # Chunk header: 8 bytes hash, 8 bytes size of the data, 8 bytes hash of the data, 1 byte kind.
        size = struct.unpack_from("<Q", chunks, offset + 8)[0]
        kind, data = chunks[offset + 24 : offset + 25], chunks[offset + _CHUNK_HEADER :][:size]
        if kind == b"r":
            yield from records(_values(data))
        elif offset and kind not in _KINDS:
            # Not a chunk, so the file has ended: its offset, with the block headers added back.
            file_offset = (
                offset // (_BLOCK - _BLOCK_HEADER) * _BLOCK
                + offset % (_BLOCK - _BLOCK_HEADER)
                + _BLOCK_HEADER
            )
            yield from records(program[start + file_offset :])
            return
        elif kind != b"s":
            # Signature chunks carry nothing; metadata, padding and transposed chunks are not written by XLA.
            raise UserError(f"an executable's chunk of kind {kind!r} cannot be read; simple ones (b'r') can.")
        offset += _CHUNK_HEADER + size


def _values(data: bytes) -> bytes:
    """Concatenated records of a simple chunk."""
    # Compression type, size of the sizes, the sizes, and then the values.
    sizes, offset = _varint(data, 1)
    values = data[offset + sizes :]
    compression = data[:1]
    if compression == b"\0":
        return values
    if compression != b"s":
        raise UserError(
            f"an executable's chunk of compression {compression!r} cannot be read; Snappy (b's') can."
        )
    _, offset = _varint(values, 0)  # the size, which Snappy's data repeats
    return snappy(values[offset:])


def snappy(data: bytes) -> bytes:
    """Decompresses `data`.

    Raises:
      UserError: the result does not have the declared size.
    """
    size, offset = _varint(data, 0)
    out = bytearray()
    while offset < len(data):
        tag = data[offset]
        offset += 1
        # The lowest two bits of a tag: 0 is a literal, 1 to 3 are copies with offsets of 11, 16 and 32 bits.
        kind = tag & 3
        if kind == 0:
            length = tag >> 2
            # 60 to 63 mean that the length follows in 1 to 4 bytes.
            if length >= 60:
                width = length - 59
                length = int.from_bytes(data[offset : offset + width], "little")
                offset += width
            out += data[offset : offset + length + 1]
            offset += length + 1
            continue
        if kind == 1:
            # Three bits of length and eleven bits of distance, the upper three of them in the tag.
            length, back = (tag >> 2 & 7) + 4, tag >> 5 << 8 | data[offset]
            offset += 1
        else:
            width = 2 * (kind - 1)
            length, back = (tag >> 2) + 1, int.from_bytes(data[offset : offset + width], "little")
            offset += width
        piece = out[-back:][:length]
        out += (piece * (length // len(piece) + 1))[:length]  # a copy may overlap its own output
    if len(out) != size:
        raise UserError(f"an executable's records are {len(out)} bytes, not {size}: the stream is damaged.")
    return bytes(out)


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    """Variable-length number (seven bits per byte) at `offset`, and the position after it."""
    value = shift = 0
    while True:
        byte = data[offset]
        offset += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, offset
