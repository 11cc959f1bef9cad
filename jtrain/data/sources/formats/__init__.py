"""File formats: random access to the records of one file."""

from collections.abc import Callable
from pathlib import Path

from jtrain.data.sources.cache import local_copy
from jtrain.data.sources.formats import sniff
from jtrain.data.sources.formats.masked_text import TextFields, check_format
from jtrain.data.sources.formats.record import BadRecord, Records
from jtrain.data.sources.formats.row_group_cache import RowGroupCache
from jtrain.data.sources.formats.suffix import format_of
from jtrain.data.sources.formats.text import JsonLines, TextFile
from jtrain.data.sources.storage import StoredFile

__all__ = ["BadRecord", "JsonLines", "Records", "RowGroupCache", "TextFile", "format_of", "open_file"]


def open_file(
    file: StoredFile,
    *,
    format: str,
    fields: TextFields,
    text_piece_bytes: int,
    cache_dir: Path,
    groups: RowGroupCache,
    check_content: bool,
    report_bytes: Callable[[int], None] = lambda size_bytes: None,
) -> Records:
    """Opens the records of a file.

    Compressed files, and remote files except Parquet, are first copied to `cache_dir`.

    Args:
      file: the file.
      format: format of the file; `auto` goes by the suffix, or by `file.kind`.
      fields: fields that make up the text.
      text_piece_bytes: `piece_bytes` of `TextFile`.
      cache_dir: folder of copies and indexes.
      groups: cache of decoded row groups.
      report_bytes: called with the bytes that were read so far, while a file is copied or searched for lines.
      check_content: read the first bytes of the file, and refuse those of another format.

    Raises:
      UserError: the file is not of that format, or has no such field.
      FileError: the file cannot be read.
    """
    field, mask = fields.config_path, fields.mask
    # The compression goes by the suffix whatever the declared format.
    by_suffix, compression = format_of(file.name, field=f"{field}.path")
    kind = (file.kind or by_suffix) if format == "auto" else format
    if mask is not None:
        check_format(kind, label=file.label, setting=f"{field}.{mask.setting}", name=mask.field)
    # Before the copy, so that a file with a wrong suffix is refused and not decompressed.
    if check_content and compression and not file.is_remote:
        sniff.check_compression(file, compression=compression, field=field)
    # Parquet's index is at its end, so a store without sizes cannot be read by range.
    reads_ranges = kind == "parquet" and compression is None and file.is_remote and file.size_bytes >= 0
    if not reads_ranges:
        file = local_copy(file, compression=compression, cache_dir=cache_dir, report_bytes=report_bytes)
        if check_content:
            sniff.check_content(file, kind=kind, field=field, is_declared=format != "auto")
    records = _open_kind(
        file,
        kind,
        fields,
        text_piece_bytes=text_piece_bytes,
        cache_dir=cache_dir,
        groups=groups,
        report_bytes=report_bytes,
    )
    if mask is not None and mask.is_split:
        from jtrain.data.sources.formats.turn_records import TurnRecords

        return TurnRecords(records, file, mask, cache_dir=cache_dir)
    return records


def _open_kind(
    file: StoredFile,
    kind: str,
    fields: TextFields,
    *,
    text_piece_bytes: int,
    cache_dir: Path,
    groups: RowGroupCache,
    report_bytes: Callable[[int], None],
) -> Records:
    """Returns the records of a file of a format; see `open_file`."""
    # Formats that need a library are imported when a file of theirs is opened: pyarrow alone takes 0.1 s.
    match kind:
        case "text":
            return TextFile(file, piece_bytes=text_piece_bytes)
        case "jsonl":
            return JsonLines(file, fields, cache_dir=cache_dir, report_bytes=report_bytes)
        case "json":
            from jtrain.data.sources.formats.json_values import open_json

            return open_json(file, fields, cache_dir=cache_dir)
        case "csv" | "tsv":
            from jtrain.data.sources.formats.delimited import DelimitedFile

            return DelimitedFile(file, fields, kind=kind, cache_dir=cache_dir)
        case "parquet":
            from jtrain.data.sources.formats.parquet import ParquetFile

            return ParquetFile(file, fields, groups=groups)
        case "arrayrecord":
            from jtrain.data.sources.formats.arrayrecord import ArrayRecordFile

            return ArrayRecordFile(file, fields)
        case "webdataset":
            from jtrain.data.sources.formats.webdataset import TarFile

            return TarFile(file, fields, cache_dir=cache_dir)
        case "arrow":
            from jtrain.data.sources.formats.arrow import open_arrow

            return open_arrow(file, fields, cache_dir=cache_dir)
        case _:
            raise AssertionError(kind)
