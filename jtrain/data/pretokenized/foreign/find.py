"""Finds the token files of other projects below a path, and tells their layout."""

import glob
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jtrain.data.pretokenized.foreign.dense import MegatronFile, llm_c_file, npy_file, raw_file
from jtrain.data.pretokenized.foreign.foreign_file import ForeignFile, ForeignLayout
from jtrain.data.pretokenized.foreign.mds import mds_shards
from jtrain.data.sources.storage import StoredFile, find_files
from jtrain.errors import FileError, UserError

_KNOWN = (
    "Megatron's .bin with .idx, nanoGPT's and llm.c's .bin, OLMo's .npy, an MDS folder, Parquet with "
    "input_ids"
)


def find_layout(
    path: str, *, end_id: int, vocab_size: int, dtype: str | None, column: str | None
) -> ForeignLayout:
    """Finds the token files at a path.

    Args:
      path: a file, a folder, a glob, or Megatron's prefix of a .bin and an .idx.
      end_id: id that ends a document, for files that do not mark documents.
      vocab_size: size of the vocabulary, which gives the dtype of files without a header: uint16 up to 65,536
        ids.
      dtype: dtype of files without a header, and of MDS columns of bytes (int64 if None, as llm-foundry
        writes them).
      column: column of the ids in MDS and Parquet.

    Raises:
      FileError: nothing is there, or a file is cut short.
      UserError: the files are of several layouts, of none that is known, or not consistent.
    """
    if "://" in path:
        raise UserError(f"--from {path}: files can only be adopted on a local disk. Copy them there first.")
    if Path(f"{path}.idx").is_file():
        path += ".idx"
    if not glob.has_magic(path) and not Path(path).expanduser().exists():
        raise FileError(
            f"--from {path}: nothing there; looked for {Path(path).expanduser().absolute()}. Set --from to a "
            "file, a folder or a glob of token files."
        )
    files = find_files(path, field="--from")
    root = Path(files[0].location.removesuffix(files[0].name) or ".").absolute()
    if any(file.name == "index.json" and _is_mds(Path(file.location)) for file in files):
        shards, column = mds_shards(
            root, column=column, dtype=np.dtype(f"<u{np.dtype(dtype or 'int64').itemsize}")
        )
        assumed = any(shard.dtype_is_assumed for shard in shards)
        return _layout("mds", root, shards, {"column": column}, dtype_is_assumed=assumed)
    suffixes = {
        suffix: [f for f in files if f.name.endswith(suffix)]
        for suffix in (".idx", ".bin", ".npy", ".parquet")
    }
    found = {suffix: some for suffix, some in suffixes.items() if some}
    if ".idx" in found:
        bins = {file.name for file in found.pop(".bin", [])}
        named = [file.name.removesuffix(".idx") + ".bin" for file in suffixes[".idx"]]
        if left := sorted(bins - set(named)):
            raise UserError(
                f"--from {path}: {left[0]} has no .idx beside it, and others have. Adopt them on their own."
            )
        for name in named:
            if not (root / name).is_file():
                raise UserError(
                    f"--from {path}: {root / name} is missing, and its .idx is there. Put it back."
                )
    if len(found) != 1:
        what = ", ".join(f"{len(some)} {suffix}" for suffix, some in found.items())
        found_what = f"files of several layouts ({what})" if what else "no token files"
        raise UserError(
            f"--from {path}: {found_what}. Set --from to a file, folder or glob of one layout: {_KNOWN}."
        )
    [(suffix, some)] = found.items()
    if suffix == ".idx":
        megatron = [MegatronFile(root / file.name.replace(".idx", ".bin")) for file in some]
        return _layout("megatron", root, megatron, {})
    if suffix == ".parquet":
        from jtrain.data.pretokenized.foreign.parquet_ids import COLUMN, ParquetIds  # imports pyarrow

        column = column or COLUMN
        parquet = [ParquetIds(Path(file.location), column) for file in some]
        return _layout("parquet", root, parquet, {"column": column}, copies=True)
    return _flat(suffix, root, some, end_id, vocab_size, dtype)


def _flat(
    suffix: str, root: Path, found: list[StoredFile], end_id: int, vocab_size: int, dtype: str | None
) -> ForeignLayout:
    raw = np.dtype(dtype or ("uint16" if vocab_size <= 1 << 16 else "uint32")).newbyteorder("<")
    with_header = llm_c_file if suffix == ".bin" else npy_file
    files: list[ForeignFile] = []
    kinds = set()
    for file in found:
        one = with_header(Path(file.location), end_id)
        kinds.add(("llm.c" if suffix == ".bin" else "npy") if one is not None else "raw")
        files.append(one if one is not None else raw_file(Path(file.location), raw, end_id))
    if len(kinds) > 1:
        raise UserError(
            f"--from: some {suffix} files below {root} have a header, others none. Adopt them on their own."
        )
    kind = kinds.pop()
    return _layout(kind, root, files, {"end_id": end_id}, splits=True, dtype_is_assumed=kind == "raw")


def _layout(
    kind: str, root: Path, files: Sequence[ForeignFile], decided_by: dict[str, str | int], **more: bool
) -> ForeignLayout:
    """Returns the layout, once all files are known to hold ids of one dtype."""
    dtypes = {file.dtype.name: file.path for file in files}
    if len(dtypes) > 1:
        which = ", ".join(f"{name} ({path})" for name, path in dtypes.items())
        raise UserError(
            f"--from: the ids are of several dtypes: {which}. Adopt the files of each on their own."
        )
    names = [file.path.absolute().relative_to(root).as_posix() for file in files]
    decided_by = {"dtype": files[0].dtype.name, **decided_by}
    return ForeignLayout(kind=kind, root=root, names=names, files=files, decided_by=decided_by, **more)


def _is_mds(path: Path) -> bool:
    try:
        body = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(body, dict) and "shards" in body
