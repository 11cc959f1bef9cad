"""Metrics of a run, the lines of metrics.jsonl; `metrics_writer` writes them.

The docstrings of `TrainLine`, `EvalLine` and `EvalResult` are what docs/metrics.md, `jtrain dashboard` and
its Prometheus endpoint say of each field (`metric_fields`).
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from jtrain.errors import UserError
from jtrain.telemetry.append_file import keep_lines, parse_line

FILE = "metrics.jsonl"
EVENTS = "tensorboard"
NOTES = "data.log"
GENERATIONS = "generations.jsonl"
BAD_STEPS = "bad_steps.jsonl"
MESSAGE = "message"


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """Result on one held-out set.

    loss_nats: cross entropy per token, over all valid targets; with preference pairs their loss per pair.
    loss_standard_error: standard error of the loss, over documents; null if there is only one.
    bits_per_byte: all nats over the bytes of the targets' UTF-8; null if they are unknown.
    tokens: valid targets.
    documents: documents of these targets, or preference pairs.
    reward_margin, accuracy: as in the line of a train step; null without pairs.
    """

    loss_nats: float
    loss_standard_error: float | None
    bits_per_byte: float | None
    tokens: int
    documents: int
    reward_margin: float | None = None
    accuracy: float | None = None

    def summary(self) -> str:
        """Loss and bits per byte, as in `loss 1.4123 +- 0.0113 nats  2.0375 bits/byte`; of pairs how many of
        them are told apart.
        """
        error = "" if self.loss_standard_error is None else f" +- {self.loss_standard_error:.4f}"
        bits = "" if self.bits_per_byte is None else f"  {self.bits_per_byte:.4f} bits/byte"
        right = "" if self.accuracy is None else f"  {self.accuracy:.1%} of {self.documents} pairs right"
        return f"loss {self.loss_nats:.4f}{error} nats{bits}{right}"


@dataclasses.dataclass(frozen=True)
class EvalLine:
    """Line of an evaluation in metrics.jsonl.

    step: completed updates.
    eval: result on the split of `data.eval_fraction`, a field of the line for each of it; null without a
      split.
    eval_sets: results on `eval.sets`, by name.
    eval_exact: share of exact answers to held-out samples, by set; empty if the model gives none.
    """

    step: int
    eval: EvalResult | None
    eval_sets: dict[str, EvalResult]
    eval_exact: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """The line; all lines have the same keys, also without a split."""
        names = (field.name for field in dataclasses.fields(EvalResult))
        return {
            "step": self.step,
            **{f"eval_{name}": getattr(self.eval, name, None) for name in names},
            "eval_sets": {name: dataclasses.asdict(result) for name, result in self.eval_sets.items()},
            "eval_exact": self.eval_exact,
        }


@dataclasses.dataclass(frozen=True)
class TrainLine:
    """Line of a train step in metrics.jsonl: values of all devices and processes.

    Of this step:
    step: completed updates.
    loss_nats: cross entropy per token, over the batch's valid targets, without z-loss; with preference pairs
      their loss per pair.
    reward_margin: beta times the mean difference of the log-probability of the better text and the worse one,
      each less that of the reference; per token as `DPO.form` says. Null without pairs.
    accuracy: share of pairs whose margin is above 0; null without pairs.
    grad_norm: global norm of the gradient before clipping.
    learning_rate: learning rate of this update.
    tokens: valid targets in the global batch.
    batch_hash: hash of this step's global batch, computed on the devices' copy.
    data_fill: share of the batch's positions that hold a token.
    data_cost_spread: largest over mean work of a data rank: 1 is perfect balance.
    data_drift: largest deviation of a source's share so far from the mixture schedule.
    data_tokens: tokens by source; sources without tokens are left out.
    data_planned: share of each source by the mixture schedule, of what data.mixture_unit counts; sources with
      share 0 are left out.
    data_queue: runs requested from each Source Loader of process 0 and not yet read.
    data_memory_mib: resident memory of each Source Loader of process 0, with shared pages.
    host_rss_mib: resident memory of process 0, with shared pages; null where the system does not tell it.

    Mean since the last line:
    tokens_per_s: valid targets per second of wall time.
    step_time_ms: wall time per step, everything included.
    data_wait_ms: part of step_time_ms spent waiting for the next batch.
    mfu: model FLOP/s over the devices' published peak; null where none is published.
    measured_peak_share: model FLOP/s over the peak that this machine's own matrix products reached at its
      first profile; null where a peak is published, and before that profile.
    straggler_score: per host and device, 1 = fastest, lower = straggler; hosts: share of the step time that
      would remain if the host were as fast as the fastest; devices: clock over the highest clock, if clocks
      are known.
    clock_mhz: clock of the cores, mean over devices; null where no driver tells it.
    power_w: power of a device, mean over devices; null where no driver tells it.
    joules_per_token: energy per token of all devices; null unless all tell it.

    So far:
    skipped_updates: updates not applied because of bad numbers, over all attempts.
    data_skipped: bad documents left out, over all attempts.
    data_retries: reads repeated by process 0's Source Loaders.
    device_memory_peak_gib: highest memory of process 0's fullest device; null where devices tell none, as a
      CPU.
    compile_count: train steps compiled by this attempt; 1 unless an argument changed.

    Over the last 1000 steps:
    step_time_p50_ms: median of step times, without evaluations and saves.
    step_time_p90_ms, step_time_p99_ms: 90th and 99th percentile of the same step times.
    """

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
    reward_margin: float | None = None
    accuracy: float | None = None
    measured_peak_share: float | None = None
    data_planned: dict[str, float] = dataclasses.field(default_factory=dict[str, float])


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

    Floats are written by `repr`, so reading them gives the same bits. NaN and infinities, which JSON does not
    have, become null, and a field `message` names them (`MESSAGE`).
    """
    non_finite: dict[str, float] = {}

    def make_finite(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: make_finite(f"{name}.{key}", item) for key, item in value.items()}
        if isinstance(value, float) and not math.isfinite(value):
            non_finite[name] = value
            return None
        return value

    values = {name: make_finite(name, value) for name, value in values.items()}
    if non_finite:
        # After all fields, so that a reader of the line sees its usual order first.
        values[MESSAGE] = ", ".join(f"{name} is {value}" for name, value in non_finite.items())
    return json.dumps(values, allow_nan=False) + "\n"


def read(path: Path) -> list[dict[str, Any]]:
    """Reads the lines of a metrics.jsonl, without those that a kill or a full disk made unreadable."""
    # A line without a line end is still being written.
    lines = [parse_line(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return [line for line in lines if line is not None and has_step(line)]


def drop_after(path: Path, step: int) -> int:
    """Drops lines after `step`, and moves unreadable ones to `<name>.damaged`; returns their number.

    Atomic: a kill leaves the old or the new file.
    """
    # A line without a step is unreadable as well: None sends it aside.
    return keep_lines(path, lambda line: line["step"] <= step if has_step(line) else None)


def has_step(line: dict[str, Any]) -> bool:
    """True if a line has the step that every line has."""
    # Not isinstance: True is an int in Python.
    return type(line.get("step")) is int
