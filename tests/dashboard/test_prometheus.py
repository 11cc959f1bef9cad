"""The text for Prometheus, as its own parser reads it."""

import json
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.dashboard.conftest import Serve
from tests.dashboard.made_up import loss_of, make_run
from tests.dashboard.test_run_folder import append

type Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples_of(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_run_has_its_newest_numbers(tmp_path: Path, serve: Serve) -> None:
    """Labelled by the workdir's name; what is not known has no sample."""
    runs = [make_run(tmp_path / name, steps) for name, steps in (("one", 30), ("two", 7))]
    evaluation = {"step": 7, "eval_loss_nats": None, "eval_sets": {"wiki": {"loss_nats": 2.5, "tokens": 9}}}
    append(runs[1] / "metrics.jsonl", json.dumps(evaluation) + "\n")
    (runs[0] / "goodput.json").write_text('{"goodput": 0.6, "categories": {"compute": 6.0, "idle": 4.0}}')
    with urllib.request.urlopen(f"{serve(*runs)}metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        samples = samples_of(answer.read().decode())

    def value(name: str, **labels: str) -> float | None:
        return samples.get((f"jtrain_{name}", frozenset(labels.items())))

    assert (value("step", run="one"), value("step", run="two")) == (30, 7)
    assert value("loss_nats", run="one") == loss_of(30)
    assert value("eval_loss_nats", run="two", set="wiki") == 2.5
    assert value("data_tokens", run="one", source="web") == 3072
    assert (value("goodput", run="one"), value("wall_s", run="one", category="idle")) == (0.6, 4.0)
    assert (value("num_steps", run="two"), value("running", run="two"), value("restarts", run="two")) == (
        7,
        0,
        0,
    )
    names = {name for name, labels in samples if ("run", "two") in labels}
    assert names.isdisjoint({"jtrain_mfu", "jtrain_goodput", "jtrain_checkpoint_step", "jtrain_batch_hash"})
    age_s = value("line_age_s", run="one")
    assert age_s is not None
    assert 0 <= age_s < 3600
