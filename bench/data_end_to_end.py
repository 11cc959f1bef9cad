"""Step time of a trainer on our data plane, beside the same ranks with a loader each.

    python -m jtrain.bench data_end_to_end

Documents of the standard library's text with a heavy tail of long ones, tokenised by a BPE tokenizer while training.
Everything that prepares data is real and runs on this machine; the accelerators of the 8 ranks are emulated: a rank
sleeps as long as its rows would take (tokens, and the square of each piece, in a 7B model's proportion), and the step
ends with its slowest rank. The baseline's ranks are processes in which Grain mixes, tokenises and packs.

Modelled: the same by cost alone, at numbers of ranks and lengths that nothing here could run.
"""

import contextlib
import dataclasses
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from bench import data_sources
from bench.data_sources import peer, peer_program
from jtrain.bench import Options, Row, option, row
from jtrain.data.dataset import PackedText, open_dataset
from jtrain.data.plane.prefetch import Prefetch
from jtrain.data.planner.balance import balanced_order, spread
from jtrain.data.sources.source import Source

LINEAR = 24576.0
"""Tokens whose attention costs as much as everything else: a 7B model's (verl's seqlen_balancing.py)."""

VOCAB, END_TOKEN = 8192, "<|endoftext|>"
MEDIAN_CHARACTERS, SIGMA = 6000, 1.6
"""Of the text's documents, which are lognormal."""
MOST_CHARACTERS = 1 << 17

_VERSION = 3  # of what is written


OPTIONS = (option("--steps", type=int, default=12, help="measured steps of each (default: 12)"),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """What is trained on in the text scenarios.

    ranks: emulated accelerators. context: of them share their rows.
    rows: of `seq_len` tokens, per group of ranks that share them.
    linear_s: a rank's step without attention, were its rows its own. Tokenising for it takes two cores about 0.6 s.
    documents: of each of the `sources`.
    """

    context: int
    ranks: int = 8
    seq_len: int = 32768
    rows: int = 2
    linear_s: float = 0.75
    sources: int = 8
    documents: int = 1500


class Steps(NamedTuple):
    """Medians in seconds, and what the ranks had to do.

    wait_s: of the rank that waited longest for its data.
    spread: largest over mean cost of the ranks.
    """

    step_s: float
    wait_s: float
    spread: float


def run(args: Options) -> list[Row]:
    """8 data ranks, then pairs of ranks that share rows; then the model."""
    peer_program("data_colocated")
    rows = []
    for context in (1, 2):
        text = Text(context=context)
        what = f"text, {text.ranks // context} data x {context} context ranks"
        rows += text_rows(what, our_text(text, args.steps), colocated_text(text, args.steps))
    for seq_len in (8192, 131072):
        rows.append(row(f"modelled, text, rows of {seq_len}, 64 ranks", modelled_speedup(seq_len), "x faster"))
    return rows


def text_rows(what: str, ours: Steps, theirs: Steps) -> list[Row]:
    """Step time against the colocated baseline's, and where it comes from. The bar is 1.3x the speed."""
    return [
        row(f"{what}: step", 1e3 * ours.step_s, "ms", baseline=1e3 * theirs.step_s, bar=f"<= {1 / 1.3:.3f}"),
        row(f"{what}: waiting for data", 1e3 * ours.wait_s, "ms", baseline=1e3 * theirs.wait_s),
        row(f"{what}: largest over mean cost of ranks", ours.spread, "x", baseline=theirs.spread),
    ]


def heavy_tailed(sources: int, documents: int) -> tuple[Path, Path]:
    """A folder of ArrayRecord files of real text, many short and a few long, and a tokenizer trained on it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = data_sources.kept() / f"heavy-{_VERSION}" / f"{sources}x{documents}"
    if not folder.exists():
        library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        pool = "".join(file.read_text(errors="ignore") for file in library)
        rng = np.random.default_rng(0)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            unfinished = Path(made) / "made"
            unfinished.mkdir()
            for source in range(sources):
                lengths = np.clip(rng.lognormal(np.log(MEDIAN_CHARACTERS), SIGMA, documents), 64, MOST_CHARACTERS)
                starts = rng.integers(0, len(pool) - MOST_CHARACTERS, documents)
                texts = [pool[s : s + n] for s, n in zip(starts.tolist(), lengths.astype(int).tolist(), strict=True)]
                data_sources.write_arrayrecord(unfinished / f"{source}.arrayrecord", texts)
            tokenizer = Tokenizer(models.BPE())
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            trainer = trainers.BpeTrainer(
                vocab_size=VOCAB,
                special_tokens=[END_TOKEN],
                show_progress=False,
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            )
            tokenizer.train_from_iterator((pool[s : s + 4096] for s in range(0, 4 << 20, 4096)), trainer)
            tokenizer.save(str(unfinished / "tokenizer.json"))
            with contextlib.suppress(OSError):  # another process was quicker
                unfinished.rename(folder)
    return folder, folder / "tokenizer.json"


def our_text(text: Text, steps: int) -> Steps:
    """One data plane for all ranks, its batches split as the mesh would; the step is that of its dearest rank."""
    folder, tokenizer = heavy_tailed(text.sources, text.documents)
    data_ranks = text.ranks // text.context
    spec = PackedText(
        sources={
            f"source_{number}": Source(path=str(folder / f"{number}.arrayrecord"), text_field="")
            for number in range(text.sources)
        },
        tokenizer=str(tokenizer),
        end_token=END_TOKEN,
        seq_len=text.seq_len,
        global_batch=data_ranks * text.rows,
        eval_fraction=0.0,
    )
    second_per_cost = text.linear_s / (LINEAR * text.rows * text.seq_len)
    step_s, wait_s, spreads = [], [], []
    batches = open_dataset(spec, seed=0).train_batches(context=text.context, cost=(LINEAR, 1.0))
    with batches, Prefetch(batches, lambda batch: batch) as ahead:
        for _ in range(3 + steps):
            start_s = time.perf_counter()
            batch = next(ahead).batch
            wait_s.append(time.perf_counter() - start_s)
            rank_rows = np.split(np.asarray(batch.segment_BL), data_ranks)
            costs = [sum(map(row_cost, rows)) / text.context for rows in rank_rows]
            time.sleep(second_per_cost * max(costs))
            step_s.append(time.perf_counter() - start_s)
            spreads.append(max(costs) / statistics.mean(costs))
    return Steps(statistics.median(step_s[3:]), statistics.median(wait_s[3:]), statistics.mean(spreads[3:]))


def row_cost(segments: Int32[np.ndarray, " L"]) -> float:
    """Of a row: its tokens, and the square of each piece."""
    pieces = np.bincount(segments)[1:].astype(np.float64)
    return float((LINEAR * pieces + pieces**2).sum())


def colocated_text(text: Text, steps: int) -> Steps:
    """A process per rank, each with a pipeline of its own."""
    folder, tokenizer = heavy_tailed(text.sources, text.documents)
    settings: dict[str, float] = {"ranks": text.ranks, "context": text.context, "seq-len": text.seq_len}
    settings |= {"rows": text.rows, "linear-s": text.linear_s}
    arguments = [part for key, value in settings.items() for part in (f"--{key}", value)]
    with peer(None, "data_colocated", folder, tokenizer, *arguments) as program:
        program.answer()
        program.ask("3")  # buffers are as full as they stay
        told = program.ask(str(steps))
    return Steps(
        statistics.median(told["step_s"]),
        statistics.median(max(waits) for waits in told["wait_s"]),
        statistics.mean(max(costs) / statistics.mean(costs) for costs in told["costs"]),
    )


def modelled_speedup(seq_len: int, *, ranks: int = 64, rows_per_rank: int = 8) -> float:
    """Step time in the order of arrival over that in the planner's, by cost alone: the most expensive rank's.

    Documents are lognormal, 1000 tokens in the median, sigma 1.6, cut where a row ends.
    """
    num_rows = ranks * rows_per_rank
    lengths = np.random.default_rng(4).lognormal(np.log(1000), 1.6, num_rows * seq_len // 500).astype(np.int64) + 1
    ends = np.union1d(np.cumsum(lengths), np.arange(1, num_rows + 1) * seq_len)
    ends = ends[: np.searchsorted(ends, num_rows * seq_len) + 1]
    pieces = np.diff(ends, prepend=0)
    costs = np.bincount((ends - 1) // seq_len, weights=LINEAR * pieces + pieces.astype(np.float64) ** 2)
    return spread(costs, ranks) / spread(costs[balanced_order(costs)], ranks)
