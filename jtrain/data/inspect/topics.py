"""Topics of the rows of a run beside those of its whole corpus: kinds of rows, told by their tokens alone.

A model that reads a sorted corpus from its begin sees few topics for long, however different the documents of
a step are from one another. So the rows that were read are compared with rows drawn from all over the corpus.
"""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float64, Int64

from jtrain.data.sources.shuffle import epoch_key
from jtrain.data.stream.chunk_order import Chunks
from jtrain.errors import UserError

if TYPE_CHECKING:
    from jtrain.data.dataset import TextDataset

BINS = 256
"""Bins of a token histogram: the token id modulo this."""

_MOST_TOPICS = 64
_ROWS_PER_TOPIC = 16
_ITERATIONS = 12
"""Iterations of k-means."""

_LEAST_ROWS, _MOST_ROWS, _MOST_TOKENS = 512, 4096, 1 << 23
"""Rows that are drawn from the corpus, and most of their tokens."""

_WINDOWS = 8
"""Runs of steps whose topics are compared with those of the corpus."""

_DRAWS = 200
"""Draws from which a chance level is estimated."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """Figure of the rows that were read; `chance`: the same of as many rows of one shuffle of the corpus."""

    found: float
    chance: float


@dataclasses.dataclass(frozen=True)
class TopicReport:
    """Topics of the rows that were read, beside those of the corpus.

    topics: number of topics, groups of rows with similar token histograms (k-means of their square roots).
    met: number of topics among the rows.
    distance: distance of the topics' shares from those in the corpus, half the sum of the absolute
      differences: 0 if they are the same, 1 if no topic is in both.
    window_distance: mean of it over eighths of the steps.
    loss: nats per token of a row of the corpus, by the frequencies of tokens in the rows of its topic that
      were read, and in all rows where these are few.
    """

    topics: int
    met: Compared
    distance: Compared
    window_distance: Compared
    loss: Compared

    @property
    def loss_ratio(self) -> float:
        """Expected loss over that of one shuffle: how much worse a model learns in this order."""
        return self.loss.found / self.loss.chance if self.loss.chance else 1.0


def corpus_rows(dataset: "TextDataset", shares: Float64[np.ndarray, " sources"]) -> Int64[np.ndarray, "n b"]:
    """Returns histograms of rows that are drawn from all over the sources, each by its share."""
    seq_len = dataset.spec.seq_len
    num_rows = min(max(_MOST_TOKENS // seq_len, _LEAST_ROWS), _MOST_ROWS)
    histograms = [np.empty((0, BINS), np.int64)]
    for stream, share in zip(dataset.streams, shares.tolist(), strict=True):
        tokens = round(num_rows * share) * seq_len
        leftover = np.empty(0, np.int32)  # tokens of chunks that fill no row together
        for records in stream.records_at_random(epoch_key(1, 0)):
            if tokens < seq_len:
                break
            records = records[~stream.held_out(records)][: 2 * num_rows]
            chunks = stream.chunks_of(records)
            # Chunks and not documents: long documents count by their length. Some in reserve for short ones.
            drawn = np.random.default_rng(0).permutation(len(chunks.record))
            for start in range(0, len(drawn), 256):
                # Read in the order of the files, and put together in that of the draw: neighbours are alike.
                drawn_numbers = np.sort(drawn[start : start + 256])
                read = stream.read_chunks(Chunks(*(array[drawn_numbers] for array in chunks)))
                pieces = np.split(read.ids, np.cumsum(read.lengths)[:-1])
                order = np.random.default_rng(start).permutation(len(pieces))
                # Full chunks first: each is a row, as in most batches. The others share rows.
                order = order[np.argsort(-read.lengths[order], kind="stable")]
                ids = np.concatenate([*(pieces[i] for i in order), leftover])
                num = min(len(ids), tokens) // seq_len
                # What is left behind whole rows are the shortest pieces, which no batch puts together like
                # this.
                leftover = ids if num == 0 else ids[:0]
                histograms.append(_histograms(ids[: num * seq_len].astype(np.int64).reshape(num, seq_len)))
                tokens -= num * seq_len
                if tokens < seq_len:
                    break
    rows = np.concatenate(histograms)
    if len(rows) < 2:
        raise UserError(
            f"--order: the documents fill {len(rows)} rows of data.seq_len={seq_len:,}, too few to compare. "
            "Lower data.seq_len."
        )
    return rows[np.random.default_rng(1).permutation(len(rows))]


def _histograms(token_BL: np.ndarray) -> Int64[np.ndarray, "B b"]:
    row = np.arange(len(token_BL))[:, None] * BINS
    counts = np.bincount((row + token_BL % BINS).ravel(), minlength=len(token_BL) * BINS)
    return counts.reshape(len(token_BL), BINS)


def compare_topics(read_rows: Int64[np.ndarray, "n b"], rows: Int64[np.ndarray, "m b"]) -> TopicReport:
    """Compares histograms of the rows that were read, in their order, with those of rows of the corpus."""
    # Half of the rows make the topics, and are what one shuffle would have read; the others are learned for.
    shuffled, held = np.array_split(rows, 2)
    centres = _k_means(_features(shuffled), max(min(_MOST_TOPICS, len(shuffled) // _ROWS_PER_TOPIC), 1))
    topic, held_topic, read_topic = (_nearest(_features(r), centres) for r in (shuffled, held, read_rows))
    topics, num_read = len(centres), len(read_rows)
    shares = np.bincount(np.concatenate([topic, held_topic]), minlength=topics) / len(rows)
    rng = np.random.default_rng(0)
    corpus_draws = rng.multinomial(len(rows), shares, _DRAWS) / len(rows)

    def distance(topic_of_row: Int64[np.ndarray, " n"]) -> Compared:
        shares_read = np.bincount(topic_of_row, minlength=topics) / len(topic_of_row)
        draws = rng.multinomial(len(topic_of_row), shares, _DRAWS) / len(topic_of_row)
        chance = np.abs(draws - corpus_draws).sum(axis=1).mean() / 2
        return Compared(float(np.abs(shares_read - shares).sum() / 2), float(chance))

    windows = [distance(window) for window in np.array_split(read_topic, min(_WINDOWS, num_read))]
    met = float(len(set(read_topic.tolist())))
    # As many rows of both: the more rows are read, the lower the loss.
    num = min(num_read, len(shuffled))
    shuffled_numbers = np.arange(num) * num_read // num
    return TopicReport(
        topics=topics,
        met=Compared(met, float((1 - (1 - shares) ** num_read).sum())),
        distance=distance(read_topic),
        window_distance=Compared(
            *(float(np.mean([getattr(w, n) for w in windows])) for n in ("found", "chance"))
        ),
        loss=Compared(
            _loss(read_rows[shuffled_numbers], read_topic[shuffled_numbers], held, held_topic, topics),
            _loss(shuffled[:num], topic[:num], held, held_topic, topics),
        ),
    )


def _loss(
    rows: Int64[np.ndarray, "n b"],
    topic: Int64[np.ndarray, " n"],
    held: Int64[np.ndarray, "m b"],
    held_topic: Int64[np.ndarray, " m"],
    topics: int,
) -> float:
    """Returns the nats per token of held rows by the tokens of the rows of their topics."""
    counts = np.zeros((topics, BINS))
    np.add.at(counts, topic, rows)
    total = counts.sum(axis=0)
    overall = (total + 1) / (total.sum() + BINS)
    # The frequencies over all rows count as much as one row of the topic.
    weight = float(rows.sum()) / max(len(rows), 1)
    by_topic = (counts + weight * overall) / (counts.sum(axis=1, keepdims=True) + weight)
    return float(-(held * np.log(by_topic)[held_topic]).sum() / max(held.sum(), 1))


def _features(rows: Int64[np.ndarray, "n b"]) -> Float64[np.ndarray, "n b"]:
    # Square roots of shares: their distances count rare tokens as well (Hellinger).
    return np.sqrt(rows / np.maximum(rows.sum(axis=1, keepdims=True), 1))


def _k_means(points: Float64[np.ndarray, "n b"], topics: int) -> Float64[np.ndarray, "k b"]:
    """Returns the centres of at most `topics` groups; each begins at the point farthest from those before."""
    centres = points[:1]
    distance = ((points - centres[0]) ** 2).sum(axis=1)
    while len(centres) < topics and distance.max() > 0:
        centres = np.concatenate([centres, points[[int(distance.argmax())]]])
        distance = np.minimum(distance, ((points - centres[-1]) ** 2).sum(axis=1))
    for _ in range(_ITERATIONS):
        nearest = _nearest(points, centres)
        sums = np.zeros_like(centres)
        np.add.at(sums, nearest, points)
        counts = np.bincount(nearest, minlength=len(centres))[:, None]
        centres = np.where(counts > 0, sums / np.maximum(counts, 1), centres)
    return centres


def _nearest(
    points: Float64[np.ndarray, "n b"], centres: Float64[np.ndarray, "k b"]
) -> Int64[np.ndarray, " n"]:
    # |p - c|^2 without |p|^2, which is the same for all centres.
    return ((centres**2).sum(axis=1) - 2 * points @ centres.T).argmin(axis=1)
