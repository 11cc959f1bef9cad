"""What lies behind a URL: the reader of each scheme, files read by range, and what the stores say when they refuse."""

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "http": "http", "https": "http"}
"""Scheme -> the extra of this package that brings its reader."""


class RangeFile(io.RawIOBase):
    """A remote file, each read one request for exactly those bytes; nothing is kept or read ahead."""

    def __init__(self, location: str, size_bytes: int, *, called: str) -> None:
        self._size_bytes = size_bytes
        self._called = called
        self._fs, self._path = filesystem(location, called)
        # File systems with an event loop take ranges by themselves; the others open the file, and would read ahead.
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
        with explained(self._called):
            content = self._fs.cat_file(self._path, start=start, end=end, **self._options)
        if len(content) != end - start:
            raise OSError(
                f"{self._called}: asked for bytes {start:,} to {end:,} of {self._size_bytes:,}, and the server sent "
                f"{len(content):,}. Either the file changed, or the server cannot send ranges: then copy the file here."
            )
        buffer[: len(content)] = content
        self._position = end
        return len(content)


def filesystem(url: str, what: str) -> tuple[Any, str]:
    """The reader of a URL, one per process and scheme, and the path as it wants it."""
    import fsspec  # lazy: 0.1 s that local files need not pay

    scheme = url.partition("://")[0]
    try:
        return fsspec.url_to_fs(url)
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        way_out = f"Run pip install 'jtrain[{extra}]'." if extra else "Install the package named there."
        raise ValueError(f"{what}: the reader of {scheme}:// is not installed ({error}). {way_out}") from error
    except ValueError as error:
        raise ValueError(
            f"{what}: no reader for {scheme}:// ({error}). Use s3://, gs://, hf://, http(s)://, file://, a path, or "
            "another scheme that fsspec knows."
        ) from error
    except Exception as error:
        raise translated(what, error) from error


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """What the stores raise, in our words; a dozen libraries agree on no classes for it."""
    try:
        yield
    except Exception as error:
        raise translated(what, error) from error


def translated(what: str, error: Exception) -> OSError:
    """The error to raise for one of a store's: nothing is there, it refuses, or it cannot be reached."""
    if isinstance(error, FileNotFoundError) and isinstance(cause := error.__cause__, Exception):
        away = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
        error = cause if away or _status(cause) in (401, 403) else error  # fsspec over http calls it all an absence
    said = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":.")
    status = _status(error)
    if isinstance(error, FileNotFoundError) or status == 404:
        return FileNotFoundError(f"{what}: nothing there ({said}). Name a file, folder or glob that the store holds.")
    forbidden = "Credentials" in type(error).__name__ or str(error).startswith("Forbidden")  # botocore; gcsfs
    if isinstance(error, PermissionError) or status in (401, 403) or forbidden:
        return PermissionError(
            f"{what}: the store refuses ({said}). Give this machine credentials for it, as the store's own tools read "
            "them, or rights to this path."
        )
    return OSError(f"{what}: cannot be read ({said}). If the network or the store was away, start again.")


def _status(error: BaseException | None) -> Any:
    """The HTTP status that an error of any of the client libraries stands for."""
    response = getattr(error, "response", None)
    return getattr(response, "status_code", None) or getattr(error, "status", None) or getattr(error, "code", None)
