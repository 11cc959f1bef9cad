"""Alerts arrive at a real server and in a file, and never delay or end a run."""

import io
import json
import math
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jtrain.errors import UserError
from jtrain.runtime.retry import Backoff
from jtrain.runtime.secrets import HIDDEN
from jtrain.telemetry import alerts as module
from jtrain.telemetry.alerts import Alerts, AlertsSpec
from jtrain.telemetry.metrics import MetricsSpec
from jtrain.telemetry.metrics_writer import Metrics
from tests.webhook_server import Server, webhook_server


@pytest.fixture
def server() -> Iterator[Server]:
    with webhook_server() as running:
        yield running


def test_an_alert_is_one_object_in_the_file_and_at_the_webhook(tmp_path: Path, server: Server) -> None:
    """With step, host, time and values; nan becomes text, because JSON has none."""
    said: list[str] = []
    alerts = Alerts(AlertsSpec(webhook=server.url, file="alerts.jsonl"), tmp_path, say=said.append)
    alerts.send("nan", 7, "loss_nats is nan", loss_nats=math.nan, names=("loss_nats",))
    got = server.next()
    alerts.close()
    (line,) = (tmp_path / "alerts.jsonl").read_text().splitlines()
    alert = json.loads(line)
    assert got == {"text": f"{socket.gethostname()}: alert (nan) at step 7: loss_nats is nan", **alert}
    assert alert.pop("time").startswith("20")
    assert alert == {
        "kind": "nan",
        "step": 7,
        "host": socket.gethostname(),
        "message": "loss_nats is nan",
        "values": {"loss_nats": "nan", "names": ["loss_nats"]},
        "suppressed": 0,
    }
    assert said == ["alert (nan) at step 7: loss_nats is nan"]


def test_alerts_of_one_kind_are_counted_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand bad steps are one message now, and one after `repeat_minutes` with their number."""
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    alerts = Alerts(AlertsSpec(file=str(tmp_path / "a" / "alerts")), tmp_path / "run", say=lambda _: None)
    for step in range(1000):
        alerts.send("spike", step, "up")
    alerts.send("disk", 1000, "full")
    now_s = 30 * 60.0
    alerts.send("spike", 1001, "up")
    alerts.close()
    lines = [json.loads(line) for line in (tmp_path / "a" / "alerts").read_text().splitlines()]
    assert [(line["kind"], line["step"], line["suppressed"]) for line in lines] == [
        ("spike", 0, 0),
        ("disk", 1000, 0),
        ("spike", 1001, 999),
    ]


def test_answers_that_may_pass_are_tried_again_and_others_not(tmp_path: Path, server: Server) -> None:
    """503 and 429 are repeated; 404 is final, said once without the address, whose path is a secret."""
    said: list[str] = []
    server.codes += [503, 429]
    spec = AlertsSpec(webhook=server.url, repeat_minutes=0.0)
    alerts = Alerts(spec, tmp_path, say=said.append, backoff=Backoff(0.0, tries=3))
    alerts.send("hang", 1, "a")
    assert [server.next()["step"] for _ in range(3)] == [1, 1, 1]
    alerts.close()
    assert said == [
        "alert (hang) at step 1: a",
        "warning: alerts.webhook at 127.0.0.1 does not take alerts (HTTP 503: Service Unavailable): training "
        "goes on",
        "alerts.webhook at 127.0.0.1 can be reached again",
    ]
    said.clear()
    server.codes += [404, 404]
    alerts = Alerts(spec, tmp_path, say=said.append, backoff=Backoff(0.0, tries=3))
    alerts.send("hang", 2, "b")
    alerts.send("hang", 3, "c")
    assert [server.next()["step"] for _ in range(2)] == [2, 3]
    alerts.close()
    assert server.posted.empty()
    assert said[-1] == "warning: alerts.webhook at 127.0.0.1 did not get 2 alerts"
    assert len([line for line in said if line.startswith("warning")]) == 2
    assert "5ec7e7" not in "".join(said)


def test_a_webhook_that_does_not_answer_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that accepts and is silent, and one that is not there: sends return, close ends in bounded
    time.
    """
    monkeypatch.setattr(module, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as closed:
        gone = closed.getsockname()[1]
        closed.close()
        for port in (silent.getsockname()[1], gone):
            said: list[str] = []
            spec = AlertsSpec(webhook=f"http://127.0.0.1:{port}/x", repeat_minutes=0.0)
            alerts = Alerts(spec, tmp_path, say=said.append)
            for step in range(module.QUEUE_LENGTH + 50):
                alerts.send("nan", step, "bad")
            alerts.close()
            lost = [line for line in said if line.startswith("warning")]
            assert (
                lost[-1]
                == f"warning: alerts.webhook at 127.0.0.1 did not get {module.QUEUE_LENGTH + 50} alerts"
            )
            assert len(lost) <= 2


def test_without_anybody_to_tell_nothing_is_said(tmp_path: Path) -> None:
    stream = io.StringIO()
    with Metrics(
        tmp_path,
        MetricsSpec(tensorboard=False),
        num_steps=3,
        start_step=0,
        stream=stream,
        alerts=AlertsSpec(),
    ) as metrics:
        metrics.alert("nan", 1, "bad")
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"webhook": "hooks.example.com/x"}, "alerts.webhook must be an address such as .*scheme '' and host None"),
        ({"webhook": "ftp://h/x"}, "scheme 'ftp' and host 'h'"),
        ({"webhook": "https://"}, "scheme 'https' and host None"),
        ({"webhook": "https://h:99999/5ec7e7"}, "this one has none: Port out of range"),
        ({"webhook": "https://u:5ec7e7@h/"}, "without user and spaces"),
        ({"webhook": "https://h/5e c7e7"}, "without user and spaces"),
        ({"file": ""}, "alerts.file='' must name a file"),
        ({"file": "logs/"}, "alerts.file='logs/' must name a file"),
        ({"spike_sigmas": 0.0}, r"alerts.spike_sigmas=0.0 must be above 0"),
        ({"hang_minutes": math.nan}, r"alerts.hang_minutes=nan must be above 0"),
        ({"goodput": 1.5}, r"alerts.goodput=1.5 must be from 0 \(never an alert\) to 1"),
        ({"disk_free_gib": -1.0}, r"alerts.disk_free_gib=-1.0 must be at least 0"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        AlertsSpec(**fields)
    assert "5ec7e7" not in str(caught.value)


def test_the_text_that_hides_an_address_is_no_address(tmp_path: Path) -> None:
    """A config read back from a workdir builds, but cannot send."""
    with pytest.raises(
        UserError, match=r"alerts\.webhook=\*\*\* is what config\.txt keeps .* Set the address itself"
    ):
        Alerts(AlertsSpec(webhook=HIDDEN), tmp_path)
