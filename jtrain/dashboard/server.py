"""Server of the live page: `/`, `/data` for its charts, `/metrics` for Prometheus.

cheroot, CherryPy's server, because it is small (0.4 MB, BSD, with two pure Python packages beside it) and has
threads, which suit files: reading metrics.jsonl blocks. The standard library's server is not meant for use.
"""

import json
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cheroot.wsgi import Server
from prometheus_client import CONTENT_TYPE_LATEST

from jtrain.dashboard import panels, prometheus
from jtrain.dashboard.run_folder import RunFolder
from jtrain.errors import UserError
from jtrain.report.page import html

MOST_BUCKETS = 4000
"""Buckets that a page may ask for: the pixels of a large screen."""


class DashboardServer:
    """Serves the page of some runs until it is stopped.

    Args:
      port: 0 for any free one.

    Raises:
      UserError: the port is in use, or the host is not this machine's.
    """

    def __init__(self, runs: Sequence[RunFolder], host: str, port: int) -> None:
        self._runs = runs
        # One reading at a time: the runs are read into lists that every request uses.
        self._lock = threading.Lock()
        self._page = html(panels.page_of(runs)).encode()
        self._server = Server((host, port), self._answer, numthreads=4)
        try:
            self._server.prepare()
        except OSError as error:
            raise UserError(
                f"--host {host} --port {port}: nothing can listen there ({error}). Use --port 0 for any free "
                "port, or leave --host out for this machine alone."
            ) from error

    @property
    def port(self) -> int:
        """Port at which it listens."""
        return self._server.bind_addr[1]

    def serve(self) -> None:
        """Answers requests until `stop` is called from another thread."""
        self._server.serve()

    def stop(self) -> None:
        """Ends `serve`."""
        self._server.stop()

    def read_all(self) -> None:
        """Reads all that the files of the runs have."""
        while self._read():
            time.sleep(0.001)  # requests meanwhile show what is read so far

    def _read(self) -> bool:
        with self._lock:
            return sum(run.refresh() for run in self._runs) > 0  # of every run, not up to the first

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        # What is no number is not of the page.
        query = {
            name: float(text)
            for name, text in urllib.parse.parse_qsl(environ["QUERY_STRING"])
            if re.fullmatch(r"\d{1,15}(\.\d*)?", text)
        }
        status, kind, body = "200 OK", "text/html; charset=utf-8", self._page
        match environ["PATH_INFO"]:
            case "/":
                pass
            case "/data":
                kind, body = "application/json", self._data(query)
            case "/metrics":
                self.read_all()
                with self._lock:
                    kind, body = CONTENT_TYPE_LATEST, prometheus.exposition(self._runs)
            case _:
                status, kind, body = "404 Not Found", "text/plain", b"there are /, /data and /metrics\n"
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
        start(status, list(headers.items()))
        return [body]

    def _data(self, query: dict[str, float]) -> bytes:
        has_more = self._read()
        first, last = query.get("first", 0.0), query.get("last", 0.0)
        buckets = int(min(max(query.get("buckets", 600.0), 10.0), MOST_BUCKETS))
        with self._lock:
            if query.get("version") == sum(run.version for run in self._runs):
                return b"{}"
            data = panels.data_of(self._runs, (first, last) if first < last else None, buckets)
        return json.dumps(data | {"has_more": has_more}, allow_nan=False).encode()
