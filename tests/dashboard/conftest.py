"""Servers of the page in this process."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jtrain.dashboard.run_folder import open_runs
from jtrain.dashboard.server import DashboardServer

type Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves the page of some workdirs until the test ends; returns its address."""
    with contextlib.ExitStack() as stack:

        def start(*workdirs: Path) -> str:
            server = DashboardServer(open_runs([str(workdir) for workdir in workdirs]), "127.0.0.1", 0)
            thread = threading.Thread(target=server.serve)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.stop)
            return f"http://127.0.0.1:{server.port}/"

        yield start
