"""Folder of an unfinished index, OUT/.NAME.partial: how it begins, how far it is, and how it becomes
OUT/NAME.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.data.pretokenized import reader
from jtrain.data.pretokenized.build_process import BuildProcess
from jtrain.runtime.atomic_io import sync_directory

STATE = ".state.json"
NOTHING: dict[str, Any] = {"units": 0, "tokens": 0, "empty": 0, "skipped": 0, "bytes": {}}
"""State before the first shard."""

_PLAN = "plan.json"
_PUBLISHED = (
    reader.INDEX,
    reader.IDS,
    reader.LENGTHS,
    reader.SHARDS,
    reader.SKIPPED,
    reader.FILES,
    reader.PLACES,
    reader.MASKS,
)
_BLOCKS_AT_ONCE = 1 << 16


def begin(partial: Path, plan: dict[str, Any], host: BuildProcess, *, source: str) -> bool:
    """Makes the folder of an unfinished index, or continues in it; returns True if one of other data was
    removed.

    Raises:
      FileError: another process is writing an index of other data.
    """
    host.begin(source, plan)
    plan_there = read_json(partial / _PLAN)
    afresh = plan_there is not None and plan_there != plan
    if afresh:
        shutil.rmtree(partial)
    if plan_there != plan:
        partial.mkdir(exist_ok=True)
        host.write_whole(partial / _PLAN, json.dumps(plan))
    return afresh


def write_lengths(lengths: Path, new: Path, records: int) -> int:
    """Writes lengths.bin: the lengths in a file, padded to whole blocks of records, and the start of each
    block.

    Args:
      lengths: file that begins with a uint32 per record; `new` takes its place, so that nobody sees a part of
        it.

    Returns:
      Number of tokens.
    """
    blocks = -(-records // reader.BLOCK)
    token = 0
    with open(lengths, "rb") as source, open(new, "wb") as file:
        file.truncate(blocks * (reader.BLOCK * 4 + 8) + 8)
        for block in range(0, blocks, _BLOCKS_AT_ONCE):
            count = min(_BLOCKS_AT_ONCE, blocks - block) * reader.BLOCK
            here = np.frombuffer(source.read(4 * min(count, records - block * reader.BLOCK)), np.uint32)
            file.seek(block * reader.BLOCK * 4)
            file.write(here.data)
            sums = np.pad(here, (0, count - len(here))).reshape(-1, reader.BLOCK).sum(axis=1, dtype=np.int64)
            ends = token + np.cumsum(sums)
            file.seek(blocks * reader.BLOCK * 4 + block * 8)
            file.write(np.append(np.asarray([token], np.int64), ends).tobytes())
            token = int(ends[-1])
        file.flush()
        os.fdatasync(file.fileno())
    new.rename(lengths)
    return token


def publish(partial: Path, folder: Path) -> None:
    """Replaces the old index folder, if there is one, by the finished one; call it in `changing_folders`."""
    for path in partial.iterdir():
        if path.name not in _PUBLISHED:
            path.unlink(missing_ok=True)
    away = partial.with_name(f".{folder.name}.replaced")
    shutil.rmtree(away, ignore_errors=True)
    if folder.exists():
        folder.rename(away)
    partial.rename(folder)
    sync_directory(folder.parent)
    shutil.rmtree(away, ignore_errors=True)


def latest_state(partial: Path) -> dict[str, Any]:
    """Returns how far the index is written, as the newest state says."""
    for path in sorted(partial.glob(f"*{STATE}"), reverse=True):
        if (state := read_json(path)) is not None:
            return state
    return NOTHING


def drop_damaged_states(partial: Path) -> None:
    """Removes each state that says more than the files hold, as after a power cut; only the one that appends
    may.
    """
    for path in partial.glob(f"*{STATE}"):
        state = read_json(path)
        if state is None or any(_size(partial / name) < size for name, size in state["bytes"].items()):
            path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    try:
        with open(path, "rb") as file:  # opened, because a network file system may tell an old size otherwise
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return 0


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the contents of a JSON file; None if it is missing or no JSON."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
