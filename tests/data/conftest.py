"""A small corpus of every format, and a tokenizer.json made on the spot."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from jtrain.dims import Batch
from tests.data import four_sources
from tests.data.writers import Write, write_jsonl, write_parquet, write_text


@pytest.fixture(params=[write_text, write_jsonl, write_parquet], ids=["txt", "jsonl", "parquet"])
def write_texts(request: pytest.FixtureRequest) -> Write:
    """Writes documents to a folder in one format and returns the `data.path` that reads them in that order."""
    return request.param


@pytest.fixture
def texts() -> list[str]:
    """Sixty different documents of 1 to 400 characters, some beyond ASCII."""
    rng = np.random.default_rng(0)
    return [f"{i}:" + "".join(rng.choice(list("ab\nüß漢🙂"), rng.integers(0, 400))) for i in range(60)]


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE in the style of Llama 3: a begin token by template, an end token by name."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the end of text"] * 20, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def assert_same_batch(got: Batch, want: Batch) -> None:
    """Bit for bit, all four arrays."""
    for field in ("token_BL", "target_BL", "position_BL", "segment_BL"):
        np.testing.assert_array_equal(getattr(got, field), getattr(want, field), err_msg=field)


@pytest.fixture
def same_batch() -> Callable[[Batch, Batch], None]:
    return assert_same_batch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What `four_sources.spec` reads."""
    return four_sources.write(tmp_path)
