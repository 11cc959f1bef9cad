"""Finds the token files of other projects below a path, and tells their layout."""

import glob
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jtrain.data.pretokenized.foreign.dense import MegatronFile, llm_c_file, npy_file, raw_file
from jtrain.data.pretokenized.foreign.foreign_file import ForeignFile, ForeignLayout, unsigned
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
    # The folder that all names are relative to.
    root = Path(files[0].location.removesuffix(files[0].name) or ".").absolute()
    # Before the suffixes: an MDS folder may hold files of any suffix.
    if any(file.name == "index.json" and _is_mds(Path(file.location)) for file in files):
        # Ids are read as unsigned, whatever the sign of the dtype that was named.
        shards, column = mds_shards(
            root, column=column, dtype=np.dtype(f"<u{np.dtype(dtype or 'int64').itemsize}")
        )
        assumed = any(shard.dtype_is_assumed for shard in shards)
        return _make_layout("mds", root, shards, {"column": column}, dtype_is_assumed=assumed)
    suffixes = {
        suffix: [f for f in files if f.name.endswith(suffix)]
        for suffix in (".idx", ".bin", ".npy", ".parquet")
    }
    files_of_suffix = {suffix: suffix_files for suffix, suffix_files in suffixes.items() if suffix_files}
    # Each .idx stands for its .bin too, so the pair counts as one layout.
    if ".idx" in files_of_suffix:
        bins = {file.name for file in files_of_suffix.pop(".bin", [])}
        expected_bins = [file.name.removesuffix(".idx") + ".bin" for file in suffixes[".idx"]]
        if lone_bins := sorted(bins - set(expected_bins)):
            raise UserError(
                f"--from {path}: {lone_bins[0]} has no .idx beside it, and others have. Adopt them on their "
                "own."
            )
        for name in expected_bins:
            if not (root / name).is_file():
                raise UserError(
                    f"--from {path}: {root / name} is missing, and its .idx is there. Put it back."
                )
    if len(files_of_suffix) != 1:
        counts = ", ".join(
            f"{len(suffix_files)} {suffix}" for suffix, suffix_files in files_of_suffix.items()
        )
        description = f"files of several layouts ({counts})" if counts else "no token files"
        raise UserError(
            f"--from {path}: {description}. Set --from to a file, folder or glob of one layout: {_KNOWN}."
        )
    [(suffix, suffix_files)] = files_of_suffix.items()
    if suffix == ".idx":
        megatron = [MegatronFile(root / file.name.replace(".idx", ".bin")) for file in suffix_files]
        return _make_layout("megatron", root, megatron, {})
    if suffix == ".parquet":
        from jtrain.data.pretokenized.foreign.parquet_ids import COLUMN, ParquetIds  # imports pyarrow

        column = column or COLUMN
        parquet = [ParquetIds(Path(file.location), column) for file in suffix_files]
        return _make_layout("parquet", root, parquet, {"column": column}, copies=True)
    return _flat_layout(suffix, root, suffix_files, end_id, vocab_size, dtype)


def _flat_layout(
    suffix: str, root: Path, stored_files: list[StoredFile], end_id: int, vocab_size: int, dtype: str | None
) -> ForeignLayout:
    # nanoGPT and OLMo write uint16 while the vocabulary fits, without a header that says so.
    raw = unsigned(dtype or ("uint16" if vocab_size <= 1 << 16 else "uint32"), "--dtype")
    with_header = llm_c_file if suffix == ".bin" else npy_file
    files: list[ForeignFile] = []
    kinds = set()
    for file in stored_files:
        foreign_file = with_header(Path(file.location), end_id)
        kinds.add(("llm.c" if suffix == ".bin" else "npy") if foreign_file is not None else "raw")
        files.append(foreign_file if foreign_file is not None else raw_file(Path(file.location), raw, end_id))
    # A file without a header among others with one may be cut at its begin, or of another data set.
    if len(kinds) > 1:
        raise UserError(
            f"--from: some {suffix} files below {root} have a header, others none. Adopt them on their own."
        )
    kind = kinds.pop()
    return _make_layout(kind, root, files, {"end_id": end_id}, splits=True, dtype_is_assumed=kind == "raw")


def _make_layout(
    kind: str, root: Path, files: Sequence[ForeignFile], decided_by: dict[str, str | int], **flags: bool
) -> ForeignLayout:
    """Returns the layout, once all files are known to hold ids of one dtype."""
    # One path per dtype is enough for the message.
    dtypes = {file.dtype.name: file.path for file in files}
    if len(dtypes) > 1:
        dtype_list = ", ".join(f"{name} ({path})" for name, path in dtypes.items())
        raise UserError(
            f"--from: the ids are of several dtypes: {dtype_list}. Adopt the files of each on their own."
        )
    names = [file.path.absolute().relative_to(root).as_posix() for file in files]
    decided_by = {"dtype": files[0].dtype.name, **decided_by}
    return ForeignLayout(kind=kind, root=root, names=names, files=files, decided_by=decided_by, **flags)


def _is_mds(path: Path) -> bool:
    try:
        body = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(body, dict) and "shards" in body
