"""Metrics files: one history, exact to the bit, however the run ends."""

import dataclasses
import io
import json
import math
import os
import random
import re
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jtrain.telemetry.metrics import (
    EvalResult,
    MetricsSpec,
    TrainLine,
    drop_after,
    encode,
    read,
)
from jtrain.telemetry.metrics_writer import Metrics
from jtrain.telemetry.run_progress import summary
from tests.processes import program

LINE = TrainLine(
    step=10,
    loss_nats=2.1034,
    grad_norm=0.5,
    learning_rate=3e-3,
    skipped_updates=0,
    tokens=4096,
    tokens_per_s=12_345.6,
    step_time_ms=331.0,
    data_wait_ms=0.25,
    batch_hash="00ff",
    mfu=None,
    device_memory_peak_gib=None,
    data_fill=1.0,
    data_cost_spread=1.02,
    data_drift=0.001,
    data_skipped=0,
    data_retries=0,
    data_tokens={"web": 4000, "code": 96},
    data_queue={"loader-0": 2},
    data_memory_mib={"loader-0": 40.5},
    step_time_p50_ms=330.0,
    step_time_p90_ms=335.0,
    step_time_p99_ms=340.0,
    straggler_score={"host 0": 1.0, "device 0": 1.0},
    clock_mhz=None,
    power_w=None,
    joules_per_token=None,
    host_rss_mib=900.5,
    compile_count=1,
)


def line(step: int, **fields: float | None) -> TrainLine:
    return dataclasses.replace(LINE, step=step, **fields)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_every_line_has_every_key_and_floats_return_to_the_bit(tmp_path: Path) -> None:
    """Losses in float32 come back by repr; null appears only in fields that may be null."""
    losses = np.random.default_rng(0).standard_normal(200).astype(np.float32)
    with Metrics(
        tmp_path, MetricsSpec(tensorboard=False), num_steps=200, start_step=0, stream=io.StringIO()
    ) as metrics:
        for step, loss in enumerate(losses, 1):
            metrics.train(line(step, loss_nats=float(loss)))
            if step == 100:
                metrics.evaluation(
                    step, EvalResult(1.25, 0.125, 2.5, 70, 3), {"wiki": EvalResult(2.5, None, None, 7, 1)}
                )
    lines = read(tmp_path / "metrics.jsonl")
    trained = [entry for entry in lines if "loss_nats" in entry]
    assert [list(entry) for entry in trained] == [
        [field.name for field in dataclasses.fields(TrainLine)]
    ] * 200
    assert np.array_equal(np.array([entry["loss_nats"] for entry in trained], np.float32), losses)
    [evaluated] = [entry for entry in lines if "loss_nats" not in entry]
    assert list(evaluated) == [
        *("step", "eval_loss_nats", "eval_loss_standard_error", "eval_bits_per_byte", "eval_tokens"),
        *("eval_documents", "eval_reward_margin", "eval_accuracy", "eval_sets", "eval_exact"),
    ]
    assert list(evaluated.values()) == [
        *(100, 1.25, 0.125, 2.5, 70, 3, None, None),
        {"wiki": dataclasses.asdict(EvalResult(2.5, None, None, 7, 1))},
        {},
    ]


def test_nan_is_null_with_a_message_and_the_json_stays_valid(tmp_path: Path) -> None:
    """A strict JSON parser can read the file of a run that diverged."""

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    text = encode({"step": 3, "loss_nats": math.nan, "grad_norm": -math.inf, "mfu": None})
    entry = json.loads(text, parse_constant=refuse)
    message = "loss_nats is nan, grad_norm is -inf"
    assert entry == {"step": 3, "loss_nats": None, "grad_norm": None, "mfu": None, "message": message}
    entry = json.loads(encode({"step": 3, "eval_sets": {"wiki": {"loss_nats": math.inf, "tokens": 7}}}))
    nested = {"wiki": {"loss_nats": None, "tokens": 7}}
    assert entry == {"step": 3, "eval_sets": nested, "message": "eval_sets.wiki.loss_nats is inf"}


def test_a_resumed_run_leaves_one_history(tmp_path: Path) -> None:
    """Lines after the restored step are dropped, and a half line; no earlier line changes."""
    spec = MetricsSpec(tensorboard=False)
    with Metrics(tmp_path, spec, num_steps=20, start_step=0, stream=io.StringIO()) as metrics:
        for step in range(1, 13):
            metrics.train(line(step, loss_nats=1 / step))
        metrics.evaluation(10, EvalResult(0.5, 0.1, 0.7, 100, 9), {})
        metrics.evaluation(12, EvalResult(0.6, 0.1, 0.8, 100, 9), {})
    path = tmp_path / "metrics.jsonl"
    first = path.read_text().splitlines(keepends=True)
    with open(path, "a") as file:
        file.write('{"step": 13, "loss_n')
    with Metrics(tmp_path, spec, num_steps=20, start_step=10, stream=io.StringIO()) as metrics:
        for step in range(11, 21):
            metrics.train(line(step, loss_nats=2 / step))
    lines = read(path)
    assert [entry["step"] for entry in lines if "loss_nats" in entry] == list(range(1, 21))
    assert [entry["step"] for entry in lines if "eval_loss_nats" in entry] == [10]
    assert path.read_text().splitlines(keepends=True)[:11] == [*first[:10], first[12]]
    assert lines[-1]["loss_nats"] == 0.1

    inode = path.stat().st_ino
    drop_after(path, 20)
    assert path.stat().st_ino == inode, "nothing to drop, so the file is not written anew"
    drop_after(path, 0)
    assert read(path) == []


def test_dropping_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash while the new file is written leaves the old one."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(encode({"step": 1}) + encode({"step": 2}))
    before = path.read_bytes()

    def fails(_: int) -> None:
        raise OSError(5, "I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="I/O error"):
            drop_after(path, 1)
    assert path.read_bytes() == before
    drop_after(path, 1)
    assert [entry["step"] for entry in read(path)] == [1]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_sigkill_loses_no_completed_line(tmp_path: Path) -> None:
    """Whenever the kill comes, every line whose call returned is in metrics.jsonl and in the event file."""
    process = subprocess.Popen(
        program(__file__, "write_lines", tmp_path, json.dumps(dataclasses.asdict(LINE))),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for _ in range(20):
        process.stdout.readline()
    time.sleep(random.Random(0).uniform(0, 0.1))
    os.kill(process.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=300)
    done = max(int(text) for text in ["20", *re.findall(r"(\d+)\n", output)])
    lines = read(tmp_path / "metrics.jsonl")
    assert len(lines) in (done, done + 1)
    assert [entry["step"] for entry in lines] == list(range(1, len(lines) + 1))
    assert [entry["loss_nats"] for entry in lines] == [1 / step for step in range(1, len(lines) + 1)]
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert sum(b"train/loss_nats" in record for record in records(events)) >= done


def test_tensorboard_gets_every_number_and_forgets_what_a_resume_repeats(tmp_path: Path) -> None:
    """The second attempt's event file starts with TensorBoard's marker that purges from its first step on."""
    from tensorboardX.proto import event_pb2

    paths: list[Path] = []
    for start_step in (0, 1):
        with Metrics(
            tmp_path, MetricsSpec(), num_steps=3, start_step=start_step, stream=io.StringIO()
        ) as metrics:
            for step in range(start_step + 1, 4):
                metrics.train(line(step, loss_nats=step / 2))
            metrics.evaluation(
                3, EvalResult(0.75, 0.1, 1.0, 70, 9), {"wiki": EvalResult(0.25, None, 0.5, 7, 1)}
            )
        paths += [path for path in (tmp_path / "tensorboard").iterdir() if path not in paths]
    marks, values = [], []
    for path in paths:
        for record in records(path):
            event = event_pb2.Event.FromString(record)  # pyright: ignore[reportAttributeAccessIssue]
            if event.session_log.status == 1:  # START
                marks.append(event.step)
            values += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    assert marks == [1, 2]
    assert [(step, value) for step, tag, value in values if tag == "train/loss_nats"] == [
        *((1, 0.5), (2, 1.0), (3, 1.5)),
        *((2, 1.0), (3, 1.5)),
    ]
    assert values.count((3, "eval/eval_loss_nats", 0.75)) == 2
    assert values.count((3, "eval/eval_sets/wiki/bits_per_byte", 0.5)) == 2
    assert not any(tag.endswith("wiki/loss_standard_error") for _, tag, _ in values), "null"
    assert not any(tag.endswith(("batch_hash", "mfu")) for _, tag, _ in values)


def records(path: Path) -> Iterator[bytes]:
    """Records of an event file: each has length, its checksum, data, its checksum."""
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield data[12 : 12 + length]
        data = data[16 + length :]


def test_a_callbacks_own_numbers_are_a_line_and_events(tmp_path: Path) -> None:
    """Under names that no number of jtrain's has; a resume drops those that come again."""
    with Metrics(tmp_path, MetricsSpec(), num_steps=20, start_step=0, stream=io.StringIO()) as metrics:
        metrics.train(LINE)
        metrics.own(10, {"perplexity": 8.25})
        metrics.own(12, {"perplexity": 8.0})
    assert drop_after(tmp_path / "metrics.jsonl", 11) == 0
    _, line = read(tmp_path / "metrics.jsonl")
    assert line == {"step": 10, "own_perplexity": 8.25}
    (events,) = (tmp_path / "tensorboard").glob("*tfevents*")
    assert b"own/own_perplexity" in events.read_bytes()


def test_elsewhere_than_on_a_terminal_there_is_one_plain_line_per_logged_step(tmp_path: Path) -> None:
    """Progress for a scheduler's log is plain lines."""
    stream = io.StringIO()
    with Metrics(
        tmp_path, MetricsSpec(tensorboard=False), num_steps=1000, start_step=0, stream=stream
    ) as metrics:
        metrics.train(line(110))
        metrics.train(line(120, mfu=0.4125))
        metrics.evaluation(
            120, EvalResult(2.25, 0.01234, 3.25, 70, 9), {"wiki": EvalResult(2.5, None, None, 7, 1)}
        )
        metrics.say("saved")
        metrics.train(line(1000))
    assert stream.getvalue().splitlines() == [
        "step 110/1000  loss 2.1034 nats  12.3k tokens/s",
        "step 120/1000  loss 2.1034 nats  12.3k tokens/s  MFU 41.2%  ETA 4m 51s",
        "step 120/1000  eval loss 2.2500 +- 0.0123 nats  3.2500 bits/byte",
        "step 120/1000  eval wiki loss 2.5000 nats",
        "saved",
        "step 1000/1000  loss 2.1034 nats  12.3k tokens/s",
    ]


def test_on_a_terminal_there_is_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the same numbers above it for each logged step; messages stand there too."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with Metrics(
        tmp_path, MetricsSpec(tensorboard=False), num_steps=40, start_step=20, stream=stream
    ) as metrics:
        assert "20/40" in plain(stream)
        assert "compiling" in plain(stream)
        metrics.train(line(21, mfu=0.5))
        metrics.train(line(30, mfu=0.5))
        metrics.say("saved [step 30]")
    shown = plain(stream)
    assert "30/40" in shown
    assert re.search(r"  30/40 +2\.1034 +0\.5 .* 12\.3k .* 50\.0% +0\.9 GiB .* 3s", shown)
    assert "saved [step 30]" in shown


def plain(stream: io.StringIO) -> str:
    """Shown text without control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


@pytest.mark.parametrize(
    ("tokens_per_s", "step_time_ms", "said"),
    [
        (999.0, 1.0, "999.0 tokens/s  ETA 1s"),
        (1.5e6, 90_000.0, "1.5M tokens/s  ETA 1d 1h"),
        (2e9, math.inf, "2.0G tokens/s  ETA unknown"),
    ],
)
def test_speed_and_time_left_are_short(tokens_per_s: float, step_time_ms: float, said: str) -> None:
    """The remaining time has at most two units, the speed one decimal."""
    first_line = line(1, tokens_per_s=tokens_per_s, step_time_ms=step_time_ms)
    assert summary(dataclasses.replace(first_line, step=0), 1000, is_first=False).endswith(said)
    assert "ETA" not in summary(first_line, 1000, is_first=True)


def test_a_resumed_run_logs_the_steps_of_an_unbroken_one() -> None:
    """First, last and every n-th step get a line, wherever a run was stopped."""
    spec = MetricsSpec(log_every_steps=10)
    assert [step for step in range(1, 26) if spec.is_logged(step, 25)] == [1, 10, 20, 25]
    with pytest.raises(ValueError, match=r"metrics\.log_every_steps=0 must be at least 1\."):
        MetricsSpec(log_every_steps=0)


def test_other_processes_than_the_first_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes may call every method."""
    import jax

    monkeypatch.setattr(jax, "process_index", lambda: 1)
    stream = io.StringIO()
    with Metrics(tmp_path, MetricsSpec(), num_steps=3, start_step=0, stream=stream) as metrics:
        metrics.train(line(1))
        metrics.evaluation(1, EvalResult(0.5, 0.1, 0.7, 70, 9), {})
        metrics.own(1, {"perplexity": 8.0})
        metrics.say("hello")
    assert stream.getvalue() == ""
    assert list(tmp_path.iterdir()) == []
