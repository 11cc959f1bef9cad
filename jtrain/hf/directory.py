"""Writes a Hugging Face directory: config.json, one or several safetensors files, tokenizer files."""

import json
import math
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jtrain.errors import UserError
from jtrain.hf.mapping import DTYPES, tensors_of, to_hf
from jtrain.hf.model_files import CONFIG, GENERATION, INDEX, SINGLE
from jtrain.model.families.family import Family
from jtrain.model.param import Params
from jtrain.model.transformer import Transformer
from jtrain.runtime.atomic_io import replacing

MAX_SHARD_BYTES = 5 * 10**9
"""Largest size of a weight file, as in transformers; larger exports are split. Writing a file holds it in
memory."""

CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    CHAT_TEMPLATE,
    GENERATION,
)


def write_directory(
    folder: Path,
    params: Params,
    model: Transformer,
    config: dict[str, Any],
    *,
    dtype: str,
    family: Family | None = None,
    tokenizer_folder: Path | None = None,
    generation: Mapping[str, Any] | None = None,
    chat_template: str = "",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Writes a directory that transformers loads, and returns the names of its files.

    The write is atomic: files are written beside `folder`, which is renamed at the end. Besides the
    parameters, one file's tensors are held in memory.

    Args:
      config: contents of config.json, from `config_from_model`.
      family: whose names the tensors get; None for the one that describes the model.
      tokenizer_folder: folder whose tokenizer files are copied.
      generation: contents of generation_config.json; None for that of the tokenizer's folder.
      chat_template: Jinja that replaces the folder's chat template; empty to leave it.

    Raises:
      UserError: `folder` exists and is not empty.
    """
    check_empty(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as part:
        part.mkdir()
        tensors = to_hf(params, model, dtype=dtype, family=family)
        shards = _plan_shards(model, family, dtype=dtype, max_shard_bytes=max_shard_bytes)
        _write_weights(part, tensors, shards)
        # That of the folder, if it has one, tells more.
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config.get(key) is not None}
        write_json(part / GENERATION, ids)
        if tokenizer_folder is not None:
            for name in TOKENIZER_FILES:
                if (tokenizer_folder / name).is_file():
                    shutil.copyfile(tokenizer_folder / name, part / name)
        if generation:
            write_json(part / GENERATION, generation)
        if chat_template:
            (part / CHAT_TEMPLATE).write_text(chat_template, "utf-8")
        write_json(part / CONFIG, config)
    return sorted(path.name for path in folder.iterdir())


def check_empty(folder: Path) -> None:
    """Raises UserError unless `folder` is missing or an empty directory."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(
            f"{folder} is there already and not empty. Give a new directory, or empty that one first."
        )


def _write_weights(folder: Path, tensors: Iterator[tuple[str, np.ndarray]], shards: list[list[str]]) -> None:
    count = len(shards)
    # Numbered from 1, as transformers names them.
    files = [SINGLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
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
        write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def _plan_shards(
    model: Transformer, family: Family | None, *, dtype: str, max_shard_bytes: int
) -> list[list[str]]:
    """Splits tensor names over files, in order. A tensor larger than the limit gets a file of its own."""
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, parts in tensors_of(model, family).items():
        size = math.prod(parts[0].shape) * DTYPES[dtype].itemsize
        # A file that is still empty takes any tensor, however large.
        if size > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a file of a model directory, as transformers lays it out."""
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
