"""Object stores on the loopback interface: real servers for the real client libraries.

S3 is moto's server. Google's JSON API and the Hugging Face Hub's are spoken here, as far as reading needs
them.
"""

import contextlib
import hashlib
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from etils.epath import backend

from jtrain.bench.fault_trials.stores.google_storage import (
    BUCKET,
    Reply,
    Store,
    StoreRequest,
    answer_google,
    as_json,
    missing,
    serve,
)

REPOSITORY = "team/corpus"


def forget_clients(client: Any) -> None:
    """Has later paths of a store connect anew: fsspec keeps a client for each server, etils the first one."""
    client.clear_instance_cache()
    type(backend.fsspec_backend)._get_filesystem.cache_clear()


@contextlib.contextmanager
def web_store() -> Iterator[Store]:
    """Plain web server, which lists no files."""
    store = Store("", {})
    with serve(store, lambda store, request: store.content(request.path.lstrip("/"), request)) as address:
        store.url = address
        yield store


@contextlib.contextmanager
def s3_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """S3 by moto, found through the environment variables that every AWS client reads."""
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    class Bucket(dict[str, bytes]):
        def __setitem__(self, name: str, content: bytes) -> None:
            super().__setitem__(name, content)
            client.put_object(Bucket=BUCKET, Key=name, Body=content)

        def __delitem__(self, name: str) -> None:
            super().__delitem__(name)
            client.delete_object(Bucket=BUCKET, Key=name)

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        reset = urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
        urllib.request.urlopen(reset).close()  # the state of moto belongs to the process, not to the server
        for key, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            monkeypatch.setenv(key, value)
        forget_clients(s3fs.S3FileSystem)
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        yield Store(f"s3://{BUCKET}", Bucket())
        client.close()
    finally:
        forget_clients(s3fs.S3FileSystem)
        server.stop()


@contextlib.contextmanager
def gs_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """JSON API of Google Cloud Storage, as far as gcsfs and TensorStore need it."""
    # Read at import: asks the service by gRPC what kind of bucket it is, which no emulator answers.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import gcsfs

    store = Store(f"gs://{BUCKET}", {})
    with serve(store, answer_google) as address:
        store.address = address
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "test")
        forget_clients(gcsfs.GCSFileSystem)
        yield store
        forget_clients(gcsfs.GCSFileSystem)


@contextlib.contextmanager
def hf_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """API of the Hugging Face Hub with one dataset repository."""
    import huggingface_hub
    from huggingface_hub import constants

    def answer(store: Store, request: StoreRequest) -> Reply:
        api, tree = f"/api/datasets/{REPOSITORY}", f"/api/datasets/{REPOSITORY}/tree/main"
        resolve = f"/datasets/{REPOSITORY}/resolve/main/"
        if request.path in (api, f"{api}/revision/main"):
            return as_json({"id": REPOSITORY, "sha": "0" * 40, "private": False, "tags": [], "siblings": []})
        if request.path == tree or request.path.startswith(tree + "/"):
            prefix = request.path.removeprefix(tree).lstrip("/")
            prefix = f"{prefix}/" if prefix else ""
            entries: dict[str, dict[str, Any]] = {}
            for name, content in sorted(store.files.items()):
                if not name.startswith(prefix):
                    continue
                folders = name.removeprefix(prefix).split("/")[:-1]
                for depth in range(1, len(folders) + 1):
                    folder = prefix + "/".join(folders[:depth])
                    entries[folder] = {"type": "directory", "oid": "1" * 40, "path": folder, "size": 0}
                oid = hashlib.sha1(content).hexdigest()
                entries[name] = {"type": "file", "oid": oid, "path": name, "size": len(content)}
            if request.query.get("recursive", "").lower() != "true":
                entries = {name: e for name, e in entries.items() if "/" not in name.removeprefix(prefix)}
            return as_json(list(entries.values())) if entries else missing(prefix)
        if request.path.startswith(resolve):
            return store.content(request.path.removeprefix(resolve), request)
        return missing(request.path)

    store = Store(f"hf://datasets/{REPOSITORY}", {})
    with serve(store, answer) as address:
        # What HF_ENDPOINT sets, which is read at import.
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        huggingface_hub.HfFileSystem.clear_instance_cache()
        yield store
        huggingface_hub.HfFileSystem.clear_instance_cache()
