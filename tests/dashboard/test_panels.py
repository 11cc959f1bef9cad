"""What the charts show are the numbers of the files, thinned so that no spike is lost."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jtrain.dashboard.panels import data_of, page_of
from jtrain.dashboard.run_folder import RunFolder
from jtrain.report.page import blocks_html, html
from tests.dashboard.made_up import loss_of, make_run, train_lines, wall_lines
from tests.dashboard.test_run_folder import append, read_all


def charts_of(
    *runs: RunFolder, shown: tuple[float, float] | None = None, buckets: int = 600
) -> dict[str, Any]:
    return data_of(runs, shown, buckets)["charts"]


def opened(workdir: Path) -> RunFolder:
    return read_all(RunFolder(workdir, workdir.name))


def test_a_spike_of_one_step_survives_the_thinning(tmp_path: Path) -> None:
    """Of 30,000 steps and 50 buckets; a chosen part has every step."""
    run = RunFolder(make_run(tmp_path / "run", 1), "run")
    for step in range(2, 30_001):
        loss = 99.0 if step == 17_321 else 0.001 if step == 20_002 else loss_of(step)
        run.metrics.add({"step": step, "loss_nats": loss, "tokens_per_s": 1.0})
    [line] = charts_of(run, buckets=50)["loss_nats"]
    assert len(line["x"]) == len(line["y"]) <= 4 * 50
    assert line["y"][line["x"].index(17_321)] == max(line["y"]) == 99.0
    assert line["y"][line["x"].index(20_002)] == min(line["y"]) == 0.001
    [part] = charts_of(run, shown=(100.0, 150.0), buckets=50)["loss_nats"]
    assert part["x"] == list(range(99, 152)), "and one more at each end"
    assert part["y"] == [float(f"{loss_of(step):.6g}") for step in range(99, 152)]


def test_wall_time_adds_up_to_one_in_each_span(tmp_path: Path) -> None:
    """3 of 4 seconds of a step are computing; the first span has 10 s of start-up more."""
    workdir = make_run(tmp_path / "run", 40)
    append(workdir / "goodput.jsonl", wall_lines(range(38, 41), start_s=1.7e9 + 200.0, before_s=0.0))
    stack = {part["name"].rpartition(" ")[0]: part for part in charts_of(opened(workdir))["goodput-0"]}
    assert list(stack) == ["start-up", "data wait", "computing", "idle"] or set(stack) == {
        *("start-up", "computing", "data wait", "idle")
    }
    sums = np.sum([part["y"] for part in stack.values()], axis=0)
    np.testing.assert_allclose(sums, 1.0, atol=1e-5)
    assert stack["computing"]["y"][5] == 0.75
    assert stack["start-up"]["y"][0] == pytest.approx(10 / 14, abs=1e-5)
    # Of 40 s that nothing ran: 200 - (10 + 4 * 40) = 30 before the attempt that goes on after step 37.
    assert stack["idle"]["y"][36] == pytest.approx(30 / 34, abs=1e-5)
    assert stack["computing"]["to"] == list(range(1, 41))
    [part] = [
        part
        for part in charts_of(opened(workdir), shown=(10.0, 20.0))["goodput-0"]
        if "computing" in part["name"]
    ]
    assert (part["x"][0], part["to"][-1], part["name"]) == (10.0, 20, "computing 75.0%")


def test_the_mixture_stands_beside_its_plan(tmp_path: Path) -> None:
    """3,072 of 4,096 tokens are of `web`, and half was planned; a run of one source has no such chart."""
    run = opened(make_run(tmp_path / "run", 10))
    web, planned, code, _ = charts_of(run)["mixture-0"]
    assert (web["name"], code["name"]) == ("web", "code")
    assert (web["y"][-1], code["y"][-1]) == (0.75, 0.25)
    assert planned["y"] == [0.5] * 10
    assert (planned["name"], planned["dashed"], planned["colour"]) == (
        "web, planned share of tokens",
        True,
        "c0",
    )
    alone = make_run(tmp_path / "alone", 1)
    append(alone / "metrics.jsonl", "")
    (alone / "metrics.jsonl").write_text(train_lines([1], data_tokens={"web": 7}, data_planned={"web": 1.0}))
    assert charts_of(opened(alone))["mixture-0"] == []


def test_several_runs_share_the_axes_of_lines(tmp_path: Path) -> None:
    """A colour for each; the first speed of an attempt is the compiler's, and what nobody told is no line."""
    long, short = opened(make_run(tmp_path / "long", 40)), opened(make_run(tmp_path / "short", 8))
    data = data_of([long, short], None, 600)
    assert data["steps"] == [0.0, 40.0]
    lines = data["charts"]["tokens_per_s"]
    assert [(line["name"], line["colour"], len(line["x"])) for line in lines] == [
        ("long", "c0", 40),
        ("short", "c1", 8),
    ]
    assert [line["y"][:2] for line in lines] == [[None, 12345.6]] * 2
    assert [line["x"] for line in data["charts"]["power_w"]] == [[], []]
    assert re.findall(r"<th scope=\"row\".*?</i>.*?>(\w+)<", data["blocks"]["runs"]) == ["long", "short"]
    assert "40 of 40" in data["blocks"]["runs"]


def test_a_run_without_a_line_has_an_empty_page(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    data = data_of([opened(tmp_path)], None, 600)
    assert all(not line["x"] for chart in data["charts"].values() for line in chart)
    assert "not begun" in data["blocks"]["runs"]


def test_texts_of_a_run_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    """An answer, an alert and a name with markup."""
    workdir = make_run(tmp_path / "<b>run", 2)
    answer = '{"step": 2, "of": "prompts", "prompt": "", "answer": "<script>owned</script>"}\n'
    append(workdir / "generations.jsonl", answer)
    append(workdir / "alerts.jsonl", '{"step": 1, "kind": "nan", "message": "<img onerror=owned>"}\n')
    run = opened(workdir)
    blocks = data_of([run], None, 600)["blocks"]
    assert "&lt;script&gt;owned" in blocks["samples"]
    assert "&lt;img onerror" in blocks["events"]
    assert "<b>" not in "".join([*blocks.values(), html(page_of([run])).partition("<script")[0]])
    assert blocks_html(["a `b`"]).strip() == "<p>a <code>b</code></p>"
