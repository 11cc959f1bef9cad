"""Every kind of alert arrives at a real server, from the numbers and phases that a run shows its
callbacks.
"""

import dataclasses
import io
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jtrain.checkpoint import Checkpoints
from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain.step.guard import GuardSpec, StepNumbers
from jtrain.telemetry.metrics_writer import Metrics
from jtrain.telemetry.step_timer import StepTimes
from jtrain.train.alert_watch import AlertWatch
from jtrain.train.bad_steps.bad_steps import BadSteps
from jtrain.train.callbacks import Callbacks, RunContext, StepResults
from jtrain.train.goodput_ledger import GoodputLedger
from tests.telemetry.test_metrics import LINE
from tests.webhook_server import Server, webhook_server

QUIET = {"disk_free_gib": 0.0, "goodput": 0.0, "straggler_score": 0.0, "hang_minutes": 1000.0}
"""Bounds that nothing reaches; each test sets one."""


def partly[T](kind: type[T], **fields: Any) -> T:
    """A value with only the fields that the test is about; using another one is an error."""
    value = object.__new__(kind)
    for name, field in fields.items():
        object.__setattr__(value, name, field)
    return value


class Watched:
    """A run of which the tests make up the steps."""

    def __init__(self, server: Server, metrics: Metrics, callbacks: Callbacks) -> None:
        self.server, self.metrics, self.callbacks = server, metrics, callbacks

    def step(self, step: int, loss: float = 3.0, *, applied: bool = True) -> None:
        values = {"loss_nats": loss, "applied": applied}
        self.callbacks.on_results(partly(StepResults, step=step, values=values))

    def alert(self) -> dict[str, Any]:
        """The next alert that arrives."""
        return self.server.next()


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """Starts the watching of a run with some bounds."""
    with webhook_server() as server:
        closing: list[Any] = []

        def start(**bounds: float) -> Watched:
            sets = [f"alerts.{name}={value}" for name, value in (QUIET | bounds).items()]
            config = load_config(
                "tiny", ["debug"], ["metrics.log_every_steps=1", *sets, f"alerts.webhook={server.url}"]
            )
            run = build_run(config)
            goodput = GoodputLedger(run, StepTimes())
            callbacks = Callbacks([goodput, AlertWatch(run, goodput)])
            callbacks.__enter__()
            metrics = Metrics(
                tmp_path, run.metrics, num_steps=5, start_step=0, stream=io.StringIO(), alerts=run.alerts
            )
            started_s = time.time() - 60.0
            context = partly(
                RunContext, workdir=tmp_path, start_step=0, started_s=started_s, metrics=metrics, run=run
            )
            running = callbacks.running(context)
            running.__enter__()
            closing.extend([callbacks, metrics])
            return Watched(server, metrics, callbacks)

        yield start
        for one in closing:
            one.__exit__(None, None, None)
        assert server.posted.empty()


@pytest.mark.parametrize(
    ("values", "bounds", "kind"),
    [((math.nan, 1.0), (math.inf, math.inf), "nan"), ((9.0, 1.0), (4.0, 2.0), "spike")],
)
def test_numbers_that_the_guard_finds_bad(
    watch: Callable[..., Watched],
    tmp_path: Path,
    values: tuple[float, float],
    bounds: tuple[float, float],
    kind: str,
) -> None:
    """A loss that is not finite, and one above the guard's bound; the step is not reported twice."""
    run = watch(repeat_minutes=0.0)
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("data",))
    say, alert = run.metrics.say, run.metrics.alert
    bad_steps = BadSteps(GuardSpec(), tmp_path, mesh, partly(Checkpoints), say, alert)
    by_device = np.asarray([[values[0], 0.0]], np.float32)
    numbers = StepNumbers(
        7, np.asarray(values, np.float32), np.asarray(bounds, np.float32), False, by_device, "00ff"
    )
    bad_steps.check(numbers, dispatched=8, last=False, documents=dict)
    run.step(7, loss=values[0], applied=False)
    got = run.alert()
    assert (got["kind"], got["step"], got["values"]["grad_norm"]) == (kind, 7, 1.0)
    assert got["message"].startswith("loss_nats bad at step 7: ")


def test_a_spike_is_far_above_the_spread_of_recent_losses(watch: Callable[..., Watched]) -> None:
    """Noise, a falling loss and a rise within the bound are none; the issue's 3.6 -> 6.0 is."""
    run = watch()
    for step in range(1, 101):
        run.step(step, loss=9.0 - 0.05 * step + 0.1 * (-1) ** step)
    run.step(101, loss=5.9)
    run.step(102, loss=20.0)
    alert = run.alert()
    assert (alert["kind"], alert["step"], alert["values"]["loss_nats"]) == ("spike", 102, 20.0)
    assert "the median of the last 101 steps is 6." in alert["message"]


def test_a_spike_over_a_flat_loss(watch: Callable[..., Watched]) -> None:
    """There the spread is almost 0, and 5 % is the least rise that counts."""
    run = watch()
    for step in range(1, 40):
        run.step(step, loss=3.6 + 0.0001 * (step % 3))
    run.step(40, loss=3.7)
    run.step(41, loss=6.0)
    assert run.alert()["step"] == 41


def test_a_disk_nearly_full(watch: Callable[..., Watched]) -> None:
    run = watch(disk_free_gib=1e9)
    run.step(1)
    alert = run.alert()
    assert (alert["kind"], alert["step"]) == ("disk", 1)
    assert 0 < alert["values"]["free_gib"] < alert["values"]["total_gib"]
    assert "GiB free of" in alert["message"]


def test_goodput_below_its_bound(watch: Callable[..., Watched]) -> None:
    """Of the last minutes, not of the whole run."""
    run = watch(goodput=0.9, goodput_minutes=1e-6)
    run.step(1)
    time.sleep(0.001)
    run.step(2)
    alert = run.alert()
    assert (alert["kind"], alert["step"], alert["values"]["goodput"]) == ("goodput", 2, 0.0)
    assert "only 0.0% of the last 0.0 minutes were training (alerts.goodput=0.9)" in alert["message"]


def test_a_straggler_of_three_lines(watch: Callable[..., Watched]) -> None:
    """One slow line is nothing; the worst host is named."""
    run = watch(straggler_score=0.7)
    scores = [
        {"host 0": 1.0, "host 1": 0.3},
        {"host 0": 1.0, "host 1": 0.9},
        *({"host 0": 1.0, "host 1": 0.4, "host 2": 0.6} for _ in range(3)),
    ]
    for step, score in enumerate(scores, 1):
        run.metrics.train(dataclasses.replace(LINE, step=step, straggler_score=score))
        run.step(step)
    alert = run.alert()
    assert (alert["kind"], alert["step"], alert["values"]) == ("straggler", 5, {"host 1": 0.4, "host 2": 0.6})
    assert alert["message"].startswith("host 1 has straggler_score 0.40")


def test_a_hang_names_its_phase(watch: Callable[..., Watched], tmp_path: Path) -> None:
    """Once per hang; the thread that watches needs no step."""
    run = watch(hang_minutes=0.01, repeat_minutes=0.0)
    with run.callbacks.during("step", 7), run.callbacks.during("device_wait", 7):
        alert = run.alert()
        time.sleep(0.9)  # longer than the limit of 0.6 s: the same hang would be told a second time here
        run.callbacks.__exit__(None, None, None)  # between the phases a hang of its own might begin
    assert (alert["kind"], alert["step"], alert["values"]["phase"]) == ("hang", 7, "device_wait")
    assert alert["message"].startswith("no progress for ")
    assert json.dumps(alert)
