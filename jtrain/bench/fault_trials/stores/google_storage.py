"""Google's JSON API of object stores, as far as gcsfs and TensorStore need it, on the loopback interface."""

import contextlib
import dataclasses
import hashlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

BUCKET = "corpus"


@dataclasses.dataclass
class StoreRequest:
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
    reaches: called before each answer; False ends the connection without one.
    generations: writes of each file so far, which a write may name as its condition.
    parts: what has come of uploads in several requests; address: where the server is.
    """

    url: str
    files: MutableMapping[str, bytes]
    requests: list[StoreRequest] = dataclasses.field(default_factory=list)
    refuse: int | None = None
    ranges: bool = True
    faults: list[int | str] = dataclasses.field(default_factory=list)
    reaches: Callable[[], bool] = lambda: True
    answering: threading.Event = dataclasses.field(default_factory=threading.Event)
    generations: dict[str, int] = dataclasses.field(default_factory=dict)
    parts: dict[str, bytes] = dataclasses.field(default_factory=dict)
    address: str = ""
    writing: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.answering.set()

    def content(self, name: str, request: StoreRequest) -> Reply:
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
def serve(store: Store, answer: Callable[[Store, StoreRequest], Reply]) -> Iterator[str]:
    """Runs a server with a thread per connection and yields its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            token = self.headers.get("Authorization")
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            byte_range = self.headers.get("Range") or self.headers.get("Content-Range")
            request = StoreRequest(self.command, unquote(parts.path), query, byte_range, token, sent)
            store.requests.append(request)
            # After the request is noted: a test sees what a client asked of a silent server.
            store.answering.wait()
            if not store.reaches():
                self.close_connection = True
                return
            status, headers, body = (store.refuse, {}, b"{}") if store.refuse else answer(store, request)
            fault = store.faults.pop(0) if store.faults and self.command == "GET" else None
            if fault == "reset":
                self.close_connection = True
                return
            if isinstance(fault, int):
                status, headers, body = fault, {}, b"{}"
            # Cut before the length is sent, so that the connection shows nothing wrong.
            body = body[: len(body) // 2] if fault == "less" else body
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                # Cut after the length was sent: the client misses the rest when the connection ends.
                self.wfile.write(body[: len(body) // 2] if fault == "cut" else body)
            self.close_connection = self.close_connection or fault == "cut"

        # `answer` tells the methods apart.
        do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # the client has disconnected

    server = Server(("127.0.0.1", 0), Handler)
    # Clients keep connections open, whose threads must not hold up the end of a test.
    server.daemon_threads = True
    # `shutdown` waits for the next poll, by default half a second.
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _entry(store: Store, name: str) -> dict[str, Any]:
    content = store.files[name]
    etag = hashlib.md5(content).hexdigest()
    names = {"kind": "storage#object", "bucket": BUCKET, "name": name}
    return names | {
        "size": str(len(content)),
        "etag": etag,
        "generation": str(store.generations.get(name, 1)),
    }


def _current_generation(store: Store, request: StoreRequest) -> int:
    name = request.query.get("name", request.path.rpartition("/o/")[2])
    # 0 is the condition of a client that wants to create an object.
    # 1: files that the store began with have no entry.
    return store.generations.get(name, 1) if name in store.files else 0


def _write(store: Store, request: StoreRequest) -> Reply:
    with store.writing:  # a condition and its write are one step
        condition = request.query.get("ifGenerationMatch")
        if condition is not None and int(condition) != _current_generation(store, request):
            return 412, {"Content-Type": "application/json"}, b"{}"
        return _write_unconditionally(store, request)


def _write_unconditionally(store: Store, request: StoreRequest) -> Reply:
    objects = f"/storage/v1/b/{BUCKET}/o"
    if request.method == "DELETE":
        name = request.path.removeprefix(objects + "/")
        return missing(name) if store.files.pop(name, None) is None else (204, {}, b"")
    if request.path.startswith("/resumed/"):
        name = request.path.removeprefix("/resumed/")
        store.parts[name] = store.parts.get(name, b"") + request.body
        if request.range and request.range.endswith("/*"):
            # The size is unknown (`*`) until the last request: 308 asks for the next part.
            return 308, {"Range": f"bytes=0-{len(store.parts[name]) - 1}"}, b""
        store.files[name] = store.parts.pop(name)
        return as_json(_entry(store, name))
    if request.path == f"/upload{objects}":
        name, content = request.query.get("name", ""), request.body
        if request.query["uploadType"] == "resumable":
            name = json.loads(request.body)["name"]
            return 200, {"Location": f"{store.address}/resumed/{quote(name)}"}, b""
        # As gcsfs writes it: two parts between lines of --==0==.
        if request.query["uploadType"] == "multipart":
            _, about, part = request.body.removesuffix(b"\n--==0==--").split(b"--==0==\n", 2)
            name = json.loads(about.partition(b"\n\n")[2])["name"]
            content = part.partition(b"\n\n")[2]
        store.files[name] = content
        store.generations[name] = store.generations.get(name, 1) + 1
        return as_json(_entry(store, name))
    source, _, target = request.path.removeprefix(objects + "/").partition(f"/rewriteTo/b/{BUCKET}/o/")
    if source not in store.files or not target:
        return missing(request.path)
    store.files[target] = store.files[source]
    return as_json({"done": True, "resource": _entry(store, target)})


def answer_google(store: Store, request: StoreRequest) -> Reply:
    """Responds as Google's JSON API."""
    objects = f"/storage/v1/b/{BUCKET}/o"
    if request.method in ("POST", "PUT", "DELETE"):
        return _write(store, request)
    path, query = request.path.removeprefix("/download"), request.query
    if path == objects:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        items, prefixes = [], set()
        for name in sorted(store.files):
            name_below = name.removeprefix(prefix)
            if name.startswith(prefix) and delimiter and delimiter in name_below:
                # Names below a folder are listed as the folder.
                prefixes.add(prefix + name_below.partition(delimiter)[0] + delimiter)
            elif name.startswith(prefix):
                items.append(_entry(store, name))
        return as_json({"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)})
    name = path.removeprefix(objects + "/")
    if not path.startswith(objects) or name not in store.files:
        return missing(path)
    if query.get("alt") == "media" or request.path.startswith("/download"):
        return store.content(name, request)
    return as_json(_entry(store, name))
