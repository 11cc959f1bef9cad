"""`jtrain dashboard`: its address, its end, and what it refuses."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from jtrain.cli import dashboard
from tests.dashboard.conftest import Serve
from tests.dashboard.made_up import make_run
from tests.dashboard.test_run_folder import append


@contextlib.contextmanager
def started(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and what it printed up to its address."""
    command = [sys.executable, "-m", "jtrain.dashboard", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        lines = ""
        while "http://" not in lines and (line := process.stdout.readline()):
            lines += line
        yield process, lines
    finally:
        process.kill()
        process.communicate()


def test_it_serves_until_a_signal(tmp_path: Path) -> None:
    """SIGINT and SIGTERM: exit code 0, and the next command; another host than loopback is said."""
    one, two = (str(make_run(tmp_path / name, 3)) for name in ("one", "two"))
    with (
        started("--port", "0", one, two) as (first, first_lines),
        started(one, "--host", "0.0.0.0", "--port=0") as (second, second_lines),
    ):
        address = first_lines.split()[0]
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(f"{address}data") as answer:
            data = json.loads(answer.read())
        assert [line["name"] for line in data["charts"]["loss_nats"]] == ["one", "two"]
        assert "warning: whoever reaches 0.0.0.0 can read these runs" in second_lines
        for process, number in ((first, signal.SIGINT), (second, signal.SIGTERM)):
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
            assert (process.returncode, errors) == (0, f"next: jtrain profile --workdir {one}\n")


# cheroot leaves the socket that it could not bind to the garbage collector.
@pytest.mark.filterwarnings("ignore:(?s).*unclosed <socket:pytest.PytestUnraisableExceptionWarning")
def test_what_it_cannot_serve_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No run, a folder without one, a port in use, a port that is none, a host of another machine."""
    workdir = str(make_run(tmp_path / "run", 1))

    def refusal(*words: str) -> str:
        assert dashboard.main(words) == 2
        return capsys.readouterr().err

    message = refusal()
    assert message.startswith(
        "error: no run is given. Give its folder, or those of several: `jtrain dashboard runs/"
    )
    assert refusal("--port", "0") == message
    assert "holds no run" in refusal(str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = refusal(workdir, "--port", port)
        assert f"--host 127.0.0.1 --port {port}: nothing can listen there (" in message
        assert "Use --port 0 for any free port" in message
        # The way out, while the port is still taken.
        with started(workdir, "--port", "0") as (_, lines):
            assert lines.startswith("http://127.0.0.1:")
    assert "leave --host out for this machine alone" in refusal(workdir, "--host", "192.0.2.1")
    assert "--port 70000 must be a port from 1 to 65535, or 0" in refusal(workdir, "--port", "70000")
    assert "Did you mean --port, --host?" in refusal(workdir, "--prot", "1")


def test_the_server_answers_what_the_page_asks(tmp_path: Path, serve: Serve) -> None:
    """Nothing new is an empty answer; other questions do no harm."""
    workdir = make_run(tmp_path / "run", 5)
    address = serve(workdir)

    def get(path: str) -> bytes:
        with urllib.request.urlopen(address + path) as answer:
            return answer.read()

    assert b"<canvas" in get("")
    first = json.loads(get("data?buckets=300"))
    while first.get("has_more"):
        first = json.loads(get("data"))
    assert get(f"data?version={first['version']}") == b"{}"
    append(workdir / "data.log", "step 5: hello\n")
    assert "hello" in json.loads(get(f"data?version={first['version']}"))["blocks"]["events"]
    for query in ("first=nan&last=x", "first=9&last=2", "buckets=99999999999", "version=", "=&&"):
        assert json.loads(get(f"data?{query}"))["steps"] == [0.0, 5.0]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get("../../etc/passwd")
