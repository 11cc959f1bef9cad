"""Token files as other projects write them, written here from the published layouts alone."""

import json
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Documents = list[list[int]]


def write_megatron(
    prefix: Path, documents: Documents, *, dtype: str = "uint16", sequences: int = 1, index: str = "megatron"
) -> None:
    """PREFIX.bin and PREFIX.idx, each document as `sequences` sequences; `index` is megatron, multimodal or
    fairseq.
    """
    codes = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
    parts = [
        part for document in documents for part in np.array_split(np.asarray(document, dtype), sequences)
    ]
    flat = np.concatenate(parts)
    flat.astype(np.dtype(dtype).newbyteorder("<")).tofile(prefix.with_suffix(".bin"))
    sizes = np.asarray([len(part) for part in parts], "<i4")
    pointers = ((np.cumsum(sizes) - sizes) * flat.itemsize).astype("<i8")
    ends = np.arange(0, len(parts) + 1, sequences, dtype="<i8")
    with open(prefix.with_suffix(".idx"), "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQ", 1, codes[dtype], len(parts)))
        if index != "fairseq":
            file.write(struct.pack("<Q", len(ends)))
        file.write(sizes.tobytes() + pointers.tobytes())
        if index != "fairseq":
            file.write(ends.tobytes())
        if index == "multimodal":
            file.write(bytes(len(parts)))


def write_raw(path: Path, documents: Documents, *, dtype: str = "uint16") -> None:
    """Ids alone, as nanoGPT's .bin and OLMo's .npy."""
    np.concatenate([np.asarray(document) for document in documents]).astype(dtype).tofile(path)


def write_llm_c(path: Path, documents: Documents, *, model: str = "gpt-2") -> None:
    """1,024 bytes of header, then the ids."""
    magic, version, dtype = {"gpt-2": (20240520, 1, "<u2"), "llama-3": (20240801, 7, "<u4")}[model]
    ids = np.concatenate([np.asarray(document) for document in documents]).astype(dtype)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids)
    path.write_bytes(header.tobytes() + ids.tobytes())


def write_npy(path: Path, documents: Documents, *, dtype: str = "uint32") -> None:
    """Array with NumPy's own header."""
    np.save(path, np.concatenate([np.asarray(document) for document in documents]).astype(dtype))


def write_mds(
    folder: Path,
    documents: Documents,
    *,
    encoding: str = "ndarray:uint32",
    column: str = "tokens",
    per_shard: int = 20,
    compression: str | None = None,
) -> None:
    """Shards of `per_shard` samples with three columns: `id` (text), the ids, and `zz` (an int)."""
    folder.mkdir(parents=True, exist_ok=True)
    kind, _, rest = encoding.partition(":")
    dtype = np.dtype(rest.partition(":")[0] or ("int64" if kind == "bytes" else "uint16"))
    codes = {"uint16": 16, "int32": 33, "uint32": 32, "int64": 65}
    columns = sorted([("id", "str", None), (column, encoding, None), ("zz", "int", 8)])
    shards = []
    for number, first in enumerate(range(0, len(documents), per_shard)):
        samples = []
        for i, document in enumerate(documents[first : first + per_shard]):
            ids = np.asarray(document, dtype)
            value = ids.tobytes()
            if kind == "ndarray" and ":" not in rest:
                width = 0 if len(ids) < 256 else 1
                value = bytes([(1 << 2) | width]) + len(ids).to_bytes(1 << width, "little") + value
                if not rest:
                    value = bytes([codes[dtype.name]]) + value
            values = {"id": f"sample {first + i}".encode(), column: value, "zz": struct.pack("<q", i)}
            sizes = b"".join(
                struct.pack("<I", len(values[name])) for name, _, size in columns if size is None
            )
            samples.append(sizes + b"".join(values[name] for name, _, _ in columns))
        description = json.dumps({"column_names": [name for name, _, _ in columns]}).encode()
        begin = 4 + 4 * (len(samples) + 1) + len(description)
        offsets = begin + np.cumsum([0, *map(len, samples)])
        content = (
            struct.pack("<I", len(samples))
            + offsets.astype("<u4").tobytes()
            + description
            + b"".join(samples)
        )
        name = f"shard.{number:05}.mds"
        (folder / (f"{name}.zstd" if compression else name)).write_bytes(content)
        shards.append(
            {
                "version": 2,
                "format": "mds",
                "column_names": [name for name, _, _ in columns],
                "column_encodings": [kind for _, kind, _ in columns],
                "column_sizes": [size for _, _, size in columns],
                "compression": compression,
                "raw_data": {"basename": name, "bytes": len(content), "hashes": {}},
                "zip_data": {"basename": f"{name}.zstd", "bytes": 1, "hashes": {}} if compression else None,
                "samples": len(samples),
                "size_limit": 1 << 26,
                "hashes": [],
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def write_parquet_ids(
    path: Path, documents: Documents, *, column: str = "input_ids", kind: str = "int32"
) -> None:
    """Row groups of 16 lists of ids, and their masks."""
    ids = pa.array([document or None for document in documents], pa.list_(pa.type_for_alias(kind)))
    mask = pa.array([[1] * len(document) for document in documents], pa.list_(pa.int8()))
    pq.write_table(pa.table({column: ids, "attention_mask": mask}), path, row_group_size=16)
