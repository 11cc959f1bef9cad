"""Inputs that fuzzing found, and the whole files that it began from: read, or refused with one message.

Steps and memory are counted, not seconds, so that the verdict does not depend on the machine.
"""

import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.data.fuzz.__main__ import CORPUS
from tests.data.fuzz.targets import TARGETS, run

MOST_LINES = 2_000_000
"""Lines of Python that an input may take. The largest input takes 0.3 million, most of them imports."""

MOST_BYTES = 48 << 20
"""Memory that an input may take at once: 3,000 times the largest input. Most of it is PyArrow's and the JSON
lines'."""


@pytest.mark.parametrize("name", TARGETS)
def test_the_inputs_that_were_found_are_read_or_refused(name: str, tmp_path: Path) -> None:
    """Each input ends in records or one UserError, within the bounds of lines and bytes."""
    inputs = sorted((CORPUS / name).iterdir())
    outcomes = {file.name: _bounded(name, file.read_bytes(), tmp_path / file.name) for file in inputs}
    assert all(said for said in outcomes.values())
    # Every dataset of several splits is refused.
    assert "read" in outcomes.values() or name == "saved_splits", outcomes


def test_every_corpus_has_a_target() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} == set(TARGETS)
    assert sum(file.stat().st_size for file in CORPUS.rglob("*") if file.is_file()) < 200_000


def test_the_bounds_end_a_loop_without_end() -> None:
    """Guards the tests above: the loop of a reader that makes no progress is found."""

    def forever() -> None:
        while True:
            pass

    with pytest.raises(AssertionError, match="2,000,000 lines"), _LineCount():
        forever()


def _bounded(name: str, content: bytes, folder: Path) -> str:
    for again in (folder.with_suffix(".first"), folder):
        again.mkdir()
    run(name, content, folder.with_suffix(".first"))  # imports what it needs
    arrow = pa.default_memory_pool()
    tracemalloc.start()
    try:
        before = arrow.bytes_allocated()
        with _LineCount():
            said = run(name, content, folder)
        peak = tracemalloc.get_traced_memory()[1] + arrow.bytes_allocated() - before
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES, f"{name}: {peak:,} bytes"
    return said


class _LineCount:
    """Counts the lines of Python that run in the block, and raises AssertionError beyond `MOST_LINES`."""

    def __enter__(self) -> None:
        events = sys.monitoring
        self._tool = next(i for i in range(6) if events.get_tool(i) is None)
        self._left = MOST_LINES
        events.use_tool_id(self._tool, "lines")
        events.register_callback(self._tool, events.events.LINE, self._count)
        events.set_events(self._tool, events.events.LINE)

    def __exit__(self, *error: Any) -> None:
        sys.monitoring.set_events(self._tool, 0)
        sys.monitoring.free_tool_id(self._tool)

    def _count(self, *line: Any) -> None:
        self._left -= 1
        assert self._left, f"more than {MOST_LINES:,} lines"
