"""Files of a Hugging Face directory, on a disk, in a store or on the Hub: config.json, and tensors that are
read by byte range, one at a time.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jtrain.data.sources.storage import StoredFile, find_files
from jtrain.errors import FileError, UserError, first_few
from jtrain.hf.mxfp4 import dequantize

CONFIG = "config.json"
GENERATION = "generation_config.json"
"""File of the tokens that begin and end a generated text, and of how it is sampled."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_BLOCKS, _SCALES = "_blocks", "_scales"
"""Ends of the names of weights of 4 bits and their scales (`mxfp4.py`)."""

_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("int64"),
    "I32": np.dtype("int32"),
    "I16": np.dtype("int16"),
    "I8": np.dtype("int8"),
    "U8": np.dtype("uint8"),
    "BOOL": np.dtype("bool"),
}
"""Dtypes by their names in safetensors files."""

_MAX_HEADER_BYTES = 100 << 20
"""Largest header, as in the safetensors library."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Tensor in a safetensors file, which is read when it is called.

    start: first byte in the file.
    """

    name: str
    file: StoredFile
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes in the file."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __call__(self) -> np.ndarray:
        """The tensor: from a disk a view of the file, of which the kernel reads what is used; from a store
        its bytes, and no others.
        """
        if self.num_bytes == 0:
            return np.empty(self.shape, self.dtype)
        if not self.file.is_remote:
            return np.memmap(self.file.location, self.dtype, "r", self.start, self.shape)
        with self.file.open() as file:
            file.seek(self.start)
            data = bytearray(self.num_bytes)
            file.readinto(data)
        return np.frombuffer(data, self.dtype).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class DequantizedTensor(StoredTensor):
    """Tensor in bfloat16 whose blocks and scales are read, and multiplied, when it is called."""

    blocks: StoredTensor
    scales: StoredTensor

    def __call__(self) -> np.ndarray:
        """The tensor; blocks are saved as [expert, outputs, inputs], what they stand for has inputs first."""
        return np.swapaxes(dequantize(self.blocks(), self.scales()), -1, -2)


def is_remote(source: Path | str) -> bool:
    """True if a model directory is behind a URL."""
    return "://" in str(source)


def read_config(source: Path | str) -> dict[str, Any]:
    """Reads the config.json of a directory, or the file itself.

    Raises:
      FileError: there is no config.json.
      UserError: the file is not a JSON object.
    """
    if not is_remote(source) and Path(source).is_file():
        return parse_json(str(source), Path(source).read_bytes())
    config = read_json(source, CONFIG)
    if config is None:
        raise FileError(f"{source}/{CONFIG}: no such file. Give a Hugging Face model directory.")
    return config


def read_json(source: Path | str, name: str) -> dict[str, Any] | None:
    """Reads a file of a directory; None if it is not there.

    Raises:
      FileError: the directory is in a store, and not there.
      UserError: the file is not a JSON object.
    """
    return _read_json(_files(source), name)


@contextlib.contextmanager
def open_tensors(source: Path | str) -> Iterator[dict[str, StoredTensor]]:
    """Maps the name of each tensor in a directory to the tensor. Opening reads only the headers.

    Raises:
      FileError: the directory has no safetensors file, or lacks some that the index names.
      UserError: a file is not in the safetensors format, or lacks a tensor that the index places in it.
    """
    files = _files(source)
    placed_by_file = _weight_files(source, files)
    if absent := sorted(placed_by_file.keys() - files.keys()):
        raise FileError(
            f"{source}: {len(absent)} of the {len(placed_by_file)} weight files are not there: "
            f"{first_few(absent, 4)}: no such file, but {INDEX} names it. Complete the download."
        )
    tensors: dict[str, StoredTensor] = {}
    for name, placed in placed_by_file.items():
        held = _header(files[name])
        # The index places tensors in files: one that lacks a tensor is not the file of this model.
        if missing := sorted(placed - held.keys()):
            raise UserError(
                f"{files[name].label} has no {', '.join(missing[:8])}, which {INDEX} places there."
            )
        tensors |= held
    yield _with_dequantized(tensors)


def _with_dequantized(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a directory, where pairs `NAME_blocks` and `NAME_scales` are one tensor `NAME` in
    bfloat16.

    Every number of 4 bits times its scale is a bfloat16, so nothing is rounded.

    Raises:
      UserError: blocks without scales.
    """
    read = dict(tensors)
    for blocks_name in [name for name in tensors if name.endswith(_BLOCKS)]:
        name = blocks_name.removesuffix(_BLOCKS)
        if (scales_name := name + _SCALES) not in tensors:
            raise UserError(f"tensor {blocks_name} has no {scales_name}. A file is incomplete.")
        blocks, scales = read.pop(blocks_name), read.pop(scales_name)
        *experts, outputs, groups, size = blocks.shape
        shape = *experts, groups * size * 2, outputs
        read[name] = DequantizedTensor(
            name, blocks.file, _DTYPES["BF16"], shape, blocks.start, blocks=blocks, scales=scales
        )
    return read


def _files(source: Path | str) -> dict[str, StoredFile]:
    """The files of a directory by name."""
    if is_remote(source):
        try:
            files = find_files(f"{source}".rstrip("/"), field="--from")
        except FileError as error:
            raise _with_hub_advice(source, error) from error
        return {file.name: file for file in files if "/" not in file.name}
    folder = Path(source)
    paths = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    return {path.name: _stored(path) for path in paths}


def _stored(path: Path) -> StoredFile:
    status = path.stat()
    return StoredFile(str(path), path.name, status.st_size, str(status.st_mtime_ns), str(path))


def _with_hub_advice(source: object, error: FileError) -> FileError:
    """The error of a store, with what opens a gated model of the Hub."""
    if not str(source).startswith("hf://"):
        return error
    name = str(source).removeprefix("hf://").partition("@")[0]
    return FileError(
        f"{error} A gated or private model needs a token: accept its terms at "
        f"https://huggingface.co/{name}, and set HF_TOKEN to a token of that account."
    )


def _read(file: StoredFile, start: int, count: int) -> bytes:
    """Some bytes of a file."""
    try:
        with file.open() as opened:
            opened.seek(start)
            data = bytearray(count)
            filled = opened.readinto(data)
    except FileError as error:
        raise _with_hub_advice(file.location, error) from error
    return bytes(data[:filled])


def _header(file: StoredFile) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file."""
    broken = f"{file.label} is no complete safetensors file"
    if not file.is_remote:
        try:
            # The library knows every way in which a header can be wrong.
            with safe_open(file.location, framework="numpy"):
                pass
        except SafetensorError as error:
            raise UserError(f"{broken}: {error}. Download or export it again.") from None
    length = int.from_bytes(_read(file, 0, 8), "little")
    if not 0 < length <= min(_MAX_HEADER_BYTES, file.size_bytes):
        raise UserError(f"{broken}: its header has {length} bytes. Download or export it again.")
    header = parse_json(file.label, _read(file, 8, length))
    header.pop("__metadata__", None)
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise UserError(
                f"tensor {name} has dtype {entry['dtype']}, which cannot be read. Convert the directory "
                "first."
            )
        tensor = StoredTensor(
            name,
            file,
            _DTYPES[entry["dtype"]],
            tuple(entry["shape"]),
            8 + length + entry["data_offsets"][0],
        )
        if tensor.start + tensor.num_bytes > file.size_bytes:
            raise UserError(f"{broken}: {name} goes past its end. Download or export it again.")
        tensors[name] = tensor
    return tensors


def _weight_files(source: Path | str, files: dict[str, StoredFile]) -> dict[str, set[str]]:
    """Maps each weight file to the tensors that the index places in it (none without an index)."""
    index = _read_json(files, INDEX)
    if index is None:
        if SINGLE not in files:
            raise FileError(
                f"{source} has neither {SINGLE} nor {INDEX}. Only safetensors are read: save the model "
                "with safe_serialization=True first."
            )
        return {SINGLE: set()}
    placed: dict[str, set[str]] = {}
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{source}/{INDEX} has no weight_map. Download it again.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            # A path in the index could point outside the directory.
            raise UserError(
                f"{source}/{INDEX} places {name} in {file!r}, which names no file there. Download it again."
            )
        placed.setdefault(file, set()).add(name)
    return placed


def _read_json(files: dict[str, StoredFile], name: str) -> dict[str, Any] | None:
    if name not in files:
        return None
    return parse_json(files[name].label, _read(files[name], 0, files[name].size_bytes))


def parse_json(label: str, content: bytes) -> dict[str, Any]:
    """Returns the object that a file holds; raises UserError if it is none."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{label} is no JSON: {error}.") from None
    if not isinstance(value, dict):
        raise UserError(f"{label} holds a JSON {type(value).__name__}, not an object.")
    return value
