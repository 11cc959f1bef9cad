"""Remote files: the fsspec reader of each URL scheme, reads by byte range, and errors of object stores."""

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any

from jtrain.data.sources.retry import FileLost, TransientError, is_transient, retried
from jtrain.errors import FileError, UserError

_PASSING_STATUS = {408, 425, 429}
"""Statuses below 500 of an HTTP answer that say nothing about the file: too slow, too early, too many
requests."""

_OUR_FAULT = (AttributeError, ImportError, LookupError, NotImplementedError, TypeError, ValueError)
"""Errors of a wrong call or installation, which no further try mends. Stores raise classes of their own."""

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "http": "http", "https": "http"}
"""URL scheme -> extra of this package that installs its reader."""


class RangeFile(io.RawIOBase):
    """Remote file that sends one request per read, for exactly these bytes, without cache or read-ahead."""

    def __init__(self, location: str, size_bytes: int, *, label: str) -> None:
        self._size_bytes = size_bytes
        self._label = label
        self._fs, self._path = filesystem(location, label)
        # File systems with an event loop fetch ranges directly; the others open the file and would read
        # ahead.
        self._options = {} if getattr(self._fs, "async_impl", False) else {"cache_type": "none"}
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size_bytes}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        start, end = self._position, min(self._position + len(buffer), self._size_bytes)
        if start >= end:
            return 0
        # Repeated range by range: a caller that repeats would fetch its whole row group again.
        content = retried(self._label, lambda: self._fetch(start, end))
        buffer[: len(content)] = content
        self._position = end
        return len(content)

    def _fetch(self, start: int, end: int) -> bytes:
        with translate_errors(self._label):
            content = self._fs.cat_file(self._path, start=start, end=end, **self._options)
        if len(content) == end - start:
            return content
        # Too few bytes: the connection closed early. Too many: the server ignores ranges.
        kind = TransientError if len(content) < end - start else FileError
        raise kind(
            f"{self._label}: asked for bytes {start:,} to {end:,} of {self._size_bytes:,}, and the server "
            f"sent {len(content):,}. Either the file changed, or the server cannot send ranges: then copy "
            "the file here."
        )


class SteadyFile(io.RawIOBase):
    """Open remote file that repeats failed reads, so that the copy of a large file goes on."""

    def __init__(self, file: Any, *, label: str) -> None:
        self._file = file
        self._label = label
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        content = retried(self._label, lambda: self._read(len(buffer)))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _read(self, size: int) -> bytes:
        with translate_errors(self._label):
            # A read that failed may have moved the file, so each try seeks first.
            self._file.seek(self._position)
            return self._file.read(size)

    def close(self) -> None:
        self._file.close()
        super().close()


def can_seek(file: Any) -> bool:
    """True if an open remote file can be read from any byte.

    Tries it, since `seekable()` is True for streams of some stores as well.
    """
    try:
        file.seek(1)
        file.seek(0)
    except (OSError, ValueError):
        return False
    return True


def filesystem(url: str, label: str) -> tuple[Any, str]:
    """Returns the fsspec file system of a URL, one per process and scheme, and the path in its own form."""
    import fsspec  # lazy: takes 0.1 s, which local files need not pay

    scheme = url.partition("://")[0]
    try:
        return fsspec.url_to_fs(url)
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        way_out = f"Run pip install 'jtrain[{extra}]'." if extra else "Install the package that it names."
        raise UserError(
            f"{label}: the reader of {scheme}:// is not installed ({error}). {way_out}"
        ) from error
    except ValueError as error:
        raise UserError(
            f"{label}: no reader for {scheme}:// ({error}). Use s3://, gs://, hf://, http(s)://, file://, a "
            "path, or another scheme that fsspec knows."
        ) from error
    except Exception as error:  # as in `translate_errors`
        raise translate_error(label, error) from error


@contextlib.contextmanager
def translate_errors(label: str) -> Iterator[None]:
    """Converts exceptions of store libraries into FileError; a dozen libraries share no classes."""
    try:
        yield
    except FileError:  # it says what it is already
        raise
    except Exception as error:
        raise translate_error(label, error) from error


def translate_error(label: str, error: Exception) -> FileError:
    """Returns the FileError for an exception of a store: not found, access refused, or store unreachable."""
    if isinstance(error, FileNotFoundError) and isinstance(cause := error.__cause__, Exception):
        away = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
        # fsspec over http reports all of these as missing files.
        error = cause if away or _status(cause) not in (None, 404, 410) else error
    description = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":.")
    status = _status(error)
    if isinstance(error, FileNotFoundError) or status == 404:
        return FileLost(
            f"{label}: nothing there ({description}). Name a file, folder or glob that the store holds."
        )
    forbidden = "Credentials" in type(error).__name__ or str(error).startswith("Forbidden")  # botocore; gcsfs
    if isinstance(error, PermissionError) or status in (401, 403) or forbidden:
        return FileError(
            f"{label}: the store refuses ({description}). Give this machine credentials for it, as the "
            "store's own tools read them, or rights to this path."
        )
    message = f"{label}: cannot be read ({description}). If the network or the store was away, start again."
    if not _is_transient(error, status):
        return FileError(message)
    transient = TransientError(message)
    transient.reason = description
    return transient


def _is_transient(error: BaseException, status: Any) -> bool:
    """True if the store or the network failed, not the request; errors of unknown kind count as such."""
    if isinstance(status, int):
        return status in _PASSING_STATUS or status >= 500
    if isinstance(error, OSError) and error.errno is not None:
        return is_transient(error)
    return not isinstance(error, _OUR_FAULT)


def _status(error: BaseException | None) -> Any:
    """Returns the HTTP status of an error of any of the client libraries; None if it has none."""
    # requests has `response.status_code`, aiohttp `status`, gcsfs `code`.
    response = getattr(error, "response", None)
    return (
        getattr(response, "status_code", None)
        or getattr(error, "status", None)
        or getattr(error, "code", None)
    )
