"""Data files of a folder: documentation, metadata and scripts that lie beside them are left out."""

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from jtrain.data.sources.formats.suffix import RECORD_FORMATS, split_suffix
from jtrain.data.sources.source import Source
from jtrain.data.sources.storage import StoredFile, search
from jtrain.errors import FileError, UserError

_DOCUMENTATION = re.compile(
    r"(readme([._-][a-z]{2}([_-][a-z]{2})?)?|licen[cs]e|notice|copying|authors|contributing|citation|changelog)(\.(md|txt|rst|cff|bib))?|requirements\.txt|(sha\d+|md5)(sums?)?(\.txt)?|checksums?(\.txt)?",
    re.IGNORECASE,
)
_METADATA = re.compile(
    r"dataset_infos?\.json|dataset_dict\.json|croissant\.json|_success|_metadata|_common_metadata",
    re.IGNORECASE,
)
_TOKEN_SUFFIXES = (".bin", ".npy", ".idx", ".mds", ".mds.zstd")
_MOST_NAMES = 4


class DataFiles(NamedTuple):
    """Data files of a folder, and a line about the files that are left out; empty if there are none."""

    files: list[StoredFile]
    left_out: str


def files_of(source: Source, *, field: str) -> DataFiles:
    """Returns the files of a source: all that its path names, or the data files of a folder.

    Args:
      field: config path of the source, for messages.

    Raises:
      UserError, FileError: as in `data_files` and `storage.search`.
    """
    match = search(source.path, field=f"{field}.path")
    if source.format == "auto":
        _refuse_token_files(match.files, path=source.path, field=field)
    if source.format in ("auto", "arrow"):
        # Before the suffixes are looked at: the folder may hold more .arrow files, caches of transforms.
        saved = saved_dataset_files(match.files, field=f"{field}.path={source.path!r}")
        if saved is not None:
            return DataFiles(saved, "")
    if not match.is_folder:
        return DataFiles(match.files, "")
    return data_files(match.files, path=source.path, format=source.format, field=field)


def _refuse_token_files(files: list[StoredFile], *, path: str, field: str) -> None:
    """Raises UserError where most of the bytes are token ids of another project; `adopt` reads them."""
    token_files = [file for file in files if file.name.lower().endswith(_TOKEN_SUFFIXES)]
    if not token_files or 2 * _size(token_files) < _size(files):
        return
    setting = "data.prepared=OUT" if field == "data" else f"data.prepared=OUT (its folder there: {field})"
    raise UserError(
        f"{field}.path={path!r} holds token ids and no text ({token_files[0].name}). Adopt them where they "
        f"lie: python -m jtrain.data adopt --from {shlex.quote(path)} --out OUT --tokenizer TOKENIZER, and "
        f"set {setting}. If they are text, set the format of the source."
    )


def data_files(files: list[StoredFile], *, path: str, format: str, field: str) -> DataFiles:
    """Returns the files of a folder that hold its data.

    Where some files have the suffix of a record format (.jsonl, .parquet, ...), these and .txt files are the
    data. Otherwise all files are text, except documentation (README, LICENSE, ...) at the top of the folder.
    Metadata of dataset libraries (dataset_infos.json, _SUCCESS, ...) is left out of every folder.

    Args:
      files: all files of the folder.
      path: the folder as the user wrote it.
      format: format of the source; `auto` goes by suffix, with any other all files but documentation are
        data.
      field: config path of the source, for messages.

    Raises:
      UserError: nothing is left, a compression is not supported, or most bytes would be left out.
    """
    bases = {base: _METADATA.fullmatch(base) is not None for base in {_base(file) for file in files}}
    data = [file for file in files if not bases[_base(file)]]
    suffixes = {file.name: split_suffix(file.name, field=f"{field}.path")[0] for file in data}
    # With a declared format the suffixes say nothing: all files are of that format.
    has_records = format == "auto" and any(suffix in RECORD_FORMATS for suffix in suffixes.values())
    documentation = {base for base in bases if _DOCUMENTATION.fullmatch(base)}
    # Below the top, README.md of a repository is text to train on, unless records are the data.
    data = [f for f in data if not (_base(f) in documentation and (has_records or "/" not in f.name))]
    if has_records:
        records = [file for file in data if suffixes[file.name] in RECORD_FORMATS]
        other_files = [file for file in data if suffixes[file.name] not in (*RECORD_FORMATS, ".txt")]
        # By bytes, since a corpus of a few large text files may lie beside many small records.
        if _size(other_files) > _size(records):
            raise UserError(
                f"{field}.path={path!r} holds {_describe(records, suffixes)}, but most of it is "
                f"{_describe(other_files, suffixes)}: which of them is the corpus? Set {field}.path to a "
                f"glob, such as {_glob(path, other_files[0], suffixes)!r} or "
                f"{_glob(path, records[0], suffixes)!r}."
            )
        data = [file for file in data if file not in other_files]
    # Where nothing is left out, `suffixes` has all the names already.
    data_names = {file.name for file in data} if len(data) < len(files) else suffixes
    left_out_names = [file.name for file in files if file.name not in data_names]
    names = ", ".join(left_out_names[:_MOST_NAMES]) + (
        f" and {len(left_out_names) - _MOST_NAMES:,} more" if len(left_out_names) > _MOST_NAMES else ""
    )
    # A glob takes all that it names, documentation too.
    way_out = f"to take them, set {field}.path to a file or to a glob such as {path.rstrip('/') + '/**'!r}"
    if not data:
        raise UserError(
            f"{field}.path={path!r} holds only documentation and metadata ({names}). Add data, or, {way_out}."
        )
    return DataFiles(data, f"left out of {path}, as not data: {names}; {way_out}" if left_out_names else "")


def _base(file: StoredFile) -> str:
    return file.name.rpartition("/")[2]


def _size(files: list[StoredFile]) -> int:
    # A server that does not tell a size has -1.
    return sum(max(file.size_bytes, 0) for file in files)


def _describe(files: list[StoredFile], suffixes: dict[str, str]) -> str:
    """Returns number, size and most frequent suffixes of files, for a message."""
    counts = Counter(suffixes[file.name] or "no suffix" for file in files)
    kinds = ", ".join(suffix for suffix, _ in counts.most_common(3))
    return f"{len(files):,} files of {kinds} ({_size(files):,} bytes)"


def _glob(path: str, file: StoredFile, suffixes: dict[str, str]) -> str:
    """Returns a glob of the files that end like `file`, its compression included."""
    ending = _base(file)[max(_base(file).rfind(suffixes[file.name]), 0) :] if suffixes[file.name] else ""
    return f"{path.rstrip('/')}/**/*{ending}"


def saved_dataset_files(files: list[StoredFile], *, field: str) -> list[StoredFile] | None:
    """Returns the files with the rows of a folder that `save_to_disk` wrote; None for any other folder.

    Such a folder may also hold caches of earlier transforms in the same format.

    Args:
      files: all files below the folder.
      field: config path of the folder, for messages.

    Raises:
      UserError: the folder holds several splits.
      FileError: a file of the dataset is missing.
    """
    by_name = {file.name: file for file in files}
    if "dataset_dict.json" in by_name:
        splits = _read_names(by_name["dataset_dict.json"], lambda body: body["splits"])
        raise UserError(
            f"{field}: a dataset of several splits ({', '.join(splits)}), which would be mixed. Set it to "
            f"the folder of one split, such as {splits[0]!r} in there."
        )
    # Both: a dataset_info.json alone lies beside files of other formats as well.
    if not {"state.json", "dataset_info.json"} <= by_name.keys():
        return None
    names = _read_names(
        by_name["state.json"], lambda body: [entry["filename"] for entry in body["_data_files"]]
    )
    if missing := [name for name in names if name not in by_name]:
        raise FileError(f"{field}: {missing[0]} is named by state.json but missing. Save the dataset again.")
    return [by_name[name] for name in names]


def _read_names(file: StoredFile, names_in: Callable[[Any], list[Any]]) -> list[str]:
    """Returns the names that a JSON file lists; raises UserError unless it lists names, and one at least."""
    try:
        with file.open() as handle:
            names = names_in(json.loads(handle.read()))
        if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
            return names
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        # A UserError of `open` is a ValueError too, and says more than the message below.
        if isinstance(error, UserError):
            raise
    raise UserError(f"{file.label}: not what `save_to_disk` of datasets writes. Save the dataset again.")
