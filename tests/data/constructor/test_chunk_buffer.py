import numpy as np
import pytest

from jtrain.data.constructor.chunk_buffer import ChunkBuffer, keys_of, split_keys
from jtrain.data.loaders.messages import ChunkRun, starts_of
from jtrain.data.planner.pieces import Pieces


def run_of(source: int, numbers: list[int], skipped: dict[int, str] | None = None) -> ChunkRun:
    """Returns a run in which document n has 1 + n % 5 tokens, each equal to its number."""
    lengths = np.asarray([1 + n % 5 for n in numbers], np.int32)
    ids = np.repeat(np.asarray(numbers, np.int32), lengths)
    return ChunkRun(
        source, np.asarray(numbers, np.int64), starts_of(lengths), ids, skipped or {}, 0.0, "loader"
    )


def pieces_of(keys: list[tuple[int, int]]) -> Pieces:
    """Returns pieces with one complete document per row."""
    source, number = np.asarray(keys, np.int64).reshape(-1, 2).T
    return Pieces(np.arange(len(keys)), source, number, np.zeros(len(keys), np.int64), 1 + number % 5)


def views_of(buffer: ChunkBuffer, pieces: Pieces) -> list[np.ndarray]:
    """Returns the ids of each piece."""
    spans, lengths = buffer.spans(pieces), pieces.end - pieces.start
    columns = zip(spans.array, spans.start, lengths, strict=True)
    return [spans.arrays[array][start : start + length] for array, start, length in columns]


def keys(documents: set[tuple[int, int]]) -> np.ndarray:
    source, number = np.asarray(sorted(documents), np.int64).reshape(-1, 2).T
    return keys_of(source, number)


@pytest.mark.parametrize("seed", range(12))
def test_a_buffer_is_a_dict_of_documents(seed: int) -> None:
    """Runs come in any size and order, far ahead; documents stay open for many steps; each run is released
    once.
    """
    rng = np.random.default_rng(seed)
    sources, released, runs = 3, [], []
    buffer = ChunkBuffer(np.zeros(sources, np.int64), lambda run: released.append(id(run)))
    cursors, asked = np.zeros(sources, np.int64), np.zeros(sources, np.int64)
    held: set[tuple[int, int]] = set()
    still_open: set[tuple[int, int]] = set()
    for _ in range(12):
        for source in rng.permutation(sources).tolist():
            for size in rng.integers(1, 90, int(rng.integers(0, 3))).tolist():
                numbers = list(range(int(asked[source]), int(asked[source]) + size))
                runs.append(run_of(source, numbers))
                buffer.put(runs[-1])
                held |= {(source, n) for n in numbers}
                asked[source] += size
        wanted = sorted(held)
        views = views_of(buffer, pieces_of(wanted))
        assert [(view[0], len(view)) for view in views] == [(n, 1 + n % 5) for _, n in wanted]
        moved = rng.integers(cursors, asked + 1)
        passed = {(s, n) for s in range(sources) for n in range(int(cursors[s]), int(moved[s]))} | still_open
        kept = {key for key in sorted(passed) if rng.random() < 0.2}
        assert buffer.drop(keys(passed - kept), keys(kept), moved) == []
        held -= passed - kept
        cursors, still_open = moved, kept
        over = {id(run) for run in runs if not any((run.source, n) in held for n in run.numbers.tolist())}
        assert sorted(released) == sorted(over), "each run goes back when its last document is done, once"
    assert held
    assert buffer.holds(pieces_of(sorted(held)))
    assert not buffer.holds(pieces_of([(0, int(asked[0]) + 7)]))


def test_keys_lead_back_to_documents() -> None:
    source, number = np.asarray([0, 305, 2]), np.asarray([(1 << 40) - 1, 0, 77])
    assert [part.tolist() for part in split_keys(keys_of(source, number))] == [
        source.tolist(),
        number.tolist(),
    ]


def test_documents_are_asked_for_once_and_are_missing_until_they_come() -> None:
    """A host with few rows asks for single documents, including some that rows of other hosts have begun."""
    buffer = ChunkBuffer(np.asarray([100]), lambda run: None)
    wanted = np.asarray([90, 100, 163, 400])
    assert buffer.expect(0, wanted).tolist() == wanted.tolist()
    assert not len(buffer.expect(0, wanted))
    buffer.put(run_of(0, [90, 100, 163]))
    assert buffer.holds(pieces_of([(0, 90), (0, 100), (0, 163)]))
    assert not buffer.holds(pieces_of([(0, 90), (0, 400)]))
    # 101 is carried by another host. This host has not asked for it, so a later step must be able to.
    passed = {(0, n) for n in range(100, 170)} | {(0, 90)}
    kept = {(0, 101), (0, 163)}
    assert buffer.drop(keys(passed - kept), keys(kept), np.asarray([170])) == []
    assert buffer.expect(0, np.asarray([101, 163])).tolist() == [101]
    assert views_of(buffer, pieces_of([(0, 163)]))[0].tolist() == [163] * 4


def test_what_a_loader_skipped_is_said_when_it_is_dropped() -> None:
    buffer = ChunkBuffer(np.asarray([0]), lambda run: None)
    buffer.put(run_of(0, [0, 1, 2], {1: "no text"}))
    run, at = buffer.find(0, 1) or (None, -1)
    assert (run is not None and run.numbers[at], buffer.find(0, 9)) == (1, None)
    bad = buffer.drop(keys({(0, 0), (0, 1)}), keys(set()), np.asarray([2]))
    assert [(run.skipped[number], number) for run, number in bad] == [("no text", 1)]


def test_a_document_shorter_than_planned_is_an_error() -> None:
    buffer = ChunkBuffer(np.asarray([0]), lambda run: None)
    buffer.put(run_of(0, [0, 1, 2]))
    pieces = Pieces(*(np.asarray([x]) for x in (0, 0, 1, 0, 3)))
    with pytest.raises(ValueError, match="document 1 of source 0 was planned up to token 3, but ends at 2"):
        buffer.spans(pieces)
