"""one_gpu: what it refuses, what it writes, and that a call that was killed goes on where it stopped."""

import collections
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jtrain.bench import REHEARSED, Options, one_gpu
from jtrain.bench.__main__ import parse
from jtrain.bench.one_gpu_parts.process import Ended, environment, processes, step_rows
from jtrain.bench.one_gpu_parts.steps import STEPS, Step
from tests.processes import program

FAILS = Step("fails", ("no_such_benchmark",), 60)
ROOT = Path(__file__).parents[2]
CHEAP = (
    "machine",
    "attention-llama1b-xla",
    "loss",
    "elementwise-rope",
    "random-against-zeros",
    "tune-llama1b-rms_norm",
)


def options(out: Path, **more: Any) -> Options:
    return Options(**({"out": out, "budget": 540.0, "only": None, "rehearse": True} | more))


def session(out: Path, **more: str) -> one_gpu.GpuSession:
    made = one_gpu.GpuSession(out, True, more.get("gpu", "CPU, rehearsal"), more.get("code", "code"))
    out.mkdir(exist_ok=True)
    return made


def collected(step: Step, out: Path) -> tuple[list[Any], Ended]:
    """All rows of a step, and how it ended."""
    rows, process = [], step_rows(step, out, rehearse=True)
    while True:
        try:
            rows.append(next(process))
        except StopIteration as end:
            return rows, end.value


def test_steps_are_bounded_and_their_options_are_those_of_benchmarks() -> None:
    """Every step's arguments parse, the rehearsal's too: a typing error would cost the minutes that a GPU is
    there.
    """
    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in STEPS:
        assert 0 < step.limit_s <= 120
        for rehearse in (False, True):
            name, *rest = step.arguments("folder", rehearse=rehearse)
            module = importlib.import_module(f"jtrain.bench.{name}")
            assert parse(module.OPTIONS, [name, *rest]).name == name


def test_without_a_gpu_only_a_rehearsal_runs(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"needs an NVIDIA GPU, and nvidia-smi lists none here\..*add --rehearse"
    ):
        list(one_gpu.run(options(tmp_path, rehearse=False)))


def test_a_step_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"--only los: no such step\. Did you mean loss\?.* There are: machine"
    ):
        list(one_gpu.run(options(tmp_path, only=["los"])))


def test_a_budget_that_holds_no_step_is_refused(tmp_path: Path) -> None:
    """With the number that would do."""
    with pytest.raises(ValueError, match=r"--budget 20 is too short .* limit of 60 s, .* Give 65 or more"):
        list(one_gpu.run(options(tmp_path, budget=20.0)))


def test_two_calls_do_not_share_a_folder(tmp_path: Path) -> None:
    """The second would end the first one's step."""
    with (
        session(tmp_path).locked(),
        pytest.raises(ValueError, match=r"another one_gpu works in .* give this one another --out"),
    ):
        list(one_gpu.run(options(tmp_path, only=["machine"])))


def test_what_a_row_depends_on_is_in_its_key(tmp_path: Path) -> None:
    """Another GPU, code or step is measured again; the budget and the folder do not matter."""
    one = session(tmp_path)
    keys = {
        one.key(FAILS),
        session(tmp_path, gpu="H100").key(FAILS),
        session(tmp_path, code="other").key(FAILS),
    }
    keys.add(one.key(Step("other name", FAILS.options, 60)))
    assert len(keys) == 4
    assert session(tmp_path / "elsewhere").key(FAILS) == one.key(FAILS)


def test_what_is_not_installed_is_said_first_and_is_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No process is started for it; the steps that need it are named."""
    lacking, here = (
        Step("lacking", ("machine",), 60, ("no_such_package",), uses=("no_such_kernels",)),
        session(tmp_path),
    )
    here.begin(540.0, [lacking, FAILS])
    said = capsys.readouterr().out
    assert "missing: no_such_package (rows with that error: lacking)\n" in said
    assert "missing: no_such_kernels (its kernels are left out of: lacking)\n" in said
    (row,) = here.carry_out(lacking, until_s=time.monotonic() + 100)
    assert row["value"] is None
    last = here.lines()[-1]
    assert (last["ended"], last["error"]) == ("failed", "needs no_such_package, not installed here")
    assert here.key(lacking) in here.ended()


def test_a_step_whose_limit_does_not_fit_is_left_for_the_next_call(tmp_path: Path) -> None:
    here = session(tmp_path)
    assert list(here.carry_out(FAILS, until_s=time.monotonic() + FAILS.limit_s - 1)) == []
    assert here.lines() == []


def test_a_line_that_was_cut_off_hides_no_other(tmp_path: Path) -> None:
    """A killed call may leave half a line; the next line begins anew."""
    here = session(tmp_path)
    here.append(step="a", key="1", ended="done")
    with open(here.rows_file, "a") as file:
        file.write('{"step": "b", "key": "2", "en')
    assert here.ended() == {"1"}
    here.append(step="c", key="3", ended="done")
    assert here.ended() == {"1", "3"}


def test_a_failing_step_is_a_row_with_its_error_and_is_not_tried_again(tmp_path: Path) -> None:
    """A real process; the second time its row comes from the file."""
    here = session(tmp_path)
    first = list(here.carry_out(FAILS, until_s=time.monotonic() + 100))
    last = here.lines()[-1]
    assert last["ended"] == "failed"
    assert "exit code 2: error: no benchmark no_such_benchmark" in last["error"]
    assert list(processes(tmp_path)) == []
    count = len(here.lines())
    assert list(here.carry_out(FAILS, until_s=time.monotonic() + 100)) == first
    assert len(here.lines()) == count


def test_a_gpu_step_gets_most_of_one_gpus_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user has chosen."""
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    found = environment(tmp_path, rehearse=False)
    assert (found["XLA_CLIENT_MEM_FRACTION"], found["CUDA_VISIBLE_DEVICES"]) == ("0.92", "0")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert "XLA_CLIENT_MEM_FRACTION" not in environment(tmp_path, rehearse=False)


def test_rows_of_an_attempt_that_was_cut_off_do_not_count(tmp_path: Path) -> None:
    """Only those after the step's last beginning; a call that goes on gives them with the others."""
    here, row = session(tmp_path), dict(value=1.0, unit="s", baseline=None, ratio=None, bar=None)
    key = here.key(FAILS)
    here.append(step="fails", key=key, begun=[])
    here.append(step="fails", key=key, what="cut off", **row)
    here.append(step="fails", key=key, begun=[])
    here.append(step="fails", key=key, what="whole", **row)
    here.append(step="fails", key=key, ended="done", seconds=1.0, error=None)
    assert [one["what"] for one in here.carry_out(FAILS, until_s=0.0)] == ["whole"]


@pytest.mark.slow
def test_a_step_over_its_limit_is_a_row_and_leaves_no_process(tmp_path: Path) -> None:
    """Soaks of a minute each, whose sampler is a process of its own, ended while it samples."""
    step, started_s = Step("soak", ("machine", "--soak", "60", "--rehearse"), 15), time.monotonic()
    command = program(__file__, "count_processes", tmp_path)
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    _, ended = collected(step, tmp_path)
    most = int(watcher.communicate(timeout=300)[0])
    assert ended.outcome == "over its limit"
    assert "ended after 15 s" in (ended.error or "")
    assert most >= 2, "the step had a process beside its own, or the rest proves nothing"
    assert list(processes(tmp_path)) == []
    assert time.monotonic() - started_s < 60


def call(out: Path, steps: tuple[str, ...]) -> "subprocess.Popen[str]":
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    return subprocess.Popen(
        [sys.executable, "-m", "jtrain.bench", "one_gpu", "--rehearse", "--out", str(out), "--budget", "1000", "--only",
         *steps],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def lines(out: Path) -> list[dict[str, Any]]:
    file = out / "rows.jsonl"
    return (
        [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        if file.exists()
        else []
    )


@pytest.mark.slow
def test_killed_at_random_moments_it_goes_on_and_repeats_nothing(tmp_path: Path) -> None:
    """Ten kills of the whole call or of its step; at the end each step has ended once, and nothing still
    runs.

    A step that was killed itself is a row with that error, as one that the system kills for its memory would
    be.
    """
    chance, killed = random.Random(0), collections.Counter[str]()
    for _ in range(10):
        process = call(tmp_path, CHEAP)
        time.sleep(chance.uniform(0.5, 9.0))  # the moment of the kill
        victim = chance.choice(("call", "step"))
        targets = [process.pid] if victim == "call" else list(processes(tmp_path))
        for pid in targets:
            os.kill(pid, signal.SIGKILL)
        killed[victim] += bool(targets)
        if victim == "step":
            time.sleep(0.5)  # the call notices that its step is gone, and is killed soon after
            process.kill()
        process.communicate()
    assert killed["call"] >= 2
    said = call(tmp_path, CHEAP).communicate()[0]
    assert f"{len(CHEAP)} of {len(CHEAP)} steps have ended" in said
    found = lines(tmp_path)
    ends = collections.Counter(line["step"] for line in found if "ended" in line)
    assert ends == dict.fromkeys(CHEAP, 1)
    for step in CHEAP:
        mine = [line for line in found if line.get("step") == step]
        assert "ended" in mine[-1], "nothing of a step comes after its end"
        last = max(i for i, line in enumerate(mine) if "begun" in line)
        rows = [line for line in mine[last:] if "what" in line]
        assert all(line["what"].startswith(REHEARSED) for line in rows)
        if mine[-1]["ended"] == "done":
            assert rows
        else:
            assert "exit code -9" in mine[-1]["error"]
    assert list(processes(tmp_path)) == []

    count = len(found)
    again = call(tmp_path, CHEAP).communicate()[0]
    assert [line for line in lines(tmp_path)[count:] if "call" not in line] == []
    assert f"{len(CHEAP)} of {len(CHEAP)} steps have ended" in again


@pytest.mark.slow
def test_a_short_rehearsal_gives_every_row(tmp_path: Path) -> None:
    """From the folder of a step's rows to the table."""
    said = call(tmp_path, ("machine", "loss", "profile-llama1b")).communicate()[0]
    found = lines(tmp_path)
    assert [line["step"] for line in found if line.get("ended") == "done"] == [
        "machine",
        "loss",
        "profile-llama1b",
    ]
    assert {"gpu", "versions", "commit", "code", "budget_s", "missing"} == set(found[0]["call"])
    assert (tmp_path / "profile" / "report.html").stat().st_size > 10_000
    assert "tokens at a time" in said
    assert not (tmp_path / "step.jsonl").exists()
