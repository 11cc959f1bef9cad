"""A real HTTP server that takes alerts, for tests."""

import contextlib
import http.server
import json
import queue
import threading
from collections.abc import Iterator
from typing import Any


class Server:
    """HTTP server on loopback that keeps what is posted; `codes` are its next answers, then 200."""

    def __init__(self, url: str, posted: "queue.Queue[dict[str, Any]]", codes: list[int]) -> None:
        self.url, self.posted, self.codes = url, posted, codes

    def next(self) -> dict[str, Any]:
        return self.posted.get(timeout=300)


@contextlib.contextmanager
def webhook_server() -> Iterator[Server]:
    """Runs a server; it checks path and content type of what it gets."""
    posted: queue.Queue[dict[str, Any]] = queue.Queue()
    codes: list[int] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert (self.path, self.headers["Content-Type"]) == ("/hook/5ec7e7", "application/json")
            posted.put(json.loads(body))  # before the answer: the client's next post has a thread of its own
            self.send_response(codes.pop(0) if codes else 200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield Server(f"http://127.0.0.1:{running.server_address[1]}/hook/5ec7e7", posted, codes)
        running.shutdown()
        thread.join()
