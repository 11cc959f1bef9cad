"""Files made to harm are refused with one message, or are bad records; `tests/data/fuzz` has more of them."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jtrain.data.sources.formats import BadRecord, Records, RowGroupCache, open_file, parquet
from jtrain.data.sources.formats.masked_text import TextFields
from jtrain.data.sources.storage import StoredFile
from jtrain.data.tokenizer import make_tokenizer
from jtrain.errors import FileError, UserError
from jtrain.hf.model_config import model_from_config
from jtrain.hf.model_files import open_tensors
from tests.data.fuzz.__main__ import CORPUS
from tests.data.fuzz.targets import SEPARATOR


def opened(folder: Path, suffix: str, content: bytes) -> Records:
    """Opens a file with these contents; its text is in `text`, or the member .txt."""
    path = folder / f"a{suffix}"
    path.write_bytes(content)
    return open_file(
        StoredFile(str(path), path.name, len(content), "1", str(path)),
        format="auto",
        fields=TextFields("txt" if suffix == ".tar" else "text", "data"),
        text_piece_bytes=4096,
        cache_dir=folder,
        groups=RowGroupCache(1 << 20),
        check_content=True,
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("found_negative_size", r"not a whole tar file: at byte 0, b'-1000' is no octal number\. Replace it"),
        ("found_pax_zero", r"at byte 0, a record of its extended header has no valid length: b'0 foo=x"),
        ("found_pax_negative", r"at byte 0, a record of its extended header has no valid length: b'-2 foo=x"),
    ],
)
def test_a_tar_whose_numbers_lead_nowhere_is_refused(name: str, message: str, tmp_path: Path) -> None:
    """Each of them made the reader loop for ever."""
    with pytest.raises(UserError, match=message):
        opened(tmp_path, ".tar", (CORPUS / "tar" / name).read_bytes())


def test_a_tars_names_are_bounded_and_printable(tmp_path: Path) -> None:
    header = bytearray(512)
    header[124:136] = b"%011o\0" % (1 << 21)
    header[156:157], header[257:263] = b"L", b"ustar\0"
    header[148:156] = b"%06o\0 " % (sum(header) + 8 * 32)
    with pytest.raises(UserError, match=r"a name of 2,097,152 bytes; names have at most 1,048,576"):
        opened(tmp_path, ".tar", bytes(header) + bytes((1 << 21) + 1024))
    with pytest.raises(UserError, match=r"no member ends in \.txt; suffixes: \.jpg\."):
        opened(tmp_path, ".tar", (CORPUS / "tar" / "found_bad_name").read_bytes())


def test_offsets_beyond_the_data_are_bad_records(tmp_path: Path) -> None:
    """Reading such a text would take bytes from anywhere in memory, or end the process; its neighbours are
    read.
    """
    texts = opened(tmp_path, ".arrow", (CORPUS / "arrow" / "found_offsets").read_bytes()).read([0, 1, 2])
    assert texts[0] == "abc"
    assert isinstance(texts[1], BadRecord)
    assert "row 1: damaged (" in str(texts[1])
    with pytest.raises(UserError, match=r"it begins with a message of type unknown, not with a schema"):
        opened(tmp_path, ".arrow", (CORPUS / "arrow" / "found_no_schema").read_bytes())


def test_a_row_group_that_decodes_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dictionary of one long text stands for any number of rows; decoding ends at the limit, here 1 MiB."""
    rows = pa.DictionaryArray.from_arrays(pa.array(np.zeros(4000, np.int32)), ["x" * 2000])
    content = io.BytesIO()
    pq.write_table(pa.table({"text": rows}), content, store_schema=False)
    assert len(content.getvalue()) < 10_000, "far smaller than what it stands for, or the test proves nothing"
    assert opened(tmp_path, ".parquet", content.getvalue()).read([3999]) == ["x" * 2000]
    monkeypatch.setattr(parquet, "MOST_DECODED_BYTES", 1 << 20)
    allocated = pa.total_allocated_bytes()
    with pytest.raises(
        FileError, match=r"row group 0 decodes to .* or more.*Write the file again with smaller row"
    ):
        opened(tmp_path, ".parquet", content.getvalue()).read([0])
    assert pa.total_allocated_bytes() - allocated < 4 << 20


def test_tokenizers_with_ids_beyond_their_size_are_refused(tmp_path: Path) -> None:
    """The table of such a tokenizer would take 16 GiB."""
    (tmp_path / "tokenizer.json").write_bytes(
        (CORPUS / "tokenizer" / "found_large_id").read_bytes().split(SEPARATOR)[0]
    )
    with pytest.raises(
        UserError, match=r"with 2 tokens, the largest id 4,294,967,290\. Export the tokenizer again"
    ):
        make_tokenizer(str(tmp_path))


def test_models_that_name_files_elsewhere_or_sizes_of_zero_are_refused(tmp_path: Path) -> None:
    index, _ = (CORPUS / "hf_index" / "found_outside").read_bytes().split(SEPARATOR)
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(UserError, match=r"names no file there\. Download it again"), open_tensors(tmp_path):
        pass
    with pytest.raises(UserError, match=r"config\.json: a field has a value of another type or size"):
        model_from_config(
            {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 0}
            | dict.fromkeys(("num_hidden_layers", "intermediate_size", "vocab_size"), 1)
        )
