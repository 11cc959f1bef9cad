"""Alerts of a run, to a file and to a webhook: bad numbers, slow hosts, disks that fill. No jax.

alerts = Alerts(AlertsSpec(webhook="https://hooks.example.com/..."), workdir)
alerts.send("nan", 1200, "loss_nats is nan", loss_nats=float("nan"))
alerts.close()
"""

import contextlib
import dataclasses
import datetime
import http.client
import json
import math
import queue
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from jtrain.errors import UserError
from jtrain.runtime.retry import Backoff, retried
from jtrain.runtime.secrets import HIDDEN
from jtrain.telemetry.append_file import AppendFile

type AlertKind = Literal["nan", "spike", "straggler", "hang", "disk", "goodput"]
"""Kind of alert; docs/verbs/launch.md says when each is sent."""

TIMEOUT_S = 10.0
"""Longest wait for the webhook's answer, and at the end of a run for alerts that are not delivered yet."""

# urllib refuses some addresses with a ValueError, http.client with an error of its own.
_POST_ERRORS = (OSError, http.client.HTTPException, ValueError)

# 1, 5 and 25 seconds, or up to a quarter less.
RETRIES = Backoff(1.0, factor=5.0, tries=4, jitter=0.25)
"""Pauses before an alert is posted again."""

QUEUE_LENGTH = 100
"""Alerts that wait for the webhook at most; more are dropped, and counted."""


@dataclasses.dataclass(frozen=True)
class AlertsSpec:
    """Config of alerts. Without `webhook` and `file` nothing is watched.

    webhook: http(s) address to which each alert is posted as JSON; shown as *** wherever the config is.
    file: file to which each alert is appended as a line of JSON; a relative path is inside the workdir.
    spike_sigmas: a loss is a spike if it is so many standard deviations (from the median absolute deviation)
      above the median of the last 128 steps, and 5 % above it.
    straggler_score: lowest score (1 = fastest) of a host or device that is no straggler; three lines in a row
      count.
    hang_minutes: longest time in one phase of a step, compilation included.
    disk_free_gib: least free space on the workdir's disk.
    goodput: lowest share of training in the wall time of `goodput_minutes`.
    goodput_minutes: wall time over which the share is taken.
    repeat_minutes: time after an alert in which others of its kind are only counted.
    """

    webhook: str | None = None
    file: str | None = None
    spike_sigmas: float = 6.0
    straggler_score: float = 0.7
    hang_minutes: float = 10.0
    disk_free_gib: float = 10.0
    goodput: float = 0.5
    goodput_minutes: float = 30.0
    repeat_minutes: float = 30.0

    def __post_init__(self) -> None:
        # `not > 0` instead of `<= 0`: nan must be refused as well.
        for name in ("spike_sigmas", "hang_minutes", "goodput_minutes"):
            if not (value := getattr(self, name)) > 0:
                raise UserError(
                    f"alerts.{name}={value} must be above 0; alerts are off without a webhook and a file."
                )
        for name in ("straggler_score", "goodput"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise UserError(f"alerts.{name}={value} must be from 0 (never an alert) to 1.")
        for name in ("disk_free_gib", "repeat_minutes"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise UserError(f"alerts.{name}={value} must be at least 0.")
        if self.file is not None and (not self.file or self.file.endswith("/")):
            raise UserError(f"alerts.file={self.file!r} must name a file, such as alerts.jsonl.")
        if self.webhook is not None and self.webhook != HIDDEN:
            _check_url(self.webhook)

    @property
    def is_active(self) -> bool:
        """True if anybody is told."""
        return self.webhook is not None or self.file is not None

    def in_workdir(self, workdir: Path | None) -> "AlertsSpec":
        """Returns the spec with an absolute `file`; without one if it is relative to an unknown workdir."""
        if self.file is None:
            return self
        absolute = Path(self.file) if workdir is None else workdir.absolute() / self.file
        return dataclasses.replace(self, file=str(absolute) if absolute.is_absolute() else None)


def _check_url(url: str) -> None:
    """Refuses an address that cannot be posted to; its text is secret, so no message quotes it."""
    try:
        parts = urllib.parse.urlsplit(url)
        is_usable = (
            # Reading hostname and port may raise too, so both are inside the try.
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and parts.username is None
        )
        reason = f"this one has scheme {parts.scheme!r} and host {parts.hostname!r}"
    except ValueError as error:
        is_usable, reason = False, f"this one has none: {error}"
    if not is_usable or any(character.isspace() or not character.isprintable() for character in url):
        raise UserError(
            "alerts.webhook must be an address such as https://hooks.example.com/path, without user and "
            f"spaces; {reason}."
        )


class Alerts:
    """Sends alerts of one attempt; neither delays nor ends a run. Threads may share it.

    A line of text is printed for each alert; the file and the webhook get an object with `kind`, `step`,
    `time`, `host`, `message`, `values` and `suppressed`: alerts of this kind since the last one that was
    sent. The webhook's has `text` too, which chat services show.

    Args:
      workdir: folder that a relative `alerts.file` is in.
      say: prints a line; None for stderr.

    Raises:
      UserError: `alerts.webhook` is the text that config.txt keeps in its place.
    """

    def __init__(
        self,
        spec: AlertsSpec,
        workdir: Path,
        *,
        say: Callable[[str], None] | None = None,
        backoff: Backoff = RETRIES,
    ) -> None:
        if spec.webhook == HIDDEN:
            raise UserError(
                f"alerts.webhook={HIDDEN} is what config.txt keeps of an address. Set the address itself."
            )
        self._spec = spec
        self._say = say or _print
        self._file = None if spec.file is None else AppendFile(workdir / spec.file, say=say)
        # Time of the last alert of each kind, on the monotonic clock.
        self._last_sent_s: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}
        self._lock = threading.Lock()
        self._post = None if spec.webhook is None else _Webhook(spec.webhook, self._say, backoff)

    def send(self, kind: AlertKind, step: int, message: str, **values: Any) -> None:
        """Sends an alert, unless one of its kind was sent in the last `repeat_minutes`. Returns at once."""
        if not self._spec.is_active:
            return
        with self._lock:
            now_s = time.monotonic()
            # Kinds are limited apart: a spike must not silence a hang.
            if now_s - self._last_sent_s.get(kind, -math.inf) < 60 * self._spec.repeat_minutes:
                self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
                return
            self._last_sent_s[kind] = now_s
            alert = {
                "kind": kind,
                "step": step,
                "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
                "host": socket.gethostname(),
                "message": message,
                "values": {name: _to_json(value) for name, value in values.items()},
                # Told with this alert, and counted anew from here on.
                "suppressed": self._suppressed.pop(kind, 0),
            }
        text = f"alert ({kind}) at step {step}: {message}"
        self._say(text)
        if self._file is not None:
            self._file.append((json.dumps(alert, allow_nan=False) + "\n").encode())
        if self._post is not None:
            self._post.put(
                # Chat services show `text`; other receivers read the fields.
                json.dumps({"text": f"{alert['host']}: {text}", **alert}, allow_nan=False).encode()
            )

    def close(self) -> None:
        """Waits at most `TIMEOUT_S` until the webhook has everything, says what is lost, closes the file."""
        if self._post is not None:
            self._post.close()
        if self._file is not None:
            self._file.close()


class _Webhook:
    """Thread that posts messages to an address, one after the other."""

    def __init__(self, url: str, say: Callable[[str], None], backoff: Backoff) -> None:
        self._url = url
        self._receiver = f"alerts.webhook at {urllib.parse.urlsplit(url).hostname}"  # its path is a secret
        self._say = say
        self._backoff = backoff
        self._messages: queue.Queue[bytes | None] = queue.Queue(QUEUE_LENGTH)
        self._closing = threading.Event()
        self._unsent = 0
        self._lock = threading.Lock()
        self._warned = False
        self._thread: threading.Thread | None = None

    def put(self, message: bytes) -> None:
        """Hands a message to the thread; never waits."""
        with self._lock:
            # Counted before the thread starts, so that `close` cannot miss a message under way.
            self._unsent += 1
            if self._thread is None:
                # A daemon: what cannot be delivered keeps no process alive.
                self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)
                self._thread.start()
        with contextlib.suppress(queue.Full):  # it stays counted as unsent
            self._messages.put_nowait(message)

    def close(self) -> None:
        """Ends the thread; says how many messages are lost."""
        if self._thread is None:
            return
        # Also ends the pause before a retry: a run does not wait for a server that is down.
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._messages.put_nowait(None)
        self._thread.join(TIMEOUT_S)
        if self._unsent:
            self._say(f"warning: {self._receiver} did not get {self._unsent} alerts")

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            if self._deliver(message):
                with self._lock:
                    self._unsent -= 1
                if self._warned:
                    self._warned = False
                    self._say(f"{self._receiver} can be reached again")
            # The queue may be full, so that None did not fit: then the end shows here.
            if self._closing.is_set() and self._messages.empty():
                return

    def _deliver(self, message: bytes) -> bool:
        headers = {"Content-Type": "application/json", "User-Agent": "jtrain"}

        def post() -> None:
            request = urllib.request.Request(self._url, message, headers, method="POST")
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                pass

        try:
            retried(
                post,
                self._backoff,
                passes=_is_temporary,
                tell=lambda error, *_: self._warn(error),
                # An event in place of sleep, so that `close` ends the pause.
                wait=self._closing.wait,
            )
        except _POST_ERRORS as error:
            self._warn(error)
            return False
        return True

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            cause = (
                f"HTTP {error.code}" if isinstance(error, urllib.error.HTTPError) else type(error).__name__
            )
            # The address is a secret: a reason that quotes it is left out.
            reason = getattr(error, "reason", None)
            cause += f": {reason}" if reason and self._url not in str(reason) else ""
            self._say(f"warning: {self._receiver} does not take alerts ({cause}): training goes on")


def _is_temporary(error: Exception) -> bool:
    """True for errors of a post that may be over later: no answer, or one that says so."""
    if isinstance(error, urllib.error.HTTPError):
        # 408: request timeout. 429: too many requests.
        return error.code >= 500 or error.code in (408, 429)
    return isinstance(error, _POST_ERRORS)


def _to_json(value: Any) -> Any:
    """Returns a value as JSON can hold it; nan and infinities, which it cannot, as text."""
    if isinstance(value, dict):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _print(text: str) -> None:
    print(text, flush=True)
