"""Files of a Hugging Face directory: config.json, one or several safetensors files, tokenizer files."""

import contextlib
import functools
import json
import math
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jtrain.errors import FileError, UserError
from jtrain.hf.mapping import DTYPES, tensors_of, to_hf
from jtrain.hf.mxfp4 import with_dequantized
from jtrain.model.param import Params
from jtrain.model.transformer import Transformer
from jtrain.runtime.atomic_io import replacing

MAX_SHARD_BYTES = 5 * 10**9
"""Largest size of a weight file, as in transformers; larger exports are split. Writing a file holds it in
memory."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)

_CONFIG = "config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the config.json of a directory.

    Raises:
      FileError: the directory has no config.json.
      UserError: the file is not a JSON object.
    """
    config = _read_json(folder, _CONFIG)
    if config is None:
        raise FileError(f"{folder / _CONFIG}: no such file. Give a Hugging Face model directory.")
    return config


@contextlib.contextmanager
def open_tensors(folder: Path) -> Iterator[dict[str, Callable[[], np.ndarray]]]:
    """Maps the name of each tensor in a directory to a function that reads it. Opening reads only the
    headers.

    Raises:
      FileError: the directory has no safetensors file, or lacks one that the index names.
      UserError: a file is not in the safetensors format, or lacks a tensor that the index places in it.
    """
    files = _weight_files(folder)
    # All files stay open until the tensors are read, and are closed together.
    with contextlib.ExitStack() as stack:
        tensors: dict[str, Callable[[], np.ndarray]] = {}
        for file, placed in files.items():
            path = folder / file
            if not path.is_file():
                raise FileError(f"{path}: no such file, but {_INDEX} names it. Complete the download.")
            try:
                reader: Any = stack.enter_context(safe_open(path, framework="numpy"))
            except SafetensorError as error:
                raise UserError(
                    f"{path} is no complete safetensors file: {error}. Download or export it again."
                ) from None
            names = set(reader.keys())
            # The index places tensors in files: one that lacks a tensor is not the file of this model.
            if absent := sorted(placed - names):
                raise UserError(f"{path} has no {', '.join(absent[:8])}, which {_INDEX} places there.")
            tensors |= {name: functools.partial(reader.get_tensor, name) for name in names}
        yield with_dequantized(tensors)


def write_directory(
    folder: Path,
    params: Params,
    model: Transformer,
    config: dict[str, Any],
    *,
    dtype: str,
    tokenizer_folder: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Writes a directory that transformers loads, and returns the names of its files.

    The write is atomic: files are written beside `folder`, which is renamed at the end. Besides the
    parameters, one file's tensors are held in memory.

    Args:
      config: contents of config.json, from `config_from_model`.
      tokenizer_folder: folder whose tokenizer files are copied.

    Raises:
      UserError: `folder` exists and is not empty.
    """
    check_empty(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as part:
        part.mkdir()
        _write_weights(part, params, model, dtype=dtype, max_shard_bytes=max_shard_bytes)
        if tokenizer_folder is not None:
            for name in TOKENIZER_FILES:
                if (tokenizer_folder / name).is_file():
                    shutil.copyfile(tokenizer_folder / name, part / name)
        _write_json(part / _CONFIG, config)
    return sorted(path.name for path in folder.iterdir())


def check_empty(folder: Path) -> None:
    """Raises UserError unless `folder` is missing or an empty directory."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(
            f"{folder} is there already and not empty. Give a new directory, or empty that one first."
        )


def _write_weights(
    folder: Path, params: Params, model: Transformer, *, dtype: str, max_shard_bytes: int
) -> None:
    shards = _plan_shards(model, dtype=dtype, max_shard_bytes=max_shard_bytes)
    count = len(shards)
    # Numbered from 1, as transformers names them.
    files = [_SINGLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    tensors = to_hf(params, model, dtype=dtype)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for file, names in zip(files, shards, strict=True):
        # One file's tensors at a time: `to_hf` yields them in the order of the plan.
        held = dict(next(tensors) for _ in names)
        # The plan and the tensors come from one list, so they cannot diverge.
        assert list(held) == names, (list(held), names)
        (folder / file).touch()
        mode = stat.S_IMODE((folder / file).stat().st_mode)  # as the umask allows
        save_file(held, folder / file, metadata={"format": "pt"})  # transformers requires this metadata
        (folder / file).chmod(mode)  # safetensors creates files readable by the owner only
        weight_map |= dict.fromkeys(names, file)
        total_bytes += sum(array.nbytes for array in held.values())
    # One file needs no index.
    if count > 1:
        _write_json(folder / _INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def _plan_shards(model: Transformer, *, dtype: str, max_shard_bytes: int) -> list[list[str]]:
    """Splits tensor names over files, in order. A tensor larger than the limit gets a file of its own."""
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, parts in tensors_of(model).items():
        size = math.prod(parts[0].shape) * DTYPES[dtype].itemsize
        # A file that is still empty takes any tensor, however large.
        if size > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _weight_files(folder: Path) -> dict[str, set[str]]:
    """Maps each weight file to the tensors that the index places in it (none without an index)."""
    index = _read_json(folder, _INDEX)
    if index is None:
        if not (folder / _SINGLE).is_file():
            raise FileError(
                f"{folder} has neither {_SINGLE} nor {_INDEX}. Only safetensors are read: save the model "
                "with safe_serialization=True first."
            )
        return {_SINGLE: set()}
    files: dict[str, set[str]] = {}
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{folder / _INDEX} has no weight_map. Download it again.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            # A path in the index could point outside the directory.
            raise UserError(
                f"{folder / _INDEX} places {name} in {file!r}, which names no file there. Download it again."
            )
        files.setdefault(file, set()).add(name)
    return files


def _read_json(folder: Path, name: str) -> dict[str, Any] | None:
    path = folder / name
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON: {error}.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {type(value).__name__}, not an object.")
    return value


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
