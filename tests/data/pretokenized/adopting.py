"""Adopts token files as the command does, and compares an index with the documents that it holds."""

import io
from pathlib import Path

import numpy as np

from jtrain.data.pretokenized.adopt import adopt
from jtrain.data.pretokenized.reader import PreparedIndex
from tests.data.pretokenized.foreign_writers import Documents

END = 1
"""End id of `tokenizer_json`, whose vocabulary has 278 ids."""


def run(path: Path | str, out: Path, tokenizer: Path | str, **more: object) -> PreparedIndex:
    options = {"name": "data", "end_token": None, "dtype": None, "column": None, "command": "adopt!"}
    options |= {"stream": io.StringIO(), **more}
    adopt(str(path), out, tokenizer=str(tokenizer), **options)
    return PreparedIndex(out / str(options["name"]))


def assert_holds(index: PreparedIndex, documents: Documents) -> None:
    """Compares counts, all ids, random spans and hashes."""
    assert index.num_records == len(documents)
    assert index.num_tokens == sum(map(len, documents))
    assert index.num_empty == sum(not document for document in documents)
    order = np.random.default_rng(1).permutation(len(documents))
    lengths, ids = index.read(order)
    assert lengths.tolist() == [len(documents[i]) for i in order]
    assert ids.dtype == index.dtype
    assert index.dtype in (np.uint8, np.uint16, np.uint32)
    assert ids.tolist() == [token for i in order for token in documents[i]]
    spans = index.read_spans(order, lengths // 3, lengths - lengths // 4)
    cut = [documents[i][len(documents[i]) // 3 : len(documents[i]) - len(documents[i]) // 4] for i in order]
    assert spans.tolist() == [token for document in cut for token in document]
    assert index.token_starts(np.asarray([index.num_blocks])).tolist() == [index.num_tokens]
    assert index.verify() == []
