"""Batches of the run's own data with the record of every token, and the same records cut or one by one."""

import dataclasses
import itertools
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np

from jtrain.check.lines import Differs
from jtrain.data import TextDataset
from jtrain.data.constructor.collate import ARRAYS
from jtrain.data.planner.pieces import Pieces
from jtrain.errors import UserError
from jtrain.layout.constants import IGNORE

type SampleArrays = dict[str, Any]
"""token_BL, target_BL, position_BL and segment_BL, int32."""

REFERENCE = "reference_BL"
"""Array of what a stored reference says of pairs, float32."""

BETTER, WORSE = 0, 1
"""Sides of a pair, in the order in which their texts lie in a row."""

CUTS = 3
"""Most places at which `cut_rows` ends a document within a row."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Part of a record in a row: columns `start` to `end` - 1.

    name: source and `file:number` of the record, and which text of a pair.
    side: BETTER or WORSE text of a pair; None for what is no pair.
    """

    row: int
    start: int
    end: int
    name: str
    source: int
    record: int
    side: int | None = None

    @property
    def place(self) -> str:
        """Record of the sample, and where it lies in the batch."""
        return f"{self.name} (row {self.row}, columns {self.start} to {self.end - 1})"

    def of(self, array_BL: np.ndarray) -> np.ndarray:
        """Part of an array of the batch that is the sample's."""
        return array_BL[self.row, self.start : self.end]


@dataclasses.dataclass(frozen=True)
class Sample:
    """A batch, and the pieces that it is made of, in the order of rows and columns."""

    arrays: SampleArrays
    pieces: tuple[Piece, ...]

    @property
    def units(self) -> list[tuple[Piece, ...]]:
        """Pieces that have a loss together: both texts of each pair, others alone."""
        if all(piece.side is None for piece in self.pieces):
            return [(piece,) for piece in self.pieces]
        return list(zip(self.pieces[::2], self.pieces[1::2], strict=True))

    @property
    def ids(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, targets and segments, of which hashes of samples are made."""
        return self.arrays["token_BL"], self.arrays["target_BL"], self.arrays["segment_BL"]

    @property
    def num_targets(self) -> int:
        """Targets of the batch."""
        return int((self.arrays["target_BL"] != IGNORE).sum())

    def only(self, units: Sequence[Sequence[Piece]]) -> "Sample":
        """The same batch in which only the pieces of these units have targets."""
        target_BL = np.full_like(self.arrays["target_BL"], IGNORE)
        for piece in itertools.chain.from_iterable(units):
            piece.of(target_BL)[:] = piece.of(self.arrays["target_BL"])
        return Sample({**self.arrays, "target_BL": target_BL}, self.pieces)


def read_samples(dataset: TextDataset) -> Generator[Sample]:
    """Yields the batches of a run, from the first one on."""
    with dataset.train_batches(inline=True) as iterator:
        for batch in iterator:
            assert iterator.plan is not None, "only a data plane in this process tells its plan"
            # Copies, since the data plane fills its arrays anew.
            arrays = {name: np.array(getattr(batch, name)) for name in ARRAYS}
            yield Sample(arrays, _pieces(dataset, iterator.plan.pieces, arrays["segment_BL"]))


def _pieces(dataset: TextDataset, pieces: Pieces, segment_BL: np.ndarray) -> tuple[Piece, ...]:
    out: list[Piece] = []
    column = row = 0
    several = len(dataset.names) > 1
    for i in range(len(pieces)):
        source, length = int(pieces.source[i]), int(pieces.end[i] - pieces.start[i])
        # Pieces are sorted by row and lie end to end: columns start anew with each row.
        column, row = (column if pieces.row[i] == row else 0), int(pieces.row[i])
        stream = dataset.streams[source]
        record = int(stream.locate(np.asarray([pieces.document[i]], np.int64)).record[0])
        name = stream.identity_of(record)
        name = f"{dataset.names[source]} {name}" if several else name
        piece = Piece(row, column, column + length, name, source, record)
        out += [piece] if stream.setup.source.rejected_field is None else texts_of_pair(piece, segment_BL)
        column += length
    return tuple(out)


def texts_of_pair(pair: Piece, segment_BL: np.ndarray) -> list[Piece]:
    """Both texts of a pair, where its segment changes.

    Raises:
      Differs: it does not change once.
    """
    borders = np.flatnonzero(np.diff(pair.of(segment_BL))) + 1
    if len(borders) != 1:
        raise Differs(f"the pair {pair.place} has {len(borders) + 1} segments, and two texts")
    border = pair.start + int(borders[0])
    return [
        dataclasses.replace(pair, end=border, name=f"{pair.name} (better)", side=BETTER),
        dataclasses.replace(pair, start=border, name=f"{pair.name} (worse)", side=WORSE),
    ]


def cut_pairs(sample: Sample, *, seed: int) -> Sample:
    """Copy of the batch with irregular pairs: texts cut by up to 3 tokens, one row empty, one row without
    targets, and one pair whose worse text has no targets. As `cut_rows`, but both texts of a pair stay beside
    each other.
    """
    rng = np.random.default_rng(seed)
    arrays = {name: np.zeros_like(array) for name, array in sample.arrays.items()}
    arrays["target_BL"][:] = IGNORE
    rows = arrays["token_BL"].shape[0]
    empty, unscored = (int(row) for row in rng.choice(rows, 2, replace=False)) if rows > 3 else (-1, -1)
    one_sided = int(rng.integers(len(sample.units)))
    pieces: list[Piece] = []
    for number, unit in enumerate(sample.units):
        for piece in unit:
            if piece.row == empty:
                continue
            previous = pieces[-1] if pieces and pieces[-1].row == piece.row else None
            start = previous.end if previous else 0
            length = piece.end - piece.start
            # Of short answers something is left.
            length -= int(rng.integers(0, max(1, min(4, length // 8))))
            part = dataclasses.replace(piece, start=start, end=start + length)
            source = dataclasses.replace(piece, end=piece.start + length)
            pieces.append(part)
            part.of(arrays["token_BL"])[:] = source.of(sample.arrays["token_BL"])
            part.of(arrays["segment_BL"])[:] = sum(p.row == piece.row for p in pieces)
            part.of(arrays["position_BL"])[:] = np.arange(length)
            if piece.row != unscored and not (number == one_sided and piece.side == WORSE):
                target = source.of(sample.arrays["target_BL"]).copy()
                # The last token of a text predicts nothing.
                target[-1] = IGNORE
                part.of(arrays["target_BL"])[:] = target
    return Sample(arrays, tuple(pieces))


def cut_rows(sample: Sample, *, seed: int) -> Sample:
    """The same rows with further ends of documents, masked beginnings, padding, an empty row and one without
    targets: nothing that a layout could take for something else is alike in two rows.
    """
    rng = np.random.default_rng(seed)
    arrays = {name: np.zeros_like(array) for name, array in sample.arrays.items()}
    arrays["target_BL"][:] = IGNORE
    rows, columns = arrays["token_BL"].shape
    empty, unscored = (int(row) for row in rng.choice(rows, 2, replace=False)) if rows > 3 else (-1, -1)
    pieces: list[Piece] = []
    for row in range(rows):
        # Rows end at different columns; the rest is padding.
        filled = 0 if row == empty else columns - int(rng.integers(0, columns // 4))
        borders = set(rng.integers(1, columns, int(rng.integers(1, CUTS + 1))).tolist())
        segment = 0
        for piece in (piece for piece in sample.pieces if piece.row == row):
            inner = sorted(border for border in borders if piece.start < border < piece.end)
            for start, end in itertools.pairwise([piece.start, *inner, piece.end]):
                end = min(end, filled)
                if start >= end:
                    continue
                segment += 1
                part = dataclasses.replace(piece, start=start, end=end)
                pieces.append(part)
                part.of(arrays["token_BL"])[:] = part.of(sample.arrays["token_BL"])
                part.of(arrays["segment_BL"])[:] = segment
                part.of(arrays["position_BL"])[:] = np.arange(end - start)
                if row != unscored:
                    target = part.of(sample.arrays["target_BL"]).copy()
                    # The last token of a document predicts nothing, nor does a prompt.
                    target[-1] = IGNORE
                    target[: int(rng.integers(0, 3)) if segment % 2 else 0] = IGNORE
                    part.of(arrays["target_BL"])[:] = target
    return Sample(arrays, tuple(pieces))


def one_by_one(
    sample: Sample, units: Sequence[Sequence[Piece]] | None = None
) -> Iterator[tuple[Sample, list[int]]]:
    """Yields batches of the same shape with one unit a row, and the numbers of the units.

    Tokens and the choice of targets are those of the batch; ids of targets, positions and segments are made
    anew, so that what the batch has of them is not taken for granted.

    Args:
      units: pieces that share a row; None for each in one of its own.
    """
    rows = sample.arrays["token_BL"].shape[0]
    units = [(piece,) for piece in sample.pieces] if units is None else units
    for numbers in itertools.batched(range(len(units)), rows):
        arrays = {name: np.zeros_like(array) for name, array in sample.arrays.items()}
        arrays["target_BL"][:] = IGNORE
        pieces = []
        for row, number in enumerate(numbers):
            start = 0
            for segment, piece in enumerate(units[number], start=1):
                alone = dataclasses.replace(piece, row=row, start=start, end=start + piece.end - piece.start)
                pieces.append(alone)
                ids = piece.of(sample.arrays["token_BL"])
                alone.of(arrays["token_BL"])[:] = ids
                alone.of(arrays["position_BL"])[:] = np.arange(len(ids))
                alone.of(arrays["segment_BL"])[:] = segment
                is_learned = piece.of(sample.arrays["target_BL"])[:-1] != IGNORE
                alone.of(arrays["target_BL"])[:-1] = np.where(is_learned, ids[1:], IGNORE)
                if REFERENCE in arrays:
                    alone.of(arrays[REFERENCE])[:] = piece.of(sample.arrays[REFERENCE])
                start = alone.end
        yield Sample(arrays, tuple(pieces)), list(numbers)


def with_few_ids(samples: Sequence[Sample]) -> tuple[list[Sample], int]:
    """The same batches with the ids that occur numbered anew, without gaps, and the size of that vocabulary.

    A table of 128,000 rows of which 500 are used would only take time. The size is a multiple of 16, so that
    it splits over every axis.
    """
    used = np.unique(np.concatenate([sample.arrays["token_BL"].reshape(-1) for sample in samples]))
    renamed = []
    for sample in samples:
        target_BL = sample.arrays["target_BL"]
        target_ids = np.searchsorted(used, target_BL)
        # A target that is no token of the batch would be given a wrong name.
        is_target = target_BL != IGNORE
        # An id above all that are used has the index behind the last one.
        if not np.array_equal(used[np.minimum(target_ids, len(used) - 1)][is_target], target_BL[is_target]):
            raise UserError("a target of the batch is none of its tokens: the data plane mixed up two rows.")
        arrays = {
            "token_BL": np.searchsorted(used, sample.arrays["token_BL"]).astype(np.int32),
            "target_BL": np.where(is_target, target_ids, IGNORE).astype(np.int32),
        }
        renamed.append(Sample({**sample.arrays, **arrays}, sample.pieces))
    return renamed, -(-len(used) // 16) * 16
