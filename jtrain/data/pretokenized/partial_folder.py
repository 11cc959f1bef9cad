"""Folder of an unfinished index, OUT/.NAME.partial: its begin, its state, and its rename to OUT/NAME."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.data.pretokenized import index_format
from jtrain.data.pretokenized.build_process import BuildProcess
from jtrain.runtime.atomic_io import sync_directory

STATE = ".state.json"
NOTHING: dict[str, Any] = {"units": 0, "tokens": 0, "empty": 0, "skipped": 0, "bytes": {}}
"""State before the first shard."""

_PLAN = "plan.json"
_PUBLISHED = (
    index_format.INDEX,
    index_format.IDS,
    index_format.LENGTHS,
    index_format.SHARDS,
    index_format.SKIPPED,
    index_format.FILES,
    index_format.PLACES,
    index_format.MASKS,
)
_BLOCKS_AT_ONCE = 1 << 16
_PLACES_AT_ONCE = 1 << 20


def begin(partial: Path, plan: dict[str, Any], host: BuildProcess, *, source: str) -> bool:
    """Makes or continues the folder of an unfinished index; returns True if one of other data was removed.

    Raises:
      FileError: another process is writing an index of other data.
    """
    # First: it raises if a living process builds other data in this folder.
    host.begin(source, plan)
    earlier_plan = read_json(partial / _PLAN)
    has_other_data = earlier_plan is not None and earlier_plan != plan
    if earlier_plan != plan:
        # The plan goes first and the new one comes last: after a kill in between, the next call finds a
        # folder without a plan, whose files may be of other data, and removes it.
        (partial / _PLAN).unlink(missing_ok=True)
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        host.write_whole(partial / _PLAN, json.dumps(plan))
    return has_other_data


def write_lengths(lengths: Path, new_path: Path, records: int) -> int:
    """Writes lengths.bin: the lengths in a file, padded to whole blocks of records, and the start of each
    block.

    Args:
      lengths: file that begins with a uint32 per record; `new_path` replaces it, so that nobody sees a part
        of it.

    Returns:
      Number of tokens.
    """
    blocks = -(-records // index_format.BLOCK)
    first_token = 0
    with open(lengths, "rb") as source, open(new_path, "wb") as file:
        # Full size at once, zero-padded: lengths and starts are then written at two places in turn.
        file.truncate(blocks * (index_format.BLOCK * 4 + 8) + 8)
        for block in range(0, blocks, _BLOCKS_AT_ONCE):
            count = min(_BLOCKS_AT_ONCE, blocks - block) * index_format.BLOCK
            lengths_of_blocks = np.frombuffer(
                source.read(4 * min(count, records - block * index_format.BLOCK)), np.uint32
            )
            file.seek(block * index_format.BLOCK * 4)
            file.write(lengths_of_blocks.data)
            sums = (
                np.pad(lengths_of_blocks, (0, count - len(lengths_of_blocks)))
                .reshape(-1, index_format.BLOCK)
                .sum(axis=1, dtype=np.int64)
            )
            ends = first_token + np.cumsum(sums)
            file.seek(blocks * index_format.BLOCK * 4 + block * 8)
            file.write(np.append(np.asarray([first_token], np.int64), ends).tobytes())
            first_token = int(ends[-1])
        file.flush()
        os.fdatasync(file.fileno())
    # Only a synced file takes the name: `finish` may be killed at any time and run again.
    new_path.rename(lengths)
    return first_token


def write_places(runs: Path, places: Path, tokens: int) -> None:
    """Writes places.bin, column after column, from rows of first token, byte offset and file."""
    count = runs.stat().st_size // 24
    with open(places, "wb") as file:
        for column in range(3):
            for first_row in range(0, count, _PLACES_AT_ONCE):
                rows = np.fromfile(
                    runs, "<i8", 3 * min(_PLACES_AT_ONCE, count - first_row), offset=24 * first_row
                )
                file.write(rows.reshape(-1, 3)[:, column].tobytes())
            # The first column ends with the number of tokens, the end of the last run.
            if column == 0:
                file.write(np.asarray([tokens], "<i8").tobytes())


def publish(partial: Path, folder: Path) -> None:
    """Replaces the old index folder, if there is one, by the finished one; call it in `changing_folders`."""
    # Before the rename, so that nobody sees an index with plan and state files in it.
    for path in partial.iterdir():
        if path.name not in _PUBLISHED:
            path.unlink(missing_ok=True)
    replaced_folder = partial.with_name(f".{folder.name}.replaced")
    shutil.rmtree(replaced_folder, ignore_errors=True)
    # A rename over a folder that is not empty fails, so the old one moves away first.
    if folder.exists():
        folder.rename(replaced_folder)
    partial.rename(folder)
    # Only now may the old index go: the new name has reached the disk.
    sync_directory(folder.parent)
    shutil.rmtree(replaced_folder, ignore_errors=True)


def latest_state(partial: Path) -> dict[str, Any]:
    """Returns how far the index is written, as the newest state says."""
    # Names begin with the number of shards, so the last one is the newest.
    for path in sorted(partial.glob(f"*{STATE}"), reverse=True):
        if (state := read_json(path)) is not None:
            return state
    return NOTHING


def drop_damaged_states(partial: Path) -> None:
    """Removes states that claim more than the files hold, as after a power cut; only the appender may."""
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
