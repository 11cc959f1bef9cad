"""Report on the order of the training data, measured on batches: likeness of neighbouring rows and steps."""

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64, Int64

from jtrain.data.inspect.topics import BINS, TopicReport, compare_topics, corpus_rows
from jtrain.data.mixture.schedule import own_weights
from jtrain.errors import UserError

if TYPE_CHECKING:
    from jtrain.data.dataset import TextDataset
    from jtrain.data.planner.pieces import Pieces
    from jtrain.layout.dims import Batch

LAGS = (1, 10)
"""Distances between two steps that are compared."""

LEAST_STEPS = 20
"""Fewest steps that say anything at the largest lag."""


@dataclasses.dataclass(frozen=True)
class DocumentOverlap:
    """Share of a step's documents that are in a later step too; `chance`: the same for shuffled chunks."""

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
    topics: topics of the rows, beside those of the corpus.
    drift: by step, largest difference between the share of a source so far and its wanted share.
    drift_beyond_a_chunk: the same, less one chunk per source, which no order of whole chunks can avoid.
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
    topics: TopicReport
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
        fields["topics"]["loss_ratio"] = self.topics.loss_ratio
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
    # Inline: the plan of a batch is known only in the process that made it.
    with dataset.train_batches(inline=True) as batches:
        for batch in itertools.islice(batches, steps):
            assert batches.plan is not None
            pieces.append(batches.plan.pieces)
            fills.append(batches.plan.fill)
            mixture.add(batches.plan.pieces, cursors)
            # After `mixture.add`, which needs the cursors before the step.
            cursors = batches.cursors
            # Part of the last step may be padding, which would count as rows unlike all others.
            if not batches.plan.last:
                rows.add(batch)
    # Full steps count here, those read above: the last one may not be full.
    if len(rows.means) < LEAST_STEPS:
        raise UserError(
            f"data.epochs={spec.epochs}: the data ends after {len(pieces)} steps, and the order of at least "
            f"{LEAST_STEPS} full ones is measured. Raise data.epochs or set it to None."
        )
    documents, overlap = _documents(dataset, pieces, cursors)
    num_pieces = sum(len(step_pieces) for step_pieces in pieces)
    return OrderReport(
        steps=len(pieces),
        rows=spec.global_batch,
        seq_len=spec.seq_len,
        documents_per_step=documents,
        overlap=overlap,
        autocorrelation={lag: rows.autocorrelation(lag) for lag in LAGS},
        row_correlation=rows.correlation(),
        effective_rows=rows.effective_rows(),
        topics=compare_topics(np.concatenate(rows.counts), corpus_rows(dataset, mixture.found_shares())),
        drift=mixture.drift(0),
        drift_beyond_a_chunk=mixture.drift(spec.seq_len if spec.mixture_unit == "tokens" else 1),
        sources=mixture.shares(),
        fill=float(np.mean(fills)),
        pieces_per_row=num_pieces / (len(pieces) * spec.global_batch),
        cut_chunks_per_step=sum(int(np.count_nonzero(step_pieces.start)) for step_pieces in pieces)
        / len(pieces),
    )


class _RowStatistics:
    """Variance of the rows' token histograms, within steps and between them, summed over the bins."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.means: list[np.ndarray] = []
        self.counts: list[np.ndarray] = []
        self._within = 0.0

    def add(self, batch: "Batch") -> None:
        tokens = np.asarray(batch.token_BL)
        # Segment 0 is padding.
        row, column = np.nonzero(np.asarray(batch.segment_BL))
        # One bincount for all rows: row r has the bins r * BINS to (r + 1) * BINS - 1.
        counts = np.bincount(row * BINS + tokens[row, column] % BINS, minlength=self.rows * BINS)
        counts = counts.reshape(self.rows, BINS)
        self.counts.append(counts)
        shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        self.means.append(shares.mean(axis=0))
        self._within += float(((shares - self.means[-1]) ** 2).sum())

    def autocorrelation(self, lag: int) -> Correlation:
        """Returns the autocorrelation of a step's shares, the mean over bins weighted by their variance."""
        deviations = np.stack(self.means) - np.mean(self.means, axis=0)
        pairs = len(deviations) - lag
        variance = float((deviations * deviations).sum()) / len(deviations)
        # Every step has the same tokens: as alike as can be.
        if not variance:
            return Correlation(1.0, 0.0)
        covariance = float((deviations[lag:] * deviations[:-lag]).sum()) / pairs
        # The norm of X @ X.T is that of X.T @ X, the bins' covariance: bins do not vary independently.
        error = float(np.linalg.norm(deviations @ deviations.T)) / len(deviations) / pairs**0.5
        return Correlation(covariance / variance, error / variance)

    def correlation(self) -> float:
        """Returns the intraclass correlation of the rows of a step (analysis of variance with one factor)."""
        between_steps, within_steps = self._mean_squares()
        # Intraclass correlation: (MSB - MSW) / (MSB + (n - 1) MSW).
        total = between_steps + (self.rows - 1) * within_steps
        return (between_steps - within_steps) / total if total else 1.0

    def effective_rows(self) -> float:
        """Returns rows / (1 + (rows - 1) * correlation): above `rows` where steps are alike by design.

        Example: 256 rows with a correlation of 0.01 are worth 256 / 3.55 = 72 independent rows.
        """
        between_steps, within_steps = self._mean_squares()
        return (between_steps + (self.rows - 1) * within_steps) / between_steps if between_steps else 1.0

    def _mean_squares(self) -> tuple[float, float]:
        steps = len(self.means)
        deviations = np.stack(self.means) - np.mean(self.means, axis=0)
        return self.rows * float((deviations * deviations).sum()) / (steps - 1), self._within / max(
            steps * (self.rows - 1), 1
        )


class _MixtureStatistics:
    """Units of each source in each step, and those that the schedule wants."""

    def __init__(self, dataset: "TextDataset") -> None:
        spec = dataset.spec
        self._names, self._unit = dataset.names, spec.mixture_unit
        self._schedule = own_weights(
            spec.mixture, {name: source.weight for name, source in spec.named_sources.items()}
        )
        slots = np.asarray([len(stream) for stream in dataset.streams], np.int64)
        self._ends = None if spec.epochs is None else slots * spec.epochs
        self._drawn_units: list[np.ndarray] = []
        self._scheduled_units: list[np.ndarray] = []

    def add(self, pieces: "Pieces", cursors: Int64[np.ndarray, " sources"]) -> None:
        """Adds a step; a source that `cursors` says has ended before it is wanted no more."""
        if self._unit == "tokens":
            # Weight of a piece in the unit of the mixture: its tokens, 1 per document begun, 1 per row begun.
            weights = pieces.end - pieces.start
        elif self._unit == "samples":
            weights = pieces.start == 0
        else:
            weights = np.diff(pieces.row, prepend=-1) > 0
        units = np.bincount(pieces.source, weights=weights, minlength=len(self._names))
        shares = self._schedule.weights(len(self._drawn_units), self._names)
        if self._ends is not None:
            # The mixture gives the share of an ended source to the others.
            shares = shares * (cursors < self._ends)
        self._drawn_units.append(units)
        self._scheduled_units.append(units.sum() * shares / max(shares.sum(), 1e-30))

    def drift(self, allowed: int) -> Float64[np.ndarray, " steps"]:
        """Returns max(0, |drawn - scheduled| - allowed) / all drawn, up to each step; the largest source."""
        drawn, scheduled = np.cumsum(self._drawn_units, axis=0), np.cumsum(self._scheduled_units, axis=0)
        return np.maximum(np.abs(drawn - scheduled) - allowed, 0).max(axis=1) / drawn.sum(axis=1)

    def found_shares(self) -> Float64[np.ndarray, " sources"]:
        """Returns the share of each source of all units drawn."""
        drawn = np.sum(self._drawn_units, axis=0)
        return drawn / drawn.sum()

    def shares(self) -> tuple[SourceShare, ...]:
        drawn, scheduled = np.sum(self._drawn_units, axis=0), np.sum(self._scheduled_units, axis=0)
        rows = zip(
            self._names, (scheduled / drawn.sum()).tolist(), (drawn / drawn.sum()).tolist(), strict=True
        )
        return tuple(SourceShare(*row) for row in rows)


def _documents(
    dataset: "TextDataset", pieces: "list[Pieces]", cursors: Int64[np.ndarray, " sources"]
) -> tuple[float, dict[int, DocumentOverlap]]:
    """Returns the mean number of documents of a step, and the share of them that later steps have too.

    By chance: a document of c chunks is in a step that draws m of the source's C chunks with 1 - q(m), and in
    two steps of one epoch with 1 - q(m) - q(m') + q(m + m'), where q(m) = (1 - m / C) ** c. Steps of two
    epochs are independent. The sums over all documents are estimated from the chunks that were read: each
    stands for 1 / c documents.
    """
    in_first = np.zeros(len(LAGS))
    in_both, both_by_chance, first_by_chance = in_first.copy(), in_first.copy(), in_first.copy()
    documents = 0
    step = np.repeat(np.arange(len(pieces)), [len(step_pieces) for step_pieces in pieces])
    source = np.concatenate([step_pieces.source for step_pieces in pieces])
    number, start, end = (
        np.concatenate([getattr(step_pieces, name) for step_pieces in pieces])
        for name in ("document", "start", "end")
    )
    for source_index, stream in enumerate(dataset.streams):
        if not (of_source := source == source_index).any():
            continue
        # Unique: a chunk may have several pieces in a step.
        drawn_chunks = np.unique(np.stack([number[of_source], step[of_source]]), axis=1)
        chunks = stream.locate(drawn_chunks[0])
        records, record_index = np.unique(chunks.record, return_inverse=True)
        # One integer per document and step that has it: document * number of steps + step.
        document_steps = np.unique(record_index * len(pieces) + drawn_chunks[1])
        documents += len(document_steps)
        # Slots of each drawn chunk's document: its chunks, by those that one slot holds.
        counts = np.unique(stream.chunks_of(records).record, return_counts=True)[1][record_index] / chunks.num
        drawn_in = np.bincount(drawn_chunks[1], minlength=len(pieces))
        num_drawn = len(np.unique(drawn_chunks[0]))
        if stream.num_documents is None:
            # Slots of files that are not open are not known: by the bytes, and the tokens of a chunk.
            tokens_per_chunk = max(float((end - start)[of_source].sum()) / num_drawn, 1.0)
            num_chunks = stream.size_bytes * stream.setup.chunk_tokens / stream.chunk_bytes / tokens_per_chunk
        else:
            # Slots minus the empty ones: scaled by the share of slots read so far that held a chunk.
            num_chunks = len(stream) * num_drawn / int(cursors[source_index])
        num_chunks = max(num_chunks, 1.0)
        for lag_index, lag in enumerate(LAGS):
            # Steps that have a step `lag` later among those read.
            earlier = document_steps[document_steps % len(pieces) < len(pieces) - lag]
            in_first[lag_index] += len(earlier)
            # + lag moves only the step part of the integer.
            in_both[lag_index] += np.isin(earlier + lag, document_steps).sum()
            chance = _chance(drawn_in[:-lag], drawn_in[lag:], np.ceil(counts), num_chunks, lag)
            first_by_chance[lag_index], both_by_chance[lag_index] = (
                first_by_chance[lag_index] + chance[0],
                both_by_chance[lag_index] + chance[1],
            )
    overlaps = zip(
        LAGS, (in_both / in_first).tolist(), (both_by_chance / first_by_chance).tolist(), strict=True
    )
    return documents / len(pieces), {
        lag: DocumentOverlap(overlap_share, chance) for lag, overlap_share, chance in overlaps
    }


def _chance(
    first: Int64[np.ndarray, " pairs"],
    second: Int64[np.ndarray, " pairs"],
    counts: Float64[np.ndarray, " drawn"],
    num_chunks: float,
    lag: int,
) -> tuple[float, float]:
    """Returns the documents of a source expected in one step and in both, summed over pairs of steps."""
    count, num_chunks_with = np.unique(counts, return_counts=True)
    # Estimated number of documents with `count` chunks: their chunks, divided by `count`.
    documents = num_chunks * num_chunks_with / num_chunks_with.sum() / count

    # q(m) of `_documents`, for each pair of steps and each count of chunks.
    def absent(drawn: Int64[np.ndarray, " pairs"]) -> Float64[np.ndarray, "pairs counts"]:
        return np.maximum(1 - drawn[:, None] / num_chunks, 0) ** count

    # Probability that no epoch ends between the two steps.
    same_epoch = max(0.0, 1 - lag * float(first.mean()) / num_chunks)
    in_first, in_second = 1 - absent(first), 1 - absent(second)
    in_both = (
        # 1 - q(m) - q(m') + q(m + m'), as in `_documents`; across epochs the two steps are independent.
        same_epoch * (in_first + in_second - 1 + absent(first + second))
        + (1 - same_epoch) * in_first * in_second
    )
    return float((in_first @ documents).sum()), float((in_both @ documents).sum())
