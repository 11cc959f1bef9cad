"""Objects in stores, through TensorStore: its drivers send many requests at once, repeat those that fail, and
write on the condition that nobody else has written.
"""

import functools
import hashlib
import os
from pathlib import Path
from typing import Any

ANSWER_S = 300.0
"""How long a store may take for one object, repetitions included, which is at most some tens of MiB:
TensorStore itself would wait for ever for a server that accepts a connection and then is silent."""

_ADDRESSES = ("TENSORSTORE_GCS_HTTP_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""Environment variables that name the server of a store."""


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
        found = pending_read.result(timeout=answer_s)
    except TimeoutError:
        pending_read.cancel()
        raise TimeoutError(f"{bucket} did not send {key} within {answer_s:g} s") from None
    return (found.value if found.state == "value" else None), found.stamp.generation


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
