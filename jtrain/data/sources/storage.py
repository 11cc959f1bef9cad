"""Stored files, local or behind a URL: how they are found and opened."""

import dataclasses
import errno
import glob
import hashlib
import io
import os
import stat
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from jtrain.data.sources.remote import RangeFile, filesystem, translate_errors
from jtrain.data.sources.retry import FileLost, NeverSkipped, retried, transient_cause
from jtrain.errors import FileError

STDLIB = "stdlib"
"""Path of a source that stands for the source text of the Python standard library, a corpus on every
machine."""

STDLIB_CHATS, STDLIB_PAIRS = "stdlib_chats", "stdlib_pairs"
"""Paths of sources that stand for conversations about the names in that library, and for a right and a wrong
answer to one question about each name.
"""

_EDITIONS = {STDLIB_CHATS: 2, STDLIB_PAIRS: 1}
"""Numbers that change with what the conversations are, for the names of their files."""

_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
"""Folders left out: installed packages, and tests, which some systems lack and which hold broken files on
purpose."""

_OPENED_FILES = 1000
"""Files of a source that are opened to see that they may be read; with more, the others are when their turn
comes."""

_VERSION_KEYS = ("ETag", "etag", "generation", "blob_id", "Last-Modified", "LastModified", "mtime", "created")
"""Metadata keys that change with a file's content, one per kind of store; the first one present is used."""


class CacheLost(NeverSkipped):
    """Copy or index in `data.cache_dir` that vanished or was damaged: no record's fault, so never skipped."""


def cache_lost(problem: str) -> CacheLost:
    """Returns the error for a copy or index in the cache; `problem` names it."""
    return CacheLost(
        f"{problem}. The same command makes it anew and goes on from the last checkpoint; if something "
        "clears that folder, set data.cache_dir to another."
    )


@dataclasses.dataclass(frozen=True, slots=True)
class StoredFile:
    """File as it was found. Each read opens it again, so that thousands of files hold no descriptors.

    Attributes:
      location: path or URL.
      name: path relative to the folder searched. It identifies the file, also when the folder moves.
      size_bytes: size in bytes; -1 if the server does not tell.
      version: text that changes with the content (etag, or time of the last change).
      label: name in messages; for a copy in the cache, the URL or compressed file that it was made from.
    """

    location: str
    name: str
    size_bytes: int
    version: str
    label: str
    span: tuple[int, int] | None = None
    """First byte and end of the part of a large file whose records these are; None for the whole file."""
    kind: str | None = None
    """Format that the content tells, where the name tells none; see `sniff.with_kinds`."""

    @property
    def is_remote(self) -> bool:
        return "://" in self.location

    @property
    def key(self) -> str:
        """Name for files derived from this content."""
        # Zero bytes separate the parts, which cannot hold any.
        identity = f"{self.location}\0{self.size_bytes}\0{self.version}"
        if self.span is not None:
            identity += f"\0{self.span[0]}\0{self.span[1]}"
        return hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()

    def open(self) -> io.BufferedReader | io.RawIOBase:
        """Opens the file to read and seek; raises FileLost if it is gone, locked, or has another size."""
        if self.is_remote:
            return RangeFile(self.location, self.size_bytes, label=self.label)
        try:
            file = open(self.location, "rb")  # noqa: SIM115, the caller closes it
        except FileNotFoundError as error:
            if self.label != self.location:
                raise cache_lost(f"{self.label}: its copy {self.location} is gone") from error
            raise FileLost(
                f"{self.label}: it is gone since this run opened it. Put it back, and start again."
            ) from error
        except PermissionError as error:
            raise FileLost(
                f"{self.label}: may no longer be read ({error.strerror}). Mend its permissions."
            ) from error
        except OSError as error:
            raise FileError(f"{self.label}: cannot be opened ({error.strerror}).") from error
        # On the descriptor: the file at this path may be replaced between `stat` and `open`.
        if (size := os.fstat(file.fileno()).st_size) != self.size_bytes:
            file.close()
            if self.label != self.location:
                raise cache_lost(
                    f"{self.label}: its copy {self.location} has {size:,} bytes, not {self.size_bytes:,}. "
                    "Remove it"
                )
            raise FileLost(
                f"{self.label}: {self.size_bytes:,} bytes when this run opened it, {size:,} now: cut short "
                "or written over. Put the file back as it was, and start again."
            )
        return file


@dataclasses.dataclass(frozen=True)
class FoundFiles:
    """Files of a source's path, ordered by name; `is_folder` if the path is a folder."""

    files: list[StoredFile]
    is_folder: bool


def find_files(path: str, *, field: str) -> list[StoredFile]:
    """Returns the files of a source's path, ordered by name; arguments and errors are those of `search`."""
    return search(path, field=field).files


def search(path: str, *, field: str) -> FoundFiles:
    """Returns the files of a source's path, and the kind of path it is.

    The path is a file; a folder, searched recursively without hidden files; a glob, `**` for any depth;
    `stdlib`; or the URL of a file, folder or glob.

    Args:
      path: the path as the user wrote it.
      field: config path of `path`, for messages.

    Raises:
      FileError: nothing is there, it may not be read, or a store refuses or cannot be reached.
      UserError: an unknown scheme, or one whose reader is not installed.
    """
    if path.startswith("file://"):
        path = path.removeprefix("file://")
    find = _find_remote if "://" in path else _find_local
    # Listing is repeated as a whole: a network file system may fail in the middle of it.
    files, is_folder = retried(f"{field}={path!r}", lambda: find(path, field))
    return FoundFiles(sorted(files, key=lambda file: file.name), is_folder)


def _stdlib_chats(name: str) -> str:
    """Returns the file of conversations about the standard library, and writes it if it is not there."""
    from jtrain.data.chat import stdlib_chats  # lazy: most runs need none

    version = ".".join(map(str, sys.version_info[:3]))
    path = Path("~/.cache/jtrain").expanduser() / f"{name}-{_EDITIONS[name]}-python-{version}.jsonl"
    if not path.exists():
        files, _ = _find_local(STDLIB, "data.path")
        record_of = stdlib_chats.chat_about if name == STDLIB_CHATS else stdlib_chats.pair_about
        stdlib_chats.write_stdlib_chats((Path(file.location) for file in files), path, record_of)
    return str(path)


def _find_local(path: str, field: str) -> tuple[list[StoredFile], bool]:
    kind = None
    path = _stdlib_chats(path) if path in _EDITIONS else path
    root = Path(sysconfig.get_paths()["stdlib"]) if path == STDLIB else Path(os.path.expanduser(path))
    if path == STDLIB:
        paths = [f for f in _walk(root, field=field, skip=_NOT_STDLIB.__contains__) if f.endswith(".py")]
        looked_for = f"*.py below {root}"
    elif (kind := _kind(root, field)) == "folder":
        paths = list(_walk(root, field=field, skip=lambda name: name.startswith(".")))
        looked_for = f"any file that is not hidden, below {root.absolute()}"
    elif kind == "file":
        paths, root, looked_for = [str(root)], root.parent, str(root)
    # Only after `_kind`: a file whose name has brackets is itself and no glob.
    elif glob.has_magic(path):
        looked_for = f"files that match {root.absolute()}"
        # A set: with `**` a file may match more than once.
        paths = [f for f in set(glob.glob(str(root), recursive=True)) if not os.path.isdir(f)]
        # Names are relative to the deepest folder without a wildcard.
        magic = next(i for i, part in enumerate(root.parts) if glob.has_magic(part))
        root = Path(*root.parts[:magic])
    else:
        paths, looked_for = [], str(root.absolute())
    if not paths:
        raise FileError(
            f"{field}={path!r}: nothing there; looked for {looked_for}. Set {field} to a file, a folder, a "
            f"glob, a URL or {STDLIB!r}."
        )
    files = []
    top = f"{root}{os.sep}" if str(root) != os.sep else os.sep
    for number, file in enumerate(paths):
        try:
            status = os.stat(file)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            if number < _OPENED_FILES:
                # Permissions, access lists and network file systems: only opening the file tells.
                os.close(os.open(file, os.O_RDONLY))
        except OSError as error:
            raise FileError(
                f"{field}={path!r}: {file} cannot be read ({error.strerror}). Mend it or its permissions, or "
                "leave it out."
            ) from error
        # `relpath` makes both paths absolute at each call: only for what does not lie below `top`.
        name = file.removeprefix(top) if file.startswith(top) else os.path.relpath(file, root)
        files.append(
            StoredFile(file, name.replace(os.sep, "/"), status.st_size, str(status.st_mtime_ns), file)
        )
    return files, kind == "folder"


def _kind(path: Path, field: str) -> str | None:
    """Returns `folder`, `file` or None; raises FileError if a folder above it may not be entered."""
    try:
        return "folder" if stat.S_ISDIR(path.stat().st_mode) else "file"
    except PermissionError as error:
        raise FileError(
            f"{field}={str(path)!r} cannot be reached ({error.strerror}). Mend the permissions of the "
            "folders above it."
        ) from error
    except OSError as error:
        if transient_cause(error):
            raise
        return None


def _walk(root: Path, *, field: str, skip: Callable[[str], bool]) -> Iterator[str]:
    """Yields every file below `root`, in no order; raises FileError for a folder that cannot be read."""

    def refuse(error: OSError) -> None:
        raise FileError(
            f"{field}: the folder {error.filename} cannot be read ({error.strerror}). Mend its permissions, "
            f"or set {field} to what lies beside it."
        ) from error

    # Links to folders are followed, as globs do; a folder that lies above itself by a link is read once.
    visited: set[tuple[int, int]] = set()
    for folder, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in visited:
            folders[:] = []
            continue
        visited.add((status.st_dev, status.st_ino))
        # In place: `os.walk` descends into what remains in the list.
        folders[:] = [name for name in sorted(folders) if not skip(name)]
        start = os.path.join(folder, "")  # once: it takes as long as all else that is done for a file here
        yield from (start + file for file in files if not skip(file))


def _find_remote(url: str, field: str) -> tuple[list[StoredFile], bool]:
    is_file = False
    setting = f"{field}={url!r}"
    fs, root = filesystem(url, setting)
    web = urlsplit(url).scheme in ("http", "https")
    # In a web address `?` starts the query, and only `*` and `[` can be a glob.
    magic = any(sign in root for sign in ("*[" if web else "*[?"))
    with translate_errors(setting):
        fs.invalidate_cache()  # a listing from earlier in this process may be stale
        if magic:
            parts = root.split("/")
            base = "/".join(
                parts[: next(i for i, part in enumerate(parts) if any(sign in part for sign in "*[?"))]
            )
            info_of = fs.glob(root, detail=True)
        else:
            info = fs.info(root)
            is_file = info["type"] == "file"
            base = root.rpartition("/")[0] if is_file else root.rstrip("/")
            info_of = {info["name"]: info} if is_file else fs.find(root, detail=True)
    files = []
    for path, info in info_of.items():
        name = (
            urlsplit(path).path.rpartition("/")[2]
            if web and not magic
            else path.removeprefix(base).lstrip("/")
        )
        # Hidden files are left out, as they are locally.
        if info["type"] != "file" or not name or any(part.startswith(".") for part in name.split("/")):
            continue
        # Listings have paths without their scheme.
        location = str(fs.unstrip_protocol(path))
        version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")
        # A web server may send no length; -1 stands for that.
        size = info.get("size")
        files.append(StoredFile(location, name, -1 if size is None else int(size), version, location))
    if not files:
        raise FileError(f"{setting}: nothing there; looked for files at {url}. Set {field} to one.")
    return files, not (is_file or magic)
