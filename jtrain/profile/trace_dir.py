"""Folder of a trace window: its name, its subfolders per process, and the facts written beside the trace."""

import json
from pathlib import Path
from typing import Any

from jtrain.errors import UserError

FOLDER = "profile"
"""Subfolder of a workdir with one folder per trace window, named after the last step before the window."""

FACTS = "facts.json"

FACT_NAMES = (
    "platform",
    "device_kind",
    "num_devices",
    "tokens_per_step",
    "mesh",
    "peaks",
    "planned",
    "memory",
)
FACT_NAMES += (
    "step_flops",
    "module",
    "settings",
    "goodput",
    "process",
    "num_processes",
    "pipeline",
    "partitions",
)
"""Keys of facts.json."""


def read_facts(folder: Path) -> dict[str, Any]:
    """Reads facts.json of a window.

    Raises:
      UserError: the folder or the file is missing, or the file is truncated or lacks a fact.
    """
    if not folder.is_dir():
        raise UserError(
            f"{folder} is not a folder. Give the folder of a trace window: <workdir>/profile/<step>."
        )
    # Written after the trace and the programs, so a folder with facts has those too.
    file = folder / FACTS
    try:
        facts = json.loads(file.read_text())
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error.strerror}): the run ended inside its window. Trace again."
        ) from error
    except ValueError as error:
        raise UserError(f"{file} is truncated or not JSON ({error}). Trace again.") from error
    missing = [name for name in FACT_NAMES if not isinstance(facts, dict) or name not in facts]
    if missing:
        raise UserError(
            f"{file} lacks {', '.join(missing)}: another version of jtrain wrote it. Trace again."
        )
    return facts


def part_of(window: Path, process: int) -> Path:
    """Folder for a process's trace and report: the window's for process 0, else a subfolder of it."""
    # A run of one process has no subfolders, and process 0 of several looks the same.
    return window if process == 0 else window / f"process-{process}"


def other_parts(window: Path) -> dict[int, Path]:
    """Existing subfolders of the other processes, by process number."""
    folders_by_number = {p.name.removeprefix("process-"): p for p in window.glob("process-*") if p.is_dir()}
    # Sorted by number: process-10 comes after process-2.
    return dict(sorted((int(index), p) for index, p in folders_by_number.items() if index.isdecimal()))
