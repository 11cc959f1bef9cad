"""Cuts of a text into chunks, at bytes that depend on the text alone."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64

from jtrain.data.sources.formats.long_lines import TextPart
from jtrain.data.tokenizer import TextChunk

_SEARCH_BYTES = 64
"""Bytes before a cut that are searched for white space, so that no word of a text is cut in two."""

_BORDER_BYTES = 8
"""Bytes by which a part of a text is read wider than the cuts look: for a begin id and the rest of a
character."""


class ChunkCut(NamedTuple):
    """Cut of the texts of a source.

    chunk_bytes: most bytes of a chunk, its border ids included.
    border_tokens: begin and end ids of a document.
    exact: True if a text may be cut at any byte: then rows of bytes are full to the last token.
    """

    chunk_bytes: int
    border_tokens: int
    exact: bool

    def counts(self, sizes: Int[np.ndarray, " n"], *, per_slot: int = 1) -> Int64[np.ndarray, " n"]:
        """Returns the number of slots of `per_slot` chunks in texts of these sizes, rounded up.

        An empty text has a chunk too, which is then empty.
        """
        return np.maximum(
            -(-(sizes.astype(np.int64) + self.border_tokens) // (self.chunk_bytes * per_slot)), 1
        )

    def spans(self, first: Int[np.ndarray, " n"], num: Int[np.ndarray, " n"]) -> list[tuple[int, int]]:
        """Returns the bytes of its text that `chunk` looks at, for each of several chunks."""
        # Wide enough for both cuts: each looks back up to 64 bytes, and a begin id shifts it by one.
        start = (first * self.chunk_bytes - _SEARCH_BYTES - _BORDER_BYTES).clip(0)
        stop = (first + num) * self.chunk_bytes + _BORDER_BYTES
        return list(zip(start.tolist(), stop.tolist(), strict=True))

    def chunk(self, part: TextPart, first: int, num: int) -> tuple[TextChunk, int]:
        """Returns chunks `first` to `first + num - 1` of a document, as one, and the byte at which it begins.

        part: the text, or what is around these chunks.
        """
        # 1 if documents begin with an id, else 0: the end id is always among the border tokens.
        begin = self.border_tokens - 1
        total = part.total + self.border_tokens if part.total else 0
        # Nominal offsets count the border ids; those of the text follow by subtracting the begin id.
        start, stop = first * self.chunk_bytes, min((first + num) * self.chunk_bytes, total)
        if start >= stop:
            return TextChunk(b"", begins=False, ends=False), 0
        low = _cut_at(part.content, max(start - begin, 0) - part.first, exact=self.exact)
        high = _cut_at(part.content, max(stop - begin, 0) - part.first, exact=self.exact)
        return TextChunk(part.content[low:high], first == 0 and bool(begin), stop == total), part.first + low


def _cut_at(content: bytes, offset: int, *, exact: bool) -> int:
    """Returns the byte of a cut near `offset`: after white space, or else between two characters."""
    if exact or offset >= len(content):
        return min(offset, len(content))
    space_at = max(content.rfind(space, max(offset - _SEARCH_BYTES, 0), offset) for space in (b" ", b"\n"))
    if space_at >= 0:
        return space_at + 1
    # 0b10xxxxxx is a continuation byte of UTF-8: a cut before it would split a character.
    while offset and content[offset] & 0xC0 == 0x80:
        offset -= 1
    return offset
