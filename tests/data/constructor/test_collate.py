import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jtrain.constants import IGNORE
from jtrain.data.constructor.collate import Rows, fill_rows, views_of
from jtrain.data.planner.pieces import Pieces

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


@given(layout=layouts, spare=st.integers(0, 4))
def test_rows_are_what_the_plan_says(layout: list[list[int]], spare: int) -> None:
    seq_len = max(2, max(sum(r) for r in layout) + spare)
    pieces, ids = documents(layout)
    out = Rows(*(np.full((len(layout), seq_len), 77, np.int32) for _ in range(4)))
    fill_rows(out, pieces, views_of(lambda source, document: ids[source, document]))
    number = 0
    for row, lengths in enumerate(layout):
        at = 0
        for segment, length in enumerate(lengths, 1):
            here = slice(at, at + length)
            start = int(pieces.start[number])
            want = ids[number % 3, number][start : start + length].tolist()
            assert out.token_BL[row, here].tolist() == want
            assert out.target_BL[row, here].tolist() == [*want[1:], IGNORE], "targets never cross documents"
            assert out.position_BL[row, here].tolist() == list(range(length))
            assert (out.segment_BL[row, here] == segment).all()
            at, number = at + length, number + 1
        for array, padding in zip(
            (out.token_BL, out.target_BL, out.position_BL, out.segment_BL), (0, IGNORE, 0, 0), strict=True
        ):
            assert (array[row, at:] == padding).all()


@given(layout=layouts, seed=st.integers(0, 99))
def test_a_host_fills_only_its_own_rows(layout: list[list[int]], seed: int) -> None:
    seq_len = max(2, max(sum(r) for r in layout))
    pieces, ids = documents(layout)
    whole = Rows.empty(len(layout), seq_len)
    fill_rows(whole, pieces, views_of(lambda source, document: ids[source, document]))
    mine = np.flatnonzero(np.random.default_rng(seed).integers(0, 2, len(layout)))
    part = Rows.empty(len(mine), seq_len)
    fill_rows(part, pieces.of_rows(mine), views_of(lambda source, document: ids[source, document]))
    for field in ("token_BL", "target_BL", "position_BL", "segment_BL"):
        np.testing.assert_array_equal(getattr(part, field), getattr(whole, field)[mine])


def test_a_document_that_has_shrunk_is_an_error() -> None:
    one = np.zeros(1, np.int64)
    pieces = Pieces(one, one, one + 4, one + 3, one + 9)
    with pytest.raises(ValueError, match="document 4 of source 0 was planned up to token 9, but ends at 7: its files"):
        fill_rows(Rows.empty(1, 8), pieces, views_of(lambda source, document: np.arange(7)))
