"""File suffixes: the format and the compression that each stands for."""

from jtrain.errors import UserError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
_OTHER_COMPRESSIONS = {".zip", ".7z", ".lz4", ".br"}
RECORD_FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrayrecord": "arrayrecord",
    ".array_record": "arrayrecord",
    ".tar": "webdataset",
    ".arrow": "arrow",
    ".feather": "arrow",
}


def split_suffix(name: str, *, field: str) -> tuple[str, str | None]:
    """Returns a file's suffix, in lower case, without that of its compression, and the compression or None.

    Raises:
      UserError: the compression is not supported.
    """
    name = name.lower()
    # The only suffix that stands for both format and compression.
    if name.endswith(".tgz"):
        name = name.removesuffix(".tgz") + ".tar.gz"
    stem, suffix = _splitext(name)
    # Refused here, or the compressed bytes would be read as text.
    if suffix in _OTHER_COMPRESSIONS:
        raise UserError(
            f"{field}: {name} is compressed as {suffix}; only {', '.join(COMPRESSIONS)} are read. "
            "Decompress it first."
        )
    compression = COMPRESSIONS.get(suffix)
    return _splitext(stem)[1] if compression else suffix, compression


def _splitext(name: str) -> tuple[str, str]:
    """Returns the result of `os.path.splitext` in a fifth of its time: folders have 100,000s of files."""
    stem, dot, suffix = name.rpartition(".")
    # `.hidden` is a name and no suffix, as for `splitext`.
    if not dot or "/" in suffix or not stem.rpartition("/")[2].strip("."):
        return name, ""
    return stem, f".{suffix}"


def format_of(name: str, *, field: str) -> tuple[str, str | None]:
    """Returns format and compression (or None) by a file's suffix; unknown suffixes are text.

    Raises:
      UserError: the compression is not supported.
    """
    suffix, compression = split_suffix(name, field=field)
    return RECORD_FORMATS.get(suffix, "text"), compression
