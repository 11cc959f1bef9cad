"""Cache folder `data.cache_dir`: copies of remote and compressed files, and record indexes of large files."""

import fcntl
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Int

from jtrain.data.sources.remote import SteadyFile, can_seek, filesystem, translate_error, translate_errors
from jtrain.data.sources.retry import TransientError
from jtrain.data.sources.storage import StoredFile, cache_lost
from jtrain.errors import FileError
from jtrain.runtime.atomic_io import replacing

SMALL_TABLE_BYTES = 1 << 20
"""Largest file whose index is kept in memory (reading it takes a millisecond); larger ones have theirs in the
cache."""

_BLOCK_BYTES = 1 << 23

_LINE_END_BYTES = 1 << 16
"""Bytes behind a stripe that are fetched with it, for the rest of its last line."""


def local_copy(
    file: StoredFile,
    *,
    compression: str | None,
    cache_dir: Path,
    report_bytes: Callable[[int], None] = lambda size_bytes: None,
) -> StoredFile:
    """Returns the file, copied to this machine and decompressed; one process copies while others wait.

    Of a stripe of a remote file of lines, the lines that begin in it are copied, by requests for these bytes.

    Args:
      file: local or remote file; a local one without compression is returned as it is.
      compression: a value of `suffix.COMPRESSIONS`, or None.
      report_bytes: called with the bytes of the file that were read so far.
      cache_dir: folder of the copies. A copy is used as long as location, size and version of the file stay
        the same.

    Raises:
      FileError: the file is missing, cut short or corrupt, or there is no space for the copy.
    """
    if compression is None and not file.is_remote:
        return file

    def write(out: BinaryIO) -> None:
        if file.span is None:
            _copy(file, compression, out, report_bytes)
        else:
            _copy_lines(file, file.span, out, report_bytes)

    # The suffix is for people who look into the folder; the key alone names location, size and version.
    suffix = file.name.rpartition("/")[2]
    path = write_once(cache_dir / "files" / f"{file.key}-{suffix}", write, label=file.label)
    status = path.stat()
    label = f"{file.label}, from byte {file.span[0]:,} on" if file.span else file.label
    return StoredFile(str(path), file.name, status.st_size, str(status.st_mtime_ns), label)


def _copy_lines(
    file: StoredFile, span: tuple[int, int], out: BinaryIO, report_bytes: Callable[[int], None]
) -> None:
    """Copies the lines that begin in the span, the last one to its end."""
    begin, stop = span
    # From the byte before the span: if it ends a line, a line begins at `begin`.
    position = max(begin - 1, 0)
    # A request waits as long as it takes to send some hundred KiB: the end of the last line comes along.
    end = min(stop + _LINE_END_BYTES, file.size_bytes)
    in_line = begin == 0
    with file.open() as raw:
        raw.seek(position)
        while position < end:
            block = raw.read(end - position)
            if not in_line:
                first = block.find(b"\n") + 1
                # The first line belongs to the stripe before; without a line end so does all of this one.
                if not first or position + first >= stop:
                    return
                block, position, in_line = block[first:], position + first, True
            # The line that byte `stop` - 1 belongs to is the last one.
            last = block.find(b"\n", max(stop - 1 - position, 0)) + 1
            out.write(block[:last] if last else block)
            position += len(block)
            report_bytes(min(position, stop) - begin)
            if last:
                return
            end = min(end + _BLOCK_BYTES, file.size_bytes)


def decompressed(raw: Any, compression: str) -> Any:
    """Returns a stream of the contents of an open compressed file."""
    import pyarrow as pa

    # Arrow has no such codec.
    if compression == "xz":
        return lzma.LZMAFile(raw)
    return pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression)


def _copy(
    file: StoredFile, compression: str | None, out: BinaryIO, report_bytes: Callable[[int], None]
) -> None:
    import pyarrow as pa

    if file.is_remote:
        fs, path = filesystem(file.location, file.label)
        with translate_errors(file.label):
            raw = fs.open(path, "rb", block_size=_BLOCK_BYTES)
        # Only a file that can seek can go on where a read failed; a stream starts anew.
        if can_seek(raw):
            raw = SteadyFile(raw, label=file.label)
    else:
        raw = file.open()
    # The decompressed size is not known: there the codec notices a cut. Plain bytes are counted.
    received = 0
    with raw:
        stream = decompressed(raw, compression) if compression else raw
        while True:
            try:
                block = stream.read(_BLOCK_BYTES)
            except FileError:
                raise
            except Exception as error:
                # Codecs raise plain OSError or Arrow's exceptions; stores raise classes of their own.
                codec_errors = (pa.ArrowException, lzma.LZMAError, EOFError)
                if compression and (type(error) is OSError or isinstance(error, codec_errors)):
                    raise FileError(
                        f"{file.label}: not a whole {compression} file ({error}): cut short or corrupt. "
                        "Replace it."
                    ) from error
                raise translate_error(file.label, error) from error
            if not block:
                break
            received += len(block)
            out.write(block)
            # Of a local compressed file the bytes that the codec has consumed; of a remote one, what it gave.
            report_bytes(raw.tell() if compression and not file.is_remote else received)
    # A server may close a connection early without an error; the next try may bring the rest.
    if not compression and file.size_bytes not in (-1, received):
        raise TransientError(f"{file.label}: {received:,} of {file.size_bytes:,} bytes arrived. Start again.")


def write_once(path: Path, write: Callable[[BinaryIO], None], *, label: str) -> Path:
    """Returns `path`, written by `write` unless it exists.

    A kill or power cut at any time leaves no partial file there, which would pass for the whole one. A
    process that calls this while another is writing waits for it; the lock is released when its holder dies.

    Raises:
      FileError: the folder cannot be written to.
    """
    try:
        if path.exists():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{path}.lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # The lock's last holder may have written the file while this process waited.
            if path.exists():
                return path
            with replacing(path) as part, part.open("wb") as out:
                write(out)
    except FileError:  # of the file that is copied or indexed
        raise
    except OSError as error:
        raise FileError(
            f"{label}: its copy or index cannot be written to {path.parent} ({error.strerror}). Make room "
            "there, or set data.cache_dir to another folder."
        ) from error
    return path


class NumberTable:
    """Table of two int64 per record: in memory for small files, otherwise in a cache file read by entry.

    The cache file is not mapped, because each map would hold a descriptor; reading 16 bytes takes 1 us.
    """

    __slots__ = ("_label", "_path", "_rows")

    def __init__(
        self,
        file: StoredFile,
        kind: str,
        make: Callable[[], Int[np.ndarray, "records 2"]],
        cache_dir: Path,
        *,
        in_memory: bool = False,
    ) -> None:
        self._label = file.label
        self._path: Path | None = None
        # The rows themselves, or their number if they lie in the cache file.
        self._rows: np.ndarray | int
        if in_memory or file.size_bytes <= SMALL_TABLE_BYTES:
            self._rows = make()
            return

        def write(out: BinaryIO) -> None:
            try:
                rows = make()
            except OSError as error:
                if isinstance(error, FileError):
                    raise
                raise FileError(f"{file.label}: cannot be read ({error.strerror}).") from error
            out.write(rows.astype("<i8").tobytes())

        self._path = write_once(cache_dir / "index" / f"{file.key}.{kind}", write, label=file.label)
        # 16 bytes per row: two int64.
        self._rows = self._path.stat().st_size // 16

    def __len__(self) -> int:
        return self._rows if isinstance(self._rows, int) else len(self._rows)

    def span(self, first: int, end: int) -> Int[np.ndarray, "records 2"]:
        """Returns the pairs of records `first` to `end` - 1."""
        return self._rows[first:end] if isinstance(self._rows, np.ndarray) else self._read([(first, end)])

    def sizes(self, first: int, end: int) -> Int[np.ndarray, " n"]:
        """Returns the difference of each pair of records `first` to `end` - 1: sizes, of starts and ends."""
        pairs = self.span(first, end)
        return pairs[:, 1] - pairs[:, 0]

    def pairs(self, records: Int[np.ndarray, " n"]) -> Int[np.ndarray, "n 2"]:
        """Returns the pairs of these records."""
        if isinstance(self._rows, np.ndarray):
            return self._rows[records]
        return self._read([(record, record + 1) for record in records.tolist()])

    def rows(self, records: list[int]) -> list[list[int]]:
        """Returns the pairs of these records as plain integers."""
        return self.pairs(np.asarray(records, np.int64)).tolist()

    def _read(self, spans: list[tuple[int, int]]) -> Int[np.ndarray, "records 2"]:
        """Reads the pairs of spans of records from the cache file."""
        assert self._path is not None
        try:
            with self._path.open("rb") as file:
                parts = [os.pread(file.fileno(), 16 * (end - first), 16 * first) for first, end in spans]
        except OSError as error:
            raise cache_lost(f"{self._label}: its index {self._path} is gone ({error.strerror})") from error
        # `pread` behind the end of a file returns fewer bytes and no error.
        if any(len(part) != 16 * (end - first) for part, (first, end) in zip(parts, spans, strict=True)):
            raise cache_lost(f"{self._label}: its index {self._path} was cut short. Remove it")
        return np.frombuffer(b"".join(parts), "<i8").reshape(-1, 2)
