"""A small corpus of every format, and a tokenizer.json made on the spot."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jtrain.data.sources import retry
from jtrain.layout.dims import Batch
from tests.data import four_sources
from tests.data.writers import Write, write_jsonl, write_parquet, write_text


@pytest.fixture(params=[write_text, write_jsonl, write_parquet], ids=["txt", "jsonl", "parquet"])
def write_texts(request: pytest.FixtureRequest) -> Write:
    """Writes documents to a folder in one format and returns the `data.path` that reads them in that
    order.
    """
    return request.param


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Sixty different documents of 1 to 400 characters, some beyond ASCII."""
    rng = np.random.default_rng(0)
    return [f"{i}:" + "".join(rng.choice(list("ab\nüß漢🙂"), rng.integers(0, 400))) for i in range(60)]


def assert_same_batch(got: Batch, want: Batch) -> None:
    """Bit for bit, all four arrays."""
    for field in ("token_BL", "target_BL", "position_BL", "segment_BL"):
        np.testing.assert_array_equal(getattr(got, field), getattr(want, field), err_msg=field)


@pytest.fixture
def same_batch() -> Callable[[Batch, Batch], None]:
    return assert_same_batch


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets reads of this process be repeated at once."""
    monkeypatch.setattr(retry, "READS", dataclasses.replace(retry.READS, first_s=0.0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What `four_sources.spec` reads."""
    return four_sources.write(tmp_path)


@pytest.fixture
def make_word_tokenizer(tmp_path: Path) -> Callable[[], Path]:
    """Writes a tokenizer that splits at white space and drops it."""

    def make() -> Path:
        tokenizer = Tokenizer(
            models.WordLevel({"the": 0, "cat": 1, "<unk>": 2, "</s>": 3}, unk_token="<unk>")
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(tmp_path / "words.json"))
        return tmp_path / "words.json"

    return make


@pytest.fixture
def make_sentence_tokenizer(tmp_path: Path) -> Callable[[], Path]:
    """Writes a BPE with byte fallback that spells a space as U+2581 and puts one before each text."""

    def make() -> Path:
        pieces = [
            "<unk>",
            "<s>",
            "</s>",
            *(f"<0x{i:02X}>" for i in range(256)),
            "\u2581",
            *map(chr, range(33, 127)),
        ]
        pieces += ["th", "the", "\u2581the"]
        model = models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [("t", "h"), ("th", "e"), ("\u2581", "the")],
            unk_token="<unk>",
            byte_fallback=True,
        )
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        steps = [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
        tokenizer.decoder = decoders.Sequence(steps)
        tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        tokenizer.save(str(tmp_path / "sentences.json"))
        return tmp_path / "sentences.json"

    return make
