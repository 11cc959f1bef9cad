"""Shards of MosaicML streaming (MDS): each sample is a document, its ids one column of it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt8

from jtrain.data.pretokenized.foreign.foreign_file import (
    LABELS,
    ForeignFile,
    PartContent,
    ignored_runs,
    unsigned,
)
from jtrain.errors import FileError, UserError

_KNOWN_COLUMNS = ("tokens", "input_ids")
_ARRAY_DTYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
"""Code of an array's dtype, where the encoding of the column does not name it."""
_ID_ENCODINGS = ("bytes", "ndarray")


class MdsShard(ForeignFile):
    """Uncompressed shard.

    A shard is uint32: number of samples, then the first byte of each and the end; a description; the samples.
    A sample is a uint32 size for each column of variable size, then the columns.

    Args:
      entry: entry of the shard in index.json.
      column: name of the column of ids.
      dtype: dtype of the ids in a column of plain bytes.

    Raises:
      FileError: the shard is missing, or only its compressed form is there.
      UserError: the column holds no ids.
    """

    def __init__(self, folder: Path, entry: dict[str, Any], column: str, dtype: np.dtype[Any]) -> None:
        name = entry["raw_data"]["basename"]
        # index.json is data of others: a name with a folder in it could lead anywhere.
        if not name or Path(name).name != name:
            raise UserError(
                f"{folder / 'index.json'}: {name!r} names no file of its folder. Copy the data set again."
            )
        self.path = folder / name
        self._samples: int = entry["samples"]
        self._column_sizes = list(zip(entry["column_names"], entry["column_sizes"], strict=True))
        self._column_index = entry["column_names"].index(column)
        if not self.path.is_file():
            if entry.get("compression"):
                raise FileError(
                    f"{folder / entry['zip_data']['basename']} is compressed ({entry['compression']}), so "
                    "its ids have no offsets. Write the data set again with MDSWriter(compression=None), or "
                    "read it once with StreamingDataset(keep_zip=False) and adopt its local folder."
                )
            raise FileError(f"{self.path} is missing, and index.json names it. Copy the data set again.")
        encoding, _, type_and_shape = entry["column_encodings"][self._column_index].partition(":")
        name, _, shape = type_and_shape.partition(":")
        # An ndarray column without a fixed dtype or shape begins each value with them.
        self._has_own_dtype = encoding == "ndarray" and not name
        self._has_own_shape = encoding == "ndarray" and not shape
        if encoding not in _ID_ENCODINGS:
            raise UserError(
                f"{folder}: column {column!r} is of encoding {encoding!r}, and ids are bytes or ndarray. Set "
                f"--column to one of {_id_columns(entry)}."
            )
        self.dtype_is_assumed = encoding == "bytes"
        self.dtype = (
            unsigned(name or dtype, f"{folder}: column {column!r}") if encoding == "ndarray" else dtype
        )
        if self._has_own_dtype:
            self.dtype = unsigned(
                _ARRAY_DTYPES.get(self._first_code(), "<f4"), f"{self.path}: column {column!r}"
            )

        # Labels of another encoding are of classes.
        self.has_labels = LABELS in _id_columns(entry).split(", ") and column != LABELS
        self._labels = MdsShard(folder, entry, LABELS, dtype) if self.has_labels else None

    def num_parts(self) -> int:
        return 1

    def scan(self, part: int) -> PartContent:
        content = np.fromfile(self.path, np.uint8)
        try:
            starts, ends = self._columns(content)
            part_content = self._part_content(content, starts, ends)
        except (IndexError, OverflowError) as error:
            raise FileError(
                f"{self.path}: a sample reaches beyond its end ({error}). Copy it again."
            ) from error
        if self._labels is None:
            return part_content
        labels = self._labels.scan(part)
        # Read as unsigned like ids, but labels may be -100.
        signed = labels.ids.view(f"<i{labels.ids.itemsize}").astype(np.int64)
        ignored = ignored_runs(part_content, signed, labels.ends, self.path)
        return dataclasses.replace(part_content, ignored=ignored)

    def _part_content(
        self, content: UInt8[np.ndarray, " b"], starts: Int64[np.ndarray, " n"], ends: Int64[np.ndarray, " n"]
    ) -> PartContent:
        if self._has_own_dtype and len(starts):
            # One dtype per shard, since the whole index has one.
            codes = np.unique(content[starts])
            if [_ARRAY_DTYPES.get(int(code)) for code in codes] != [_ARRAY_DTYPES[self._first_code()]]:
                raise UserError(
                    f"{self.path}: its arrays are not all of one dtype. Write it with one, such as uint32."
                )
            # Behind the code of the dtype, one byte.
            starts = starts + 1
        # One byte: number of dimensions << 2 | log2 of the bytes per size; the sizes follow.
        if self._has_own_shape:
            code = content[starts].astype(np.int64)
            starts = starts + 1 + (code >> 2) * (1 << (code & 3))
        sizes = ends - starts
        # Negative sizes come from a shape header that is longer than its sample.
        invalid = np.flatnonzero((sizes < 0) | (sizes % self.dtype.itemsize != 0))
        if len(invalid):
            i = int(invalid[0])
            raise UserError(
                f"{self.path}: sample {i} holds {sizes[i]} bytes of ids, no whole number of "
                f"{self.dtype.name}. Set --dtype to what its ids are, or --column to another column."
            )
        parts = [content[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        ids = np.concatenate([np.empty(0, np.uint8), *parts]).view(self.dtype)
        return PartContent(ids, np.cumsum(sizes // self.dtype.itemsize), starts)

    def _columns(
        self, content: UInt8[np.ndarray, " b"]
    ) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Returns the first byte and the end of the column in each sample."""
        count = int.from_bytes(content[:4].tobytes(), "little")
        if count != self._samples:
            raise FileError(
                f"{self.path}: {count} samples, and index.json says {self._samples}. Copy it again."
            )
        bounds = content[4 : 4 * (count + 2)]
        # A file that was cut short may end within a number.
        bounds = bounds[: len(bounds) // 4 * 4].view("<u4").astype(np.int64)
        if len(bounds) != count + 1 or bounds[-1] != len(content) or (np.diff(bounds) < 0).any():
            raise FileError(
                f"{self.path}: {len(content):,} bytes, its head says otherwise: cut short. Copy it again."
            )
        sample_start = bounds[:-1]
        variable_columns = [size for _, size in self._column_sizes if not size]
        data_start = sample_start + 4 * len(variable_columns)
        num_sizes_read = 0
        start = end = data_start
        # Sums the sizes of the columns up to the column of ids; one without a size has it in each sample.
        for index, (_, size) in enumerate(self._column_sizes[: self._column_index + 1]):
            length: Any = size
            if not size:
                length = _uint32(content, sample_start + 4 * num_sizes_read)
                num_sizes_read += 1
            start, end = (data_start, data_start + length) if index == 0 else (end, end + length)
        # Without this, a thousand samples could each be the whole file.
        if (start < sample_start).any() or (end > bounds[1:]).any():
            raise IndexError("its sizes are larger than the sample")
        return start, end

    def _first_code(self) -> int:
        """Returns the code of the dtype of the first array."""
        content = np.fromfile(self.path, np.uint8)
        # 32, uint32, for a shard without samples.
        return int(content[self._columns(content)[0][0]]) if self._samples else 32


def mds_shards(folder: Path, *, column: str | None, dtype: np.dtype[Any]) -> tuple[list[MdsShard], str]:
    """Returns the shards that index.json of a folder lists, and the name of the column of ids.

    Raises:
      UserError: index.json is not one of MDS, or `column` is not named and several could be meant.
    """
    try:
        return _shards(folder, json.loads((folder / "index.json").read_bytes())["shards"], column, dtype)
    except (UserError, OSError):
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{folder / 'index.json'}: not what MDSWriter writes ({type(error).__name__}: {error}). Copy the "
            "data set again."
        ) from error


def _shards(
    folder: Path, entries: Any, column: str | None, dtype: np.dtype[Any]
) -> tuple[list[MdsShard], str]:
    if not entries or any(entry["format"] != "mds" for entry in entries):
        kinds = sorted({str(entry["format"]) for entry in entries})
        raise UserError(f"{folder}: shards of format {', '.join(kinds) or 'none'}; only mds can be adopted.")
    names = entries[0]["column_names"]
    if column is None:
        id_columns = [name for name in names if name in _KNOWN_COLUMNS]
        if len(id_columns) != 1:
            raise UserError(
                f"{folder}: which column holds the ids? Set --column to one of {_id_columns(entries[0])}."
            )
        [column] = id_columns
    if any(column not in entry["column_names"] for entry in entries):
        raise UserError(f"{folder}: no column {column!r}. Set --column to one of {_id_columns(entries[0])}.")
    return [MdsShard(folder, entry, column, dtype) for entry in entries], column


def _id_columns(entry: Any) -> str:
    """Names of the columns that can hold ids, by their encoding, for messages."""
    columns = zip(entry["column_names"], entry["column_encodings"], strict=True)
    return ", ".join(name for name, encoding in columns if encoding.partition(":")[0] in _ID_ENCODINGS)


def _uint32(content: UInt8[np.ndarray, " b"], offset: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
    """Returns the numbers at these bytes, which need not be aligned."""
    # Four bytes gathered per number, since `view` needs aligned and adjacent ones.
    return content[offset[:, None] + np.arange(4)].copy().view("<u4")[:, 0].astype(np.int64)
