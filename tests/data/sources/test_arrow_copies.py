"""Arrow files that cannot be mapped row by row are read from a copy that can."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.source import Source

TEXTS = [f"text {n % 7} ü漢" * (n % 5) for n in range(50)]
TYPES = {
    "plain": pa.string(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
    "view": pa.string_view(),
}


def read(path: Path, **fields: Any) -> list[Any]:
    corpus = Corpus(Source(path=str(path), **fields), name="web", cache_dir=path.parent.with_name("cache"))
    texts = list(corpus.read(np.arange(len(corpus))))
    assert (corpus.sizes(0, len(corpus)) >= [len(text.encode()) for text in texts]).all()
    return texts


@pytest.mark.parametrize("compression", ["lz4", "zstd", "uncompressed"])
@pytest.mark.parametrize("kind", TYPES)
def test_feather_files_are_read_whatever_their_columns_and_compression(
    kind: str, compression: str, tmp_path: Path
) -> None:
    column = pa.array(TEXTS, pa.string()).cast(TYPES[kind])
    table = pa.table({"id": range(50), "text": column})
    feather.write_feather(table, str(tmp_path / "a.feather"), compression=compression, chunksize=16)
    assert read(tmp_path / "a.feather") == TEXTS


@pytest.mark.parametrize("kind", TYPES)
def test_columns_of_parquet_and_of_streams_are_read_in_each_layout(kind: str, tmp_path: Path) -> None:
    table = pa.table({"text": pa.array(TEXTS, pa.string()).cast(TYPES[kind])})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=16)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=16)
    assert read(tmp_path / "a.parquet") == read(tmp_path / "a.arrow") == TEXTS


def test_messages_with_a_dictionary_of_roles_are_read(tmp_path: Path) -> None:
    role, content = pa.array(["user", "assistant"]).dictionary_encode(), pa.array(["Hi", "Hello!"])
    messages = pa.StructArray.from_arrays([role, content], ["role", "content"])
    table = pa.table({"m": pa.ListArray.from_arrays([0, 2], messages)})
    pq.write_table(table, tmp_path / "a.parquet")
    feather.write_feather(table, str(tmp_path / "a.feather"))
    want = ["<|user|>\nHi\n<|assistant|>\nHello!\n"]
    assert read(tmp_path / "a.parquet", messages_field="m") == want
    assert read(tmp_path / "a.feather", messages_field="m") == want
