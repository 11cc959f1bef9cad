"""Workdirs with files of the forms that runs write, of any length, and with known numbers in them."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from tests.telemetry.test_metrics import LINE

CONFIG = (
    "num_steps: int = {steps}\nalerts.file: str | None = 'alerts.jsonl'\ndata.mixture_unit: str = 'tokens'\n"
)


def noise(step: int) -> float:
    """A number from 0 to 1 that looks drawn at random, and is the same in every call."""
    return step * 2_654_435_761 % 1_000_003 / 1_000_003


def loss_of(step: int) -> float:
    """A loss that falls, with noise."""
    return 2.0 + 6.0 / step**0.3 + 0.05 * noise(step)


def train_lines(steps: Iterable[int], **fields: object) -> str:
    """Lines of train steps: three quarters of the tokens are of `web`, and a half from the middle on is planned."""
    lines = []
    for step in steps:
        values = dataclasses.asdict(dataclasses.replace(LINE, step=step, loss_nats=loss_of(step)))
        values |= {"step_time_ms": 300.0 + step % 7 + noise(step + 1), "clock_mhz": 1980.0}
        values |= {"data_tokens": {"web": 3072, "code": 1024}, "data_planned": {"web": 0.5, "code": 0.5}}
        lines.append(json.dumps(values | fields) + "\n")
    return "".join(lines)


def wall_lines(steps: Iterable[int], *, start_s: float = 1.7e9, before_s: float = 10.0) -> str:
    """Lines of goodput.jsonl of one attempt: start-up, then 3 of 4 seconds of computing and one of waiting."""
    steps = list(steps)
    lines = [{"event": "start", "time_s": start_s, "step": steps[0] - 1}]
    for number, step in enumerate(steps, 1):
        seconds = {"compute": 3.0, "data_wait": 1.0} | ({"startup": before_s} if number == 1 else {})
        time_s = start_s + before_s + 4.0 * number
        lines.append({"event": "interval", "time_s": time_s, "step": step, "seconds": seconds})
    return "".join(json.dumps(line) + "\n" for line in lines)


def make_run(workdir: Path, num_steps: int, *, first: int = 1) -> Path:
    """A run of which each step is logged."""
    workdir.mkdir(parents=True)
    steps = range(first, num_steps + 1)
    (workdir / "config.txt").write_text(CONFIG.format(steps=num_steps))
    (workdir / "metrics.jsonl").write_text(train_lines(steps))
    (workdir / "goodput.jsonl").write_text(wall_lines(steps))
    return workdir
