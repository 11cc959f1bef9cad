"""Newest numbers of runs in Prometheus' text format, by the names and meanings of metrics.jsonl's fields."""

import datetime
import time
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from jtrain.dashboard.run_folder import RunFolder
from jtrain.report.number_formats import Number
from jtrain.telemetry.metric_fields import result_fields, train_fields
from jtrain.telemetry.metrics import FILE

type LabelledNumber = tuple[str, Number]
"""Value of a metric's second label, and its own value."""

SPLIT = "split"
"""Label of the split of `data.eval_fraction`, beside the names of `eval.sets`."""

FACTS = {
    "num_steps": "updates of the whole run",
    "running": "1 while a process has the workdir, else 0",
    "restarts": "attempts after the first",
    "goodput": "share of training in the wall time of all attempts",
    "checkpoint_step": "step of the newest complete checkpoint",
    "checkpoint_age_s": "seconds since the newest complete checkpoint was saved",
    "line_age_s": "seconds since the last line of metrics.jsonl: it grows while a run hangs",
}
"""What files other than metrics.jsonl tell of a run."""


def exposition(runs: Sequence[RunFolder]) -> bytes:
    """All metrics of the runs; a value that is not known has no sample."""
    registry = CollectorRegistry()
    registry.register(_Runs(runs))
    return generate_latest(registry)


class _Runs(Collector):
    def __init__(self, runs: Sequence[RunFolder]) -> None:
        self._runs = runs

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return []  # without it, registering collects everything once more

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for field in train_fields().values():
            samples = {run.name: _numbers(run.metrics.newest.get(field.name)) for run in self._runs}
            yield _family(field.name, field.meaning, samples, field.labels)
        for field in result_fields().values():
            samples = {run.name: _numbers(_evaluations(run, field.name)) for run in self._runs}
            yield _family(f"eval_{field.name}", field.meaning, samples, "set")
        seconds = {run.name: _numbers(run.goodput.get("categories")) for run in self._runs}
        yield _family("wall_s", "wall time of all attempts by what it went to", seconds, "category")
        facts = {run.name: _facts(run) for run in self._runs}
        for name, meaning in FACTS.items():
            yield _family(name, meaning, {run: _numbers(values.get(name)) for run, values in facts.items()})


def _family(
    name: str, meaning: str, samples: dict[str, list[LabelledNumber]], label: str = ""
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"jtrain_{name}", meaning, labels=["run", label] if label else ["run"])
    for run, run_samples in samples.items():
        for key, value in run_samples:
            family.add_metric([run, key] if label else [run], value)
    return family


def _numbers(value: object) -> list[LabelledNumber]:
    """Numbers of a value by their keys; a text such as a hash has none."""
    parts = value if isinstance(value, dict) else {"": value}
    return [(key, part) for key, part in parts.items() if isinstance(part, int | float)]


def _evaluations(run: RunFolder, name: str) -> dict[str, Number | None]:
    line = run.metrics.newest_evaluation
    sets = {key: result.get(name) for key, result in line.get("eval_sets", {}).items()}
    return {SPLIT: line.get(f"eval_{name}")} | sets


def _facts(run: RunFolder) -> dict[str, Number | None]:
    facts: dict[str, Number | None] = {
        "num_steps": run.num_steps,
        "running": float(run.status.startswith("running")),
        "restarts": len(run.wall.attempts[1:]),
        "goodput": run.goodput.get("goodput"),
    }
    if run.checkpoints:
        newest = run.checkpoints[max(run.checkpoints)]
        saved_s = datetime.datetime.fromisoformat(newest.saved_at).timestamp()
        facts |= {"checkpoint_step": newest.step, "checkpoint_age_s": time.time() - saved_s}
    if (file := run.workdir / FILE).exists():
        facts["line_age_s"] = time.time() - file.stat().st_mtime
    return facts
