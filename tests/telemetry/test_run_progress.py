"""Screens of a run on a terminal, against golden texts; `python -m tests.telemetry.test_run_progress` remakes them."""

import io
import math
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from jtrain.telemetry.metrics import EvalResult, MetricsSpec, TrainLine
from jtrain.telemetry.metrics_writer import Metrics
from jtrain.telemetry.run_progress import (
    ContinuedText,
    PlainProgress,
    ProgressStream,
    RunProgressBar,
    sparkline,
    summary,
)
from tests.telemetry.screens import screen
from tests.telemetry.test_metrics import Terminal, line

GOLDEN = Path(__file__).parents[1] / "golden" / "terminal"
CASES = [(width, colour) for width in (80, 140) for colour in (False, True)]
NEXT = [f"jtrain {verb} --workdir runs/tiny" for verb in ("generate", "checkpoint list", "hf export")]


def golden_file(width: int, *, colour: bool) -> Path:
    return GOLDEN / f"{width}{'_colour' if colour else ''}.txt"


SAMPLE = ContinuedText("def main", "():\n\treturn 1\x1b[31m é" + 200 * "a", 1.25)


def run_on_terminal(
    stream: ProgressStream, workdir: Path, *, mfu: float | None, sample: ContinuedText | str | None = SAMPLE
) -> None:
    """A run of 1,000 steps with an evaluation and a warning, as the loop tells it."""
    for name in ("config.txt", "plan.txt"):
        (workdir / name).touch()
    speeds: list[dict[str, Any]] = [
        dict(loss_nats=6.0801, tokens_per_s=391.4, step_time_ms=9000.0),
        dict(loss_nats=3.3466, tokens_per_s=4_400.0, grad_norm=0.0001234, host_rss_mib=1536.0),
        dict(loss_nats=1.3539, tokens_per_s=2_750.0, grad_norm=123.4567, device_memory_peak_gib=61.25),
    ]
    with Metrics(
        workdir, MetricsSpec(tensorboard=False), num_steps=1000, start_step=0, stream=stream
    ) as metrics:
        metrics.say("resumed [from] step 0")
        for step, values in zip((1, 500, 1000), speeds, strict=True):
            metrics.train(line(step, mfu=mfu, **values))
            if step == 500:
                metrics.evaluation(
                    step, EvalResult(2.25, 0.01234, 3.25, 70, 9), {"wiki": EvalResult(2.5, None, None, 7, 1)}
                )
                metrics.say("WARNING: the disk fills")
        metrics.say("done: 1000 steps in 62 s")
        # No such folder is there: a store is not listed, but the folder on this machine.
        metrics.end(Path("runs/tiny"), NEXT, lambda: sample)


def shown(width: int, workdir: Path, *, colour: bool, mfu: float | None = None) -> str:
    """Screen at the end of the run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("COLUMNS", str(width))
        patch.setenv("NO_COLOR", "" if colour else "1")
        stream = Terminal()
        run_on_terminal(stream, workdir, mfu=mfu)
    return "\n".join(screen(stream.getvalue(), width, styles=colour)) + "\n"


class EncodedTerminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal_of_80(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.parametrize(("width", "colour"), CASES)
def test_a_terminal_shows_the_golden_screen(width: int, colour: bool, tmp_path: Path) -> None:
    """A line that stays for each logged step, evaluations between them, and at the end what to do next."""
    want = golden_file(width, colour=colour).read_text()
    assert shown(width, tmp_path, colour=colour) == want
    lines = want.splitlines()
    steps = train_rows(lines)
    assert len(steps) == 3
    assert ("<" in want) == colour
    if not colour:
        assert all(len(row) < width for row in steps)
        header, evaluation = lines[1], next(row for row in lines if row.endswith(" eval"))
        assert header.index("loss") + 4 == steps[0].index("6.0801") + 6 == evaluation.index("2.2500") + 6
        assert ("data wait" in want) == (width == 140)


def test_the_share_is_of_the_peak_where_one_is_published(tmp_path: Path) -> None:
    """Otherwise of the fastest that this run has been on this machine, from the second line on."""
    rows = shown(80, tmp_path, colour=False).splitlines()
    assert "of best" in rows[1]
    assert [row.split()[5] for row in train_rows(rows)] == ["-", "100.0%", "62.5%"]
    rows = shown(80, tmp_path, colour=False, mfu=0.4125).splitlines()
    assert "MFU" in rows[1]
    assert [row.split()[5] for row in train_rows(rows)] == ["41.2%"] * 3


def test_a_measured_peak_is_named_once_it_is_known(terminal_of_80: None) -> None:
    """The heading comes again where a column changes its meaning; without a terminal words say it."""
    unknown, known = line(10, mfu=None), line(20, mfu=None, measured_peak_share=0.1234)
    names, first, again, second, *_ = table_of(Terminal(), unknown, known, from_row=0)
    assert (names[5:7], first[5]) == (["of", "best"], "-")
    assert (again[5:7], second[5]) == (["of", "peak"], "12.3%")
    assert "tokens/s  12.3% of the measured peak" in summary(known, 1000, is_first=False)
    assert "peak" not in summary(unknown, 1000, is_first=False)
    assert "measured" not in summary(line(20, mfu=0.4, measured_peak_share=0.1), 1000, is_first=False)


def train_rows(rows: list[str]) -> list[str]:
    """Rows of the table that are of train steps."""
    return [row for row in rows if "/1000" in row and " eval" not in row]


def table_of(stream: Terminal, *lines: TrainLine, start_step: int = 0, from_row: int = 1) -> list[list[str]]:
    """Words of the rows that a run of 1,000 steps prints for these lines."""
    progress = RunProgressBar(stream, 1000, start_step)
    try:
        for train_line in lines:
            progress.train(train_line)
        progress.evaluation(0, "eval", "loss 2.2500 nats")
    finally:
        progress.close()
    return [row.split() for row in screen(stream.getvalue(), 80)[from_row:]]


def test_the_first_line_of_an_attempt_has_no_speed_to_compare(terminal_of_80: None) -> None:
    """It holds the compilation, also where a run was resumed; an evaluation before it has its own step."""
    slow, fast = (line(step, tokens_per_s=10.0 * step, step_time_ms=100.0) for step in (30, 40))
    first, second, evaluation = table_of(Terminal(), slow, fast, start_step=20)
    assert (first[0], first[5], first[-1]) == ("30/1000", "-", "-")
    assert (second[0], second[5], second[-2:]) == ("40/1000", "100.0%", ["1m", "36s"])
    assert evaluation == ["0/1000", "2.2500", "nats", "eval"]


def test_batches_without_targets_have_no_share(terminal_of_80: None) -> None:
    """No division by the best speed where that is 0."""
    rows = table_of(Terminal(), *(line(step, tokens_per_s=0.0, step_time_ms=1.0) for step in (1, 2, 3)))
    assert [row[5] for row in rows[:3]] == ["-"] * 3


def test_a_text_is_shown_within_the_screen_and_no_reason_is_hidden(tmp_path: Path) -> None:
    """Six rows at most, however long the text; a reason in its place, and nothing where none is due."""
    long = ContinuedText("", " ".join(["word"] * 500), 1.0)
    for sample, expected in ((long, 7), ("no text by the model: ValueError: 3", 1), (None, 0)):
        stream = Terminal()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", "80")
            patch.setenv("NO_COLOR", "1")
            patch.setenv("TERM", "xterm-256color")
            run_on_terminal(stream, tmp_path, mfu=None, sample=sample)
        rows = screen(stream.getvalue(), 80)
        first, last = (
            next(i for i, row in enumerate(rows) if word in row) for word in ("█▄▁", "in runs/tiny")
        )
        assert len(rows[first + 1 : last]) == expected
        assert sample is not long or all(row.startswith("  word word") for row in rows[first + 2 : last])
    plain, called = io.StringIO(), list[int]()
    PlainProgress(plain, 3, 0).end(tmp_path, tmp_path, NEXT, lambda: called.append(1))
    assert (plain.getvalue(), called) == (f"next: {NEXT[0]}\n", []), "nobody watches: nothing is sampled"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode_shows_a_run(encoding: str, tmp_path: Path, terminal_of_80: None) -> None:
    """Every character can be encoded; the line of blocks is left out."""
    terminal_bytes = io.BytesIO()
    stream = EncodedTerminal(terminal_bytes, encoding=encoding)
    run_on_terminal(stream, tmp_path, mfu=None)
    stream.flush()
    text = terminal_bytes.getvalue().decode(encoding)
    assert "1000/1000    1.3539" in text
    assert re.search(r"[-|/\\] step", text)


def test_the_bar_moves_while_a_step_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a thread: nobody calls it in the time between two pictures."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    progress = RunProgressBar(stream, 300, 20)
    deadline = time.monotonic() + 60
    try:
        while len(set(re.findall("[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏]", stream.getvalue()))) < 3:
            assert time.monotonic() < deadline, stream.getvalue()
            time.sleep(0.05)
        (bar,) = screen(stream.getvalue(), 80)
        assert re.fullmatch(r". step  20/300 ━* ?[╸╺]?━* compiling 0:00:\d\d", bar), bar
    finally:
        progress.close()
    assert screen(stream.getvalue(), 80) == [], "nothing of it stays"


@pytest.mark.parametrize(
    ("values", "line_of_blocks"),
    [
        ([], ""),
        ([2.0], "▁"),
        ([1.0, 2.0, 3.0, math.nan, 8.0], "▁▂▃█"),
        ([float(number) for number in range(80)], "▁▁▁▂▂▂▂▂▂▃▃▃▃▃▄▄▄▄▄▄▅▅▅▅▅▅▆▆▆▆▆▇▇▇▇▇▇███"),
    ],
    ids=["none", "one", "not all finite", "means of two"],
)
def test_a_loss_is_a_line_of_blocks(values: list[float], line_of_blocks: str) -> None:
    assert sparkline(values) == line_of_blocks


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for case_width, case_colour in CASES:
        with tempfile.TemporaryDirectory() as folder:
            text = shown(case_width, Path(folder), colour=case_colour)
        golden_file(case_width, colour=case_colour).write_text(text)
