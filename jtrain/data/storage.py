"""Where bytes lie: files on this machine or behind a URL, found, read again by range, and kept in a cache folder."""

import contextlib
import dataclasses
import errno
import fcntl
import glob
import hashlib
import io
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import numpy as np
from jaxtyping import Int

STDLIB = "stdlib"
"""As a source's path: the Python standard library's own source text, a corpus that every machine has."""

_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
"""Installed packages; and tests, which some systems leave out and which hold files that are broken on purpose."""

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "http": "http", "https": "http"}
"""Scheme -> the extra of this package that brings its reader."""

_VERSION_KEYS = ("ETag", "etag", "generation", "blob_id", "Last-Modified", "LastModified", "mtime", "created")
"""What the several stores call that which changes with a file's content; the first one present is used."""

_BLOCK_BYTES = 1 << 23

SMALL_TABLE_BYTES = 1 << 20
"""Files up to this size are indexed in memory (reading them takes a millisecond), larger ones in the cache folder."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredFile:
    """A file as it was found; reading opens it anew, so that thousands of files cost no descriptors.

    Attributes:
      location: path or URL to read it by.
      name: relative to the folder searched: the file's identity, the same when the folder moves.
      size_bytes: -1 where the server does not say.
      version: changes with the content (etag, or time of the last change).
      called: what messages call it: the URL, or the compressed file, that a copy in the cache was made from.
    """

    location: str
    name: str
    size_bytes: int
    version: str
    called: str

    @property
    def is_remote(self) -> bool:
        return "://" in self.location

    @property
    def key(self) -> str:
        """A name for what is derived from this content."""
        identity = f"{self.location}\0{self.size_bytes}\0{self.version}"
        return hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()

    def open(self) -> io.BufferedReader | io.RawIOBase:
        """To read and seek in. Raises OSError, naming the file, where it is gone, shut, or of another size."""
        if self.is_remote:
            return _RangeFile(self)
        try:
            file = open(self.location, "rb")  # noqa: SIM115
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{self.called}: {self.location if self.called != self.location else 'it'} is gone since this run "
                "opened it. Put it back, and start again."
            ) from error
        except PermissionError as error:
            raise PermissionError(
                f"{self.called}: may no longer be read ({error.strerror}). Mend its permissions."
            ) from error
        except OSError as error:
            raise OSError(f"{self.called}: cannot be opened ({error.strerror}).") from error
        if (size := os.fstat(file.fileno()).st_size) != self.size_bytes:
            file.close()
            raise OSError(
                f"{self.called}: {self.size_bytes:,} bytes when this run opened it, {size:,} now: cut short or "
                "written over. Put the file back as it was, and start again."
            )
        return file


class _RangeFile(io.RawIOBase):
    """A remote file, each read one request for exactly those bytes; nothing is kept or read ahead."""

    def __init__(self, file: StoredFile) -> None:
        self._file = file
        self._fs, self._path = _filesystem(file.location, file.called)
        # File systems with an event loop take ranges by themselves; the others open the file, and would read ahead.
        self._options = {} if getattr(self._fs, "async_impl", False) else {"cache_type": "none"}
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size_bytes}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        file = self._file
        start, end = self._position, min(self._position + len(buffer), file.size_bytes)
        if start >= end:
            return 0
        with _explained(file.called):
            content = self._fs.cat_file(self._path, start=start, end=end, **self._options)
        if len(content) != end - start:
            raise OSError(
                f"{file.called}: asked for bytes {start:,} to {end:,} of {file.size_bytes:,}, and the server sent "
                f"{len(content):,}. Either the file changed, or the server cannot send ranges: then copy the file here."
            )
        buffer[: len(content)] = content
        self._position = end
        return len(content)


def find_files(path: str, *, field: str) -> list[StoredFile]:
    """The files that a source's path stands for, in the order of their names.

    A file; a folder, searched all the way down without hidden files; a glob, `**` for any depth; `stdlib`; or any of
    the first three behind a URL.

    Args:
      path: as the user wrote it.
      field: what the user calls it, for messages.

    Raises:
      FileNotFoundError: nothing is there.
      PermissionError: a file or folder may not be read, or a store refuses.
      ValueError: an unknown scheme, or one whose reader is not installed.
      OSError: a store cannot be reached.
    """
    if path.startswith("file://"):
        path = path.removeprefix("file://")
    files = _find_remote(path, field) if "://" in path else _find_local(path, field)
    return sorted(files, key=lambda file: file.name)


def _find_local(path: str, field: str) -> list[StoredFile]:
    root = Path(sysconfig.get_paths()["stdlib"]) if path == STDLIB else Path(os.path.expanduser(path))
    if path == STDLIB:
        found = [f for f in _walk(root, field=field, skip=_NOT_STDLIB.__contains__) if f.suffix == ".py"]
        looked_for = f"*.py below {root}"
    elif (kind := _kind(root, field)) == "folder":
        found = list(_walk(root, field=field, skip=lambda name: name.startswith(".")))
        looked_for = f"any file that is not hidden, below {root.absolute()}"
    elif kind == "file":
        found, root, looked_for = [root], root.parent, str(root)
    elif glob.has_magic(path):
        looked_for = f"files that match {root.absolute()}"
        found = [Path(f) for f in set(glob.glob(str(root), recursive=True)) if not os.path.isdir(f)]
        magic = next(i for i, part in enumerate(root.parts) if glob.has_magic(part))
        root = Path(*root.parts[:magic])
    else:
        found, looked_for = [], str(root.absolute())
    if not found:
        raise FileNotFoundError(
            f"{field}={path!r}: nothing there; looked for {looked_for}. Set {field} to a file, a folder, a glob, a URL "
            f"or {STDLIB!r}."
        )
    files = []
    for file in found:
        try:
            status = file.stat()
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            file.open("rb").close()  # permissions, access lists, network file systems: only opening tells
        except OSError as error:
            kind = PermissionError if isinstance(error, PermissionError) else OSError
            raise kind(
                f"{field}={path!r}: {file} cannot be read ({error.strerror}). Mend it or its permissions, or leave "
                "it out."
            ) from error
        name = os.path.relpath(file, root).replace(os.sep, "/")
        files.append(StoredFile(str(file), name, status.st_size, str(status.st_mtime_ns), str(file)))
    return files


def _kind(path: Path, field: str) -> str | None:
    """`folder`, `file` or None; a folder on the way that may not be entered is an error, not an absence."""
    try:
        return "folder" if stat.S_ISDIR(path.stat().st_mode) else "file"
    except PermissionError as error:
        raise PermissionError(
            f"{field}={str(path)!r} cannot be reached ({error.strerror}). Mend the permissions of the folders above it."
        ) from error
    except OSError:
        return None


def _walk(root: Path, *, field: str, skip: Callable[[str], bool]) -> Iterator[Path]:
    """Every file below `root`, in no order; a folder that cannot be read is an error, not left out in silence."""

    def refuse(error: OSError) -> None:
        raise PermissionError(
            f"{field}: the folder {error.filename} cannot be read ({error.strerror}). Mend its permissions, or set "
            f"{field} to what lies beside it."
        ) from error

    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not skip(name)]
        yield from (Path(folder, file) for file in files if not skip(file))


def _find_remote(url: str, field: str) -> list[StoredFile]:
    where = f"{field}={url!r}"
    fs, root = _filesystem(url, where)
    web = urlsplit(url).scheme in ("http", "https")
    # In a web address `?` starts the query, and only `*` and `[` can be a glob.
    magic = any(sign in root for sign in ("*[" if web else "*[?"))
    with _explained(where):
        fs.invalidate_cache()  # a listing made earlier in this process may be stale
        if magic:
            parts = root.split("/")
            base = "/".join(parts[: next(i for i, part in enumerate(parts) if any(sign in part for sign in "*[?"))])
            found = fs.glob(root, detail=True)
        else:
            info = fs.info(root)
            is_file = info["type"] == "file"
            base = root.rpartition("/")[0] if is_file else root.rstrip("/")
            found = {info["name"]: info} if is_file else fs.find(root, detail=True)
    files = []
    for path, info in found.items():
        name = urlsplit(path).path.rpartition("/")[2] if web and not magic else path.removeprefix(base).lstrip("/")
        if info["type"] != "file" or not name or any(part.startswith(".") for part in name.split("/")):
            continue
        location = str(fs.unstrip_protocol(path))
        version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")
        size = info.get("size")
        files.append(StoredFile(location, name, -1 if size is None else int(size), version, location))
    if not files:
        raise FileNotFoundError(f"{where}: nothing there; looked for files at {url}. Set {field} to one.")
    return files


def _filesystem(url: str, what: str) -> tuple[Any, str]:
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
        raise _translated(what, error) from error


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """What the stores raise, in our words; a dozen libraries agree on no classes for it."""
    try:
        yield
    except Exception as error:
        raise _translated(what, error) from error


def _translated(what: str, error: Exception) -> OSError:
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


def local_copy(file: StoredFile, *, compression: str | None, cache_dir: Path) -> StoredFile:
    """The same file, decompressed and on this machine: made once in `cache_dir`, by one process while others wait.

    Args:
      file: local and compressed, or remote.
      compression: `gzip`, `zstd` or None.
      cache_dir: a copy is used again as long as location, size and version of the file stay as they are.

    Raises:
      OSError: cut short, corrupt, not there, or no space for the copy.
    """
    if compression is None and not file.is_remote:
        return file

    def write(out: BinaryIO) -> None:
        _copy(file, compression, out)

    suffix = file.name.rpartition("/")[2]
    path = cached(cache_dir / "files" / f"{file.key}-{suffix}", write, what=file.called)
    status = path.stat()
    return StoredFile(str(path), file.name, status.st_size, str(status.st_mtime_ns), file.called)


def _copy(file: StoredFile, compression: str | None, out: BinaryIO) -> None:
    import pyarrow as pa

    if file.is_remote:
        fs, path = _filesystem(file.location, file.called)
        with _explained(file.called):
            raw = fs.open(path, "rb", block_size=_BLOCK_BYTES)
    else:
        raw = file.open()
    received = 0
    with raw:
        stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression) if compression else raw
        while True:
            try:
                block = stream.read(_BLOCK_BYTES)
            except Exception as error:
                # Codecs raise OSError itself, or Arrow's; stores their own classes.
                if compression and (type(error) is OSError or isinstance(error, pa.ArrowException)):
                    raise OSError(
                        f"{file.called}: not a whole {compression} file ({error}): cut short or corrupt. Replace it."
                    ) from error
                raise _translated(file.called, error) from error
            if not block:
                break
            received += len(block)
            out.write(block)
    if not compression and file.size_bytes not in (-1, received):
        raise OSError(f"{file.called}: {received:,} of {file.size_bytes:,} bytes arrived. Start again.")


def cached(path: Path, write: Callable[[BinaryIO], None], *, what: str) -> Path:
    """`path`, written by `write` unless it is there already; whole or not at all, whoever is killed when.

    A process that comes while another writes waits for it: the lock ends with its holder.
    """
    if path.exists():
        return path
    part = Path(f"{path}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{path}.lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path
            try:
                with part.open("wb") as out:
                    write(out)
                part.rename(path)
            finally:
                part.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOTDIR, errno.EEXIST):
            raise OSError(
                f"{what}: its copy or index cannot be written to {path.parent} ({error.strerror}). Make room there, or "
                "set data.cache_dir to another folder."
            ) from error
        raise
    return path


class NumberTable:
    """Pairs of int64, one per record: in memory for small files, else in a cache file and read entry by entry.

    A mapped file would hold a descriptor each; a read of 16 bytes takes 1 us.
    """

    __slots__ = ("_path", "_rows", "_what")

    def __init__(
        self, file: StoredFile, kind: str, make: Callable[[], Int[np.ndarray, "records 2"]], cache_dir: Path
    ) -> None:
        self._what = file.called
        self._path: Path | None = None
        self._rows: np.ndarray | int
        if file.size_bytes <= SMALL_TABLE_BYTES:
            self._rows = make()
            return

        def write(out: BinaryIO) -> None:
            out.write(make().astype("<i8").tobytes())

        self._path = cached(cache_dir / "index" / f"{file.key}.{kind}", write, what=file.called)
        self._rows = self._path.stat().st_size // 16

    def __len__(self) -> int:
        return self._rows if isinstance(self._rows, int) else len(self._rows)

    def rows(self, records: list[int]) -> list[list[int]]:
        """The pairs of these records."""
        if isinstance(self._rows, np.ndarray):
            return self._rows[records].tolist()
        assert self._path is not None
        try:
            with self._path.open("rb") as file:
                content = [os.pread(file.fileno(), 16, 16 * record) for record in records]
        except OSError as error:
            raise OSError(f"{self._what}: its index {self._path} is gone ({error.strerror}). Start again.") from error
        return np.frombuffer(b"".join(content), "<i8").reshape(-1, 2).tolist()
