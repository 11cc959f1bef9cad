"""The C core and NumPy give the same bits, and a library that is not of this source is refused."""

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jtrain.data.constructor import chunk_buffer
from jtrain.data.constructor.collate import ARRAYS, Rows, Spans, fill_by_core, fill_by_numpy, memory_of
from jtrain.data.native.library import LIBRARY, load
from jtrain.data.planner.pieces import Pieces

ROOT = Path(__file__).parents[3]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Pieces, Spans, int, int]:
    """Pieces of arrays of every width at any place, rows that are empty, short and full, and their shape."""
    layout = draw(st.lists(st.lists(st.integers(1, 40), max_size=6), min_size=1, max_size=5))
    seq_len = max(1, *(sum(row) for row in layout)) + draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    dtypes = (np.uint8, np.uint16, np.uint32, np.int32, np.int64)
    arrays = [rng.integers(0, min(np.iinfo(t).max, 1 << 31) - 1, 64).astype(t) for t in dtypes]
    lengths = np.asarray([length for row in layout for length in row], np.int64)
    array = rng.integers(0, len(arrays), len(lengths))
    start = rng.integers(0, 64 - lengths + 1) if len(lengths) else lengths
    row = np.repeat(np.arange(len(layout)), [len(lengths) for lengths in layout])
    zeros = np.zeros_like(lengths)
    memory = np.asarray([memory_of(ids) for ids in arrays], np.int64)
    return (
        Pieces(row, zeros, zeros, zeros, lengths),
        Spans(arrays, memory, array, start),
        len(layout),
        seq_len,
    )


@given(batch=batches())
def test_both_cores_fill_rows_with_the_same_bits(
    library: ctypes.CDLL, batch: tuple[Pieces, Spans, int, int]
) -> None:
    pieces, spans, rows, seq_len = batch
    ours, theirs = (Rows(*(np.full((rows, seq_len), 77, np.int32) for _ in ARRAYS)) for _ in range(2))
    fill_by_core(library, ours, pieces, spans)
    fill_by_numpy(theirs, pieces, spans)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)


@pytest.mark.parametrize(("row", "lengths"), (([1, 0], [1, 1]), ([0, 0], [3, 2]), ([0, 2], [1, 1])), ids=str)
def test_the_core_writes_nothing_beyond_a_row(
    library: ctypes.CDLL, row: list[int], lengths: list[int]
) -> None:
    """Rows out of order, a row that is too full, and a row that is not there."""
    ids, zeros = np.arange(9, dtype=np.uint16), np.zeros(2, np.int64)
    pieces = Pieces(np.asarray(row), zeros, zeros, zeros, np.asarray(lengths))
    spans = Spans([ids], np.asarray([memory_of(ids)], np.int64), zeros, zeros)
    with pytest.raises(AssertionError, match="a piece lies beyond the last row, or a row holds more"):
        fill_by_core(library, Rows.empty(2, 4), pieces, spans)


def test_ids_that_the_core_would_read_otherwise_are_refused() -> None:
    """Bytes of the other order, strides, and signed ids of two bytes."""
    for ids in (np.zeros(4, ">u2"), np.zeros(8, np.uint16)[::2], np.zeros(4, np.int16)):
        with pytest.raises(AssertionError):
            memory_of(ids)


@given(seed=st.integers(0, 99))
def test_both_cores_find_the_same_documents(library: ctypes.CDLL, seed: int) -> None:
    """Documents that are there, that are not, and newer ones in the same place of a ring."""
    rng = np.random.default_rng(seed)
    buffer = chunk_buffer.ChunkBuffer(np.zeros(3, np.int64), lambda run: None)
    buffer._table[:, :] = rng.integers(0, 1000, buffer._table.shape)
    source = rng.integers(0, 3, 50)
    number = rng.integers(0, 1 << 39, 50)
    is_there = rng.random(50) < 0.5
    buffer._table[buffer._table_rows(source, number)[is_there], chunk_buffer.NUMBER] = number[is_there]
    found = buffer._find(source, number)
    assert 0 < (found[0] >= 0).sum() < 50
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_buffer, "core", lambda: None)
        for ours, theirs in zip(found, buffer._find(source, number), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_library_that_is_not_of_this_source_is_not_used(library: ctypes.CDLL, tmp_path: Path) -> None:
    """The first lines of a run say why NumPy does the work, and how to mend that."""
    assert load(LIBRARY)[1] == "data core: C"
    assert load(tmp_path / "none.so") == (
        None,
        "data core: NumPy, which is slower: no C core was built (python hatch_build.py, in a checkout with a C "
        "compiler, builds it)",
    )
    broken, other = tmp_path / "broken.so", tmp_path / "other.so"
    broken.write_bytes(b"no library")
    # One digit of the hash that it carries is enough.
    carried = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, "jtrain_core_source")))
    assert carried in LIBRARY.read_bytes()
    other.write_bytes(LIBRARY.read_bytes().replace(carried, carried[::-1]))
    for path, reason in ((broken, "broken.so"), (other, "other.so is of another core.c")):
        loaded, line = load(path)
        assert loaded is None
        assert reason in line
        assert "hatch_build.py" in line


@pytest.mark.parametrize(("compiler", "reason"), (("/none/cc", "no C compiler"), ("false", "false -std=c11")))
def test_without_a_compiler_the_build_says_why_and_leaves_the_library(
    compiler: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.syspath_prepend(str(ROOT))
    import hatch_build

    refusal = hatch_build.build(tmp_path / "_core.so")
    assert refusal is not None
    assert refusal.startswith(reason)
    assert list(tmp_path.iterdir()) == []


def test_the_core_is_no_module_that_a_loader_pays_for() -> None:
    """The library takes less than 0.1 MB of a process, and no package beside NumPy."""
    program = "import sys, jtrain.data.native.library as l; print(l.core_line(), 'jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.endswith("False\n")
    if LIBRARY.is_file():
        assert LIBRARY.stat().st_size < 100_000
