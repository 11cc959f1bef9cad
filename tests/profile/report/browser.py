"""Headless browser, driven over the DevTools protocol through two pipes, without a port or a library.

Chromium reads commands from file descriptor 3 and answers on 4, each message JSON and a zero byte
(`--remote-debugging-pipe`).
"""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
SILENCE_S = 300
WANTED = (
    "no headless browser: as root, `apt-get install chromium-headless-shell` (Debian), or put chromium "
    "on PATH"
)


def find() -> str:
    """Path of the browser. Without one a test fails under CI=true, and is skipped elsewhere with the
    reason.
    """
    for name in NAMES:
        if program := shutil.which(name):
            return program
    if os.environ.get("CI") == "true":
        pytest.fail(WANTED)
    pytest.skip(WANTED)


class Page:
    """One page, with its log and its network requests.

    problems: exceptions, failed assertions, and logged warnings and errors.
    requests: every address that it loaded, its own first.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._to, self._from = to_browser, from_browser
        self._rest = b""
        self._events: list[dict[str, Any]] = []
        self._ids = itertools.count(1)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session: str | None = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    _session = None

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command and returns its answer; records the events that arrive meanwhile."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def open(self, address: Path | str, *, width: int, height: int = 844, dark: bool = False) -> None:
        """Loads a file, or a URL, on a screen of `width` CSS pixels, and waits until it is complete."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self.call("Page.navigate", url=address if isinstance(address, str) else address.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._receive()

    def value(self, expression: str) -> Any:
        """Value of a JavaScript expression, by way of JSON."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """Writes the whole page as a JPEG of low quality."""
        picture = self.call("Page.captureScreenshot", format="jpeg", quality=40, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(picture["data"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            # The limit keeps a hanging browser from blocking CI.
            assert select.select([self._from], [], [], SILENCE_S)[0], (
                f"the browser said nothing for {SILENCE_S} s"
            )
            read = os.read(self._from, 1 << 20)
            assert read, "the browser has gone"
            self._rest += read
        text, self._rest = self._rest.split(b"\0", 1)
        message = json.loads(text)
        if "method" in message:
            self._note(message)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        method, params = event["method"], event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"].get("exception", params)))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])


@contextmanager
def page() -> Iterator[Page]:
    """Page in a new browser with a temporary profile, which ends with the block."""
    program = find()
    command_in, command_out = os.pipe()
    answer_in, answer_out = os.pipe()
    with tempfile.TemporaryDirectory(prefix="jtrain-browser-", ignore_cleanup_errors=True) as folder:
        # The shell gives the pipes the numbers that Chromium expects. Root cannot use its sandbox;
        # --disable-gpu saves the start of a GPU process.
        words = [
            program,
            "--headless",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
            "--no-sandbox",
        ]
        words += [
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
        ]
        started = subprocess.Popen(
            ["bash", "-c", f'exec 3<&{command_in} 4>&{answer_out}; exec "$@"', "browser", *words],
            pass_fds=(command_in, answer_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_in)
        os.close(answer_out)
        try:
            yield Page(command_out, answer_in)
        finally:
            os.close(command_out)  # end of input ends the browser
            os.close(answer_in)
            try:
                started.wait(timeout=20)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()
