"""Held-out sets: which text an evaluation reads, how its bytes are counted, and what may not be held out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jtrain.data import HeldOutSet, PackedText, Source, make_tokenizer, open_dataset, open_sets
from jtrain.data.pretokenized.build import prepare
from jtrain.data.pretokenized.shard import Recipe
from jtrain.errors import UserError
from jtrain.layout.dims import IGNORE
from tests.data.documents import encode_document

WORDS = ["the", "cat", "sat", "on", "mat,", "Ünï", "漢字", "🙂", "\n", "  and"]


def stories(count: int, words: int) -> list[str]:
    """Different texts with characters of one to four bytes; some are four times as long."""
    rng = np.random.default_rng(0)
    return [f"{i} " + " ".join(rng.choice(WORDS, words * (1 + 3 * (i % 5 == 0)))) for i in range(count)]


def spec(folder: Path, texts: list[str], **fields: Any) -> PackedText:
    """Data of one file of JSON lines, half of it held out."""
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sizes: dict[str, Any] = {"seq_len": 64, "global_batch": 4, "eval_fraction": 0.5, "eval_batches": 1000}
    return PackedText(**{"path": str(folder / "a.jsonl"), "engine": "inline", **sizes, **fields})


def held_out_texts(held_out: HeldOutSet, texts: list[str]) -> list[str]:
    return [texts[i] for i in np.concatenate(list(held_out.streams[0].held_out_records()))]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize("prepared", [False, True], ids=["text", "prepared"])
def test_the_bytes_of_a_set_are_those_of_its_text(
    tokenizer: str, prepared: bool, tokenizer_json: Path, tmp_path: Path
) -> None:
    """In rows that hold every document whole all tokens but the begin id are targets, so all bytes of text
    count.
    """
    texts = stories(60, 20)
    name = tokenizer if tokenizer == "bytes" else str(tokenizer_json)
    whole: dict[str, Any] = dict(tokenizer=name, packing="best_fit", seq_len=2048)
    data = spec(tmp_path, texts, **whole, prepared=str(tmp_path / "out") if prepared else None)
    if prepared:
        source = data.named_sources["data"]
        recipe = Recipe(
            name="data", source=source, tokenizer=name, on_bad_record="fail", cache_dir=tmp_path / "cache"
        )
        with open(tmp_path / "progress", "w") as stream:
            prepare(
                [recipe], tmp_path / "out", workers=1, stream=stream, command="prepare", shard_bytes=1 << 20
            )
    held_out = open_dataset(data, seed=0).held_out()
    batches = list(held_out.batches())
    want = held_out_texts(held_out, texts)
    assert 20 < len(want) < 40
    assert sum(batch.text_bytes or 0 for batch in batches) == sum(len(text.encode()) for text in want)
    encode = make_tokenizer(name).encode
    targets = sum(int((batch.batch.target_BL != IGNORE).sum()) for batch in batches)
    assert targets == sum(len(encode(text)) + 1 for text in want), (
        "each token, and the end id of each document"
    )


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_where_rows_cut_documents_the_bytes_are_those_of_the_targets(
    tokenizer: str, tokenizer_json: Path, tmp_path: Path
) -> None:
    """Cuts fall inside characters too, so the bytes are compared with the raw bytes of each id."""
    name = tokenizer if tokenizer == "bytes" else str(tokenizer_json)
    held_out = open_dataset(spec(tmp_path, stories(60, 60), tokenizer=name), seed=0).held_out()
    if tokenizer == "bytes":
        raw = dict.fromkeys(range(1, 256), 1)
    else:
        vocabulary = json.loads(tokenizer_json.read_text())["model"]["vocab"]
        raw = {i: len(token) for token, i in vocabulary.items() if not token.startswith("<|")}
    for batch in held_out.batches():
        targets = batch.batch.target_BL[batch.batch.target_BL != IGNORE]
        assert batch.text_bytes == sum(raw.get(int(i), 0) for i in targets)


def test_each_token_knows_its_document(tmp_path: Path) -> None:
    """Also over cuts: the tokens of a document, in whichever rows and batches, are text of that document
    alone.
    """
    texts = stories(40, 30)
    held_out = open_dataset(spec(tmp_path, texts), seed=0).held_out()
    seen: dict[int, int] = {}
    for batch in held_out.batches():
        rows, numbers, segments = batch.batch.token_BL, batch.document_BL, batch.batch.segment_BL
        assert ((numbers < 0) == (segments == 0)).all()
        for row, number, segment in zip(rows, numbers, segments, strict=True):
            for piece in range(1, segment.max() + 1):
                [document] = set(number[segment == piece].tolist())
                text = texts[int(held_out.document_table.record[document])].encode()
                assert row[segment == piece].astype(np.uint8).tobytes() in b"\0" + text + b"\0"
                seen[document] = seen.get(document, 0) + int((segment == piece).sum())
    assert len(seen) == held_out.num_documents > 10
    assert sum(seen.values()) == sum(len(text.encode()) + 2 for text in held_out_texts(held_out, texts))


def test_an_evaluation_reads_many_documents_however_long_they_are(tmp_path: Path) -> None:
    """Sixteen rows of 100 documents of about 30 rows each are from ten documents or more, the same for every
    seed.
    """
    texts = ["".join(chr(97 + (i * 7 + j * j) % 26) for j in range(2000)) + str(i) for i in range(200)]
    data = spec(tmp_path, texts, eval_batches=4)
    held_out = open_dataset(data, seed=0).held_out()
    batches = list(held_out.batches())
    documents = {int(n) for batch in batches for n in np.unique(batch.document_BL) if n >= 0}
    assert len(batches) == 4
    assert len(documents) >= 10
    again = list(open_dataset(data, seed=7).held_out().batches())
    for one, other in zip(batches, again, strict=True):
        np.testing.assert_array_equal(one.batch.token_BL, other.batch.token_BL)
        np.testing.assert_array_equal(one.document_BL, other.document_BL)


def test_short_documents_fill_the_rows_of_an_evaluation_too(tmp_path: Path) -> None:
    """Eight documents fill a row: as many are taken as fill all rows, not one for each."""
    data = spec(tmp_path, [f"{i:06}" for i in range(2000)], eval_batches=4)
    batches = list(open_dataset(data, seed=0).held_out().batches())
    assert len(batches) == 4
    assert all((batch.document_BL >= 0).all() for batch in batches)


def test_every_source_has_the_same_share_of_the_sample(tmp_path: Path) -> None:
    sources = {}
    for letter in "ab":
        lines = (json.dumps({"text": letter * 600}) + "\n" for _ in range(300 if letter == "a" else 1000))
        (tmp_path / f"{letter}.jsonl").write_text("".join(lines))
        sources[letter] = Source(path=str(tmp_path / f"{letter}.jsonl"))
    data = PackedText(sources=sources, seq_len=64, global_batch=8, eval_fraction=0.5, eval_batches=8)
    tokens = np.concatenate(
        [b.batch.token_BL.ravel() for b in open_dataset(data, seed=0).held_out().batches()]
    )
    share = (tokens == ord("a")).sum() / ((tokens == ord("a")) | (tokens == ord("b"))).sum()
    assert 0.3 < share < 0.7


def test_a_set_of_its_own_is_read_whole(tmp_path: Path) -> None:
    """Every document of the set, none of the run's; a tokenizer and fields of its own are the source's."""
    data = spec(tmp_path, stories(40, 10))
    (tmp_path / "b.jsonl").write_text('{"body": "first words"}\n{"body": "and a second one"}\n')
    dataset = open_dataset(data, seed=0)
    held_out = open_sets(
        {"b": Source(path=str(tmp_path / "b.jsonl"), text_field="body")}, data, dataset.setups
    )["b"]
    assert held_out.describe().startswith("2 documents in 1 files")
    [batch] = held_out.batches()
    text = bytes(batch.batch.token_BL[batch.document_BL >= 0].astype(np.uint8))
    assert sorted(text.strip(b"\0").split(b"\0\0")) == [b"and a second one", b"first words"]
    assert batch.text_bytes == len("first wordsand a second one")
    assert set(np.unique(batch.document_BL)) == {-1, 0, 1}


def refusal(sets: dict[str, Source], data: PackedText) -> str:
    with pytest.raises(UserError) as caught:
        open_sets(sets, data, open_dataset(data, seed=0).setups)
    return str(caught.value)


def test_a_set_that_is_trained_on_is_refused(tmp_path: Path) -> None:
    """By a folder, a link or the file itself; the message names the file, and other files are accepted."""
    folder = tmp_path / "data"
    folder.mkdir()
    data = spec(folder, stories(40, 10))
    (folder / "other.txt").write_text("other text")
    (tmp_path / "link.jsonl").symlink_to(folder / "a.jsonl")
    for path in (folder, folder / "*", tmp_path / "link.jsonl"):
        said = refusal({"mine": Source(path=str(path))}, data)
        assert f"eval.sets.mine.path={str(path)!r}: 1 of its" in said
        assert f"trained on by data.path={data.path!r} (first: {folder / 'a.jsonl'})" in said
        assert "set eval.sets.mine.path to other files" in said
    open_sets({"mine": Source(path=str(folder / "other.txt"))}, data, open_dataset(data, seed=0).setups)


def test_a_set_without_text_is_refused(tmp_path: Path) -> None:
    data = spec(tmp_path, stories(40, 10))
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n' * 3)
    said = refusal({"b": Source(path=str(tmp_path / "b.jsonl"))}, data)
    assert "none of its 3 documents has two tokens" in said
    assert refusal({"b": Source(path="/no/where")}, data).startswith(
        "eval.sets.b.path='/no/where': nothing there"
    )


def test_a_tokenizer_whose_ids_do_not_tell_the_bytes_has_none(
    make_word_tokenizer: Callable[[], Path],
) -> None:
    """Split at spaces, which are lost: no number is better than a wrong one."""
    tokenizer = make_tokenizer(str(make_word_tokenizer()))
    assert tokenizer.text_bytes(tokenizer.encode("the cat")) is None


def test_a_tokenizer_that_puts_a_space_before_a_document_does_not_count_it(
    make_sentence_tokenizer: Callable[[], Path],
) -> None:
    """In the style of Llama 2: a SentencePiece vocabulary with single bytes, and a begin id before the first
    word.
    """
    tokenizer = make_tokenizer(str(make_sentence_tokenizer()))
    text = "the cat 漢  sat 🙂"
    ids = encode_document(tokenizer, text)
    sizes = tokenizer.text_bytes(ids)
    assert sizes is not None
    assert sizes.sum() == len(text.encode())
    assert sizes[0] == sizes[-1] == 0, "begin and end"
