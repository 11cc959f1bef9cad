import hashlib
import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jtrain.data import BatchIterator, PackedText, Source, Staged, TextDataset, open_dataset
from jtrain.data.constructor.context_order import context_order
from jtrain.errors import FileError
from jtrain.layout.dims import Batch
from tests.processes import program, run_together


def spec(path: Path | str | None, **fields: Any) -> PackedText:
    fields = {
        "seq_len": 16,
        "global_batch": 4,
        "eval_fraction": 0.1,
        "engine": "inline",
        "balance": False,
        **fields,
    }
    return PackedText(**{"path": path if path is None else str(path), **fields})


def next_chunk(batches: BatchIterator) -> int:
    """Returns the first chunk of the only source that has not been drawn."""
    return batches.state()["planner"]["sources"]["data"][0]


def train_records(dataset: TextDataset) -> list[int]:
    stream = dataset.streams[0]
    return np.flatnonzero(~stream.held_out(np.arange(stream.num_documents or 0))).tolist()


def held_out_records(dataset: TextDataset) -> list[int]:
    return np.concatenate(list(dataset.streams[0].held_out_records())).tolist()


def test_an_epoch_holds_every_training_document_once_and_the_next_another_order(
    write_texts: Callable[[Path, list[str]], Path], texts: list[str], tmp_path: Path
) -> None:
    path = write_texts(tmp_path, texts)
    dataset = open_dataset(spec(path, packing="best_fit", seq_len=2048, eval_fraction=0.0), seed=0)
    records = train_records(dataset)
    want = sorted(b"\0" + texts[i].encode() + b"\0" for i in records)
    whole: list[bytes] = []
    iterator = dataset.train_batches()
    while next_chunk(iterator) < 3 * len(dataset.streams[0]) + 20:
        batch = next(iterator)
        for token, segment in zip(batch.token_BL, batch.segment_BL, strict=True):
            for number in range(1, segment.max() + 1):
                whole.append(token[segment == number].astype(np.uint8).tobytes())
    n, counts = len(records), Counter(whole)
    assert set(counts) == set(want)
    assert {3, 4} >= set(counts.values()) >= {3}, "three epochs and the start of a fourth"
    assert whole[:n] != whole[n : 2 * n]


@pytest.mark.smoke
def test_the_same_seed_gives_the_same_batches_and_another_seed_others(
    write_texts: Callable[[Path, list[str]], Path],
    texts: list[str],
    tmp_path: Path,
    same_batch: Callable[[Batch, Batch], None],
) -> None:
    path = write_texts(tmp_path, texts)
    first, again, other = (open_dataset(spec(path), seed=seed).train_batches() for seed in (1, 1, 2))
    tokens = []
    for _ in range(30):
        batch = next(first)
        same_batch(next(again), batch)
        tokens.append((batch.token_BL != next(other).token_BL).mean())
    assert np.mean(tokens) > 0.5


def test_another_process_builds_the_same_batches(texts: list[str], tmp_path: Path) -> None:
    """The order does not depend on the hash seed, threads or clock of a process."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    [ended] = run_together([program(__file__, "hash_batches", tmp_path)], [{}])
    iterator = open_dataset(spec(tmp_path), seed=3).train_batches()
    here = b"".join(np.asarray(batch.token_BL).tobytes() for batch in islice(iterator, 20))
    assert ended.output == hashlib.sha256(here).hexdigest() + "\n", ended.errors


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8)
@given(stops=st.lists(st.integers(0, 40), min_size=2, max_size=3), lookahead=st.integers(0, 3))
def test_resuming_twice_at_any_step_equals_the_unbroken_run(
    stops: list[int],
    lookahead: int,
    texts: list[str],
    tmp_path: Path,
    same_batch: Callable[[Batch, Batch], None],
) -> None:
    """The state goes through JSON, as in a checkpoint; batches built ahead of the saved step have no
    effect.
    """
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    unbroken = open_dataset(spec(tmp_path), seed=5).train_batches(inline=True)
    state = None
    for steps in stops:
        with open_dataset(spec(tmp_path), seed=5).train_batches(state) as part:
            for _ in range(steps):
                same_batch(next(part), next(unbroken))
            saved = json.dumps(part.state())
            assert len(saved) < 4096
            list(islice(part, lookahead))
        state = json.loads(saved)
    with open_dataset(spec(tmp_path), seed=5).train_batches(state) as part:
        same_batch(next(part), next(unbroken))


@pytest.mark.parametrize("change", ["seed", "files", "tokenizer", "split"])
def test_the_state_of_another_run_is_refused(
    change: str, texts: list[str], tmp_path: Path, tokenizer_json: Path
) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    saved = open_dataset(spec(tmp_path), seed=0).train_batches().state()
    other, seed = spec(tmp_path), 0
    match change:
        case "seed":
            seed = 1
        case "files":
            (tmp_path / "a.jsonl").write_text('{"text": "less"}\n' * 60)
        case "tokenizer":
            other = spec(tmp_path, tokenizer=str(tokenizer_json))
        case "split":
            other = spec(tmp_path, eval_fraction=0.2)
    key = "seed" if change == "seed" else "sources.data"
    with pytest.raises(
        ValueError, match=rf"saved with {key}=.*would differ from those of the uninterrupted run.*--workdir"
    ):
        open_dataset(other, seed=seed).train_batches(saved)


def test_held_out_documents_are_never_trained_on_and_give_a_fixed_list(
    write_texts: Callable[[Path, list[str]], Path],
    texts: list[str],
    tmp_path: Path,
    same_batch: Callable[[Batch, Batch], None],
) -> None:
    path = write_texts(tmp_path, texts)
    dataset = open_dataset(spec(path, eval_fraction=0.2, eval_batches=1000), seed=0)
    train, held_out = set(train_records(dataset)), set(held_out_records(dataset))
    assert train | held_out == set(range(len(texts)))
    assert not train & held_out
    assert len(held_out) > 3
    batches = [held.batch for held in dataset.held_out().batches()]
    want = sum(len(texts[i].encode()) + 2 for i in held_out)
    assert sum(int((batch.segment_BL > 0).sum()) for batch in batches) == want, (
        "each token once: padded, not looped"
    )
    assert (batches[-1].segment_BL == 0).any()
    other_seed = open_dataset(spec(path, eval_fraction=0.2, eval_batches=1000), seed=9).held_out()
    for got, expected in zip(other_seed.batches(), batches, strict=True):
        same_batch(got.batch, expected)
    split = next(dataset.held_out().batches(context=2)).batch
    order = context_order(batches[0].token_BL.shape[1], 2, "zigzag")
    np.testing.assert_array_equal(split.token_BL, batches[0].token_BL[:, order])
    np.testing.assert_array_equal(split.segment_BL, batches[0].segment_BL[:, order])


def test_bad_records_stop_the_run_or_are_skipped_and_counted(texts: list[str], tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) for text in texts]
    lines[20], lines[40] = '{"text": ', '{"body": ""}'
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    iterator = open_dataset(spec(path), seed=0).train_batches()
    with pytest.raises(ValueError, match=r"a\.jsonl, line (21|41): .*data\.on_bad_record='skip'"):
        list(islice(iterator, 400))
    dataset = open_dataset(spec(path, on_bad_record="skip"), seed=0)
    assert {20, 40} <= set(train_records(dataset))
    iterator = dataset.train_batches()
    while next_chunk(iterator) < 3 * len(dataset.streams[0]):
        next(iterator)
    assert iterator.stats is not None
    assert 6 <= iterator.stats.skipped <= 8, "twice each epoch"
    assert iterator.state()["skipped"] == {"data": iterator.stats.skipped}


def test_too_little_text_for_a_row_is_refused_with_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("hello")
    with pytest.raises(
        ValueError,
        match=r"is too small: data\.eval_fraction=0\.0 leaves 1 documents with 7 tokens for training"
        r".*data\.seq_len=16.*lower data\.seq_len",
    ):
        open_dataset(spec(path, eval_fraction=0.0), seed=0)
    path.write_text("hello" * 100)
    with pytest.raises(
        ValueError,
        match=r"leaves 0 documents with 0 tokens for evaluation.*raise data\.eval_fraction, or set it to 0",
    ):
        open_dataset(spec(path), seed=0)
    dataset = open_dataset(spec(path, eval_fraction=0.0), seed=0)
    assert next(dataset.train_batches()).token_BL.shape == (4, 16)
    with pytest.raises(ValueError, match=r"data\.eval_fraction=0 holds out no documents"):
        dataset.held_out()


def test_a_corpus_of_bad_records_only_is_refused_though_they_may_be_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' + "no\n" * 30)
    with pytest.raises(ValueError, match=r"too small: .* documents with 0 tokens for training"):
        open_dataset(spec(tmp_path, on_bad_record="skip"), seed=0)


def test_one_big_file_is_shuffled_and_split_in_pieces(tmp_path: Path) -> None:
    """A book in one file is a common first corpus; as a single document it could be neither shuffled nor
    split.
    """
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {i}\n" for i in range(20_000)))
    dataset = open_dataset(
        spec(path, text_piece_bytes=2000, eval_fraction=0.1, seq_len=64, global_batch=16), seed=0
    )
    assert (dataset.streams[0].num_documents or 0) > 100
    assert len(held_out_records(dataset)) > 5
    starts = {bytes(row[:12].astype(np.uint8)) for row in next(dataset.train_batches()).token_BL}
    assert len(starts) == 16


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seq_len", 1),
        ("global_batch", 0),
        ("eval_batches", 0),
        ("text_piece_bytes", 3),
        ("eval_fraction", 1.0),
    ],
)
def test_a_field_out_of_range_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"data\.{field}={value} must be at least .*Set data\.{field}"):
        spec("x", **{field: value})


def test_an_unknown_policy_is_refused() -> None:
    # TypeError: the tests' own type checker.
    with pytest.raises((ValueError, TypeError), match="on_bad_record"):
        spec("x", on_bad_record="ignore")


def test_one_source_or_several_but_not_both(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.path .* data\.sources .* both are set"):
        spec("x", sources={"web": Source(path="y")})
    with pytest.raises(ValueError, match="neither is set"):
        PackedText(seq_len=16, global_batch=4)
    with pytest.raises(ValueError, match=r"data\.sources: '1 web' is not a valid name"):
        PackedText(sources={"1 web": Source(path="y")}, seq_len=16, global_batch=4)
    missing = str(tmp_path / "missing")
    with pytest.raises(FileError, match=r"data\.sources\.web\.path='.*missing': nothing there"):
        open_dataset(PackedText(sources={"web": Source(path=missing)}, seq_len=16, global_batch=4), seed=0)
    with pytest.raises(FileError, match=r"data\.path='.*missing': nothing there"):
        open_dataset(PackedText(path=missing, seq_len=16, global_batch=4), seed=0)
    with pytest.raises(
        ValueError, match=r"'data' is not a valid name.* which is the name of the source at data\.path"
    ):
        PackedText(sources={"data": Source(path="y")}, seq_len=16, global_batch=4)


def test_the_plan_lists_each_source_with_its_share(tmp_path: Path) -> None:
    for name in ("web", "code"):
        (tmp_path / f"{name}.txt").write_text("some text " * 50)
    sources = {name: Source(path=str(tmp_path / f"{name}.txt")) for name in ("web", "code")}
    mixture = Staged(((0, {"web": 3.0, "code": 1.0}),))
    dataset = open_dataset(spec(None, sources=sources, mixture=mixture, eval_fraction=0.0), seed=0)
    assert "web (75.0%): 1 documents in 1 files" in dataset.describe()
    assert dataset.vocab_size == 256


def test_opening_the_standard_library_needs_neither_grain_nor_pyarrow() -> None:
    """Errors and the plan appear before the 0.9 s that an import of grain takes."""
    [ended] = run_together([program(__file__, "open_stdlib")], [{}])
    assert ended.output == "[]\n", ended.errors
