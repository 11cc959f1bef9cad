"""`python -m jtrain.plan pipeline`: pictures, figures, files, and one message for each mistake."""

import functools
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from jtrain.cli.plan import main
from jtrain.config.load import load_config
from jtrain.pipeline.cells import to_csv
from jtrain.pipeline.published_schedules import PUBLISHED_SCHEDULES, make_schedule
from jtrain.plan.estimate.machine import make_machine
from jtrain.plan.pipeline_choice import plan_stages
from tests.cli.loaded import list_loaded

type Output = Callable[..., str]

SMALL = ("--stages", "4", "--microbatches", "8")
TINY = ("--config=tiny", "--device", "h200", "--count", "8")


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Output:
    """Runs `plan pipeline` with these words; returns what it prints, or after exit code 2 the message."""

    def run(*words: str, code: int = 0) -> str:
        assert main(["pipeline", *words]) == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    return run


@pytest.mark.parametrize(
    ("name", "bubble", "peaks"),
    [
        ("gpipe", Fraction(3, 8 + 3), [8, 8, 8, 8]),
        ("1f1b", Fraction(3, 8 + 3), [4, 3, 2, 1]),
        ("interleaved", Fraction(3, 2 * 8 + 3), [11, 9, 7, 5]),
        ("zb-h1", Fraction(3, 3 * 8 + 3), [4, 4, 4, 4]),
        ("zbv", Fraction(3, 6 * 8 + 3), [8, 8, 8, 8]),
        ("dualpipev", Fraction(3, 6 * 8 + 3), [9, 9, 9, 9]),
    ],
)
def test_json_has_bubble_peaks_and_instructions_in_unit_costs(
    output: Output, name: str, bubble: Fraction, peaks: list[int]
) -> None:
    """Closed forms, exactly; nothing else is in the JSON or on the standard output."""
    found = json.loads(output("--schedule", name, *SMALL, "--json", "-"))
    assert list(found) == ["bubble", "peak_buffers", "instructions"]
    assert found["bubble"] == float(bubble)
    assert found["peak_buffers"] == peaks
    for worker, program in enumerate(found["instructions"]):
        computed = [one for one in program if re.fullmatch(r"\d+[FIWB]\d+", one)]
        assert computed == [str(op) for op in make_schedule(name, 4, 8).streams[worker]]
        assert {"UPDATE", "REDUCE", "GATHER", "DROP"} <= {re.sub(r"\d", "", one) for one in program}


def test_json_goes_to_a_file_beside_the_picture(output: Output, tmp_path: Path) -> None:
    """And with --costs the bubble is that of the costs: (F + I - W) of F = 2, I = 3, W = 1."""
    path = tmp_path / "plan.json"
    printed = output("--schedule", "zb-h1", *SMALL, "--costs", "2,3,1", "--json", str(path))
    assert json.loads(path.read_text())["bubble"] == float(Fraction(3 * 4, 8 * 6 + 3 * 4))
    assert "bubble, stages on their own: 0.2" in printed


def test_the_picture_shows_who_computes_what_when(output: Output) -> None:
    """1F1B of two stages and two microbatches, by hand; four columns per unit of time."""
    printed = output("--schedule", "1f1b", "--stages", "2", "--microbatches", "2")
    assert "worker 0  F0--F1--........B0------....B1------    2 in flight" in printed
    assert "worker 1  ....F0--B0------F1--B1------........    1 in flight" in printed
    assert "bubble, stages on their own: 0.3333" in printed
    assert "bubble, one SPMD program: 0.3333, in 4 ticks packed as `fused`" in printed
    assert "input slots: 2 1; in lockstep 2 1" in printed
    assert "messages per step: 2 messages between two workers, 4 in all" in printed


def test_long_schedules_fit_the_terminal(output: Output) -> None:
    """More time than columns: a letter stands for several operations."""
    lines = output("--schedule", "zbv", "--stages", "8", "--microbatches", "64").splitlines()
    assert max(map(len, lines)) <= 110
    assert len({len(line) for line in lines if "in flight" in line and line.startswith("worker")}) == 1


def test_without_a_schedule_all_are_compared(output: Output) -> None:
    """The best in lockstep first; where I costs more than F, split backward passes lose to interleaving."""
    for costs, best in (("1,1,1", "zbv"), ("1,2,1", "interleaved")):
        printed = output("--stages", "4", "--microbatches", "16", "--costs", costs)
        rows = [
            line.split()[0]
            for line in printed.splitlines()
            if line.strip().split(" ")[0] in PUBLISHED_SCHEDULES
        ]
        assert sorted(rows) == sorted(PUBLISHED_SCHEDULES)
        assert rows[0] == best
        assert f"take {best}: the smallest bubble in lockstep" in " ".join(printed.split())
    found = json.loads(output(*SMALL, "--json", "-"))
    assert set(found) == set(PUBLISHED_SCHEDULES)
    assert found["1f1b"]["peak_buffers"] == [4, 3, 2, 1]


def test_schedules_that_need_more_microbatches_are_left_out_of_the_comparison(
    output: Output, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each with its reason on the error stream."""
    assert main(["pipeline", "--stages", "4", "--microbatches", "3", "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert set(json.loads(printed.out)) == {"gpipe", "1f1b", "zb-h1"}
    assert [line.split(": ")[0] for line in printed.err.splitlines()] == ["not compared"] * 3 + ["next"]
    assert "stages=0 must be at least 1" in output("--stages", "0", "--microbatches", "3", code=2)


def test_pictures_as_files(output: Output, tmp_path: Path) -> None:
    """SVG and HTML parse, with a box per operation; the page has the instructions."""
    drawing, page = tmp_path / "a.svg", tmp_path / "a.html"
    output("--schedule", "dualpipev", *SMALL, "--svg", str(drawing), "--html", str(page))
    boxes = ET.parse(drawing).getroot().findall(".//{http://www.w3.org/2000/svg}g")
    schedule = make_schedule("dualpipev", 4, 8)
    assert len(boxes) == sum(map(len, schedule.streams))
    titles = {box.findtext("{http://www.w3.org/2000/svg}title", "").split(":")[0] for box in boxes}
    assert titles == {str(op) for stream in schedule.streams for op in stream}
    text = page.read_text()
    assert text.count("<details>") == 4
    assert "7SEND_B0" in text
    assert "bubble, one SPMD program" in text


def test_a_schedule_is_written_changed_and_read(output: Output, tmp_path: Path) -> None:
    """The way of a schedule of one's own: two operations swapped by hand, checked, and shown."""
    path = tmp_path / "mine.csv"
    output("--schedule", "zb-h1", "--stages", "2", "--microbatches", "2", "--write-csv", str(path))
    assert "1W0" in path.read_text()
    path.write_text("0F0,0F1,,0I0,0W0,0I1,0W1\n,1F0,1I0,1F1,1I1,1W1,1W0\n")
    printed = output("--csv", str(path))
    assert "bubble, stages on their own" in printed
    path.write_text("0F0,0F1,,0I0,0W0,0I1,0W1\n,1F0,1W0,1F1,1I1,1W1,1I0\n")
    assert "worker 1, 1W0: it needs 1I0, which comes later on this worker" in output(
        "--csv", str(path), code=2
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--schedule", "zbx", *SMALL), "schedule zbx is unknown. Did you mean zbv"),
        (("--schedule", "ZBV", *SMALL), "schedule ZBV is unknown. Did you mean zbv"),
        (
            ("--schedule", "1f1b", "--stages", "8", "--microbatches", "100000"),
            "--microbatches 100000 over 8 stages: schedules are simulated and drawn pass by pass, up to "
            "16,384. Give --microbatches 2048 or fewer",
        ),
        (("--stages", "8", "--microbatches", "100000"), "Give --microbatches 2048 or fewer"),
        (
            ("--schedule", "zbv", "--stages", "8", "--microbatches", "4"),
            "microbatches=4: schedule zbv over stages=8 ",
        ),
        (
            ("--schedule", "zbv"),
            "a pipeline needs a number of stages. Give --stages, or --config with --device",
        ),
        (("--stages", "4"), "a pipeline needs a number of microbatches. Give --microbatches"),
        (("--csv", "none.csv"), "schedule none.csv cannot be read: No such file"),
        (("--csv", "a.csv", "--schedule", "zbv"), "both name a schedule. Leave one of them out"),
        (("--csv", "a.csv", "--chunks", "2"), "the rows of --csv a.csv say the chunks"),
        (("--chunks", "2", *SMALL), "--chunks 2 is of one schedule. Add --schedule interleaved"),
        (("--svg", "a.svg", *SMALL), "--svg a.svg shows one schedule. Add --schedule, one of gpipe"),
        (("--write-csv", "a.csv", *SMALL), "--write-csv a.csv shows one schedule"),
        (
            ("--schedule", "1f1b", "--json", "no/where.json", *SMALL),
            "--json no/where.json: there is no folder",
        ),
        (
            ("--costs", "1,2", *SMALL),
            "--costs 1,2: expected the times of F, I and W, three numbers such as 1,2,1",
        ),
        (("--costs", "1,0,1", *SMALL), "--costs 1,0,1: each time must be a number above 0"),
        (("--device", "h200", *SMALL), "--device is for a config's times. Give --config"),
        (("--set", "seed=1", *SMALL), "--set seed=1 changes a config. Give --config"),
        (("--config=tiny", "--costs", "1,1,1", *SMALL), "--costs: the times of tiny are the plan's"),
        (("--config=tiny", *SMALL), "no machine is named. Give --device, one of "),
        (
            (*TINY, "--stages", "3", "--microbatches", "4"),
            "3 stages on --count 8 devices: a pipeline has at least 2 ",
        ),
        (
            (*TINY, "--stages", "8", "--microbatches", "8"),
            "(tiny has model.num_layers=4). Give --stages 2 or 4.",
        ),
        (
            (*TINY[:-1], "7", "--stages", "7"),
            "7 stages on --count 7 devices: a pipeline has at least 2 stages, a num",
        ),
        ((*TINY[:-1], "7", "--stages", "7"), "Give --count 8 --stages 2."),
        ((*TINY, "--microbatches", "4"), "1 stages on --count 8 devices"),
        ((*TINY, "--csv", "mine.txt"), "a run takes a schedule from a file whose name ends in .csv"),
        ((*TINY, "--set", "pipeline.schedule=zbv"), "Give --schedule zbv in its place"),
        (
            (*TINY, "--schedule", "zbv", "--stages", "4", "--microbatches", "8"),
            "schedule zbv has 8 virtual stages, and the config model.num_layers=4: each needs at least one "
            "layer. Give --stages 2 or fewer, or --schedule 1f1b.",
        ),
        (
            (*TINY, "--stages", "2", "--microbatches", "3"),
            "data.global_batch=16 sequences. Give one of 1, 2, 4, or set",
        ),
        ((*TINY, "--network", "0", *SMALL), "--network 0 must be a number above 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_each_mistake_is_one_message(output: Output, words: tuple[str, ...], message: str) -> None:
    """Exit code 2, no traceback."""
    printed = output(*words, code=2)
    assert message in printed
    assert printed.startswith("error: ")
    assert "Traceback" not in printed


def test_a_csv_for_another_number_of_stages_is_refused(output: Output, tmp_path: Path) -> None:
    """And cells that do not parse, with line and cell."""
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(make_schedule("zbv", 2, 4)))
    assert "is for 2 stages, one per row, but stages=4" in output("--csv", str(path), "--stages", "4", code=2)
    path.write_text("0F0,0B0\n1F0,1X0\n")
    assert "line 2, cell 2: '1X0' is not an operation" in output("--csv", str(path), code=2)


def test_a_config_gives_seconds_and_bytes(output: Output, tmp_path: Path) -> None:
    """And the comparison with ZeRO-3 alone; a slower network makes messages longer."""
    words = ("--stages", "2", "--microbatches", "4")
    printed = " ".join(output(*TINY, *words).split())
    assert "tiny on 8 x h200: stage=2 data=4" in printed
    assert "of the pipelines. ZeRO-3 alone on the same devices takes" in printed
    assert re.search(
        r"s for the network and \S+ s for other stages. (ZeRO-3 alone|the pipeline) is \d+\.\d\d times",
        printed,
    )
    printed = output(*TINY, "--schedule", "zb-h1", *words, "--json", str(tmp_path / "plan.json"))
    assert re.search(r"F / I / W of a stage: \S+ / \S+ / \S+ ms per microbatch; a message \S+ ms", printed)
    assert re.search(r"memory: \S+ GiB per device", printed)
    assert "step: " in printed
    bubble = json.loads((tmp_path / "plan.json").read_text())["bubble"]
    assert bubble > float(Fraction(1, 3 * 4 + 1)), "messages take time, and I takes longer than F"


def plan_of(tmp_path: Path, *sets: str) -> dict[str, Any]:
    """What `plan tiny` writes as JSON for a layout."""
    words = [word for text in sets for word in ("--set", text)]
    assert main([*TINY, *words, "--json", str(tmp_path / "plan.json")]) == 0
    return json.loads((tmp_path / "plan.json").read_text())


@pytest.mark.parametrize(
    ("schedule", "chunks", "sets"),
    (
        ("1f1b", None, ("mesh.data=4", "layout.zero_stage=3", "layout.remat=full")),
        ("interleaved", 2, ("mesh.data=2", "mesh.tensor=2", "layout.tensor_overlap=True")),
        ("zbv", None, ("mesh.data=4", "layout.zero_stage=3", "pipeline.gather=step")),
    ),
)
def test_both_plans_of_a_layout_agree_to_the_last_digit(
    tmp_path: Path, schedule: str, chunks: int | None, sets: tuple[str, ...]
) -> None:
    """Seconds and bytes of `plan pipeline` are those of `plan`."""
    load = functools.partial(load_config, "tiny", (), sets)
    planned = plan_stages("tiny", load, make_machine("h200", 8), stages=2, microbatches=4)
    point = planned.point(make_schedule(schedule, 2, 4, chunks))
    assert point.timed is not None
    named = (
        "mesh.stage=2",
        "layout.microbatches=4",
        f"pipeline.schedule={schedule}",
        f"pipeline.chunks={chunks or 1}",
    )
    whole = plan_of(tmp_path, *sets, *named)
    assert whole["step"]["step_s"] == point.step_s
    assert whole["step"]["parts_s"] == point.timed.parts
    assert point.timed.parts["pipeline bubble"] > 0
    assert whole["formula"]["peak_bytes"] == point.plan.total_bytes


def test_a_picture_needs_no_jax() -> None:
    """In a process of its own, which must not import jax."""
    command = ["pipeline", "--schedule", "zbv", "--stages", "2", "--microbatches", "4"]
    loaded = list_loaded(["jax"], ["jtrain.plan", *command])
    assert (loaded.codes, loaded.packages) == ([0], [])
    assert "worker 1" in loaded.output
