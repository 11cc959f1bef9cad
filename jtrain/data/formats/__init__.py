"""Random access to the records of one file, whatever its format."""

from pathlib import Path

from jtrain.data.cache import local_copy
from jtrain.data.formats.parquet import ParquetFile, RowGroupCache
from jtrain.data.formats.record import BadRecord, Records
from jtrain.data.formats.text import JsonLines, TextFile
from jtrain.data.storage import StoredFile

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
    """Format and compression (gzip, zstd, None) by a file's suffix; anything unknown is text.

    Raises:
      ValueError: a compression that is not read.
    """
    if name.endswith(".tgz"):
        name = name.removesuffix(".tgz") + ".tar.gz"
    stem, suffix = Path(name).stem, Path(name).suffix
    if suffix in _OTHER_COMPRESSIONS:
        raise ValueError(
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
    """The records of a file. Anything compressed, and anything remote but Parquet, is copied to `cache_dir` first.

    Args:
      file: as it was found.
      format: `auto` for what the suffix says.
      text_field: JSON key, column, or member suffix of the text.
      text_piece_bytes: see TextFile.
      field: of the source, such as `data.sources.web`, for messages.
      cache_dir: for copies and indices.
      groups: where decoded row groups are kept.

    Raises:
      ValueError: not a file of that format, or without that field.
      OSError: it cannot be read.
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
            from jtrain.data.formats.arrayrecord import ArrayRecordFile

            return ArrayRecordFile(file, text_field=text_field, field=field)
        case "webdataset":
            from jtrain.data.formats.webdataset import TarFile

            return TarFile(file, text_field=text_field, field=field, cache_dir=cache_dir)
        case "arrow":
            from jtrain.data.formats.arrow import ArrowFile

            return ArrowFile(file, text_field=text_field, field=field)
        case _:
            raise AssertionError(kind)
