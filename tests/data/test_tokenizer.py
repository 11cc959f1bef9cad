import json
import shutil
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from jtrain.data.tokenizer import (
    ByteTokenizer,
    HFTokenizer,
    encode_documents,
    make_tokenizer,
    smallest_id_dtype,
)
from jtrain.errors import FileError
from tests.data.documents import encode_document


@given(st.text())
def test_bytes_round_trip_any_text(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert encode_document(tokenizer, text).tolist() == ([0, *ids.tolist(), 0] if text else [])


@pytest.mark.smoke
def test_bytes_cut_inside_a_character_still_decode() -> None:
    assert ByteTokenizer().decode([0x61, 0xE6, 0xBC]) == "a\ufffd"


@given(st.text())
def test_a_hugging_face_tokenizer_round_trips_any_text(tokenizer_json: Path, text: str) -> None:
    tokenizer = HFTokenizer(tokenizer_json)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_hugging_face_document_has_its_begin_and_end(tokenizer_json: Path) -> None:
    tokenizer = make_tokenizer(str(tokenizer_json.parent))
    text = "the cat sat"
    want = Tokenizer.from_file(str(tokenizer_json)).encode(text).ids
    ids = encode_document(tokenizer, text)
    assert ids.dtype == np.int32
    assert ids.tolist() == [*want, 1]
    assert tokenizer.begin_id == 0
    assert tokenizer.end_id == 1
    assert tokenizer.encode(text).tolist() == want[1:]
    assert encode_document(tokenizer, "").tolist() == []
    assert max(ids) < tokenizer.vocab_size == Tokenizer.from_file(str(tokenizer_json)).get_vocab_size()


@given(texts=st.lists(st.text(), max_size=8))
def test_many_documents_at_once_have_the_ids_of_each(tokenizer_json: Path, texts: list[str]) -> None:
    """Covers empty documents in any place; ids are in the smallest dtype for the vocabulary."""
    for tokenizer, dtype in ((ByteTokenizer(), np.uint8), (HFTokenizer(tokenizer_json), np.uint16)):
        lengths, ids = encode_documents(tokenizer, texts)
        want = [encode_document(tokenizer, text) for text in texts]
        assert (lengths.dtype, ids.dtype) == (np.int32, dtype)
        assert ids.dtype == tokenizer.id_dtype
        assert lengths.tolist() == [len(one) for one in want]
        assert ids.tolist() == [i for one in want for i in one.tolist()]


def test_ids_take_as_few_bytes_as_the_vocabulary_allows() -> None:
    sizes = {2: 1, 256: 1, 257: 2, 1 << 16: 2, (1 << 16) + 1: 4, 1 << 18: 4}
    assert {size: smallest_id_dtype(size).itemsize for size in sizes} == sizes
    assert all(smallest_id_dtype(size).kind == "u" for size in sizes)


def test_encoding_bytes_holds_three_copies_at_most() -> None:
    """Many documents, one of them beyond Latin-1: joined as text, it would widen the others to 4 bytes a
    character.
    """
    texts = ["the cat sat on the mat " * 100] * 1000 + ["🙂"]
    tracemalloc.start()
    try:
        encode_documents(ByteTokenizer(), texts)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3.5 * sum(map(len, texts))


def test_text_cannot_spell_a_special_token(tokenizer_json: Path) -> None:
    tokenizer = HFTokenizer(tokenizer_json)
    text = "quoting <|end_of_text|> is fine"
    assert not {0, 1} & set(tokenizer.encode(text).tolist())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_end_token_comes_from_the_config_beside_or_from_the_user(
    tokenizer_json: Path, tmp_path: Path
) -> None:
    path = shutil.copy(tokenizer_json, tmp_path)
    config = tmp_path / "tokenizer_config.json"
    for declared in ("<|begin_of_text|>", {"content": "<|begin_of_text|>"}):
        config.write_text(json.dumps({"eos_token": declared}))
        assert HFTokenizer(path).end_id == 0
    assert HFTokenizer(path, end_token="the").end_id > 1
    config.write_text(json.dumps({"eos_token": "<nope>"}))
    with pytest.raises(
        ValueError, match=r"eos_token of .*tokenizer_config\.json='<nope>' is not one of the \d+ tokens"
    ):
        HFTokenizer(path)
    config.write_text("{eos")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not a JSON object"):
        HFTokenizer(path)
    config.write_text("{}")
    assert HFTokenizer(path).end_id == 1


def test_an_unknown_or_ambiguous_end_token_is_refused(tokenizer_json: Path, tmp_path: Path) -> None:
    for others, message in (
        (["</s>"], r"several candidates: <\|end_of_text\|>, </s>"),
        ([], "its vocabulary has none of"),
    ):
        content = tokenizer_json.read_text()
        tokenizer = Tokenizer.from_str(content if others else content.replace("<|end_of_text|>", "<stop>"))
        tokenizer.add_special_tokens(others)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(ValueError, match=rf"data\.tokenizer=.*{message}.*Set data\.end_token"):
            HFTokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"data\.end_token='x y z' is not one of"):
        HFTokenizer(tmp_path, end_token="x y z")


def test_a_tokenizer_that_is_missing_or_broken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"data\.tokenizer='.*gone.*no such file; looked for"):
        make_tokenizer(str(tmp_path / "gone.json"))
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ValueError, match=r"data\.tokenizer=.* is not a tokenizer\.json that"):
        make_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match=r"data\.end_token='x' has no meaning for data\.tokenizer='bytes'"):
        make_tokenizer("bytes", end_token="x")


def test_identity_tells_tokenizers_apart(tokenizer_json: Path) -> None:
    names = {
        ByteTokenizer().identity,
        HFTokenizer(tokenizer_json).identity,
        HFTokenizer(tokenizer_json, end_token="the").identity,
    }
    assert len(names) == 3


def test_encoding_lets_other_threads_run(tokenizer_json: Path) -> None:
    """Encoding on the prefetch thread must not stop the training loop.

    With such a long switch interval no thread is asked to give up the GIL, so others run only if it is
    released.
    """
    tokenizer = HFTokenizer(tokenizer_json)
    text = "the cat sat on the mat, the end of text. " * 20_000
    wakes, woken = 0, False
    done = threading.Event()

    def wake_up() -> None:
        nonlocal wakes
        while not done.is_set():
            wakes += 1
            time.sleep(0.001)

    thread = threading.Thread(target=wake_up)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(600.0)
    try:
        thread.start()
        for _ in range(20):  # mostly the first is enough; a busy machine may wake the thread late
            before = wakes
            tokenizer.encode(text)
            if woken := wakes > before:
                break
    finally:
        sys.setswitchinterval(interval_s)
        done.set()
        thread.join()
    assert woken
