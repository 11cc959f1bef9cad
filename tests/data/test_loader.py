import hashlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jtrain.data.loader import PackedText, TextDataset, open_dataset
from jtrain.dims import Batch


def spec(path: Path | str, **fields: Any) -> PackedText:
    return PackedText(**{"path": str(path), "seq_len": 16, "global_batch": 4, "eval_fraction": 0.1, **fields})


def documents_of(dataset: TextDataset, batches: Iterable[Batch]) -> list[bytes]:
    """Whole documents put together again: byte 0 starts and ends each, and lanes go round in order."""
    lanes: dict[int, bytes] = {}
    whole, row = [], 0
    num_lanes = min(32, len(dataset.train_records))
    for batch in batches:
        for token, segment in zip(batch.token_BL, batch.segment_BL, strict=True):
            for number in range(1, segment.max() + 1):
                piece = token[segment == number].astype(np.uint8).tobytes()
                lane = row % num_lanes
                lanes[lane] = lanes.get(lane, b"") + piece
                if len(lanes[lane]) > 1 and lanes[lane].endswith(b"\0"):
                    whole.append(lanes.pop(lane))
            row += 1
    return whole


def test_an_epoch_holds_every_training_document_once_and_the_next_another_order(
    write_texts: Callable[[Path, list[str]], Path], texts: list[str], tmp_path: Path
) -> None:
    dataset = open_dataset(spec(write_texts(tmp_path, texts)), seed=0)
    n = len(dataset.train_records)
    want = sorted(b"\0" + texts[i].encode() + b"\0" for i in dataset.train_records)
    order = [dataset._train_ids(number).astype(np.uint8).tobytes() for number in range(4 * n)]
    epochs = [order[start : start + n] for start in range(0, 3 * n, n)]
    assert all(sorted(epoch) == want for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != want

    iterator = dataset.train_batches()
    batches = []
    while iterator.state()["next_document"] < 3 * n:
        batches.append(next(iterator))
    state = iterator.state()
    still_open = [order[number] for number in state["lanes"][::2] if number >= 0]
    assert len(still_open) > 1
    found = documents_of(dataset, batches)
    assert Counter(found) + Counter(still_open) == Counter(order[: state["next_document"]])


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
    """Order hangs on no hash seed, thread or clock of the process."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    code = (
        "import sys, hashlib; from jtrain.data import *\n"
        f"it = open_dataset(PackedText(path={str(tmp_path)!r}, seq_len=16, global_batch=4, eval_fraction=0.1), seed=3)"
        ".train_batches()\n"
        "print(hashlib.sha256(b''.join(next(it).token_BL.tobytes() for _ in range(20))).hexdigest())"
    )
    there = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    iterator = open_dataset(spec(tmp_path), seed=3).train_batches()
    here = b"".join(np.asarray(batch.token_BL).tobytes() for batch in islice(iterator, 20))
    assert there == hashlib.sha256(here).hexdigest() + "\n"


def test_pieces_say_which_document_each_segment_came_from(texts: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    dataset = open_dataset(spec(tmp_path), seed=0)
    iterator = dataset.train_batches()
    for batch in islice(iterator, 50):
        segments = [
            (row, batch.token_BL[row][batch.segment_BL[row] == number].tolist())
            for row in range(4)
            for number in range(1, batch.segment_BL[row].max() + 1)
        ]
        said = []
        for piece in iterator.pieces:
            name, _, number = dataset.train_document_identity(piece.document).rpartition(":")
            assert name == "a.jsonl"
            ids = dataset.tokenizer.encode_document(texts[int(number)])
            said.append((piece.row, ids[piece.start : piece.end].tolist()))
        assert said == segments


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)
@given(stops=st.lists(st.integers(0, 40), min_size=2, max_size=3), lookahead=st.integers(0, 3))
def test_resuming_twice_at_any_step_equals_the_unbroken_run(
    stops: list[int], lookahead: int, texts: list[str], tmp_path: Path, same_batch: Callable[[Batch, Batch], None]
) -> None:
    """Through JSON, as a checkpoint keeps it; batches built ahead of the saved step leave no trace."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    unbroken = open_dataset(spec(tmp_path), seed=5).train_batches()
    state = None
    for steps in stops:
        part = open_dataset(spec(tmp_path), seed=5).train_batches(state)
        for _ in range(steps):
            same_batch(next(part), next(unbroken))
        saved = json.dumps(part.state())
        assert len(saved) < 1024
        list(islice(part, lookahead))
        state = json.loads(saved)
    same_batch(next(open_dataset(spec(tmp_path), seed=5).train_batches(state)), next(unbroken))


def test_the_state_stays_below_a_kilobyte_far_into_a_run(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "x" * 50}) + "\n" for _ in range(100)))
    dataset = open_dataset(spec(tmp_path), seed=2**31)
    iterator = dataset.train_batches()
    next(iterator)
    far = iterator.state() | {"row": 10**12, "next_document": 10**10, "lanes": [10**10, 40] * 32}
    later = dataset.train_batches(far)
    assert later.state() == far
    assert len(json.dumps(far)) < 1024
    next(later)


def test_the_state_does_not_hang_on_the_batch_size(
    texts: list[str], tmp_path: Path, write_texts: Callable[[Path, list[str]], Path]
) -> None:
    """Rows are a stream of their own, so a resumed run may change data.global_batch."""
    path = write_texts(tmp_path, texts)
    small = open_dataset(spec(path, global_batch=2), seed=0).train_batches()
    rows = [next(small).token_BL for _ in range(9)]
    large = open_dataset(spec(path, global_batch=6), seed=0)
    iterator = large.train_batches()
    got = [next(iterator).token_BL, next(large.train_batches(iterator.state())).token_BL]
    np.testing.assert_array_equal(np.concatenate(got), np.concatenate(rows[:6]))


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
            (tmp_path / "b.txt").write_text("more")
        case "tokenizer":
            other = spec(tmp_path, tokenizer=str(tokenizer_json))
        case "split":
            other = spec(tmp_path, eval_fraction=0.2)
    key = "seed" if change == "seed" else "corpus"
    with pytest.raises(ValueError, match=rf"saved with {key}=.*would not be those of the unbroken run.*--workdir"):
        open_dataset(other, seed=seed).train_batches(saved)


def test_held_out_documents_are_never_trained_on_and_give_a_fixed_list(
    write_texts: Callable[[Path, list[str]], Path],
    texts: list[str],
    tmp_path: Path,
    same_batch: Callable[[Batch, Batch], None],
) -> None:
    path = write_texts(tmp_path, texts)
    dataset = open_dataset(spec(path, eval_fraction=0.2, eval_batches=1000), seed=0)
    train, held_out = set(dataset.train_records.tolist()), set(dataset.eval_records.tolist())
    assert train | held_out == set(range(len(texts)))
    assert not train & held_out
    assert len(held_out) > 3
    batches = list(dataset.eval_batches())
    want = sum(len(texts[i].encode()) + 2 for i in held_out)
    assert sum(int((batch.segment_BL > 0).sum()) for batch in batches) == want, "each token once: padded, not looped"
    assert (batches[-1].segment_BL == 0).any()
    other_seed = list(open_dataset(spec(path, eval_fraction=0.2, eval_batches=2), seed=9).eval_batches())
    assert len(other_seed) == 2
    for got, expected in zip(other_seed, batches[:2], strict=True):
        same_batch(got, expected)


def test_bad_records_stop_the_run_or_are_skipped_and_counted_once(texts: list[str], tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) for text in texts]
    lines[20], lines[40] = '{"text": ', '{"body": ""}'
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    assert {20, 40} <= set(open_dataset(spec(path, on_bad_record="skip"), seed=0).train_records.tolist())
    iterator = open_dataset(spec(path), seed=0).train_batches()
    with pytest.raises(ValueError, match=r"a\.jsonl, line (21|41): .*data\.on_bad_record='skip'"):
        list(islice(iterator, 400))
    dataset = open_dataset(spec(path, on_bad_record="skip"), seed=0)
    assert dataset.skipped == 0
    iterator = dataset.train_batches()
    while iterator.state()["next_document"] < 3 * len(texts):
        next(iterator)
    assert dataset.skipped == 2


def test_too_little_text_for_a_row_is_refused_with_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("hello")
    with pytest.raises(
        ValueError,
        match=r"too small: of its 1 documents, data\.eval_fraction=0\.0 leaves 1 for training, with 7 tokens"
        r".*data\.seq_len=16.*lower data\.seq_len",
    ):
        open_dataset(spec(path, eval_fraction=0.0), seed=0)
    path.write_text("hello" * 100)
    with pytest.raises(
        ValueError, match=r"leaves 0 for evaluation, with 0 tokens.*raise data\.eval_fraction, or set it to 0"
    ):
        open_dataset(spec(path), seed=0)
    dataset = open_dataset(spec(path, eval_fraction=0.0), seed=0)
    assert next(dataset.train_batches()).token_BL.shape == (4, 16)
    with pytest.raises(ValueError, match=r"data\.eval_fraction=0 holds nothing out"):
        dataset.eval_batches()


def test_a_corpus_of_bad_records_only_is_refused_though_they_may_be_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("no\n" * 30)
    with pytest.raises(ValueError, match=r"of its 30 documents \(\d+ bad ones skipped\)"):
        open_dataset(spec(tmp_path, on_bad_record="skip"), seed=0)


def test_one_big_file_is_shuffled_and_split_in_pieces(tmp_path: Path) -> None:
    """A book in one file is the commonest first corpus; as one document it could be neither."""
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {i}\n" for i in range(20_000)))
    dataset = open_dataset(spec(path, text_piece_bytes=2000, eval_fraction=0.1, seq_len=64, global_batch=16), seed=0)
    assert len(dataset.corpus) > 100
    assert len(dataset.eval_records) > 5
    starts = {bytes(row[:12].astype(np.uint8)) for row in next(dataset.train_batches()).token_BL}
    assert len(starts) == 16


@pytest.mark.parametrize(
    ("field", "value"),
    [("seq_len", 1), ("global_batch", 0), ("eval_batches", 0), ("text_piece_bytes", 3), ("eval_fraction", 1.0)],
)
def test_a_field_out_of_range_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"data\.{field}={value} must be at least .*Set data\.{field}"):
        spec("x", **{field: value})


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises((ValueError, TypeError), match="on_bad_record"):  # TypeError: the tests' own type checker
        spec("x", on_bad_record="ignore")


def test_opening_the_standard_library_needs_neither_grain_nor_pyarrow() -> None:
    """Refusals and the plan come before the 0.9 s that importing grain takes."""
    code = (
        "import sys; from jtrain.data import *\n"
        "open_dataset(PackedText(path='stdlib', seq_len=256, global_batch=16), seed=0)\n"
        "print([m for m in ('grain', 'pyarrow', 'tokenizers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
