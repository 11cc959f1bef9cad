"""Step time of a trainer on our data plane, beside the same ranks with a loader each: text, and images with text.

    python -m jtrain.bench data_end_to_end

Text: documents of the standard library's text with a heavy tail of long ones, tokenised by a BPE tokenizer while
training. Everything that prepares data is real and runs on this machine; the accelerators of the 8 ranks are emulated:
a rank sleeps as long as its rows would take (tokens, and the square of each piece, in a 7B model's proportion), and the
step ends with its slowest rank. The baseline's ranks are processes in which Grain mixes, tokenises and packs.

Vision-like: each rank's encoder and backbone work is real computing (patches, attention, MLP), measured one rank after
another on one core; the step is the slowest rank's. The baseline keeps samples where they arrived; ours spreads images
over all ranks and sequences over all data ranks, each by cost. Moving encoded images between ranks is not counted.

Modelled: the same by cost alone, at numbers of ranks and lengths that nothing here could run.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int32, Int64

from jtrain.bench import Row, data_sources, row
from jtrain.bench.data_sources import peer, peer_program
from jtrain.data.dataset import PackedText, open_dataset
from jtrain.data.mixture.draw import Buffers
from jtrain.data.mixture.schedule import Constant
from jtrain.data.planner import balance
from jtrain.data.planner.device_tree import ClientPlaceTree
from jtrain.data.planner.graph import Graph, NodeAssignment
from jtrain.data.prefetch import prefetch
from jtrain.data.sources.source import Source

LINEAR = 24576.0
"""Tokens whose attention costs as much as everything else: a 7B model's (verl's seqlen_balancing.py)."""

VOCAB, END_TOKEN = 8192, "<|endoftext|>"
MEDIAN_CHARACTERS, SIGMA = 6000, 1.6
"""Of the text's documents, which are lognormal."""
MOST_CHARACTERS = 1 << 17

_VERSION = 3  # of what is written

SAMPLES = 8
"""Images with text, per rank and step."""

type Costs = Float64[np.ndarray, " items"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each (default: 12)")


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


def run(args: argparse.Namespace) -> list[Row]:
    """Text with 8 data ranks, then with pairs of ranks that share rows; vision-like at 8 and 72 ranks; the models."""
    peer_program("data_colocated")
    rows = []
    for context in (1, 2):
        text = Text(context=context)
        what = f"text, {text.ranks // context} data x {context} context ranks"
        rows += text_rows(what, our_text(text, args.steps), colocated_text(text, args.steps))
    for ranks, steps in ((8, args.steps), (72, max(2, args.steps // 4))):
        rows += vision_rows(ranks, steps)
    return rows + model_rows()


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
    with batches, prefetch(batches, lambda batch: batch) as ahead:
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


class Samples(NamedTuple):
    """Images with text, in the order in which they arrive.

    patches: of each sample's image. tokens: of its sequence in the backbone, one for 4 patches, and its text.
    """

    patches: Int64[np.ndarray, " samples"]
    tokens: Int64[np.ndarray, " samples"]


def samples_of(step: int, count: int, *, sigma: float = 1.0, most: int = 2048) -> Samples:
    """Images in native resolution: lognormal, 256 patches in the median, at least 64 and `most` of them."""
    rng = np.random.default_rng((3, step))
    patches = np.clip(rng.lognormal(np.log(256), sigma, count), 64, most).astype(np.int64)
    text = np.clip(rng.lognormal(np.log(150), 1.0, count), 16, 1024).astype(np.int64)
    return Samples(patches, patches // 4 + text)


def vision_rows(ranks: int, steps: int) -> list[Row]:
    """Both arrangements of the same samples, by what each of them took. The bar is 2.2x the speed.

    A step in which ranks wait for each other at its end only, and one in which they do so in each of its microbatches
    of one sample, as under ZeRO 3 or in a pipeline.
    """
    found: dict[str, list[tuple[float, float, float]]] = {"at its end": [], "in each microbatch": []}
    with _one_thread(), peer(None, "data_vision") as worker:
        worker.answer()
        for step in range(steps):
            samples = samples_of(step, ranks * SAMPLES)
            question = {"images": samples.patches.tolist(), "sequences": samples.tokens.tolist()}
            told = worker.ask(json.dumps(question))
            encoder, backbone = np.asarray(told["encoder_s"]), np.asarray(told["backbone_s"])
            for name, microbatches in zip(found, (1, SAMPLES), strict=True):
                found[name].append(arrangements(samples, encoder, backbone, ranks, microbatches))
    rows = []
    for name, steps_s in found.items():
        arrived, hybrid, joint = (1e3 * statistics.median(times) for times in zip(*steps_s, strict=True))
        what = f"vision-like, {ranks} ranks that wait {name}"
        rows += [
            row(f"{what}, hybrid: step", hybrid, "ms", baseline=arrived, bar=f"<= {1 / 2.2:.3f}"),
            row(f"{what}, image and text of a sample together: step", joint, "ms", baseline=arrived),
        ]
    return rows


def arrangements(
    samples: Samples, encoder: Costs, backbone: Costs, ranks: int, microbatches: int
) -> tuple[float, float, float]:
    """Seconds of a step: samples as they arrived, hybrid, and each sample's image on the rank of its text.

    Args:
      samples: what is planned with.
      encoder: what each image costs, for the result.
      backbone: the same of each sequence.
      ranks: that wait for each other.
      microbatches: per step, at the end of each of which they do so.
    """
    buckets = ranks * microbatches
    arrived = np.arange(len(encoder)) * buckets // len(encoder)
    image, sequence, joint = planned(samples, buckets)
    return (
        barrier_s(encoder + backbone, arrived, ranks, microbatches),
        # the backbone waits for everybody's images
        barrier_s(encoder, image, ranks, microbatches) + barrier_s(backbone, sequence, ranks, microbatches),
        barrier_s(encoder + backbone, joint, ranks, microbatches),
    )


def barrier_s(costs: Costs, bucket: Int64[np.ndarray, " items"], ranks: int, microbatches: int) -> float:
    """Time until the dearest rank of each microbatch is done; bucket m * ranks + r is microbatch m of rank r."""
    totals = np.bincount(bucket, weights=costs, minlength=ranks * microbatches)
    return float(totals.reshape(microbatches, ranks).max(axis=1).sum())


type Buckets = Int64[np.ndarray, " samples"]


def planned(samples: Samples, buckets: int) -> tuple[Buckets, Buckets, Buckets]:
    """The bucket of each sample's image, of its sequence, and of both together: the planner's graph, by cost.

    Buckets that cost alike are the same microbatch of different ranks: what the ranks wait for differs least.
    """
    lengths = samples.tokens.astype(np.int32)
    place = ClientPlaceTree({"data": buckets}, np.zeros(buckets, np.int64), global_batch=buckets)
    graph = Graph(
        Buffers(("samples",), (len(lengths),), 1, lambda source, first, count: lengths[first : first + count]),
        place=place,
        sizes={
            "image": lambda source, document: samples.patches[document],
            "both": lambda source, document: document,
        },
    )
    graph.mix(Constant({"samples": 1.0}), step=0, unit="samples").freeze(len(lengths))
    costs = {
        "image": encoder_cost,
        "text": backbone_cost,
        "both": lambda document: encoder_cost(samples.patches[document]) + backbone_cost(samples.tokens[document]),
    }
    for view, cost in costs.items():
        graph.view(view).distribute("world" if view == "image" else "data").cost(cost).balance("lpt")
    views, document = graph.plan().views, graph.pieces.document
    image, text, both = (_by_sample(views[view], document, buckets) for view in costs)
    return image, text, both


def _by_sample(found: NodeAssignment, document: Int64[np.ndarray, " samples"], buckets: int) -> Buckets:
    """Buckets in the order of their cost, the dearest of all ranks in one microbatch."""
    assert found.bucket is not None
    totals = np.bincount(found.bucket, weights=found.costs, minlength=buckets)
    place = np.empty(buckets, np.int64)
    place[np.argsort(-totals, kind="stable")] = np.arange(buckets)
    by_sample = np.empty_like(document)
    by_sample[document] = place[found.bucket]
    return by_sample


def encoder_cost(patches: Int64[np.ndarray, " n"]) -> Costs:
    """Multiply-adds of two layers of width 192, patches of 588 values."""
    return patches * (588 * 192 + 2 * 8 * 192**2) + 2 * 2 * 192.0 * patches**2


def backbone_cost(tokens: Int64[np.ndarray, " n"]) -> Costs:
    """Multiply-adds of a layer of width 256."""
    return tokens * (8 * 256**2) + 2 * 256.0 * tokens**2


def model_rows() -> list[Row]:
    """Speed-ups by cost alone: text and vision-like, waiting once a step or in each of 8 microbatches."""
    rows = []
    for seq_len in (8192, 131072):
        at_end, each = text_speedups(seq_len, 64, SAMPLES)
        what = f"modelled, text, rows of {seq_len}, 64 ranks that wait"
        rows += [row(f"{what} at its end", at_end, "x faster"), row(f"{what} in each microbatch", each, "x faster")]
    for sigma, most in ((1.0, 2048), (1.3, 4096)):
        for name, microbatches in (("at its end", 1), ("in each microbatch", SAMPLES)):
            speedup = vision_speedup(72, microbatches, sigma=sigma, most=most)
            what = f"modelled, vision-like, tail {sigma} up to {most} patches, 72 ranks that wait {name}"
            rows.append(row(what, speedup, "x faster"))
    return rows


def text_speedups(seq_len: int, ranks: int, microbatches: int) -> tuple[float, float]:
    """Of rows in the planner's order, where ranks wait at the end; and sorted by cost, where they do each microbatch.

    A row per microbatch; documents lognormal, 1000 tokens in the median, sigma 1.6, cut where a row ends.
    """
    num_rows = ranks * microbatches
    lengths = np.random.default_rng(4).lognormal(np.log(1000), 1.6, num_rows * seq_len // 500).astype(np.int64) + 1
    ends = np.union1d(np.cumsum(lengths), np.arange(1, num_rows + 1) * seq_len)
    ends = ends[: np.searchsorted(ends, num_rows * seq_len) + 1]
    pieces = np.diff(ends, prepend=0)
    costs = np.bincount((ends - 1) // seq_len, weights=LINEAR * pieces + pieces.astype(np.float64) ** 2)
    whole = np.rint(costs).astype(np.int64)
    arrived, given = np.arange(num_rows) // microbatches, np.arange(num_rows)
    at_end, each = np.empty(num_rows, np.int64), np.empty(num_rows, np.int64)
    at_end[balance.tree(whole)] = arrived
    each[np.argsort(-whole, kind="stable")] = given
    return (
        barrier_s(costs, arrived, ranks, 1) / barrier_s(costs, at_end, ranks, 1),
        barrier_s(costs, given, ranks, microbatches) / barrier_s(costs, each, ranks, microbatches),
    )


def vision_speedup(ranks: int, microbatches: int, *, sigma: float, most: int) -> float:
    """Hybrid over as they arrived, mean of 8 steps."""
    speedups = []
    for step in range(8):
        samples = samples_of(step, ranks * SAMPLES, sigma=sigma, most=most)
        costs = encoder_cost(samples.patches), backbone_cost(samples.tokens)
        arrived, hybrid, _ = arrangements(samples, *costs, ranks, microbatches)
        speedups.append(arrived / hybrid)
    return statistics.mean(speedups)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Numpy in a process started here computes on one core."""
    before = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OPENBLAS_NUM_THREADS"]
        if before is not None:
            os.environ["OPENBLAS_NUM_THREADS"] = before
