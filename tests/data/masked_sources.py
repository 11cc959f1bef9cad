"""Corpora with a loss mask whose learned text is upper case and whose other text is lower case."""

import csv
import io
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from array_record.python.array_record_module import ArrayRecordWriter

Part = tuple[str, bool]
"""Text, and True if it is learned."""


def spans_of(text: str) -> list[list[int]]:
    """Upper-case spans of a text."""
    return [list(match.span()) for match in re.finditer(r"[A-ZЖ]+", text)]


def long_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of up to a thousand characters that change between the cases, so that each byte tells its
    case.
    """
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(count):
        first = int(rng.integers(0, 2))
        parts = [("abcdλ", "ABCDЖ")[i % 2] for i in range(first, first + int(rng.integers(1, 40)))]
        texts.append("".join("".join(rng.choice(list(letters), rng.integers(1, 60))) for letters in parts))
    return texts


def write_masked(path: Path, texts: list[str]) -> str:
    """Writes texts with the column of their learned spans as JSON lines; returns the path."""
    path.write_text("".join(json.dumps({"text": text, "mask": spans_of(text)}) + "\n" for text in texts))
    return str(path)


def write_prompts(path: Path, pairs: list[tuple[str, str]]) -> str:
    """Writes prompts and completions as JSON lines; returns the path."""
    lines = (json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in pairs)
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def write_records(folder: Path, kind: str, records: list[dict[str, Any]]) -> str:
    """Writes records in one of the formats that have fields; returns the path."""
    path = folder / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif kind == "json":
        path.write_text(json.dumps(records, indent=1))
    elif kind in ("csv", "tsv"):
        out = io.StringIO(newline="")
        writer = csv.writer(out, delimiter=",\t"[kind == "tsv"])
        writer.writerow(records[0])
        writer.writerows(
            [value if isinstance(value, str) else json.dumps(value) for value in record.values()]
            for record in records
        )
        path.write_bytes(out.getvalue().encode())
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=3)
    elif kind == "arrow":
        table = pa.Table.from_pylist(records)
        with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    else:
        writer = ArrayRecordWriter(str(path), "group_size:1")
        for record in records:
            writer.write(json.dumps(record).encode())
        writer.close()
    return str(path)


def parts_of(text: str) -> list[Part]:
    """Parts of one case each, in their order."""
    return [("".join(part), upper) for upper, part in itertools.groupby(text, str.isupper)]
