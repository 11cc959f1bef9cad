"""Metrics of a run: their definitions, and the lines of metrics.jsonl; `metrics_writer` writes them."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Literal

from jtrain.errors import UserError
from jtrain.telemetry.append_file import keep_lines, parsed

FILE = "metrics.jsonl"
EVENTS = "tensorboard"
NOTES = "data.log"

type Reduced = Literal[
    "this step", "mean since the last line", "last 1000 steps", "highest so far", "so far", "held-out batches"
]


@dataclasses.dataclass(frozen=True)
class Metric:
    """Definition of a metric.

    reduced: steps or batches over which its value is taken; always over all devices and processes.
    """

    name: str
    unit: str
    reduced: Reduced
    meaning: str


TRAIN_METRICS = (
    Metric("step", "steps", "this step", "completed updates"),
    Metric("loss_nats", "nats/token", "this step", "cross entropy over the batch's valid targets, without z-loss"),
    Metric("grad_norm", "", "this step", "global norm of the gradient before clipping"),
    Metric("learning_rate", "", "this step", "learning rate of this update"),
    Metric("skipped_updates", "updates", "so far", "updates not applied because of bad numbers, over all attempts"),
    Metric("tokens", "tokens", "this step", "valid targets in the global batch"),
    Metric("tokens_per_s", "tokens/s", "mean since the last line", "valid targets per second of wall time"),
    Metric("step_time_ms", "ms", "mean since the last line", "wall time per step, everything included"),
    Metric("data_wait_ms", "ms", "mean since the last line", "part of step_time_ms spent waiting for the next batch"),
    Metric("batch_hash", "hex", "this step", "hash of this step's global batch, computed on the devices' copy"),
    Metric("mfu", "", "mean since the last line", "model FLOP/s over the devices' peak; null if the peak is unknown"),
    Metric(
        "device_memory_peak_gib",
        "GiB",
        "highest so far",
        "peak memory of process 0's fullest device; null if the device does not report it",
    ),
    Metric("data_fill", "", "this step", "share of the batch's positions that hold a token"),
    Metric("data_cost_spread", "", "this step", "largest over mean work of a data rank: 1 is perfect balance"),
    Metric("data_drift", "", "this step", "largest deviation of a source's share so far from the mixture schedule"),
    Metric("data_skipped", "documents", "this step", "bad documents left out so far, over all attempts"),
    Metric("data_retries", "reads", "this step", "reads repeated so far by process 0's Source Loaders"),
    Metric("data_tokens", "tokens", "this step", "tokens by source; sources without tokens are left out"),
    Metric("data_queue", "runs", "this step", "runs requested from each Source Loader of process 0 and not yet read"),
    Metric("data_memory_mib", "MiB", "this step", "resident memory of process 0's Source Loaders, with shared pages"),
    Metric("step_time_p50_ms", "ms", "last 1000 steps", "median step time, without evaluations and saves"),
    Metric("step_time_p90_ms", "ms", "last 1000 steps", "90th percentile of step times"),
    Metric("step_time_p99_ms", "ms", "last 1000 steps", "99th percentile of step times"),
    Metric(
        "straggler_score",
        "",
        "mean since the last line",
        "per host and device, 1 = fastest, lower = straggler; hosts: share of the step time that would remain if the "
        "host were as fast as the fastest; devices: clock over the highest clock, if clocks are known",
    ),
    Metric("clock_mhz", "MHz", "mean since the last line", "clock of the cores, mean over devices; null if unknown"),
    Metric("power_w", "W", "mean since the last line", "power of a device, mean over devices; null if unknown"),
    Metric("joules_per_token", "J/token", "mean since the last line", "energy per token, all devices; null if unknown"),
    Metric("host_rss_mib", "MiB", "this step", "resident memory of process 0, with shared pages; null without /proc"),
    Metric("compile_count", "programs", "so far", "train steps compiled by this attempt; 1 unless an argument changed"),
)
"""Fields of the line of a train step, in this order."""

EVAL_METRICS = (
    Metric("step", "steps", "this step", "completed updates"),
    Metric("eval_loss_nats", "nats/token", "held-out batches", "cross entropy over all their valid targets"),
    Metric(
        "eval_loss_standard_error", "nats/token", "held-out batches", "of the loss, over documents; null if only one"
    ),
    Metric("eval_bits_per_byte", "bits/byte", "held-out batches", "all nats over the targets' UTF-8; null if unknown"),
    Metric("eval_tokens", "tokens", "held-out batches", "valid targets"),
    Metric("eval_documents", "documents", "held-out batches", "documents of these targets"),
    Metric("eval_sets", "", "held-out batches", "eval.sets by name: the same five, without their prefix"),
)
"""Fields of the line of an evaluation; those of the split are null if data.eval_fraction=0."""


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """Result on one held-out set; `EVAL_METRICS` describes the fields."""

    loss_nats: float
    loss_standard_error: float | None
    bits_per_byte: float | None
    tokens: int
    documents: int

    def summary(self) -> str:
        """Loss and bits per byte, as in `loss 1.4123 +- 0.0113 nats  2.0375 bits/byte`."""
        error = "" if self.loss_standard_error is None else f" +- {self.loss_standard_error:.4f}"
        bits = "" if self.bits_per_byte is None else f"  {self.bits_per_byte:.4f} bits/byte"
        return f"loss {self.loss_nats:.4f}{error} nats{bits}"


@dataclasses.dataclass(frozen=True)
class TrainLine:
    """Line of a train step in metrics.jsonl; `TRAIN_METRICS` describes the fields."""

    step: int
    loss_nats: float
    grad_norm: float
    learning_rate: float
    skipped_updates: int
    tokens: int
    tokens_per_s: float
    step_time_ms: float
    data_wait_ms: float
    batch_hash: str
    mfu: float | None
    device_memory_peak_gib: float | None
    data_fill: float
    data_cost_spread: float
    data_drift: float
    data_skipped: int
    data_retries: int
    data_tokens: dict[str, int]
    data_queue: dict[str, int]
    data_memory_mib: dict[str, float]
    step_time_p50_ms: float
    step_time_p90_ms: float
    step_time_p99_ms: float
    straggler_score: dict[str, float]
    clock_mhz: float | None
    power_w: float | None
    joules_per_token: float | None
    host_rss_mib: float | None
    compile_count: int


@dataclasses.dataclass(frozen=True)
class MetricsSpec:
    """Reporting settings of a run.

    log_every_steps: train steps per line; the first and the last step always have a line.
    tensorboard: also write event files for TensorBoard.
    """

    log_every_steps: int = 10
    tensorboard: bool = True

    def __post_init__(self) -> None:
        if self.log_every_steps < 1:
            raise UserError(f"metrics.log_every_steps={self.log_every_steps} must be at least 1.")

    def is_logged(self, step: int, num_steps: int) -> bool:
        """True if `step` gets a line; the same for a resumed run as for an uninterrupted one."""
        return step in (1, num_steps) or step % self.log_every_steps == 0


def encode(values: dict[str, Any]) -> str:
    """Encodes values as one line of valid JSON.

    Floats are written by `repr`, so reading them gives the same bits. NaN and infinities, which JSON does not have,
    become null, and a field `message` names them.
    """
    lost: dict[str, float] = {}

    def kept(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: kept(f"{name}.{key}", item) for key, item in value.items()}
        if isinstance(value, float) and not math.isfinite(value):
            lost[name] = value
            return None
        return value

    values = {name: kept(name, value) for name, value in values.items()}
    if lost:
        values["message"] = ", ".join(f"{name} is {value}" for name, value in lost.items())
    return json.dumps(values, allow_nan=False) + "\n"


def read(path: Path) -> list[dict[str, Any]]:
    """Reads the lines of a metrics.jsonl, without those that a kill, a full disk or a damaged one made unreadable."""
    lines = [parsed(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return [line for line in lines if line is not None and _has_step(line)]


def drop_after(path: Path, step: int) -> int:
    """Drops the lines of `path` after `step`, and moves unreadable ones to `<name>.damaged`; returns their number.

    Atomic: a kill leaves the old or the new file.
    """
    return keep_lines(path, lambda line: line["step"] <= step if _has_step(line) else None)


def _has_step(line: dict[str, Any]) -> bool:
    return type(line.get("step")) is int
