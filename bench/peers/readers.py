"""Readers that the data benchmarks compare, jtrain's among them: processes with the protocol of protocol.py.

    python readers.py mixing READER FOLDER --rows 64 --seq-len 8192        rows of a mixture, drawn for some seconds
    python readers.py consumers READER FOLDER --consumers 32 --batches 40  each opens every source (Parquet)
    python readers.py resume READER FOLDER --step 1000                     seconds to the first batch after that step
    python readers.py trainers jtrain FOLDER --hosts 4 --rows 32           a trainer for each host, opened in two steps
    python readers.py write mosaicml PARQUET_FOLDER --out FOLDER           rows of ids, as llm-foundry prepares text

torch, WebDataset and MosaicML run in the peers' environment, which setup.sh makes, the others in jtrain's. A
reader's packages are imported when it is called, and only jtrain's reader imports jtrain. With jax installed
`import grain` imports jax, also in every worker process that Grain spawns.
"""

import dataclasses
import itertools
import json
import multiprocessing
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from protocol import Batches, answer, arguments, consumers, draw, keep, rows_of, weights_of

SHUFFLE_BUFFER = 100
"""Documents in the shuffle buffer of each of WebDataset's sources."""


def memmap_nanogpt(args: Any) -> Batches:
    """Random windows as nanoGPT's get_batch builds them: tokens, then targets, each converted and stacked."""
    ids = np.memmap(Path(args.folder) / "tokens.bin", np.uint16, "r")
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(0, len(ids) - args.seq_len, args.rows)
        tokens = np.stack([ids[i : i + args.seq_len].astype(np.int32) for i in starts])
        targets = np.stack([ids[i + 1 : i + 1 + args.seq_len].astype(np.int32) for i in starts])
        yield tokens, targets


def memmap_windows(args: Any) -> Batches:
    """The same windows, each copied once, the least work for int32; tokens and targets are views of them."""
    ids = np.memmap(Path(args.folder) / "tokens.bin", np.uint16, "r")
    rng = np.random.default_rng(0)
    while True:
        window = np.empty((args.rows, args.seq_len + 1), np.int32)
        for row, start in enumerate(rng.integers(0, len(ids) - args.seq_len, args.rows)):
            window[row] = ids[start : start + args.seq_len + 1]
        yield window[:, :-1], window[:, 1:]


def memmap_documents(args: Any) -> Batches:
    """Documents of the flat file in random order, in rows of four arrays."""
    # np.asarray: slicing an np.memmap makes an np.memmap, which is slow.
    ids = np.asarray(np.memmap(Path(args.folder) / "tokens.bin", np.uint16, "r"))
    # A zero before each document and one behind it.
    borders = np.flatnonzero(ids == 0)
    starts, ends = borders[::2].tolist(), (borders[1::2] + 1).tolist()
    rng = random.Random(0)

    def shuffled_documents() -> Iterator[Any]:
        while True:
            for i in rng.sample(range(len(starts)), len(starts)):
                yield ids[starts[i] : ends[i]]

    return _pack_rows(shuffled_documents(), args.rows, args.seq_len)


def _json_texts(folder: str) -> Iterator[bytes]:
    """Texts of files in random order, lines in theirs: no mixture, no shuffle within a file."""
    files = sorted(Path(folder).glob("*.jsonl"))
    rng = random.Random(0)
    while True:
        for file in rng.sample(files, len(files)):
            with file.open("rb") as opened:
                for line in opened:
                    yield json.loads(line)["text"].encode()


def json_lines(args: Any) -> Batches:
    """JSON lines, tokenised as they come."""
    return rows_of(_json_texts(args.folder), args.rows, args.seq_len)


def json_documents(args: Any) -> Batches:
    """Documents of JSON lines in rows of four arrays."""
    documents = (np.frombuffer(b"\0%b\0" % text, np.uint8) for text in _json_texts(args.folder))
    return _pack_rows(documents, args.rows, args.seq_len)


def _pack_rows(documents: Iterator[Any], rows: int, seq_len: int) -> Batches:
    """Joins documents and cuts them into rows; each array is written once, piece by piece.

    The four arrays are what a step on packed documents needs: tokens; targets, none at the end of a document;
    positions and segment numbers.
    """
    count = np.arange(seq_len, dtype=np.int32)
    remaining = next(documents)
    while True:
        tokens, targets, positions, segments = (np.empty((rows, seq_len), np.int32) for _ in range(4))
        for token, target, position, segment in zip(tokens, targets, positions, segments, strict=True):
            start = number = 0
            while start < seq_len:
                end = min(start + len(remaining), seq_len)
                number += 1
                token[start:end] = remaining[: end - start]
                target[start : end - 1] = token[start + 1 : end]
                # No target at the end of a document.
                target[end - 1] = -1
                position[start:end] = count[: end - start]
                segment[start:end] = number
                # What does not fit goes on in the next row, as a segment of its own.
                remaining = remaining[end - start :] if end - start < len(remaining) else next(documents)
                start = end
        yield tokens, targets


def _grain_records(folder: str) -> Any:
    """Endless records by `MapDataset.mix`, Grain's fastest: every source shuffled."""
    import grain

    # Sorted: the weights follow the order of the files.
    files = sorted(Path(folder).glob("*.arrayrecord"))
    sources = [
        grain.MapDataset.source(grain.sources.ArrayRecordDataSource(str(file)))
        .seed(number)
        .shuffle()
        .repeat(reseed_each_epoch=True)
        for number, file in enumerate(files)
    ]
    return grain.MapDataset.mix(sources, weights=weights_of(len(files)))


def grain_mixture(args: Any) -> Batches:
    """Rows of Grain's records, without threads (no gain here)."""
    import grain

    records = iter(_grain_records(args.folder).to_iter_dataset(grain.ReadOptions(0, 0)))
    return rows_of(records, args.rows, args.seq_len)


def grain_consumer(folder: str, seed: int, batch: int) -> Iterator[Any]:
    """Batches by `IterDataset.mix`, the only mixture that Grain has for Parquet.

    A consumer stands for the worker of a rank, with all sources open: `mp_prefetch` slices the indices of the
    mixture and not the sources.
    """
    import grain
    import pyarrow.parquet  # noqa: F401, Grain imports it at the first batch, whose time counts
    from grain import experimental

    files = sorted(Path(folder).glob("*.parquet"))
    sources = [experimental.RepeatIterDataset(experimental.ParquetIterDataset(str(file))) for file in files]
    mixed = grain.IterDataset.mix(sources, weights=weights_of(len(files)))
    ids = mixed.map(lambda record: np.frombuffer(record["text"].encode(), np.uint8).astype(np.int32))

    # A generator: nothing is opened before the first next().
    def batches() -> Iterator[Any]:
        yield from ids.seed(seed).batch(batch, batch_fn=list)

    return batches()


def grain_resume(args: Any) -> Callable[[], None]:
    """Grain's first batch after a step, from its state of one number."""
    import grain.sources

    def first_batch() -> None:
        ids = _grain_records(args.folder).map(lambda record: np.frombuffer(record, np.uint8).astype(np.int32))
        iterator = iter(ids.batch(args.batch, batch_fn=list).to_iter_dataset(grain.ReadOptions(0, 0)))
        iterator.set_state(iterator.get_state() | {"next_index": args.step})
        next(iterator)
        # Guards against a Grain that ignores the number.
        assert iterator.get_state()["next_index"] == args.step + 1, iterator.get_state()

    return first_batch


def _torch_loader(folder: str, seed: int, batch: int) -> Any:
    """torchdata's loader as users write it: an iterator per source, a weighted choice for each sample.

    The loader is inside the consumer's process: a worker process on top would only add to it.
    """
    import pyarrow.parquet
    import torch

    # torchdata calls a function that torch retired
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
    from torchdata.stateful_dataloader import StatefulDataLoader

    def documents(file: Path) -> Iterator[Any]:
        while True:
            for rows in pyarrow.parquet.ParquetFile(file).iter_batches(64, columns=["text"]):
                for text in rows["text"]:
                    yield torch.from_numpy(np.frombuffer(text.as_py().encode(), np.uint8).astype(np.int32))

    class Mixture(torch.utils.data.IterableDataset):
        """Endless weighted mixture of all sources."""

        def __iter__(self) -> Iterator[Any]:
            sources = [documents(file) for file in sorted(Path(folder).glob("*.parquet"))]
            rng = random.Random(seed)
            cumulative = list(itertools.accumulate(weights_of(len(sources))))
            while True:
                yield next(rng.choices(sources, cum_weights=cumulative)[0])

    return StatefulDataLoader(Mixture(), batch_size=batch, collate_fn=list)


def torch_consumer(folder: str, seed: int, batch: int) -> Iterator[Any]:
    """Batches of one consumer."""
    return iter(_torch_loader(folder, seed, batch))


def torch_resume(args: Any) -> Callable[[], None]:
    """torchdata's first batch after a step; its iterable has no state: all earlier batches are read again."""
    loader = _torch_loader(args.folder, 0, args.batch)  # imports
    # Runs once, so that the state has all its keys, and imports do not count.
    next(iter(loader))
    state = loader.state_dict() | {"_num_yielded": args.step, "_sampler_iter_yielded": args.step}

    def first_batch() -> None:
        resumed_loader = _torch_loader(args.folder, 0, args.batch)
        resumed_loader.load_state_dict(state)
        next(iter(resumed_loader))

    return first_batch


def webdataset_mixture(args: Any) -> Batches:
    """WebDataset's RandomMix over one tar per source, each through a shuffle buffer."""
    import webdataset

    sources = [
        webdataset.WebDataset(str(tar), shardshuffle=False).repeat().shuffle(SHUFFLE_BUFFER)
        for tar in sorted(Path(args.folder).glob("*.tar"))
    ]
    samples = webdataset.RandomMix(sources, weights_of(len(sources)))
    return rows_of((sample["txt"] for sample in samples), args.rows, args.seq_len)


def mosaicml_write(args: Any) -> None:
    """Writes a folder of MDS shards for each Parquet file; what does not fill a last row is left out."""
    import pyarrow.parquet
    from streaming import MDSWriter

    for file in sorted(Path(args.folder).glob("*.parquet")):
        texts = pyarrow.parquet.read_table(file)["text"].to_pylist()
        ids = np.frombuffer(b"".join(b"\0" + text.encode() + b"\0" for text in texts), np.uint8).astype(
            np.uint16
        )
        columns = {"tokens": f"ndarray:uint16:{args.seq_len + 1}"}
        with MDSWriter(out=f"{args.out}/{file.stem}", columns=columns) as out:
            for start in range(0, len(ids) - args.seq_len, args.seq_len):
                out.write({"tokens": ids[start : start + args.seq_len + 1]})


def mosaicml_mixture(args: Any) -> Batches:
    """A stream per source, mixed by proportion, shuffled; drawn in this process, as there is one core.

    A sample is a row of one token more than it trains on.
    """
    import torch
    from streaming import Stream, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    # Left by a run that was killed, it would make this one fail.
    clean_stale_shared_memory()
    sources = sorted(Path(args.folder).iterdir())
    weights = weights_of(len(sources))
    streams = [Stream(local=str(s), proportion=weight) for s, weight in zip(sources, weights, strict=True)]
    dataset = StreamingDataset(
        streams=streams, shuffle=True, batch_size=args.rows, num_canonical_nodes=1, epoch_size=1 << 20
    )

    def collate(samples: list[dict[str, Any]]) -> Any:
        return np.stack([sample["tokens"] for sample in samples]).astype(np.int32)

    while True:
        for window in torch.utils.data.DataLoader(
            dataset, batch_size=args.rows, collate_fn=collate, drop_last=True
        ):
            yield window[:, :-1], window[:, 1:]


def jtrain_mixture(args: Any) -> Batches:
    """jtrain's packed rows, with `mallopt` as the training loop sets it on a CPU."""
    from bench.data_parts.files import mixture
    from jtrain.data.dataset import open_dataset
    from jtrain.runtime.platform import keep_freed_memory

    keep_freed_memory()
    spec = mixture(Path(args.folder), seq_len=args.seq_len, global_batch=args.rows)
    # Options of the command line have no None: "" stands for it.
    spec = dataclasses.replace(spec, prepared=args.prepared or None, engine=args.engine)
    with open_dataset(spec, seed=0).train_batches() as batches:
        for batch in batches:
            yield batch.token_BL, batch.target_BL, batch.segment_BL


def jtrain_trainers(args: Any) -> None:
    """Starts a trainer for each emulated host, with the rows of its own ranks.

    A trainer has JAX anyway: importing it is no part of the data's memory, but importing jtrain.data and
    opening the data is. The first answer gives the process ids before, then a line of standard input has
    jtrain.data imported, and the next one opens the data.
    """
    context = multiprocessing.get_context("spawn")
    ready_trainers, first_batches, all_batches = (context.Semaphore(0) for _ in range(3))
    steps, end = (context.Event(), context.Event()), context.Event()
    processes = [
        context.Process(
            target=_jtrain_trainer, args=(args, host, ready_trainers, steps, first_batches, all_batches, end)
        )
        for host in range(args.hosts)
    ]
    for process in processes:
        process.start()
    start = 0.0
    # Two phases, import and open: in each all trainers get ready before any goes on.
    for step in steps:
        for _ in processes:
            ready_trainers.acquire()
        answer(trainers=[process.pid for process in processes])
        sys.stdin.readline()
        start = time.perf_counter()
        step.set()
    keep(processes, first_batches, all_batches, end, since_s=start)


def _jtrain_trainer(
    args: Any, host: int, ready_trainers: Any, steps: Any, first_batches: Any, all_batches: Any, end: Any
) -> None:
    """Opens every source, draws its batches, and keeps its data until the end."""
    import jax  # noqa: F401, a trainer has it, and its memory counts

    ready_trainers.release()
    steps[0].wait()
    import jtrain.data.dataset
    from bench.data_parts.files import mixture

    spec = mixture(Path(args.folder), seq_len=args.seq_len, global_batch=args.rows)
    # As equal as possible; the constructor takes any ascending rows.
    rows = np.array_split(np.arange(args.rows), args.hosts)[host]
    ready_trainers.release()
    steps[1].wait()
    with jtrain.data.dataset.open_dataset(spec, seed=0).train_batches(rows=rows) as batches:
        next(batches)
        first_batches.release()
        for _ in range(args.batches - 1):
            next(batches)
        all_batches.release()
        end.wait()


MIXTURES: dict[str, Callable[[Any], Batches]] = {
    "jtrain": jtrain_mixture,
    "grain": grain_mixture,
    "webdataset": webdataset_mixture,
    "mosaicml": mosaicml_mixture,
    "memmap-nanogpt": memmap_nanogpt,
    "memmap-windows": memmap_windows,
    "memmap-documents": memmap_documents,
    "json-lines": json_lines,
    "json-documents": json_documents,
}
CONSUMERS = {"grain": grain_consumer, "torch": torch_consumer}
RESUMES = {"grain": grain_resume, "torch": torch_resume}
TASKS = {"trainers": jtrain_trainers, "write": mosaicml_write}


def main() -> None:
    """Runs the command line."""
    args = arguments(
        "what", "reader", "folder", rows=64, seq_len=8192, batches=40, batch=64, consumers=1, hosts=1, step=0,
        prepared="", engine="inline", out="",
    )  # fmt: skip
    match args.what:
        case "mixing":
            batches = MIXTURES[args.reader](args)
            tokens, _, *segments = next(batches)
            # Segment 0 is padding; readers without segments have none.
            answer(filled=np.count_nonzero(segments[0]) / tokens.size if segments else 1.0)
            draw(batches)
        case "consumers":
            consumers(CONSUMERS[args.reader], args)
        case "resume":
            first_batch = RESUMES[args.reader](args)
            start = time.perf_counter()
            first_batch()
            answer(first_batch_s=time.perf_counter() - start)
        case _:
            TASKS[args.what](args)


if __name__ == "__main__":
    main()
