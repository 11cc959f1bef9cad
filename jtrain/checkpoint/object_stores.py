"""Arrays in object stores, through TensorStore: its drivers send many requests at once, and repeat those that
fail.
"""

import functools
import hashlib
import os
from pathlib import Path
from typing import Any

from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

_SCHEMES = ("gs://", "s3://")
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
def teach_orbax() -> None:
    """Lets Orbax read arrays behind s3:// as well: of all stores, it hands only gs:// to TensorStore."""

    def is_url(directory: str) -> bool:
        return directory.startswith(_SCHEMES)

    def normalize(path: str) -> str:
        text = os.path.normpath(path)
        return text.replace(":/", "://", 1) if path.startswith(_SCHEMES) else text

    # Orbax has no setting for other schemes: three of its functions are replaced.
    gcs_utils.get_kvstore_for_gcs = spec
    tensorstore_utils._use_gcs_driver = is_url
    tensorstore_utils._normalize_path = normalize


@functools.cache
# The addresses are a key of the cache alone: a test or a user may point the variables elsewhere in between.
def _bucket(url: str, _addresses: tuple[str | None, ...]) -> Any:
    """Returns TensorStore's access to a bucket; one for all writes, since each makes its own client of the
    store.
    """
    import tensorstore as ts

    return ts.KvStore.open(spec(url)).result()


def write(path: Path, data: memoryview) -> str:
    """Writes one object and returns its hash; it is there as a whole when this returns, or not at all.

    Raises:
      ValueError: the store refuses.
      TimeoutError: the store does not take the object within `ANSWER_S`.
    """
    scheme, _, bucket_path = str(path).partition("://")
    bucket, _, key = bucket_path.partition("/")
    addresses = tuple(os.environ.get(name) for name in _ADDRESSES)
    # TensorStore keeps the bytes until they are sent, but the memory of `data` is reused when this returns.
    pending_write = _bucket(f"{scheme}://{bucket}/", addresses).write(key, bytes(data))
    try:
        pending_write.result(timeout=ANSWER_S)
    except TimeoutError:
        # Otherwise the write could finish later, when a retry or a deletion has gone past it.
        pending_write.cancel()
        raise TimeoutError(f"{scheme}://{bucket} did not take {key} within {ANSWER_S:g} s") from None
    return hashlib.blake2b(data, digest_size=16).hexdigest()
