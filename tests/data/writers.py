"""Documents into a folder in each format; each returns the `path` that reads them in that order."""

import csv
import gzip
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from array_record.python.array_record_module import ArrayRecordWriter

Write = Callable[[Path, Sequence[str]], Path]


def write_text(folder: Path, texts: Sequence[str]) -> Path:
    for i, text in enumerate(texts):
        (folder / f"doc{i:04}.txt").write_bytes(text.encode())
    return folder


def write_jsonl(folder: Path, texts: Sequence[str]) -> Path:
    (folder / "docs.jsonl").write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts))
    return folder / "docs.jsonl"


def write_jsonl_gz(folder: Path, texts: Sequence[str]) -> Path:
    content = write_jsonl(folder, texts).read_bytes()
    (folder / "docs.jsonl").unlink()
    # Two members, as `cat a.gz b.gz` makes them.
    (folder / "docs.jsonl.gz").write_bytes(gzip.compress(content[:100]) + gzip.compress(content[100:]))
    return folder


def write_jsonl_zst(folder: Path, texts: Sequence[str]) -> Path:
    content = write_jsonl(folder, texts).read_bytes()
    (folder / "docs.jsonl").unlink()
    (folder / "docs.jsonl.zst").write_bytes(b"".join(
        pa.compress(part, codec="zstd", asbytes=True) for part in (content[:100], content[100:])
    ))  # fmt: skip
    return folder


def write_ndjson_zst(folder: Path, texts: Sequence[str]) -> Path:
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (folder / "docs.ndjson.zst").write_bytes(pa.compress(content, codec="zstd", asbytes=True))
    return folder


def write_json_array(folder: Path, texts: Sequence[str]) -> Path:
    content = [{"id": 1, "text": text, "tags": ["]", {"a": "}"}]} for text in texts]
    (folder / "docs.json").write_text(json.dumps(content, indent=1, ensure_ascii=False))
    return folder


def write_json_files(folder: Path, texts: Sequence[str]) -> Path:
    for i, text in enumerate(texts):
        (folder / f"doc{i:04}.json").write_text(json.dumps({"text": text}, indent=2))
    return folder


def write_json_lines_gz(folder: Path, texts: Sequence[str]) -> Path:
    content = write_jsonl(folder, texts).read_bytes()
    (folder / "docs.jsonl").unlink()
    (folder / "docs.json.gz").write_bytes(gzip.compress(content))
    return folder


def write_csv(folder: Path, texts: Sequence[str]) -> Path:
    with open(folder / "docs.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["id", "text", "n"], *([i, text, "a,b"] for i, text in enumerate(texts))])
    return folder


def write_tsv_gz(folder: Path, texts: Sequence[str]) -> Path:
    out = io.StringIO(newline="")
    csv.writer(out, delimiter="\t").writerows([["text", "id"], *([text, i] for i, text in enumerate(texts))])
    (folder / "docs.tsv.gz").write_bytes(gzip.compress(out.getvalue().encode()))
    return folder


def write_parquet(folder: Path, texts: Sequence[str]) -> Path:
    table = pa.table({"id": list(range(len(texts))), "text": list(texts)})
    pq.write_table(table, folder / "docs.parquet", row_group_size=7)
    return folder / "docs.parquet"


def write_array_record(folder: Path, texts: Sequence[str]) -> Path:
    writer = ArrayRecordWriter(str(folder / "docs.arrayrecord"), "group_size:1")
    for text in texts:
        writer.write(text.encode())
    writer.close()
    return folder


def write_tar(folder: Path, texts: Sequence[str]) -> Path:
    with tarfile.open(folder / "docs.tar", "w") as tar:
        for i, text in enumerate(texts):
            for suffix, content in (("json", b"{}"), ("text", text.encode())):
                info = tarfile.TarInfo(f"{i:04}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return folder / "docs.tar"


def write_tar_gz(folder: Path, texts: Sequence[str]) -> Path:
    content = write_tar(folder, texts).read_bytes()
    (folder / "docs.tar").unlink()
    (folder / "docs.tar.gz").write_bytes(gzip.compress(content))
    return folder


def write_saved_dataset(folder: Path, texts: Sequence[str] | pa.Table) -> Path:
    """What Hugging Face's `save_to_disk` writes, of texts or of a table."""
    table: Any = texts if isinstance(texts, pa.Table) else pa.table({"text": list(texts)})
    name = "data-00000-of-00001.arrow"
    with pa.OSFile(str(folder / name), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


WRITERS = (
    write_text,
    write_jsonl,
    write_jsonl_gz,
    write_jsonl_zst,
    write_ndjson_zst,
    write_json_array,
    write_json_files,
    write_json_lines_gz,
    write_csv,
    write_tsv_gz,
    write_parquet,
    write_array_record,
    write_tar,
    write_tar_gz,
    write_saved_dataset,
)
