from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jtrain.data.constructor import collate
from jtrain.data.constructor.collate import ARRAYS, Rows, fill_by_numpy, fill_rows, spans_of
from jtrain.data.planner.pieces import Pieces
from jtrain.layout.constants import IGNORE

layouts = st.lists(st.lists(st.integers(1, 9), max_size=5), min_size=1, max_size=6)


def documents(layout: list[list[int]]) -> tuple[Pieces, dict[tuple[int, int], np.ndarray]]:
    """Returns pieces of the given lengths, each in the middle of its own document."""
    row = np.repeat(np.arange(len(layout)), [len(r) for r in layout]).astype(np.int64)
    lengths = np.asarray([n for r in layout for n in r], np.int64)
    number = np.arange(len(lengths), dtype=np.int64)
    pieces = Pieces(row, number % 3, number, number % 4, number % 4 + lengths)
    ids = {
        (int(n % 3), int(n)): np.arange(100 * n, 100 * n + end + 2).astype(np.uint16)
        for n, end in zip(number, pieces.end, strict=True)
    }
    return pieces, ids


def collated(pieces: Pieces, rows: int, seq_len: int, ids_of: Callable[[int, int], np.ndarray]) -> Rows:
    """What a plan says, document by document: targets never cross from one to the next."""
    out = Rows(*(np.full((rows, seq_len), padding, np.int32) for padding in (0, IGNORE, 0, 0)))
    first, number = [0] * rows, [0] * rows
    columns = (pieces.row, pieces.source, pieces.document, pieces.start, pieces.end)
    for row, source, document, start, end in zip(*(column.tolist() for column in columns), strict=True):
        number[row] += 1
        columns_of_piece = slice(first[row], first[row] + end - start)
        ids = ids_of(source, document)[start:end].tolist()
        out.token_BL[row, columns_of_piece] = ids
        out.target_BL[row, columns_of_piece] = [*ids[1:], IGNORE]
        out.position_BL[row, columns_of_piece] = range(len(ids))
        out.segment_BL[row, columns_of_piece] = number[row]
        first[row] += len(ids)
    return out


def assert_collated(layout: list[list[int]], seq_len: int) -> None:
    """Fills arrays that held something else; `tests/data/native` holds the C core to the same."""
    pieces, ids = documents(layout)
    out = Rows(*(np.full((len(layout), seq_len), 77, np.int32) for _ in range(4)))
    fill_by_numpy(out, pieces, spans_of(lambda source, document: ids[source, document])(pieces))
    want = collated(pieces, len(layout), seq_len, lambda source, document: ids[source, document])
    for field in ARRAYS:
        np.testing.assert_array_equal(getattr(out, field), getattr(want, field), err_msg=field)


@given(layout=layouts, spare=st.integers(0, 4), block=st.sampled_from((1, 30, 100, 1 << 15)))
def test_rows_are_what_the_plan_says(layout: list[list[int]], spare: int, block: int) -> None:
    """However many rows are filled at a time: one, some, or all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collate, "BLOCK_TOKENS", block)
        assert_collated(layout, max(2, max(sum(r) for r in layout) + spare))


@pytest.mark.parametrize(("rows", "seq_len"), ((5, 16384), (11, 7000), (4, 40000)))
def test_batches_of_production_size_are_what_the_plan_says(rows: int, seq_len: int) -> None:
    """Three or more blocks, of two rows, of four rows, and of one row that is longer than a block.

    A row is empty, one document, or full of documents of one token; others end in padding.
    """
    rng = np.random.default_rng(0)
    kinds = ([], [seq_len], [1] * 300)
    others = [np.diff(np.unique(rng.integers(1, seq_len, 40)), prepend=0).tolist() for _ in range(rows)]
    layout = [kinds[row % 5] if row % 5 < 3 else others[row] for row in range(rows)]
    assert rows * seq_len > 2 * collate.BLOCK_TOKENS
    assert_collated(layout, seq_len)


@given(layout=layouts, seed=st.integers(0, 99))
def test_a_host_fills_only_its_own_rows(layout: list[list[int]], seed: int) -> None:
    seq_len = max(2, max(sum(r) for r in layout))
    pieces, ids = documents(layout)
    whole = Rows.empty(len(layout), seq_len)
    fill_rows(whole, pieces, spans_of(lambda source, document: ids[source, document]))
    mine = np.flatnonzero(np.random.default_rng(seed).integers(0, 2, len(layout)))
    part = Rows.empty(len(mine), seq_len)
    fill_rows(part, pieces.of_rows(mine), spans_of(lambda source, document: ids[source, document]))
    for field in ("token_BL", "target_BL", "position_BL", "segment_BL"):
        np.testing.assert_array_equal(getattr(part, field), getattr(whole, field)[mine])


def test_a_document_that_has_shrunk_is_an_error() -> None:
    one = np.zeros(1, np.int64)
    pieces = Pieces(one, one, one + 4, one + 3, one + 9)
    with pytest.raises(
        ValueError, match="document 4 of source 0 was planned up to token 9, but ends at 7: its files"
    ):
        fill_rows(Rows.empty(1, 8), pieces, spans_of(lambda source, document: np.arange(7)))
