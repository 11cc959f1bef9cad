"""Folders of checkpoints, on a disk or in an object store: listing, sizes, hashing, moving and removing.

A folder on a disk is a `pathlib.Path`, one in a store a `StorePath`, which has the same methods. Standard
library only, until a folder of a store is used.
"""

import concurrent.futures
import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from jtrain.runtime.stores import in_store

_READ_BYTES = 1 << 20
_THREADS = 8
_STORE_READ_BYTES = 16 << 20  # each read of a store is a request of its own


def names(folder: Path) -> list[str]:
    """Returns the names of the files and folders in `folder`, sorted; none if it does not exist."""
    if in_store(folder):
        with contextlib.suppress(FileNotFoundError):
            paths = store_of(folder).ls(str(folder), detail=False)
            # Some stores list the folder itself, or an empty object of its name.
            entry_names = (str(name).rstrip("/").rpartition("/")[2] for name in paths)
            return sorted(set(entry_names) - {"", folder.name})
        return []
    try:
        return sorted(entry.name for entry in os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def folder_names(folder: Path) -> list[str]:
    """Returns the names of the folders in `folder`, sorted; none if it does not exist."""
    if in_store(folder):
        with contextlib.suppress(FileNotFoundError):
            entries = store_of(folder).ls(str(folder), detail=True)
            folders = (str(entry["name"]).rstrip("/") for entry in entries if entry["type"] == "directory")
            return sorted({name.rpartition("/")[2] for name in folders} - {"", folder.name})
        return []
    try:
        return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def has_file(folder: Path, name: str) -> bool:
    """True if `folder` holds a file of this name.

    Unlike the methods of paths in a store, which call a file missing if the store does not answer, this
    raises then.
    """
    return name in names(folder) if in_store(folder) else (folder / name).is_file()


def sizes(folder: Path) -> dict[str, int]:
    """Returns the path relative to `folder` and the bytes of each file in it and in its subfolders,
    sorted.
    """
    if in_store(folder):
        # `find` lists by prefix: one request for many files, where a walk would take one for each folder.
        files_by_path = cast(dict[str, Any], store_of(folder).find(str(folder), detail=True))
        start = len(store_of(folder)._strip_protocol(str(folder))) + 1
        return {
            name[start:]: int(entry["size"]) for name, entry in sorted(files_by_path.items()) if name[start:]
        }
    return dict(sorted(_sizes(str(folder), "")))


def _sizes(folder: str, prefix: str) -> Iterator[tuple[str, int]]:
    # A file or folder may go while it is listed: another process deletes an old checkpoint.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            # No symbolic links to folders: a loop would not end.
            if entry.is_dir(follow_symlinks=False):
                yield from _sizes(entry.path, f"{prefix}{entry.name}/")
            elif entry.is_file():
                yield prefix + entry.name, entry.stat().st_size


def hash_of(path: Path) -> str:
    """Returns the 128-bit blake2b of a file: 1 GB/s per core; hashlib releases the GIL meanwhile."""
    return read(path)[1]


def read(path: Path) -> tuple[int, str]:
    """Returns bytes and hash of a file."""
    digest = hashlib.blake2b(digest_size=16)
    size = 0
    if in_store(path):
        store = store_of(path)
        block = store.cat_file(str(path), start=0, end=_STORE_READ_BYTES)
        # A small file takes one request. A longer one tells its size: a read behind its end would fail.
        size = store.info(str(path))["size"] if len(block) == _STORE_READ_BYTES else len(block)
        digest.update(block)
        for start in range(len(block), size, _STORE_READ_BYTES):
            digest.update(store.cat_file(str(path), start=start, end=min(start + _STORE_READ_BYTES, size)))
        return size, digest.hexdigest()
    # No buffer: hashing reads large blocks, which a buffer would only copy.
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def move(folder: Path, new: Path, *, first: str) -> None:
    """Gives a folder another name; in a store all files are copied, then removed beginning with `first`."""
    if not in_store(folder):
        folder.rename(new)
        return
    # `list` raises the first failure of a copy: then nothing is removed.
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        list(
            pool.map(
                lambda name: store_of(folder).cp_file(str(folder / name), str(new / name)), sizes(folder)
            )
        )
    # Only after every copy: until then a kill leaves the old folder whole.
    remove(folder, first=first)


def remove(folder: Path, *, first: str, last: str = "") -> None:
    """Removes a folder with all that it holds; in a store beginning with `first` and ending with `last`."""
    if not in_store(folder):
        shutil.rmtree(folder, ignore_errors=True)
        return
    file_names = sizes(folder)
    # Alone and awaited: the folder stops being a checkpoint before any other file of it goes.
    if first in file_names:
        store_of(folder).rm_file(str(folder / first))
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        middle_names = sorted(name for name in file_names if name not in (first, last))
        list(pool.map(lambda name: store_of(folder).rm_file(str(folder / name)), middle_names))
    if last in file_names:
        store_of(folder).rm_file(str(folder / last))


def store_of(folder: Path) -> Any:
    """Returns the fsspec file system of a folder in a store, without listings of earlier calls."""
    store = cast(Any, folder)._backend.fs(folder)
    # fsspec caches listings per process and would not see what another process wrote.
    store.invalidate_cache()
    return store
