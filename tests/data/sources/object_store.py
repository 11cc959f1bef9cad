"""Object stores on the loopback interface: real servers for the real client libraries.

S3 is moto's server. Google's JSON API and the Hugging Face Hub's are spoken here, as far as reading needs
them.
"""

import contextlib
import dataclasses
import hashlib
import http.server
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest
from etils.epath import backend

BUCKET = "corpus"
REPOSITORY = "team/corpus"


@dataclasses.dataclass
class Request:
    """Request of a client: method, path, query, the byte range it wanted or sent, and what it sent."""

    method: str
    path: str
    query: dict[str, str]
    range: str | None
    token: str | None
    body: bytes = b""


Reply = tuple[int, dict[str, str], bytes]


@dataclasses.dataclass
class Store:
    """Store that serves `files` (name -> content).

    url: URL of the folder of the files.
    files: the files; may change while the server runs.
    requests: all requests received, in order.
    refuse: status that answers every request, if set.
    ranges: True if the server can send parts of a file.
    faults: faults of the next requests for contents: a status, `reset` (no answer), `cut` (half of it, then
      the connection ends) or `less` (half of a range, as if that was all).
    answering: while cleared, the server accepts connections and is silent.
    generations: writes of each file so far, which a write may name as its condition.
    """

    url: str
    files: dict[str, bytes]
    requests: list[Request] = dataclasses.field(default_factory=list)
    refuse: int | None = None
    ranges: bool = True
    faults: list[int | str] = dataclasses.field(default_factory=list)
    answering: threading.Event = dataclasses.field(default_factory=threading.Event)
    generations: dict[str, int] = dataclasses.field(default_factory=dict)
    writing: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.answering.set()

    def content(self, name: str, request: Request) -> Reply:
        """Responds with a file or a part of it."""
        if name not in self.files:
            return missing(name)
        content = self.files[name]
        etag = hashlib.md5(content).hexdigest()
        headers = {
            "ETag": f'"{etag}"',
            "Accept-Ranges": "bytes" if self.ranges else "none",
            "x-goog-generation": str(self.generations.get(name, 1)),
        }
        if request.range and self.ranges:
            first, _, last = request.range.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or len(content) - 1) + 1, len(content))
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
            return 206, headers, content[start:end]
        return 200, headers, content


def forget_clients(client: Any) -> None:
    """Has later paths of a store connect anew: fsspec keeps a client for each server, etils the first one."""
    client.clear_instance_cache()
    type(backend.fsspec_backend)._get_filesystem.cache_clear()


def missing(name: str) -> Reply:
    """Responds 404 as Google Cloud Storage and the Hub do."""
    body = {"error": {"code": 404, "message": f"No such object: {name}"}}
    return (
        404,
        {"Content-Type": "application/json", "X-Error-Code": "EntryNotFound"},
        json.dumps(body).encode(),
    )


def as_json(body: Any) -> Reply:
    """Responds with JSON."""
    return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()


@contextlib.contextmanager
def _serve(store: Store, answer: Callable[[Store, Request], Reply]) -> Iterator[str]:
    """Runs a server with a thread per connection and yields its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            token = self.headers.get("Authorization")
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            wanted = self.headers.get("Range") or self.headers.get("Content-Range")
            request = Request(self.command, unquote(parts.path), query, wanted, token, sent)
            store.requests.append(request)
            store.answering.wait()
            status, headers, body = (store.refuse, {}, b"{}") if store.refuse else answer(store, request)
            fault = store.faults.pop(0) if store.faults and self.command == "GET" else None
            if fault == "reset":
                self.close_connection = True
                return
            if isinstance(fault, int):
                status, headers, body = fault, {}, b"{}"
            body = body[: len(body) // 2] if fault == "less" else body
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[: len(body) // 2] if fault == "cut" else body)
            self.close_connection = self.close_connection or fault == "cut"

        do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # the client has disconnected

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def web_store() -> Iterator[Store]:
    """Plain web server, which lists no files."""
    store = Store("", {})
    with _serve(store, lambda store, request: store.content(request.path.lstrip("/"), request)) as address:
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

    def entry(store: Store, name: str) -> dict[str, Any]:
        content = store.files[name]
        etag = hashlib.md5(content).hexdigest()
        names = {"kind": "storage#object", "bucket": BUCKET, "name": name}
        return names | {
            "size": str(len(content)),
            "etag": etag,
            "generation": str(store.generations.get(name, 1)),
        }

    def current_generation(store: Store, request: Request) -> int:
        name = request.query.get("name", request.path.rpartition("/o/")[2])
        return store.generations.get(name, 1) if name in store.files else 0

    def write(store: Store, request: Request) -> Reply:
        with store.writing:  # a condition and its write are one step
            condition = request.query.get("ifGenerationMatch")
            if condition is not None and int(condition) != current_generation(store, request):
                return 412, {"Content-Type": "application/json"}, b"{}"
            return write_unconditionally(store, request)

    def write_unconditionally(store: Store, request: Request) -> Reply:
        objects = f"/storage/v1/b/{BUCKET}/o"
        if request.method == "DELETE":
            name = request.path.removeprefix(objects + "/")
            return missing(name) if store.files.pop(name, None) is None else (204, {}, b"")
        if request.path.startswith("/resumed/"):
            name = request.path.removeprefix("/resumed/")
            parts[name] = parts.get(name, b"") + request.body
            if request.range and request.range.endswith("/*"):
                return 308, {"Range": f"bytes=0-{len(parts[name]) - 1}"}, b""
            store.files[name] = parts.pop(name)
            return as_json(entry(store, name))
        if request.path == f"/upload{objects}":
            name, content = request.query.get("name", ""), request.body
            if request.query["uploadType"] == "resumable":
                name = json.loads(request.body)["name"]
                return 200, {"Location": f"{addresses[0]}/resumed/{quote(name)}"}, b""
            # As gcsfs writes it: two parts between lines of --==0==.
            if request.query["uploadType"] == "multipart":
                _, about, part = request.body.removesuffix(b"\n--==0==--").split(b"--==0==\n", 2)
                name = json.loads(about.partition(b"\n\n")[2])["name"]
                content = part.partition(b"\n\n")[2]
            store.files[name] = content
            store.generations[name] = store.generations.get(name, 1) + 1
            return as_json(entry(store, name))
        source, _, target = request.path.removeprefix(objects + "/").partition(f"/rewriteTo/b/{BUCKET}/o/")
        if source not in store.files or not target:
            return missing(request.path)
        store.files[target] = store.files[source]
        return as_json({"done": True, "resource": entry(store, target)})

    def answer(store: Store, request: Request) -> Reply:
        objects = f"/storage/v1/b/{BUCKET}/o"
        if request.method in ("POST", "PUT", "DELETE"):
            return write(store, request)
        path, query = request.path.removeprefix("/download"), request.query
        if path == objects:
            prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
            items, prefixes = [], set()
            for name in sorted(store.files):
                rest = name.removeprefix(prefix)
                if name.startswith(prefix) and delimiter and delimiter in rest:
                    prefixes.add(prefix + rest.partition(delimiter)[0] + delimiter)
                elif name.startswith(prefix):
                    items.append(entry(store, name))
            return as_json({"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)})
        name = path.removeprefix(objects + "/")
        if not path.startswith(objects) or name not in store.files:
            return missing(path)
        if query.get("alt") == "media" or request.path.startswith("/download"):
            return store.content(name, request)
        return as_json(entry(store, name))

    store = Store(f"gs://{BUCKET}", {})
    parts: dict[str, bytes] = {}
    addresses: list[str] = []
    with _serve(store, answer) as address:
        addresses.append(address)
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

    def answer(store: Store, request: Request) -> Reply:
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
    with _serve(store, answer) as address:
        # What HF_ENDPOINT sets, which is read at import.
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        huggingface_hub.HfFileSystem.clear_instance_cache()
        yield store
        huggingface_hub.HfFileSystem.clear_instance_cache()
