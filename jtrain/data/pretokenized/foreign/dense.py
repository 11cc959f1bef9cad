"""Files of ids that lie one after another: Megatron .bin/.idx, llm.c and nanoGPT .bin, OLMo .npy."""

import functools
import struct
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from jtrain.data.pretokenized.foreign.foreign_file import PART_BYTES, ForeignFile, PartContent, unsigned
from jtrain.errors import FileError, UserError

_LLM_C = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
"""(magic, version) of an llm.c file -> dtype of its ids, for GPT-2 and for Llama 3."""

_LLM_C_HEADER_BYTES = 1024
# Ids enough that no text has 0 at every second place by chance.
_SURELY_IDS = 64

_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_MEGATRON_MAGIC = b"MMIDIDX\0\0"


class SplitFile(ForeignFile):
    """File of ids whose documents end with an end id, which belongs to the document before it.

    What follows the last end id is a document too. In llm.c's files the token stands before each document:
    the first document is then that token alone, and every other one ends with the token of the next.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], first_byte: int, tokens: int, end_id: int) -> None:
        self.path = path
        self.dtype = dtype
        self.first_byte = first_byte
        self._tokens = tokens
        self._end_id = end_id

    def num_parts(self) -> int:
        return -(-self._tokens * self.dtype.itemsize // PART_BYTES)

    def scan(self, part: int) -> PartContent:
        ids = _read_part(self.path, self.dtype, self.first_byte, self._tokens, part)
        # The upper halves of uint32 ids below 65,536 are all 0.
        if part == 0 and self.dtype.itemsize == 2 and len(ids) >= _SURELY_IDS and not ids[1::2].any():
            raise UserError(
                f"{self.path}: every second of its ids is 0, as where uint32 is read as uint16. Set --dtype "
                "uint32."
            )
        return PartContent(ids, np.flatnonzero(ids == self._end_id) + 1)


class MegatronFile(ForeignFile):
    """Megatron's .bin with its .idx, which says where documents end; a document is one or more sequences.

    Files of fairseq have the same index without the list of documents: each sequence is one.

    Raises:
      UserError: the index is of another version, has an unknown dtype, or does not fit the .bin.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._index = path.with_suffix(".idx")
        size = self._index.stat().st_size
        with open(self._index, "rb") as file:
            head = file.read(34)
        # 9 bytes of magic, uint64 version, uint8 dtype code, uint64 sequences; Megatron: uint64 documents.
        if len(head) < 26 or head[:9] != _MEGATRON_MAGIC:
            raise UserError(
                f"{self._index}: not an index of Megatron: it does not begin with MMIDIDX. Leave it out."
            )
        version, code, self._sequences = struct.unpack_from("<QBQ", head, 9)
        if version != 1 or code not in _MEGATRON_DTYPES:
            raise UserError(
                f"{self._index}: version {version} with dtype code {code}; version 1 with codes "
                f"{', '.join(map(str, _MEGATRON_DTYPES))} can be read. Write it again by Megatron's "
                "preprocess_data.py."
            )
        self.dtype = unsigned(_MEGATRON_DTYPES[code], str(self._index))
        # Per sequence an int32 size and an int64 pointer: 12 bytes.
        is_fairseq = size == 26 + 12 * self._sequences
        self._sizes_offset = 26 if is_fairseq else 34
        self._documents = 0 if is_fairseq else int.from_bytes(head[26:34], "little")
        expected_bytes = self._sizes_offset + 12 * self._sequences + 8 * self._documents
        # Multimodal files end with a byte per sequence.
        if size not in (expected_bytes, expected_bytes + self._sequences):
            raise FileError(
                f"{self._index}: {size:,} bytes, and its head says {expected_bytes:,}: cut short. Copy it "
                "again."
            )

    def num_parts(self) -> int:
        return max(1, -(-int(self._ends[-1]) * self.dtype.itemsize // PART_BYTES)) if len(self._ends) else 0

    def scan(self, part: int) -> PartContent:
        first = part * (PART_BYTES // self.dtype.itemsize)
        ids = _read_part(self.path, self.dtype, 0, int(self._ends[-1]), part)
        # A document without tokens belongs to the part where it ends, and to the first one at the very start.
        low = 0 if part == 0 else np.searchsorted(self._ends, first, side="right")
        # Ends up to and including the part's last token belong to it.
        high = np.searchsorted(self._ends, first + len(ids), side="right")
        return PartContent(ids, self._ends[low:high] - first)

    def close(self) -> None:
        # Undoes the cached property: 8 bytes per document of each file would add up.
        vars(self).pop("_ends", None)

    @functools.cached_property
    def _ends(self) -> Int64[np.ndarray, " documents"]:
        """End of each document in tokens; 8 bytes per document, freed by `close`."""

        def column(dtype: str, count: int, offset: int) -> np.ndarray:
            return np.fromfile(self._index, dtype, count, offset=offset)

        offset = self._sizes_offset
        sizes = column("<i4", self._sequences, offset)
        pointers = column("<i8", self._sequences, offset + 4 * self._sequences)
        if len(sizes) and sizes.min() < 0:
            raise UserError(
                f"{self._index}: sequence {int(sizes.argmin())} has {sizes.min():,} tokens. Write it again "
                "by Megatron's preprocess_data.py."
            )
        ends = np.cumsum(sizes, dtype=np.int64)
        tokens = int(ends[-1]) if len(ends) else 0
        # Otherwise documents would need offsets of their own.
        if not np.array_equal(pointers, (ends - sizes) * self.dtype.itemsize):
            raise UserError(
                f"{self._index}: its sequences do not lie one after another in {self.path.name}. Write both "
                "again by Megatron's preprocess_data.py or merge_datasets.py."
            )
        if (bin_bytes := self.path.stat().st_size) != tokens * self.dtype.itemsize:
            raise FileError(
                f"{self.path}: {bin_bytes:,} bytes, and {self._index.name} says "
                f"{tokens * self.dtype.itemsize:,}: one of them was cut short or replaced. Copy both again."
            )
        if not self._documents:
            return ends
        document_ends = column("<i8", self._documents, offset + 12 * self._sequences)
        if document_ends[0] or document_ends[-1] != self._sequences or (np.diff(document_ends) < 0).any():
            raise UserError(
                f"{self._index}: its documents do not cover its {self._sequences:,} sequences. Write it "
                "again by Megatron's preprocess_data.py."
            )
        # The first entry is 0; the others number the sequence after each document.
        return np.append(np.int64(0), ends)[document_ends[1:]]


def llm_c_file(path: Path, end_id: int) -> SplitFile | None:
    """Returns the file if it has a header of llm.c; None if not."""
    with open(path, "rb") as file:
        head = file.read(12)
    # The header has 256 int32; the others are 0.
    magic, version, tokens = struct.unpack("<iiI", head) if len(head) == 12 else (0, 0, 0)
    if (dtype := _LLM_C.get((magic, version))) is None:
        return None
    expected_bytes = _LLM_C_HEADER_BYTES + tokens * dtype.itemsize
    if (file_bytes := path.stat().st_size) != expected_bytes:
        raise FileError(
            f"{path}: {file_bytes:,} bytes, and its head says {expected_bytes:,}: cut short. Copy it again."
        )
    return SplitFile(path, dtype, _LLM_C_HEADER_BYTES, tokens, end_id)


def npy_file(path: Path, end_id: int) -> SplitFile | None:
    """Returns the file if it has a header of NumPy; None if not: OLMo's .npy files are ids alone."""
    with open(path, "rb") as file:
        if file.read(6) != b"\x93NUMPY":
            return None
        file.seek(0)
        try:
            version = np.lib.format.read_magic(file)
            read_header = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, _, dtype = read_header(file)
        except Exception as error:  # NumPy parses a Python literal, which raises errors of many types
            raise UserError(
                f"{path}: its header cannot be read ({_first_line(error)}). Save it again."
            ) from error
        first_byte = file.tell()
    dtype = unsigned(dtype, str(path))
    if len(shape) != 1:
        raise UserError(
            f"{path}: an array of shape {shape}; a flat one is needed. Save it as ids.reshape(-1)."
        )
    expected_bytes = first_byte + shape[0] * dtype.itemsize
    if (file_bytes := path.stat().st_size) != expected_bytes:
        raise FileError(
            f"{path}: {file_bytes:,} bytes, and its head says {expected_bytes:,}: cut short. Copy it again."
        )
    return SplitFile(path, dtype, first_byte, shape[0], end_id)


def _first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, at most 200 letters: NumPy's quotes the whole header."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def raw_file(path: Path, dtype: np.dtype[Any], end_id: int) -> SplitFile:
    """Returns a file of ids without a header; raises FileError for a fraction of an id at its end."""
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise FileError(
            f"{path}: {size:,} bytes are no whole number of {dtype.name} ids. Copy it again, or set --dtype "
            "to what its ids are."
        )
    return SplitFile(path, dtype, 0, size // dtype.itemsize, end_id)


def _read_part(path: Path, dtype: np.dtype[Any], first_byte: int, tokens: int, part: int) -> np.ndarray:
    per_part = PART_BYTES // dtype.itemsize
    first = part * per_part
    # The last part is shorter.
    count = min(per_part, tokens - first)
    return np.fromfile(path, dtype, count, offset=first_byte + first * dtype.itemsize)
