"""Makes docs/metrics.md: every field of metrics.jsonl, from the docstrings of its lines.

    python docs/make_metrics_page.py

`tests/train/test_loop.py` asks that the page equals what this makes, and that a run writes these
fields and no other.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from jtrain.telemetry.metric_fields import (  # noqa: E402 - after the path
    MESSAGE_FIELD,
    MetricField,
    eval_fields,
    result_fields,
    train_fields,
)

PAGE = ROOT / "docs" / "metrics.md"
HEAD = """# Every field of metrics.jsonl

A run appends a line of JSON to `metrics.jsonl` of its workdir for each logged step: the first, the last and
every `metrics.log_every_steps` between them. An evaluation has a line of its own, after the line of its step.
A resumed run drops the lines after the step that it goes on from, so that the file is one history. Numbers
have all their digits: a program that reads them gets the same bits.
[`jtrain dashboard`](verbs/dashboard.md) draws them while the run goes on, and has the newest ones at
`/metrics` for Prometheus.

"""
FOOT = "`python docs/make_metrics_page.py` writes this page from the code.\n"


def page() -> str:
    """The page: a table for each kind of line."""
    whens = dict.fromkeys(field.when for field in train_fields().values())
    parts = [HEAD, "## A line of a train step\n\nEvery line has all of these fields.\n\n"]
    for when in whens:
        fields = (field for field in train_fields().values() if field.when == when)
        parts.append(f"### {when}\n\n{_table(fields)}\n")
    parts.append("## A line of an evaluation\n\nEvery line has all of these fields.\n\n")
    parts.append(f"{_table(eval_fields().values())}\n")
    parts.append("Each result in `eval_sets` has these fields:\n\n")
    parts.append(f"{_table(result_fields().values())}\n")
    parts.append("## A line with a value that is not finite\n\n")
    return "".join([*parts, f"{_table([MESSAGE_FIELD])}\n", FOOT])


def _table(fields: Iterable[MetricField]) -> str:
    rows = (
        f"| `{field.name}` | {field.kind}{field.labels and f', by {field.labels}'} | {field.unit} | "
        f"{field.meaning}. |\n"
        for field in fields
    )
    return "| field | type | unit | meaning |\n|---|---|---|---|\n" + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
