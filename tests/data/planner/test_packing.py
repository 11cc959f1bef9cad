from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jtrain.data.planner.packing import Packed, Packing, Spans, concat, fit

PACKINGS: tuple[Packing, ...] = ("concat", "first_fit", "best_fit")


class Endless:
    """Repeats documents of the given lengths for ever, and carries remainders from step to step."""

    def __init__(self, lengths: list[int], count: int | None = None) -> None:
        self.lengths, self.count = lengths, count
        self.next = 0
        self.carry: list[tuple[int, tuple[int, int]]] = []  # (number, span)

    def step(self, packing: Packing, rows: int, seq_len: int) -> list[tuple[int, int, int, int]]:
        """Pieces (row, number, start, end) of one step."""
        numbers, spans = [n for n, _ in self.carry], [span for _, span in self.carry]
        carried = np.asarray(spans, np.int64).reshape(-1, 2)

        def more(tokens: int) -> Spans | None:
            total, before = 0, len(spans)
            while total < tokens and (self.count is None or self.next < self.count):
                length = self.lengths[self.next % len(self.lengths)]
                numbers.append(self.next)
                spans.append((0, length))
                self.next, total = self.next + 1, total + length
            return np.asarray(spans[before:], np.int64) if total else None

        if packing == "concat":
            packed: Packed = concat(carried, more, rows=rows, seq_len=seq_len)
        else:
            packed = fit(
                carried, more, rows=rows, seq_len=seq_len, slack_tokens=seq_len, best=packing == "best_fit"
            )
        self.next = numbers[packed.num_used] if packed.num_used < len(numbers) else self.next
        self.carry = [(numbers[i], (start, spans[i][1])) for i, start in packed.remainders.T.tolist()]
        return [(row, numbers[i], start, end) for row, i, start, end in packed.pieces.T.tolist()]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    seq_len=st.integers(2, 17),
    rows=st.integers(1, 5),
    packing=st.sampled_from(PACKINGS),
)
def test_every_token_is_placed_once_in_order_and_no_row_overflows(
    lengths: list[int], seq_len: int, rows: int, packing: Packing
) -> None:
    stream = Endless(lengths, count=len(lengths))
    found: dict[int, list[tuple[int, int]]] = {}
    for _ in range(10_000):
        pieces = stream.step(packing, rows, seq_len)
        if not pieces:
            break
        room = [seq_len] * rows
        for row, number, start, end in sorted(pieces, key=lambda piece: piece[2]):
            room[row] -= end - start
            found.setdefault(number, []).append((start, end))
            if packing != "concat":
                assert start % seq_len == 0, "a document is cut only where a row is full"
                assert end == lengths[number] or end - start == seq_len
        assert min(room) >= 0
    else:
        pytest.fail("documents were left waiting for ever")
    assert not stream.carry
    assert sorted(found) == list(range(len(lengths)))
    for number, spans in found.items():
        assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
        assert spans[-1][1] == lengths[number]


@pytest.mark.parametrize("packing", PACKINGS)
def test_rows_are_full(packing: Packing) -> None:
    """Rows are 99.8 % full with 64 rows of 8192 tokens and a median document of 318; concat fills them
    completely.
    """
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.76, 1.21, 20_000), 16, 8192).astype(int).tolist()
    stream = Endless(lengths)
    fill = [
        sum(end - start for *_, start, end in stream.step(packing, 64, 8192)) / (64 * 8192) for _ in range(12)
    ]
    assert min(fill) >= {"concat": 1.0, "first_fit": 0.997, "best_fit": 0.999}[packing], fill
    assert np.mean(fill) >= 0.998, fill
    assert len(stream.carry) < (2 if packing == "concat" else 500)


@pytest.mark.parametrize("packing", PACKINGS)
def test_no_document_waits_for_ever(packing: Packing) -> None:
    """Best fit tends to leave small documents over, and long documents that do not fit beside others."""
    rng = np.random.default_rng(1)
    stream = Endless(rng.choice([3, 40, 90, 100, 350], 1000).tolist())
    for _ in range(60):
        stream.step(packing, 4, 100)
        oldest = min((number for number, _ in stream.carry), default=stream.next)
        assert stream.next - oldest < 60


def test_a_chunk_as_long_as_a_row_has_a_row_of_its_own() -> None:
    """Only the rows of shorter chunks are cut, and at most one chunk waits."""
    rng = np.random.default_rng(2)
    lengths = np.where(rng.random(900) < 0.8, 256, rng.integers(1, 256, 900))
    stream = Endless(lengths.tolist())
    cut = 0
    for _ in range(20):
        pieces = stream.step("concat", 16, 256)
        rows = Counter(row for row, *_ in pieces)
        whole = {row for row, _, start, end in pieces if end - start == 256}
        assert all(rows[row] == 1 for row in whole)
        assert len(stream.carry) <= 1
        cut += sum(
            stream.lengths[number % 900] == 256 and end - start < 256 for _, number, start, end in pieces
        )
    assert cut <= 2 * 2 * 20, "of all long chunks only the last of a step is cut"


@pytest.mark.parametrize("packing", ["first_fit", "best_fit"])
def test_a_document_of_ten_million_tokens_leaves_room_for_others(packing: Packing) -> None:
    stream = Endless([10_000_000, *[500] * 2000])
    for _ in range(5):
        pieces = stream.step(packing, 64, 1024)
        assert sum(end - start for _, n, start, end in pieces if n == 0) <= 64 * 1024 // 2
        assert sum(end - start for *_, start, end in pieces) > 0.95 * 64 * 1024
    assert any(number == 0 for number, _ in stream.carry)


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_last_document_fills_whole_batches_however_long_it_is(packing: Packing) -> None:
    stream = Endless([64 * 100 * 3], count=1)
    assert [len({row for row, *_ in stream.step(packing, 64, 100)}) for _ in range(4)] == [64, 64, 64, 0]


def test_concat_asks_for_little_more_than_it_needs() -> None:
    asked = []

    def more(tokens: int) -> Spans | None:
        asked.append(tokens)
        return np.asarray([(0, 100)] * (tokens // 100 + 1), np.int64)

    concat(np.asarray([(100, 150)], np.int64), more, rows=32, seq_len=200)
    assert asked == [32 * 200 - 50]
