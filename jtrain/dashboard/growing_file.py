"""Files that a run appends to and sometimes rewrites, read as they grow, and columns of their numbers."""

import json
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from jtrain.report.number_formats import Number
from jtrain.telemetry.append_file import parse_line

CHUNK_BYTES = 4 << 20
"""Bytes that are read at once: thousands of lines, in a tenth of a second."""

_TAIL_BYTES = 4096


class GrowingFile:
    """Entries of a file of JSON lines, each read once; a line without its end waits for it.

    A run that goes on from an earlier step rewrites its file. That shows where the end of what was read is no
    longer at its place: times have so many digits that no other line equals it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset, self._tail = 0, b""
        self.clear()

    def clear(self) -> None:
        """Forgets all entries: the file has another history."""
        self.entries: list[dict[str, Any]] = []

    def add(self, entry: dict[str, Any]) -> None:
        """Takes the next entry."""
        self.entries.append(entry)

    def parse(self, lines: Sequence[bytes]) -> list[dict[str, Any] | None]:
        """Returns the entries of lines; None for one that cannot be read."""
        try:
            # All at once takes half the time.
            values = json.loads(b"[%b]" % b",".join(lines))
            return [value if isinstance(value, dict) else None for value in values]
        except (ValueError, RecursionError):
            return [parse_line(line) for line in lines]

    def refresh(self) -> bool:
        """Reads the next lines; True if there were any, and there may be more."""
        content = self._read_lines()
        for entry in self.parse(content.splitlines()):
            if entry is not None:
                self.add(entry)
        return bool(content)

    def _read_lines(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset - len(self._tail))
                if file.read(len(self._tail)) != self._tail:
                    self._offset, self._tail = file.seek(0), b""
                    self.clear()
                chunk = file.read(CHUNK_BYTES)
        except OSError:  # not there yet, or the disk is away: what was read stays
            return b""
        content = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(content)
        self._tail = (self._tail + content)[-_TAIL_BYTES:]
        return content


class Columns:
    """Numbers by name and step; NaN where a line has none. Values of objects are named `data_tokens.web`.

    Args:
      names: fields that are kept.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._steps = array("d")
        self._columns: dict[str, array[float]] = {}

    def add(self, step: int, line: Mapping[str, Any]) -> None:
        """Adds the values of a line that this has names for."""
        for name in self._names:
            value = line.get(name)
            if isinstance(value, dict):
                for key, part in value.items():
                    self._append(f"{name}.{key}", part)
            else:
                self._append(name, value)
        self._steps.append(step)

    def _append(self, name: str, value: Number | None) -> None:
        if value is not None:
            if (column := self._columns.get(name)) is None:
                column = self._columns[name] = array("d")
            # Lines before this one did not have it.
            if missing := len(self._steps) - len(column):
                column.extend([np.nan] * missing)
            column.append(value)

    def names(self, prefix: str = "") -> list[str]:
        """Names of the columns that begin so, in the order in which they appeared."""
        return [name for name in self._columns if name.startswith(prefix)]

    def values(self, name: str) -> Float64[np.ndarray, " lines"]:
        """Values of a column, in the order of `steps`."""
        values = np.full(len(self._steps), np.nan)
        column = self._columns.get(name, ())
        values[: len(column)] = column
        return values[self._order]

    @property
    def steps(self) -> Float64[np.ndarray, " lines"]:
        """Steps, ascending."""
        return np.asarray(self._steps)[self._order]

    @property
    def _order(self) -> Any:
        steps = np.asarray(self._steps)
        # The ledger has steps that were done again; metrics.jsonl is one history, and needs no sort.
        return np.argsort(steps, kind="stable") if np.any(np.diff(steps) < 0) else slice(None)
