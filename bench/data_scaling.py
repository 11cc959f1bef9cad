"""Step time when reading is what takes time: by number of loaders, and as a source slows or its weight rises.

    python -m jtrain.bench data_scaling

The trainer's accelerator is emulated: a step sleeps 100 ms. Each of 64 documents a step takes 1 ms to read, 10 ms from
the slow source, with the interpreter's lock held: what decoding takes on a core of its own, of which this machine has
two. One loader keeps up with the quick ones (64 ms a step) but not with a slow source at its even share (136 ms) or at
30 % (237 ms). Beside Grain with one worker, as many as keep up at first: its number of workers and its weights are
fixed, so it is started anew with the later weights.

Three kinds of sources are read with one loader, with `MOST` and with as many as the autoscaler chooses: Parquet over
HTTP where each request takes 50 ms, JSON lines for a BPE tokenizer of 8,192 tokens, and Parquet of zstd row groups for
the byte tokenizer. Loaders that compute share the cores of the machine; those that wait for a server do not.
"""

import contextlib
import dataclasses
import http.server
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

from bench.data_sources import DOCUMENT_CHARACTERS, QUICK_S, SLOW_S, peer, peer_program, sources
from jtrain.bench import Options, Row, option, row
from jtrain.data.constructor.collate import Rows
from jtrain.data.constructor.constructor import Constructor, ConstructorSetup
from jtrain.data.dataset import PackedText, TextDataset, open_dataset
from jtrain.data.loaders.forkserver import Forkserver
from jtrain.data.loaders.process_pool import ProcessPool
from jtrain.data.mixture.schedule import Constant, Staged
from jtrain.data.sources.source import Source

SOURCES, DOCUMENTS = 8, 64
"""Sources, and documents per step."""
NAMES = tuple(f"source_{number}" for number in range(SOURCES))
STEP_S = 0.100
EVEN, RARE, FREQUENT = 1 / SOURCES, 0.01, 0.30
"""Weights of the slow source."""

MOST = 4
"""Loaders at most, where their number is compared."""
SHARDS = 64
"""Files of a source whose number of loaders is compared, 17 MB of text."""
REQUEST_S = 0.050
"""Time that the server of remote files takes for each request."""


OPTIONS = (option("--steps", type=int, default=60, help="steps before the change, and after (default: 60)"),)


@dataclasses.dataclass(frozen=True)
class Steps:
    """Medians in seconds: before the change, and in the last third of the steps after it.

    slowest_s: the slowest step between.
    steps_until_back: steps after the change until step times, by the median of five, stay within 10 %.
    """

    before_s: float
    after_s: float
    slowest_s: float
    steps_until_back: int


def run(args: Options) -> list[Row]:
    """Both scenarios of ours, Grain's steps under the same weights, then each kind of source by number of loaders."""
    peer_program("data_grain")
    slow, risen = our_slow_source(args.steps), our_risen_weight(args.steps)
    grain = {
        "no source slow": grain_step_s(args.steps, weight=EVEN, slow_s=QUICK_S),
        "one source 10x slower": grain_step_s(args.steps, weight=EVEN, slow_s=SLOW_S),
        "its weight 1 %": grain_step_s(args.steps, weight=RARE, slow_s=SLOW_S),
        "its weight 30 %": grain_step_s(args.steps, weight=FREQUENT, slow_s=SLOW_S),
    }
    return [
        row("step, one source 10x slower, against none", 1e3 * slow.after_s, "ms", baseline=1e3 * slow.before_s,
            bar="<= 1.1"),
        row("step, slow source at 30 %, against 1 % before", 1e3 * risen.after_s, "ms", baseline=1e3 * risen.before_s,
            bar="<= 1.1"),
        row("slowest step after the weight rose", 1e3 * risen.slowest_s, "ms"),
        row("steps until they are within 10 %", float(risen.steps_until_back), "steps"),
        row("step, one source 10x slower, against Grain", 1e3 * slow.after_s, "ms",
            baseline=1e3 * grain["one source 10x slower"]),
        row("step, slow source at 30 %, against Grain", 1e3 * risen.after_s, "ms",
            baseline=1e3 * grain["its weight 30 %"]),
        *(row(f"step, Grain, one worker, {name}", 1e3 * seconds, "ms") for name, seconds in grain.items()),
        *kinds_of_sources(2 * args.steps),
    ]  # fmt: skip


def kinds_of_sources(steps: int) -> list[Row]:
    """Steps of each kind of source: with one loader, with `MOST`, and autoscaled."""
    rows = []
    for kind in (remote_parquet, costly_tokenizer, zstd_parquet):
        with tempfile.TemporaryDirectory() as folder, kind(Path(folder)) as spec:
            # Means, since a window that opens makes one step wait for many row groups.
            one, most = (statistics.mean(fixed_steps(spec, count, steps)[steps // 2 :]) for count in (1, MOST))
            scaled, loaders = autoscaled_steps(spec, steps)
            auto = statistics.mean(scaled[steps // 2 :])
        what = (kind.__doc__ or "").partition(".")[0]
        rows += [
            row(f"step, {what}: one loader", 1e3 * one, "ms"),
            row(f"step, {what}: {MOST} loaders, against one", 1e3 * most, "ms", baseline=1e3 * one),
            row(f"step, {what}: autoscaled to {loaders}, against the better of both", 1e3 * auto, "ms",
                baseline=1e3 * min(one, most), bar="<= 1.1"),
        ]  # fmt: skip
    return rows


@contextlib.contextmanager
def remote_parquet(folder: Path) -> Iterator[PackedText]:
    """Parquet over HTTP. Half a megabyte a step, four row groups; a window holds some thirty of them."""
    with served(write_parquet(folder).parent) as url:  # a listing over HTTP has no sizes: such files are copied whole
        yield parquet_spec(f"{url}/text.parquet", folder, global_batch=512)


@contextlib.contextmanager
def costly_tokenizer(folder: Path) -> Iterator[PackedText]:
    """JSON lines, BPE of 8,192 tokens. One loader does not tokenise 64 rows of 2,048 tokens in the time of a step."""
    import tokenizers
    import tokenizers.models
    import tokenizers.pre_tokenizers
    import tokenizers.trainers

    files = sources("jsonl", num_sources=SHARDS)
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train([str(next(files.iterdir()))], trainer)
    bpe.save(str(folder / "tokenizer.json"))
    yield PackedText(
        path=f"{files}/*.jsonl", tokenizer=str(folder / "tokenizer.json"), end_token="<|endoftext|>", seq_len=2048,
        global_batch=64, eval_fraction=0.0, max_loaders=MOST, cache_dir=str(folder),
    )  # fmt: skip


@contextlib.contextmanager
def zstd_parquet(folder: Path) -> Iterator[PackedText]:
    """Parquet of zstd on disk. Two megabytes a step."""
    yield parquet_spec(str(write_parquet(folder)), folder, global_batch=2048)


def write_parquet(folder: Path) -> Path:
    """One file of the texts of `SHARDS` sources, in row groups of 200."""
    import pyarrow
    import pyarrow.parquet as pq

    files = sorted(sources("parquet", num_sources=SHARDS).iterdir())
    texts = pyarrow.concat_tables([pq.read_table(file) for file in files])
    path = folder / "files" / "text.parquet"
    path.parent.mkdir()
    pq.write_table(texts, path, row_group_size=200, compression="zstd")
    return path


def parquet_spec(path: str, folder: Path, *, global_batch: int) -> PackedText:
    """That file, in windows of thirty row groups."""
    return PackedText(
        path=path, seq_len=1024, global_batch=global_batch, eval_fraction=0.0, max_loaders=MOST,
        shuffle_window_bytes=1 << 22, cache_dir=str(folder / "cache"),
    )  # fmt: skip


class _Slow(http.server.SimpleHTTPRequestHandler):
    """Sends files, or ranges of them, `REQUEST_S` after each request."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def do_GET(self) -> None:
        self._answer(with_content=True)

    def _answer(self, *, with_content: bool) -> None:
        time.sleep(REQUEST_S)  # the distance to the store that is measured
        content = Path(self.translate_path(self.path)).read_bytes()
        first, last = 0, len(content) - 1
        if wanted := self.headers.get("Range"):
            low, _, high = wanted.removeprefix("bytes=").partition("-")
            first, last = (int(low), int(high or last)) if low else (max(len(content) - int(high), 0), last)
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if with_content:
            with contextlib.suppress(ConnectionError):  # a loader that is ended hangs up
                self.wfile.write(content[first : last + 1])


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves a folder on the loopback interface; gives its URL."""

    def handler(*arguments: Any) -> _Slow:
        return _Slow(*arguments, directory=str(folder))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def autoscaled_steps(spec: PackedText, steps: int) -> tuple[list[float], int]:
    """Seconds of each step of a trainer that sleeps for its accelerator, and the loaders at the end."""
    step_s = []
    with open_dataset(spec, seed=0).train_batches() as batches:
        next(batches)
        for _ in range(steps):
            start_s = time.perf_counter()
            next(batches)
            time.sleep(STEP_S)  # the device's step
            step_s.append(time.perf_counter() - start_s)
        assert batches.stats is not None
        return step_s, len(batches.stats.loaders)


def fixed_steps(spec: PackedText, loaders: int, steps: int) -> list[float]:
    """The same with a number of loaders that stays, each of which reads every source."""
    dataset = open_dataset(spec, seed=0)
    ready: queue.Queue[None] = queue.Queue(2)
    stop = threading.Event()
    failed: list[BaseException] = []

    def construct() -> None:
        try:
            with constructor_of(dataset, loaders) as (constructor, pool):
                rows = Rows.empty(spec.global_batch, spec.seq_len)
                while not stop.is_set():
                    constructor.advance()
                    if constructor.fill(vars(rows)) is None:
                        wait(pool.connections(), timeout=0.05)
                        continue
                    while not stop.is_set():
                        with contextlib.suppress(queue.Full):
                            ready.put(None, timeout=0.02)
                            break
                        constructor.advance()
        except BaseException as error:
            failed.append(error)
            ready.put(None)

    working = threading.Thread(target=construct)
    working.start()
    step_s = []
    try:
        ready.get()
        for _ in range(steps):
            start_s = time.perf_counter()
            ready.get()
            time.sleep(STEP_S)  # the device's step
            step_s.append(time.perf_counter() - start_s)
            if failed:
                raise failed[0]
    finally:
        stop.set()
        working.join()
    return step_s


@contextlib.contextmanager
def constructor_of(dataset: TextDataset, loaders: int) -> Iterator[tuple[Constructor, ProcessPool]]:
    """A constructor and its loaders, each of which reads every source."""
    spec = dataset.spec
    work = ConstructorSetup(
        sources=dataset.setups,
        planner=dataset._planner_spec((1.0, 0.0)),
        rows=np.arange(spec.global_batch),
        column_order=None,
        chunk_bytes=tuple(stream.mean_bytes for stream in dataset.streams),
        lookahead_steps=spec.lookahead_steps,
    )
    forkserver = Forkserver()
    everything = tuple(range(len(work.sources)))
    pool = ProcessPool(
        work.sources,
        forkserver.client,
        placement={f"loader-{number}": everything for number in range(loaders)},
        shadows=0,
        read_timeout_s=spec.read_timeout_s,
        say=lambda text: None,
    )
    try:
        yield Constructor(work, pool, None), pool
    finally:
        pool.close()
        forkserver.close()


def our_slow_source(steps: int) -> Steps:
    """Two runs: `before_s` of one whose last source is as quick as the rest, `after_s` of one where it is slow."""
    even = Constant(dict.fromkeys(NAMES, EVEN))
    return steps_of(our_steps(even, "quick", steps), our_steps(even, "slow", 2 * steps))


def our_risen_weight(steps: int) -> Steps:
    """One run whose schedule takes the slow source from 1 % to 30 % after `steps` steps."""
    rare, frequent = (
        dict.fromkeys(NAMES, (1 - weight) / (SOURCES - 1)) | {NAMES[-1]: weight} for weight in (RARE, FREQUENT)
    )
    step_s = our_steps(Staged(((0, rare), (steps, frequent))), "slow", 3 * steps)
    return steps_of(step_s[steps // 2 : steps], step_s[steps:])


def our_steps(mixture: Constant | Staged, last: str, steps: int) -> list[float]:
    """Seconds of each step of a trainer that sleeps for its accelerator; the last source is that function's."""
    mixed = {name: Source(path="bench.data_sources:quick", format="grain") for name in NAMES[:-1]}
    mixed[NAMES[-1]] = Source(path=f"bench.data_sources:{last}", format="grain")
    spec = PackedText(
        sources=mixed,
        mixture=mixture,
        seq_len=8 * (DOCUMENT_CHARACTERS + 1),  # and the end token
        global_batch=DOCUMENTS // 8,
        eval_fraction=0.0,
        max_loaders=8,
    )
    return autoscaled_steps(spec, steps)[0]


def steps_of(before_s: list[float], after_s: list[float]) -> Steps:
    """What the step times before and after the change say."""
    before = statistics.median(before_s)
    smooth = [statistics.median(after_s[at : at + 5]) for at in range(len(after_s))]
    above = [at for at, seconds in enumerate(smooth) if seconds > 1.1 * before]
    return Steps(
        before_s=before,
        after_s=statistics.median(after_s[-(len(after_s) // 3) :]),
        slowest_s=max(after_s),
        steps_until_back=above[-1] + 1 if above else 0,
    )


def grain_step_s(steps: int, *, weight: float, slow_s: float) -> float:
    """Median step of a trainer on Grain's batches, in seconds."""
    settings = {"sources": SOURCES, "batch": DOCUMENTS, "slow-weight": weight, "slow-s": slow_s, "quick-s": QUICK_S}
    arguments = [text for key, value in (settings | {"step-s": STEP_S}).items() for text in (f"--{key}", value)]
    with peer(None, "data_grain", "scaling", *arguments) as program:
        program.answer()
        program.ask(str(steps // 3))  # what was read ahead is used up
        return statistics.median(program.ask(str(steps))["step_s"])
