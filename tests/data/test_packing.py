import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jtrain.data.packing import RowPacker
from jtrain.dims import IGNORE, Batch

lengths = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(sum)


def documents(lengths: list[int]) -> list[np.ndarray]:
    """Every token of every document has a value of its own."""
    ends = np.cumsum(lengths)
    return [np.arange(end - n + 1, end + 1, dtype=np.int32) for end, n in zip(ends.tolist(), lengths, strict=True)]


def pieces(batch: Batch) -> list[list[int]]:
    """The tokens of each segment, row by row; checks what must hold of any row on the way."""
    found = []
    for token, target, position, segment in zip(
        *map(np.asarray, (batch.token_BL, batch.target_BL, batch.position_BL, batch.segment_BL)), strict=True
    ):
        real = segment > 0
        assert not real[np.argmin(real) :].any() or real.all(), "padding comes last"
        assert (target[~real] == IGNORE).all()
        assert segment[real].tolist() == sorted(segment[real].tolist())
        for number in range(1, segment.max() + 1):
            here = segment == number
            assert here.any(), "segments are numbered without gaps"
            assert position[here].tolist() == list(range(here.sum())), "positions restart in each document"
            assert target[here].tolist() == [*token[here][1:].tolist(), IGNORE], "targets never cross documents"
            found.append(token[here].tolist())
    return found


@given(lengths=lengths, seq_len=st.integers(2, 17), lanes=st.integers(1, 5), rows=st.integers(1, 4))
def test_every_token_appears_exactly_once_in_order(lengths: list[int], seq_len: int, lanes: int, rows: int) -> None:
    docs = documents(lengths)
    packer = RowPacker(docs.__getitem__, seq_len=seq_len, lanes=lanes, count=len(docs), epoch_documents=len(docs))
    found = []
    for _ in range(-(-sum(lengths) // rows)):
        if not packer.exhausted:
            found += pieces(packer.take(rows))
    assert packer.exhausted
    assert sorted(token for piece in found for token in piece) == list(range(1, sum(lengths) + 1))
    owner = np.repeat(np.arange(len(docs)), lengths)
    for piece in found:
        assert len(set(owner[np.asarray(piece) - 1])) == 1
    for doc in range(len(docs)):
        of_doc = [token for piece in found if owner[piece[0] - 1] == doc for token in piece]
        assert of_doc == docs[doc].tolist()


@given(
    lengths=lengths, seq_len=st.integers(2, 17), lanes=st.integers(1, 5), stops=st.lists(st.integers(0, 9), max_size=4)
)
def test_restoring_any_number_of_times_goes_on_as_if_unbroken(
    lengths: list[int], seq_len: int, lanes: int, stops: list[int]
) -> None:
    docs = documents(lengths)

    def fresh() -> RowPacker:
        return RowPacker(lambda n: docs[n % len(docs)], seq_len=seq_len, lanes=lanes, epoch_documents=len(docs))

    whole, broken = fresh(), fresh()
    for rows in stops:
        state = broken.state()
        broken = fresh()
        broken.restore(state)
        assert broken.state() == state
        np.testing.assert_array_equal(broken.take(rows).token_BL, whole.take(rows).token_BL)
        assert broken.state() == whole.state()


def test_neighbouring_rows_come_from_different_documents() -> None:
    """One lane would fill a batch from a single long document."""
    docs = [np.full(1000, n, np.int32) for n in range(8)]
    for lanes, want in ((8, 8), (1, 1)):
        packer = RowPacker(docs.__getitem__, seq_len=10, lanes=lanes, epoch_documents=8)
        assert len(np.unique(packer.take(8).token_BL)) == want


def test_restoring_reads_only_the_documents_that_are_open() -> None:
    reads: list[int] = []

    def document(n: int) -> np.ndarray:
        reads.append(n)
        return np.full(25, n, np.int32)

    packer = RowPacker(document, seq_len=10, lanes=4, epoch_documents=10**6)
    packer.take(4000)
    state = packer.state()
    reads.clear()
    fresh = RowPacker(document, seq_len=10, lanes=4, epoch_documents=10**6)
    fresh.restore(state)
    assert reads == []
    fresh.take(4)
    assert len(reads) <= 8


def test_a_corpus_without_a_token_is_an_error_not_a_hang() -> None:
    packer = RowPacker(lambda _: np.empty(0, np.int32), seq_len=4, lanes=2, epoch_documents=5)
    with pytest.raises(ValueError, match=r"data\.path holds no text: 5 documents in a row.*data\.on_bad_record='fail'"):
        packer.take(1)


def test_a_document_that_has_shrunk_since_the_state_was_saved_is_an_error() -> None:
    packer = RowPacker(lambda _: np.ones(5, np.int32), seq_len=4, lanes=1, epoch_documents=5)
    packer.restore({"row": 3, "next_document": 1, "lanes": [0, 7]})
    with pytest.raises(ValueError, match=r"token 7 of a document that now has 5: the files of data\.path have changed"):
        packer.take(1)
