"""Report on the order of the training data, measured on batches: how alike neighbouring rows and steps
are.
"""

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64, Int64

from jtrain.data.mixture.schedule import own_weights
from jtrain.errors import UserError
from jtrain.report.table import Table, numbers, words

if TYPE_CHECKING:
    from jtrain.data.dataset import TextDataset
    from jtrain.data.planner.pieces import Pieces
    from jtrain.layout.dims import Batch

LAGS = (1, 10)
"""Distances between two steps that are compared."""

LEAST_STEPS = 20
"""Fewest steps that say anything at the largest lag."""

MOST_SOURCES = 12
"""Sources that the table lists, those farthest from their shares first."""

_GOOD = {
    "documents": "Good is many: rows of one document teach less than rows of several.",
    "distinct": "Good is 0.95 or more; rows of many short documents make it larger than 1.",
    "overlap": (
        "Good is what one shuffle of all chunks gives, beside it, and for k+1 a chunk that a step's end cuts."
    ),
    "autocorrelation": (
        "Good is 0, but for the standard error beside it; a mixture that changes makes it larger."
    ),
    "effective_rows": (
        "Good is the number of rows, beside it, or more: a mixture's shares make steps more even."
    ),
    "fill": "Good is above 99 %; the rest of the token positions is padding.",
    "pieces": "1 is a row of one chunk; attention does not cross from one piece to the next.",
    "cuts": "Good is few: tokens after a cut do not see those before it.",
    "drift": "Good is at most 0.1 % beyond one chunk per source, which is beside it.",
}

BINS = 256
"""Bins of a token histogram: the token id modulo this."""


@dataclasses.dataclass(frozen=True)
class DocumentOverlap:
    """Share of a step's documents that are in a later step too; `chance`: the same if all chunks were
    shuffled.
    """

    found: float
    chance: float


@dataclasses.dataclass(frozen=True)
class Correlation:
    """Correlation of two steps; `error`: its standard error if steps are independent."""

    found: float
    error: float


@dataclasses.dataclass(frozen=True)
class SourceShare:
    """Wanted and found share of a source, of the units of `data.mixture_unit` in all steps read."""

    name: str
    wanted: float
    found: float


@dataclasses.dataclass(frozen=True)
class OrderReport:
    """Figures of the first steps of a run.

    documents_per_step: mean number of different documents that a step reads from.
    overlap: by lag.
    autocorrelation: of a step's token histogram, by lag; 0 if steps are independent.
    row_correlation: correlation of the token histograms of two rows of a step; 0 if rows are independent.
    effective_rows: number of independent rows whose mean varies as much as the mean of a step's rows.
    drift: by step, largest difference between the share of a source so far and its wanted share.
    drift_beyond_a_chunk: the same, without one chunk per source: no order of whole chunks can avoid that
      much.
    fill: mean share of the token positions that hold tokens.
    cut_chunks_per_step: mean number of places at which a chunk is cut because a row ends.
    """

    steps: int
    rows: int
    seq_len: int
    documents_per_step: float
    overlap: dict[int, DocumentOverlap]
    autocorrelation: dict[int, Correlation]
    row_correlation: float
    effective_rows: float
    drift: Float64[np.ndarray, " steps"]
    drift_beyond_a_chunk: Float64[np.ndarray, " steps"]
    sources: tuple[SourceShare, ...]
    fill: float
    pieces_per_row: float
    cut_chunks_per_step: float

    @property
    def distinct_over_rows(self) -> float:
        """Different documents of a step per row."""
        return self.documents_per_step / self.rows

    def drift_steps(self) -> tuple[int, ...]:
        """Returns the numbers of steps after which the drift is printed: 1, half of all, all."""
        return 1, self.steps // 2, self.steps

    def to_json(self) -> dict[str, Any]:
        """Returns all figures as plain values, the drift in % of all units."""
        fields: dict[str, Any] = dataclasses.asdict(self)
        fields["distinct_over_rows"] = self.distinct_over_rows
        for name in ("drift", "drift_beyond_a_chunk"):
            drift = fields.pop(name)
            fields[f"{name}_percent"] = {
                str(steps): 100 * float(drift[steps - 1]) for steps in self.drift_steps()
            }
        return fields


def measure_order(dataset: "TextDataset", steps: int) -> OrderReport:
    """Reads the first `steps` batches in this process and measures their order.

    Raises:
      UserError: fewer than `LEAST_STEPS` steps are asked for, or the data ends before.
    """
    if steps < LEAST_STEPS:
        raise UserError(
            f"--steps {steps} must be at least {LEAST_STEPS}: steps {max(LAGS)} apart are compared."
        )
    spec = dataset.spec
    rows = _RowStatistics(spec.global_batch)
    mixture = _MixtureStatistics(dataset)
    pieces, fills, cursors = [], [], np.zeros(len(dataset.names), np.int64)
    with dataset.train_batches(inline=True) as batches:
        for batch in itertools.islice(batches, steps):
            assert batches.plan is not None
            pieces.append(batches.plan.pieces)
            fills.append(batches.plan.fill)
            mixture.add(batches.plan.pieces, cursors)
            cursors = batches.cursors
            if not batches.plan.last:  # part of the last step may be empty
                rows.add(batch)
    if len(rows.means) < LEAST_STEPS:
        raise UserError(
            f"data.epochs={spec.epochs}: the data ends after {len(pieces)} steps, and the order of at least "
            f"{LEAST_STEPS} full ones is measured. Raise data.epochs or set it to None."
        )
    documents, overlap = _documents(dataset, pieces, cursors)
    num_pieces = sum(len(one) for one in pieces)
    return OrderReport(
        steps=len(pieces),
        rows=spec.global_batch,
        seq_len=spec.seq_len,
        documents_per_step=documents,
        overlap=overlap,
        autocorrelation={lag: rows.autocorrelation(lag) for lag in LAGS},
        row_correlation=rows.correlation(),
        effective_rows=rows.effective_rows(),
        drift=mixture.drift(0),
        drift_beyond_a_chunk=mixture.drift(spec.seq_len if spec.mixture_unit == "tokens" else 1),
        sources=mixture.shares(),
        fill=float(np.mean(fills)),
        pieces_per_row=num_pieces / (len(pieces) * spec.global_batch),
        cut_chunks_per_step=sum(int(np.count_nonzero(one.start)) for one in pieces) / len(pieces),
    )


class _RowStatistics:
    """Variance of the rows' token histograms, within steps and between them, summed over the bins."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.means: list[np.ndarray] = []
        self._within = 0.0

    def add(self, batch: "Batch") -> None:
        tokens = np.asarray(batch.token_BL)
        row, column = np.nonzero(np.asarray(batch.segment_BL))
        counts = np.bincount(row * BINS + tokens[row, column] % BINS, minlength=self.rows * BINS)
        counts = counts.reshape(self.rows, BINS)
        shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        self.means.append(shares.mean(axis=0))
        self._within += float(((shares - self.means[-1]) ** 2).sum())

    def autocorrelation(self, lag: int) -> Correlation:
        """Returns the mean over the bins of the autocorrelation of a step's share, weighted by the bins'
        variance.
        """
        off = np.stack(self.means) - np.mean(self.means, axis=0)
        pairs = len(off) - lag
        variance = float((off * off).sum()) / len(off)
        if not variance:
            return Correlation(1.0, 0.0)
        covariance = float((off[lag:] * off[:-lag]).sum()) / pairs
        error = float(np.linalg.norm(off @ off.T)) / len(off) / pairs**0.5
        return Correlation(covariance / variance, error / variance)

    def correlation(self) -> float:
        """Returns the intraclass correlation of the rows of a step (analysis of variance with one factor)."""
        between, within = self._mean_squares()
        total = between + (self.rows - 1) * within
        return (between - within) / total if total else 1.0

    def effective_rows(self) -> float:
        """Returns rows / (1 + (rows - 1) * correlation): it is more than `rows` where steps are alike by
        design.
        """
        between, within = self._mean_squares()
        return (between + (self.rows - 1) * within) / between if between else 1.0

    def _mean_squares(self) -> tuple[float, float]:
        steps = len(self.means)
        off = np.stack(self.means) - np.mean(self.means, axis=0)
        return self.rows * float((off * off).sum()) / (steps - 1), self._within / max(
            steps * (self.rows - 1), 1
        )


class _MixtureStatistics:
    """Units of each source in each step, and those that the schedule wants."""

    def __init__(self, dataset: "TextDataset") -> None:
        spec = dataset.spec
        self._names, self._unit = dataset.names, spec.mixture_unit
        self._schedule = own_weights(
            spec.mixture, {name: one.weight for name, one in spec.named_sources.items()}
        )
        slots = np.asarray([len(stream) for stream in dataset.streams], np.int64)
        self._ends = None if spec.epochs is None else slots * spec.epochs
        self._found: list[np.ndarray] = []
        self._wanted: list[np.ndarray] = []

    def add(self, pieces: "Pieces", cursors: Int64[np.ndarray, " sources"]) -> None:
        """Adds a step; a source that `cursors` says has ended before it is wanted no more."""
        if self._unit == "tokens":
            weights = pieces.end - pieces.start
        elif self._unit == "samples":
            weights = pieces.start == 0
        else:
            weights = np.diff(pieces.row, prepend=-1) > 0
        found = np.bincount(pieces.source, weights=weights, minlength=len(self._names))
        shares = self._schedule.weights(len(self._found), self._names)
        if self._ends is not None:
            shares = shares * (cursors < self._ends)
        self._found.append(found)
        self._wanted.append(found.sum() * shares / max(shares.sum(), 1e-30))

    def drift(self, allowed: int) -> Float64[np.ndarray, " steps"]:
        """Returns max(0, |found - wanted| - allowed) / all, of the sums up to each step; the largest of the
        sources.
        """
        found, wanted = np.cumsum(self._found, axis=0), np.cumsum(self._wanted, axis=0)
        return np.maximum(np.abs(found - wanted) - allowed, 0).max(axis=1) / found.sum(axis=1)

    def shares(self) -> tuple[SourceShare, ...]:
        found, wanted = np.sum(self._found, axis=0), np.sum(self._wanted, axis=0)
        rows = zip(self._names, (wanted / found.sum()).tolist(), (found / found.sum()).tolist(), strict=True)
        return tuple(SourceShare(*row) for row in rows)


def _documents(
    dataset: "TextDataset", pieces: "list[Pieces]", cursors: Int64[np.ndarray, " sources"]
) -> tuple[float, dict[int, DocumentOverlap]]:
    """Returns the mean number of documents of a step, and how many of them later steps have too.

    By chance: a document of c chunks is in a step that draws m of the source's C chunks with 1 - q(m), and in
    two steps of one epoch with 1 - q(m) - q(m') + q(m + m'), where q(m) = (1 - m / C) ** c. Steps of two
    epochs are independent. The sums over all documents are estimated from the chunks that were read: each
    stands for 1 / c documents.
    """
    total = np.zeros(len(LAGS))
    both, by_chance, any_chance = total.copy(), total.copy(), total.copy()
    documents = 0
    step = np.repeat(np.arange(len(pieces)), [len(one) for one in pieces])
    source = np.concatenate([one.source for one in pieces])
    number = np.concatenate([one.document for one in pieces])
    for i, stream in enumerate(dataset.streams):
        if not (here := source == i).any():
            continue
        drawn = np.unique(
            np.stack([number[here], step[here]]), axis=1
        )  # a chunk may have several pieces in a step
        chunks = stream.locate(drawn[0])
        records, which = np.unique(chunks.record, return_inverse=True)
        seen = np.unique(which * len(pieces) + drawn[1])  # a document's number, and a step that has it
        documents += len(seen)
        counts = np.unique(stream.chunks_of(records).record, return_counts=True)[1][which] / chunks.num
        drawn_in = np.bincount(drawn[1], minlength=len(pieces))
        num_chunks = max(len(stream) * len(np.unique(drawn[0])) / int(cursors[i]), 1.0)
        for at, lag in enumerate(LAGS):
            first = seen[seen % len(pieces) < len(pieces) - lag]
            total[at] += len(first)
            both[at] += np.isin(first + lag, seen).sum()
            chance = _chance(drawn_in[:-lag], drawn_in[lag:], np.ceil(counts), num_chunks, lag)
            any_chance[at], by_chance[at] = any_chance[at] + chance[0], by_chance[at] + chance[1]
    overlaps = zip(LAGS, (both / total).tolist(), (by_chance / any_chance).tolist(), strict=True)
    return documents / len(pieces), {lag: DocumentOverlap(found, chance) for lag, found, chance in overlaps}


def _chance(
    first: Int64[np.ndarray, " pairs"],
    second: Int64[np.ndarray, " pairs"],
    counts: Float64[np.ndarray, " drawn"],
    num_chunks: float,
    lag: int,
) -> tuple[float, float]:
    """Returns how many documents of a source are expected in one step and in both, summed over pairs of
    steps.
    """
    count, times = np.unique(counts, return_counts=True)
    documents = num_chunks * times / times.sum() / count  # estimated number of documents with so many chunks

    def absent(drawn: Int64[np.ndarray, " pairs"]) -> Float64[np.ndarray, "pairs counts"]:
        return np.maximum(1 - drawn[:, None] / num_chunks, 0) ** count

    same_epoch = max(0.0, 1 - lag * float(first.mean()) / num_chunks)
    in_first, in_second = 1 - absent(first), 1 - absent(second)
    in_both = (
        same_epoch * (in_first + in_second - 1 + absent(first + second))
        + (1 - same_epoch) * in_first * in_second
    )
    return float((in_first @ documents).sum()), float((in_both @ documents).sum())


def lines_of(report: OrderReport) -> list[str]:
    """Returns the report as tables: each figure, what it is compared with, and a sentence on what is good."""
    head = f"order of the first {report.steps} steps of {report.rows} rows x {report.seq_len} tokens"
    table = Table("order", words(head) + numbers("found", "beside") + words(""))
    table.add("documents per step", f"{report.documents_per_step:.1f}", "", _GOOD["documents"])
    table.add("documents per step / rows", f"{report.distinct_over_rows:.3f}", "", _GOOD["distinct"])
    for lag, overlap in report.overlap.items():
        what, good = f"share of step k's documents in k+{lag}", _GOOD["overlap"] if lag == LAGS[0] else ""
        table.add(what, f"{overlap.found:.3f}", f"{overlap.chance:.3f}", good)
    for lag, one in report.autocorrelation.items():
        what, good = (
            f"correlation of the tokens of k and k+{lag}",
            _GOOD["autocorrelation"] if lag == LAGS[0] else "",
        )
        table.add(what, f"{one.found:.3f}", f"±{one.error:.3f}", good)
    rows = f"{report.effective_rows:.1f}", str(report.rows)
    table.add("independent rows in a step", *rows, _GOOD["effective_rows"])
    table.add("fill", f"{report.fill:.2%}", "", _GOOD["fill"])
    table.add("pieces per row", f"{report.pieces_per_row:.2f}", "", _GOOD["pieces"])
    table.add("cut chunks per step", f"{report.cut_chunks_per_step:.2f}", "", _GOOD["cuts"])
    if len(report.sources) == 1:
        return table.lines()
    for steps in report.drift_steps():
        found, beside = (f"{drift[steps - 1]:.3%}" for drift in (report.drift, report.drift_beyond_a_chunk))
        table.add(f"drift after {steps:,} steps", found, beside, _GOOD["drift"] if steps == 1 else "")
    shares = Table("shares", words("share of a source") + numbers("found", "wanted"))
    worst = sorted(report.sources, key=lambda source: -abs(source.found - source.wanted))[:MOST_SOURCES]
    for one in worst:
        shares.add(f"  {one.name}", f"{one.found:.3%}", f"{one.wanted:.3%}")
    if more := len(report.sources) - len(worst):
        shares.add(f"  ... and {more} more sources, which are closer to theirs")
    return [*table.lines(), *shares.lines()]
