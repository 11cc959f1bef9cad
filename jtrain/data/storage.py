"""Where bytes lie: files on this machine or behind a URL, found and opened again."""

import dataclasses
import errno
import glob
import hashlib
import io
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from jtrain.data.remote import RangeFile, explained, filesystem

STDLIB = "stdlib"
"""As a source's path: the Python standard library's own source text, a corpus that every machine has."""

_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
"""Installed packages; and tests, which some systems leave out and which hold files that are broken on purpose."""

_VERSION_KEYS = ("ETag", "etag", "generation", "blob_id", "Last-Modified", "LastModified", "mtime", "created")
"""What the several stores call that which changes with a file's content; the first one present is used."""


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
            return RangeFile(self.location, self.size_bytes, called=self.called)
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
    fs, root = filesystem(url, where)
    web = urlsplit(url).scheme in ("http", "https")
    # In a web address `?` starts the query, and only `*` and `[` can be a glob.
    magic = any(sign in root for sign in ("*[" if web else "*[?"))
    with explained(where):
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
