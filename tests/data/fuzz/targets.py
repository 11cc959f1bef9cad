"""Readers to fuzz: each takes the bytes of a file and reads all of it, as a run would.

A reader may refuse any input with a UserError (of which FileError and BadRecord are kinds) and raises nothing
else.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from jtrain.data.pretokenized.foreign.find import find_layout
from jtrain.data.sources.data_files import saved_dataset_files
from jtrain.data.sources.formats import BadRecord, RowGroupCache, open_file
from jtrain.data.sources.formats.masked_text import MaskFields, TextFields
from jtrain.data.sources.storage import StoredFile
from jtrain.data.tokenizer import make_tokenizer
from jtrain.errors import UserError
from tests.data.documents import encode_document

SEPARATOR = b"\n=====\n"
"""Between the files of an input of several files."""

CHAT = MaskFields("messages", "messages_field", mask_prompt=True)
SPANS = MaskFields("mask", "mask_field", mask_prompt=True)

_MOST_RECORDS = 4096


@dataclasses.dataclass(frozen=True)
class Target:
    """Reader that is fuzzed.

    read: reads the bytes, with an empty folder to write them to.
    files: files that an input has, one after another with `SEPARATOR` between them.
    """

    read: Callable[[list[bytes], Path], object]
    files: int = 1


def run(name: str, content: bytes, folder: Path) -> str:
    """Reads an input with a target; returns "read", or the message of the UserError."""
    target = TARGETS[name]
    files = content.split(SEPARATOR, target.files - 1)
    try:
        target.read(files + [b""] * (target.files - len(files)), folder)
    except UserError as error:
        str(error).encode("utf-8")  # messages are printed and written to data.log
        return str(error)
    return "read"


def _stored(path: Path, content: bytes) -> StoredFile:
    path.write_bytes(content)
    return StoredFile(str(path), path.name, len(content), "1", str(path))


def _records(
    suffix: str, *, mask: MaskFields | None = None, text_field: str = "text", block_bytes: int = 0
) -> Target:
    """Target of a format of records; with `block_bytes`, an input is the begin of each of two blocks of the
    file.
    """

    def read(files: list[bytes], folder: Path) -> None:
        files = [b"".join(part.ljust(block_bytes, b"\0") for part in files)]
        cache = RowGroupCache(1 << 24)
        records = open_file(
            _stored(folder / f"a{suffix}", _with_checksums(files[0]) if suffix == ".tar" else files[0]),
            format="auto",
            fields=TextFields(text_field, "data.sources.web", mask),
            text_piece_bytes=1 << 12,
            cache_dir=folder,
            groups=cache,
            check_content=False,
        )
        count = len(records)
        assert count >= 0
        some = list(range(min(count, _MOST_RECORDS)))
        for text in records.read(some):
            if isinstance(text, BadRecord):
                str(text).encode("utf-8")
            else:
                text.encode("utf-8")
        if some:
            assert records.sizes(0, len(some)).min() >= 0
        assert records.group_starts[-1] == count
        records.close()

    return Target(read, 2 if block_bytes else 1)


def _with_checksums(content: bytes) -> bytes:
    """Returns a tar file in which the checksum of each header is right, which random changes seldom leave
    so.
    """
    blocks = bytearray(content)
    for at in range(0, len(blocks) - 511, 512):
        if blocks[at + 257 : at + 262] == b"ustar":
            total = sum(blocks[at : at + 512]) - sum(blocks[at + 148 : at + 156]) + 8 * ord(" ")
            blocks[at + 148 : at + 156] = b"%06o\0 " % total
    return bytes(blocks)


def _foreign(*names: str, column: str | None = None) -> Target:
    def read(files: list[bytes], folder: Path) -> None:
        for name, content in zip(names, files, strict=True):
            (folder / name).write_bytes(content)
        layout = find_layout(str(folder), end_id=0, vocab_size=256, dtype=None, column=column)
        for file in layout.files:
            for part in range(min(file.num_parts(), 64)):
                found = file.scan(part)
                assert not len(found.ends) or 0 <= found.ends.min() <= found.ends.max()
            file.close()

    return Target(read, len(names))


def _saved_dataset(files: list[bytes], folder: Path) -> None:
    names = ("dataset_info.json", "state.json", "data-0.arrow")
    saved_dataset_files([_stored(folder / name, files[0]) for name in names], field="data.path")


def _saved_splits(files: list[bytes], folder: Path) -> None:
    saved_dataset_files([_stored(folder / "dataset_dict.json", files[0])], field="data.path")


def _tokenizer(files: list[bytes], folder: Path) -> None:
    for name, content in zip(("tokenizer.json", "tokenizer_config.json"), files, strict=True):
        (folder / name).write_bytes(content)
    tokenizer = make_tokenizer(str(folder))
    tokenizer.text_bytes(encode_document(tokenizer, "It's 3 o'clock.\n"))


def _hf(files: list[bytes], folder: Path) -> None:
    from jtrain.hf.model_config import model_from_config
    from jtrain.hf.model_files import open_tensors, read_config

    for name, content in zip(("config.json", "model.safetensors"), files, strict=True):
        (folder / name).write_bytes(content)
    try:
        model_from_config(read_config(folder))
    finally:
        with open_tensors(folder) as tensors:
            for read in tensors.values():
                read()


def _hf_index(files: list[bytes], folder: Path) -> None:
    from jtrain.hf.model_files import open_tensors

    for name, content in zip(("model.safetensors.index.json", "a.safetensors"), files, strict=True):
        (folder / name).write_bytes(content)
    with open_tensors(folder) as tensors:
        for read in tensors.values():
            read()


def _manifest(files: list[bytes], folder: Path) -> None:
    from jtrain.checkpoint import files as checkpoint_files

    try:  # the digest that a hostile file would have as well
        body = json.loads(files[0])
        body["digest"] = checkpoint_files.manifest_digest(
            {key: value for key, value in body.items() if key != "digest"}
        )
        content = json.dumps(body).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        content = files[0]
    (folder / "manifest.json").write_bytes(content)
    checkpoint_files.find_damage(folder, checkpoint_files.read_manifest(folder))


def _prepared(files: list[bytes], folder: Path) -> None:
    import numpy as np

    from jtrain.data.pretokenized import index_format, reader

    names = (index_format.INDEX, index_format.LENGTHS, index_format.IDS, index_format.FILES)
    for name, content in zip(names, files, strict=True):
        (folder / name).write_bytes(content)
    try:
        body = json.loads(files[0])
        body.pop("digest", None)
        body["bytes"] = {name: len(content) for name, content in zip(names[1:], files[1:], strict=True)}
        body["hashes"] = {index_format.FILES: index_format.digest(files[3])}
        (folder / index_format.INDEX).write_text(index_format.sign(body))
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    index = reader.PreparedIndex(folder)
    index.read(np.arange(min(len(index), _MOST_RECORDS)))
    if len(index):
        index.identity_of(0)


TARGETS: dict[str, Target] = {
    "tar": _records(".tar", text_field="txt"),
    "json": _records(".json"),
    "jsonl": _records(".jsonl"),
    "jsonl_chat": _records(".jsonl", mask=CHAT),
    "jsonl_mask": _records(".jsonl", mask=SPANS),
    "csv": _records(".csv"),
    "tsv": _records(".tsv"),
    "text": _records(".txt"),
    "gzip": _records(".jsonl.gz"),
    "zstd": _records(".jsonl.zst"),
    "parquet": _records(".parquet"),
    "parquet_chat": _records(".parquet", mask=CHAT),
    "arrow": _records(".arrow"),
    "arrow_chat": _records(".arrow", mask=CHAT),
    "arrayrecord": _records(".arrayrecord", block_bytes=1 << 16),
    "saved_dataset": Target(_saved_dataset),
    "saved_splits": Target(_saved_splits),
    "megatron": _foreign("a.idx", "a.bin"),
    "bin": _foreign("a.bin"),
    "npy": _foreign("a.npy"),
    "mds": _foreign("index.json", "shard.00000.mds"),
    "parquet_ids": _foreign("a.parquet"),
    "tokenizer": Target(_tokenizer, 2),
    "hf": Target(_hf, 2),
    "hf_index": Target(_hf_index, 2),
    "manifest": Target(_manifest),
    "prepared": Target(_prepared, 4),
}
