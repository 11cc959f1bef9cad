"""Workdirs in folders and in object stores, `gs://bucket/run` and `s3://bucket/run`.

Paths go through etils and fsspec. Objects that are large, or written on the condition that nobody else has
written, go through TensorStore: its drivers send many requests at once and repeat those that fail.
"""

import contextlib
import errno
import functools
import hashlib
import importlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jtrain.errors import AwayError, UserError, did_you_mean, first_few
from jtrain.runtime.atomic_io import cannot_write, is_away

EXTRAS = {"gs": ("gs", "gcsfs"), "s3": ("s3", "s3fs")}
"""Scheme of a URL -> extra of this package that installs its client, and the client's module."""

REQUEST_S = 60.0
"""How long Google's store may take for one request of a few MiB; S3's client waits 15 s, five times."""

ANSWER_S = 300.0
"""How long a store may take for one object, repetitions included, which is at most some tens of MiB:
TensorStore itself would wait for ever for a server that accepts a connection and then is silent."""

_ADDRESSES = ("TENSORSTORE_GCS_HTTP_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""Environment variables that name the server of a store."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+")


def default_workdir(config: str) -> Path:
    """Returns runs/<config>; for a file or module, its function's name or its own."""
    name, _, function = config.partition(":")
    return Path("runs") / (function or Path(name).stem)


def check_workdir(text: str) -> None:
    """Refuses a folder that cannot become a workdir, before a run downloads or compiles anything; leaves
    nothing there.

    A URL is left to `workdir_path`.

    Raises:
      UserError: the text is empty, the folder is `/`, it is a file or below one, or this user may not write
        to it.
    """
    if not text.strip():
        raise UserError("--workdir is empty. Give a folder, or leave --workdir out for runs/CONFIG.")
    if _URL.match(text):
        return
    folder = Path(text).resolve()
    if folder == Path("/"):
        raise UserError(
            f"--workdir {text} is the root of the file system, and each run has a folder of its own. Give "
            "another one, or leave --workdir out for runs/CONFIG."
        )
    # The nearest folder that exists: the rest of the path will be made below it. Path.exists may raise.
    existing_parent = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not existing_parent.is_dir():
        problem = "is a file" if existing_parent == folder else f"is below {existing_parent}, which is a file"
        raise UserError(f"--workdir {text} {problem}. Give a folder, or a path where one can be made.")
    # By trying it: only the kernel knows quotas, read-only mounts and ACLs.
    try:
        # os.access is wrong for root on NFS, and in /proc.
        os.rmdir(tempfile.mkdtemp(prefix=".jtrain-", dir=existing_parent))
    except OSError as error:
        # No owner can help there: the disk is full, away or mounted read-only.
        if is_away(error) or error.errno == errno.EROFS:
            raise cannot_write(Path(text), error) from error
        raise UserError(
            f"--workdir {text} cannot be written to: {existing_parent} belongs to user "
            f"{existing_parent.stat().st_uid}, this process to user {os.geteuid()} ({error.strerror}). Give "
            "a folder of your own, or have its owner give you write access."
        ) from error


def workdir_path(text: str) -> Path:
    """Returns the folder that `--workdir` names: a `Path`, or for a URL a `StorePath`.

    Raises:
      UserError: the scheme is not one of a store that can hold a run, or its client is not installed.
    """
    url = _URL.match(text)
    if url is None:
        return Path(text)
    scheme = url[1]
    schemes = " and ".join(f"{name}://" for name in EXTRAS)
    if scheme not in EXTRAS:
        raise UserError(
            f"--workdir {text}: {did_you_mean(scheme, EXTRAS)}A run can live in a folder, or in a store "
            f"behind {schemes}, but not behind {scheme}://."
        )
    bucket = text[url.end() :].strip("/")
    if not text.startswith(f"{scheme}://") or not bucket:
        raise UserError(f"--workdir {text} names no bucket as a URL does. Write {scheme}://bucket/run.")
    extra, module = EXTRAS[scheme]
    try:
        importlib.import_module(module)
        store_path = _store_path()
    except ImportError as error:
        raise UserError(
            f"--workdir {text}: the client of {scheme}:// is not installed ({error}). Run pip install "
            f"'jtrain[{extra}]'."
        ) from error
    # Before the first connection: fsspec reads the limits when it makes a client, and caches the client.
    _limit_requests()
    with store_errors(text):
        return store_path(f"{scheme}://{bucket}")


def run_folder(text: str, option: str = "--workdir") -> Path:
    """Returns the folder that an option names as `workdir_path` does; of a run that has been, so it is there.

    Raises:
      UserError: there is no such folder; names the runs beside it and below `runs`.
    """
    folder = workdir_path(text)
    if in_store(folder) or folder.is_dir():
        return folder
    configs = (*folder.parent.glob("*/config.txt"), *Path("runs").glob("*/config.txt"))
    runs = sorted({str(config.parent) for config in configs})
    hint = did_you_mean(str(folder), runs)
    runs_text = f"There are: {first_few(runs, 5)}." if runs else "Train one: jtrain launch --config=tiny."
    raise UserError(f"{option} {text}: there is no such folder. {hint}{runs_text}")


@functools.cache
def _store_path() -> type[Path]:
    """Type of paths in object stores; imports etils, which only runs in stores need."""
    from etils.epath.gpath import PosixGPath

    class StorePath(PosixGPath, Path):  # pyright: ignore[reportIncompatibleMethodOverride]: options that etils lacks
        """Path behind gs:// or s3:// with the methods of `pathlib.Path`: etils implements them, through
        fsspec.
        """

    return StorePath


def _limit_requests() -> None:
    """Sets time limits for servers that accept a connection and then are silent, unless the user's fsspec
    config does.

    By default gcsfs waits for ever. For S3, botocore and s3fs each repeat every request five times: together
    7 minutes.
    """
    from fsspec.config import conf

    conf.setdefault("gcs", {}).setdefault("requests_timeout", REQUEST_S)
    conf.setdefault("s3", {}).setdefault("config_kwargs", {}).setdefault("retries", {"total_max_attempts": 1})


def in_store(folder: Path) -> bool:
    """True if the folder is in an object store."""
    return "://" in str(folder)  # paths on a disk never have two slashes in a row


@contextlib.contextmanager
def store_errors(name: object) -> Iterator[None]:
    """Converts errors of store clients, which share no classes, into a UserError that says what to do."""
    try:
        yield
    # Already says what to do.
    except UserError:
        raise
    except Exception as error:
        raise unusable(name, error) from error


def unusable(name: object, error: Exception) -> UserError:
    """Returns the error of a store; an AwayError where it does not answer, which no user can mend."""
    text = error_line(error)
    is_silent = (isinstance(error, OSError) and is_away(error)) or is_silent_text(text)
    return (AwayError if is_silent else UserError)(f"{name} cannot be used ({text}). {WAY_OUT}")


def is_silent_text(text: str) -> bool:
    """True if the text of a client's error tells that nobody answered."""
    return any(word in text for word in _SILENT)


_SILENT = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "onnection", "imeout", "timed out", "no answer in time")
"""Words of clients' errors, which share no classes, where nobody answered."""


WAY_OUT = (
    "Create the bucket, give this machine credentials for it, as the store's own tools read them, or check "
    "the network; then run the same command again."
)


def error_line(error: BaseException) -> str:
    """Returns type and text of an error in one line."""
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    # One line: messages put it into parentheses, and clients' texts hold whole XML answers.
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":. ")


def spec(url: str) -> dict[str, Any]:
    """Returns TensorStore's description of a key or a prefix of keys in a store."""
    scheme, _, bucket_path = url.partition("://")
    bucket, _, path = bucket_path.partition("/")
    if scheme == "gs":
        return {"driver": os.environ.get("TENSORSTORE_GCS_BACKEND", "gcs"), "bucket": bucket, "path": path}
    description: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": path}
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:  # TensorStore's driver reads neither variable, unlike every other client of S3
        description |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    elif region:
        description |= {"aws_region": region}
    return description


@functools.cache
# The addresses are a key of the cache alone: a test or a user may point the variables elsewhere in between.
def _bucket(url: str, _addresses: tuple[str | None, ...]) -> Any:
    """Returns TensorStore's access to a bucket; one for all writes, since each makes its own client of the
    store.
    """
    import tensorstore as ts

    return ts.KvStore.open(spec(f"{url}/")).result()


def write(path: Path, data: memoryview) -> str:
    """Writes one object and returns its hash; it is there as a whole when this returns, or not at all.

    Raises:
      ValueError: the store refuses.
      TimeoutError: the store does not take the object within `ANSWER_S`.
    """
    # TensorStore keeps the bytes until they are sent, but the memory of `data` is reused when this returns.
    _put(path, bytes(data), answer_s=ANSWER_S)
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def read_version(path: Path, *, answer_s: float = ANSWER_S) -> tuple[bytes | None, bytes]:
    """Returns an object and the version that a later write may replace; None for one that is not there.

    Raises:
      ValueError: the store refuses.
      TimeoutError: the store does not answer within `answer_s`.
    """
    bucket, key = _split(path)
    pending_read = _bucket(bucket, _addresses()).read(key)
    try:
        content = pending_read.result(timeout=answer_s)
    except TimeoutError:
        pending_read.cancel()
        raise TimeoutError(f"{bucket} did not send {key} within {answer_s:g} s") from None
    return (content.value if content.state == "value" else None), content.stamp.generation


def replace_version(path: Path, data: bytes, version: bytes, *, answer_s: float = ANSWER_S) -> bytes | None:
    """Writes one object if its version is still `version`; returns the new version, None if it was not.

    Of several processes that try, one succeeds: the store decides. S3 names a version by a hash of the
    content, so no two writes may have the same `data`.

    Raises:
      ValueError: the store refuses.
      TimeoutError: the store does not answer within `answer_s`: the object may have been written.
    """
    # TensorStore answers a write whose condition failed with an empty version, not with an error.
    return _put(path, data, if_equal=version, answer_s=answer_s) or None


def _put(path: Path, data: bytes, *, answer_s: float, if_equal: bytes | None = None) -> bytes:
    bucket, key = _split(path)
    pending_write = _bucket(bucket, _addresses()).write(key, data, if_equal=if_equal)
    try:
        return pending_write.result(timeout=answer_s).generation
    except TimeoutError:
        # Otherwise the write could finish later, when a retry or a deletion has gone past it.
        pending_write.cancel()
        raise TimeoutError(f"{bucket} did not take {key} within {answer_s:g} s") from None


def _split(path: Path) -> tuple[str, str]:
    """Returns the URL of a bucket and the key in it."""
    scheme, _, bucket_path = str(path).partition("://")
    bucket, _, key = bucket_path.partition("/")
    return f"{scheme}://{bucket}", key


def _addresses() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in _ADDRESSES)
