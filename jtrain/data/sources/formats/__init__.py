"""File formats: random access to the records of one file."""

from pathlib import Path

from jtrain.data.sources.cache import local_copy
from jtrain.data.sources.formats.parquet import ParquetFile, RowGroupCache
from jtrain.data.sources.formats.record import BadRecord, Records
from jtrain.data.sources.formats.text import JsonLines, TextFile
from jtrain.data.sources.storage import StoredFile
from jtrain.errors import UserError

__all__ = ["BadRecord", "JsonLines", "ParquetFile", "Records", "RowGroupCache", "TextFile", "format_of", "open_file"]

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_OTHER_COMPRESSIONS = {".bz2", ".xz", ".zip", ".7z", ".lz4", ".br"}
_FORMATS = {
    ".jsonl": "jsonl",
    ".parquet": "parquet",
    ".arrayrecord": "arrayrecord",
    ".array_record": "arrayrecord",
    ".tar": "webdataset",
    ".arrow": "arrow",
}


def format_of(name: str, *, field: str) -> tuple[str, str | None]:
    """Returns format and compression (gzip, zstd or None) by a file's suffix; unknown suffixes are text.

    Raises:
      UserError: the compression is not supported.
    """
    if name.endswith(".tgz"):
        name = name.removesuffix(".tgz") + ".tar.gz"
    stem, suffix = Path(name).stem, Path(name).suffix
    if suffix in _OTHER_COMPRESSIONS:
        raise UserError(
            f"{field}: {name} is compressed as {suffix}; only {' and '.join(_COMPRESSIONS)} are read. Decompress it "
            "first."
        )
    compression = _COMPRESSIONS.get(suffix)
    return _FORMATS.get(Path(stem).suffix if compression else suffix, "text"), compression


def open_file(
    file: StoredFile,
    *,
    format: str,
    text_field: str,
    text_piece_bytes: int,
    field: str,
    cache_dir: Path,
    groups: RowGroupCache,
) -> Records:
    """Opens the records of a file. Compressed files, and remote files except Parquet, are first copied to `cache_dir`.

    Args:
      file: the file.
      format: format of the file; `auto` goes by the suffix.
      text_field: JSON key, column, or member suffix of the text.
      text_piece_bytes: `piece_bytes` of `TextFile`.
      field: config path of the source, such as `data.sources.web`, for messages.
      cache_dir: folder of copies and indexes.
      groups: cache of decoded row groups.

    Raises:
      UserError: the file is not of that format, or has no such field.
      FileError: the file cannot be read.
    """
    by_suffix, compression = format_of(file.name, field=f"{field}.path")
    kind = by_suffix if format == "auto" else format
    if kind == "parquet" and compression is None and file.size_bytes >= 0:
        return ParquetFile(file, text_field=text_field, field=field, groups=groups)
    file = local_copy(file, compression=compression, cache_dir=cache_dir)
    match kind:
        case "text":
            return TextFile(file, piece_bytes=text_piece_bytes)
        case "jsonl":
            return JsonLines(file, text_field=text_field, field=field, cache_dir=cache_dir)
        case "parquet":
            return ParquetFile(file, text_field=text_field, field=field, groups=groups)
        case "arrayrecord":
            from jtrain.data.sources.formats.arrayrecord import ArrayRecordFile

            return ArrayRecordFile(file, text_field=text_field, field=field)
        case "webdataset":
            from jtrain.data.sources.formats.webdataset import TarFile

            return TarFile(file, text_field=text_field, field=field, cache_dir=cache_dir)
        case "arrow":
            from jtrain.data.sources.formats.arrow import ArrowFile

            return ArrowFile(file, text_field=text_field, field=field)
        case _:
            raise AssertionError(kind)
