"""Weights of a model directory, written into a checkpoint one tensor at a time.

A chunk of a parameter is filled from the tensors that hold it, checked, hashed and written; memory holds a
few chunks of 64 MiB, and of a store one tensor for each thread.
"""

import concurrent.futures
import dataclasses
import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jtrain.checkpoint.streamed import StreamedCheckpoint, StreamedChunk, chunks_of
from jtrain.errors import UserError, first_few
from jtrain.hf.mapping import DTYPES, Part, check_tensor
from jtrain.hf.model_files import DequantizedTensor, StoredTensor
from jtrain.layout.dims import ParamInfo

_THREADS = 4
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True)
class ImportedLeaf:
    """A parameter in the state, and the tensor of each of its layers and experts by their indices."""

    name: str
    info: ParamInfo
    dtype: np.dtype[Any]
    parts: dict[tuple[int, ...], tuple[StoredTensor, Part]]

    @property
    def depth(self) -> int:
        """Dimensions that layers and experts are stacked in."""
        return len(next(iter(self.parts)))

    def chunks(self) -> Iterator[StreamedChunk]:
        """Yields the files of the parameter."""
        return chunks_of(self.name, self.info.shape, self.dtype)


def leaves_of(
    tensors: Mapping[str, StoredTensor], parts_by_name: Mapping[str, list[Part]], dtypes: Mapping[str, str]
) -> list[ImportedLeaf]:
    """The leaves of a state that a model directory fills; checks shapes and dtypes, which the headers tell.

    Args:
      dtypes: dtype of the leaves below each of these branches of the state: `params`, `opt_state.master`.

    Raises:
      UserError: a tensor has another shape than the model's, or a dtype that cannot be read.
    """
    parts: dict[str, dict[tuple[int, ...], tuple[StoredTensor, Part]]] = {}
    infos: dict[str, ParamInfo] = {}
    for name, parts_of_tensor in parts_by_name.items():
        for part in parts_of_tensor:
            check_tensor(name, part, tensors[name].shape, tensors[name].dtype)
            infos[part.info.path] = part.info
            parts.setdefault(part.info.path, {})[part.index] = (tensors[name], part)
    return [
        ImportedLeaf(f"{branch}.{path}", info, DTYPES[dtype], parts[path])
        for branch, dtype in dtypes.items()
        for path, info in infos.items()
    ]


def dtype_note(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> str | None:
    """A line about matrices of another dtype than config.json says; None if there are none."""
    config_dtype = config.get("dtype") or config.get("torch_dtype")
    if not isinstance(config_dtype, str):
        return None
    odd_tensors = [
        tensor for tensor in tensors.values() if len(tensor.shape) > 1 and tensor.dtype.name != config_dtype
    ]
    if not odd_tensors:
        return None
    odd_names = first_few([f"{tensor.name} ({tensor.dtype})" for tensor in odd_tensors], 3)
    return (
        f"config.json says {config_dtype}, and {len(odd_tensors)} of {len(tensors)} tensors have another "
        f"dtype: {odd_names}"
    )


def write_leaves(
    leaves: list[ImportedLeaf], checkpoint: StreamedCheckpoint, *, share: tuple[int, int] = (0, 1)
) -> int:
    """Writes this process's share of the files that are missing; returns the number of all that still are.

    Raises:
      UserError: a tensor has values that are no numbers.
    """
    # Files of one tensor stay together: from a store it is read once.
    units = [list(unit) for leaf in leaves for _, unit in itertools.groupby(leaf.chunks(), _unit_key(leaf))]
    owners = [leaf for leaf in leaves for _ in itertools.groupby(leaf.chunks(), _unit_key(leaf))]
    mine = list(zip(owners, units, strict=True))[share[0] :: share[1]]
    threads = min(_THREADS, len(os.sched_getaffinity(0)))
    cache = threading.local()
    with concurrent.futures.ThreadPoolExecutor(threads, "import") as pool:
        futures = [
            pool.submit(_write_unit, leaf, chunk, checkpoint, cache)
            for leaf, unit in mine
            for chunk in [checkpoint.missing(unit)]
            if chunk
        ]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        except BaseException:
            # The first bad tensor ends the import; what was written stays for the next attempt.
            pool.shutdown(cancel_futures=True)
            raise
    checkpoint.read_journals()
    return sum(len(checkpoint.missing(unit)) for unit in units)


def _unit_key(leaf: ImportedLeaf) -> Any:
    """Key that is the same for chunks of one tensor."""

    def key(chunk: StreamedChunk) -> Any:
        is_one = all(size == 1 for size in chunk.shape[: leaf.depth])
        return chunk.start[: leaf.depth] if is_one else chunk.name

    return key


def _write_unit(
    leaf: ImportedLeaf, chunks: list[StreamedChunk], checkpoint: StreamedCheckpoint, cache: Any
) -> None:
    for chunk in chunks:
        content = chunk.empty()
        largest = _fill(leaf, chunk, content, cache)
        checkpoint.write(chunk, content, largest)


def _fill(leaf: ImportedLeaf, chunk: StreamedChunk, content: np.ndarray, cache: Any) -> dict[str, float]:
    """Fills a chunk; returns the largest absolute value of each layer in it, by its number."""
    depth, largest = leaf.depth, dict[str, float]()
    stacked = [range(a, a + b) for a, b in zip(chunk.start[:depth], chunk.shape[:depth], strict=True)]
    inner = tuple(slice(a, a + b) for a, b in zip(chunk.start[depth:], chunk.shape[depth:], strict=True))
    for index in itertools.product(*stacked):
        tensor, part = leaf.parts[index]
        ours = part.read(_read(tensor, cache))[inner]
        target = content[tuple(i - a for i, a in zip(index, chunk.start[:depth], strict=True))]
        bits = target.view(np.dtype(f"uint{8 * target.itemsize}"))
        if ours.dtype == _BFLOAT16 and target.dtype == np.float32:
            # The upper half of a float32; four times as fast as a conversion number by number.
            np.copyto(bits, ours.view(np.uint16))
            np.left_shift(bits, 16, out=bits)
        else:
            target[...] = ours
        value = _largest(target, bits)
        if not np.isfinite(value):
            wrong = int(np.count_nonzero(~np.isfinite(np.asarray(ours, np.float32))))
            raise UserError(
                f"tensor {tensor.name} in {tensor.file.label} has {wrong} values that are NaN or infinite"
                + (f" as {target.dtype}" if not wrong else "")
                + ". Nothing can be trained from it: download or export it again."
            )
        layer = str(index[0] if index else 0)
        largest[layer] = max(value, largest.get(layer, 0.0))
    return largest


def _largest(values: np.ndarray, bits: np.ndarray) -> float:
    """Largest absolute value; not finite if any value is not."""
    # Without the sign, the bits of floats are ordered as their values; NaN is above infinity.
    top = np.bitwise_and(bits, bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)).max(keepdims=True)
    return float(np.asarray(top, bits.dtype).reshape(-1).view(values.dtype)[0])


def _read(tensor: StoredTensor, cache: Any) -> np.ndarray:
    """The tensor; of a store or of 4 bits, the last one of each thread is kept."""
    if not tensor.file.is_remote and not isinstance(tensor, DequantizedTensor):
        return tensor()
    if getattr(cache, "name", None) != tensor.name:
        cache.array = None  # before the next one is there
        cache.array, cache.name = tensor(), tensor.name
    return cache.array
