import dataclasses
import json
import shlex
import shutil
import statistics
from pathlib import Path

import pytest

from jtrain.cli import launch
from jtrain.cli.profile import find, main
from jtrain.profile.analysis.breakdown_json import write_breakdown
from jtrain.profile.analysis.records import Breakdown
from jtrain.profile.report import profile_page
from tests.cli.loaded import list_loaded
from tests.cli.test_launch import python
from tests.profile import example
from tests.profile.traced import traced


def left(workdir: Path, step: int, breakdown: Breakdown) -> Path:
    """Writes the files of a postprocessed window into a workdir."""
    folder = workdir / "profile" / str(step)
    folder.mkdir(parents=True)
    write_breakdown(breakdown, folder / "breakdown.json")
    profile_page.write(breakdown, folder / "report.html")
    return folder


def test_a_workdir_is_shown_with_the_newest_window(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--step chooses another window; --json writes breakdown.json; the last line has the path of the page."""
    old, new = example.unknown(), example.breakdown()
    left(tmp_path, 2, old)
    folder = left(tmp_path, 20, new)

    assert main(["--workdir", str(tmp_path), "--json", str(tmp_path / "out.json")]) == 0
    shown = capsys.readouterr().out
    assert "Steps 20 to 24" in shown
    assert shown.splitlines()[-1] == f"HTML report with charts: {folder / 'report.html'}"
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads(
        (folder / "breakdown.json").read_text()
    )

    assert main(["--workdir", str(tmp_path), "--step", "2"]) == 0
    assert "Step 3 on 4 × cpu" in capsys.readouterr().out
    assert main(["--workdir", str(folder)]) == 0
    assert "Steps 20 to 24" in capsys.readouterr().out


def test_processes_are_laid_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has waits and computing per process; a process without files gets an error line."""
    first = dataclasses.replace(example.breakdown(), all_devices=24, num_processes=3)
    folder = left(tmp_path, 20, first)
    steps = [dataclasses.replace(step, parts=step.parts | {"data_wait": 0.3}) for step in first.steps]
    for process in (1, 2):
        (folder / f"process-{process}").mkdir()
    write_breakdown(
        dataclasses.replace(first, process=1, steps=steps), folder / "process-1" / "breakdown.json"
    )

    assert main(["--workdir", str(tmp_path)]) == 0

    shown, said = capsys.readouterr()
    assert "on 24 × NVIDIA H200 (cuda), the 4 of process 0" in shown
    rows = shown.partition("processes, mean over the steps")[2].splitlines()[2:6]
    assert " ".join(rows[0].split()) == "process step computing exposed communication data wait host idle"
    assert [row.split()[0] for row in rows[2:]] == ["0", "1"]
    assert "300.0 ms" in rows[3]
    assert said.startswith(f"process 2: {folder / 'process-2' / 'facts.json'} cannot be read")


def test_two_workdirs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The only difference, steps that take 100 ms more, is in the first line; the JSON has every op."""
    a, b = example.breakdown(), example.breakdown()
    steps = [
        dataclasses.replace(step, duration_s=step.duration_s + 0.1, parts=step.parts | {"host": 0.124})
        for step in b.steps
    ]
    left(tmp_path / "a", 20, a)
    left(tmp_path / "b", 40, dataclasses.replace(b, steps=steps))
    file = tmp_path / "compared.json"

    assert (
        main(
            [
                "compare",
                "--workdir",
                str(tmp_path / "b"),
                "--against",
                str(tmp_path / "a"),
                "--json",
                str(file),
            ]
        )
        == 0
    )

    shown = capsys.readouterr().out
    assert "A step of B is slower: 1.220 s -> 1.320 s (+8.2%)." in shown
    assert "Because of host +99.60 ms." in shown
    assert len(json.loads(file.read_text())["ops"]) == len(a.ops)


def test_a_window_that_nobody_has_read_yet_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the run ended before postprocessing, both files are written now; the profile equals itself in
    `compare`.
    """
    folder = tmp_path / "profile" / "10"
    shutil.copytree(traced(data=8), folder)

    assert main(["--workdir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "Steps 11 to 13 on 8 × cpu (cpu)" in shown
    assert (folder / "breakdown.json").exists()
    assert (folder / "report.html").exists()

    assert main(["compare", "--workdir", str(folder), "--against", str(tmp_path)]) == 0
    assert "A step of B is no slower" in capsys.readouterr().out


@pytest.mark.slow
def test_a_real_window_opens_in_perfetto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On every device and in every step the phases' median times are in order, and all ops are within the
    steps.
    """
    folder = tmp_path / "profile" / "10"
    shutil.copytree(traced(data=8), folder)

    assert main(["export", "--workdir", str(tmp_path), "--perfetto"]) == 0

    assert capsys.readouterr().out.startswith(f"{folder / 'perfetto.json'}: ")
    events = json.loads((folder / "perfetto.json").read_text())["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert named == {0: "host"} | {i + 1: f"device {i}: cpu" for i in range(8)}
    steps = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (0, 0)]
    assert [e["name"] for e in steps] == ["step 11", "step 12", "step 13"]
    end = steps[-1]["ts"] + steps[-1]["dur"]
    for device in range(8):
        for step in (11, 12, 13):
            here = [
                e for e in events if (e["pid"], e["tid"]) == (device + 1, 2) and e["args"].get("step") == step
            ]
            middle = [
                statistics.median(e["ts"] for e in here if e["args"]["phase"] == phase)
                for phase in ("forward", "backward", "optimizer")
            ]
            assert middle == sorted(middle)
    assert all(e["ts"] >= 0 and e["ts"] + e["dur"] <= end for e in events if e["ph"] == "X" and e["pid"])


def test_no_such_workdir(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr and exit code 2, also for `compare` and `export`."""
    missing = str(tmp_path / "nowhere")
    for words in ([], ["compare", "--against", missing], ["export", "--perfetto"]):
        assert main([*words, "--workdir", missing]) == 2
        option = "--against" if "compare" in words else "--workdir"
        out, err = capsys.readouterr()
        assert (out, err) == (
            "",
            f"error: {option} {missing}: there is no such folder. Train one: jtrain launch --config=tiny.\n",
        )


def test_a_workdir_without_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message says how to get a profile."""
    assert main(["--workdir", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {tmp_path} holds no profile: there is no {tmp_path}/profile/<step>.")
    assert err.endswith(f"\nnext: jtrain launch --config=tiny --with profile --workdir {tmp_path}-profile\n")
    assert err.count("\n") == 2


@pytest.mark.parametrize(
    ("num_steps", "command", "new"),
    [
        (300, "--config=tiny --workdir {run}", "--config=tiny --with profile"),
        (
            20,
            "--config=tiny --workdir={run} --set seed=1",
            "--config=tiny --set seed=1 --set 'profile.steps=(15,20)'",
        ),
        (3, "--config=tiny", "--config=tiny --set 'profile.steps=(1,3)'"),
        (1, "--config=tiny", "--config=tiny --set num_steps=25 --with profile"),
        (99, "--config=tiny --with profile", "--config=tiny --with profile --set 'profile.steps=(20,25)'"),
    ],
)
def test_the_way_to_a_profile_is_a_window_within_the_run(
    num_steps: int, command: str, new: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run's own command, in a folder that is not there yet; it is no dead end."""
    workdir = tmp_path / "run"
    workdir.mkdir()
    words = ["python", "-m", "jtrain.launch", *command.format(run=workdir).split()]
    (workdir / "run.json").write_text(json.dumps({"command": words}))
    (workdir / "config.txt").write_text(f"seed: int = 0\nnum_steps: int = {num_steps}\n")
    (tmp_path / "run-profile").mkdir()
    assert main([str(workdir)]) == 2
    advice = capsys.readouterr().err.rpartition("\nnext: ")[2]
    assert advice == f"jtrain launch {new} --workdir {workdir}-profile-2\n"
    assert launch.main([*shlex.split(advice)[2:], "--dry-run"]) == 0


def test_a_run_that_a_script_started_is_shown_the_way_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its command has no options of ours to repeat."""
    (tmp_path / "run.json").write_text(json.dumps({"command": ["python", "train.py", "--config=mine"]}))
    (tmp_path / "config.txt").write_text("num_steps: int = 3\n")
    assert main([str(tmp_path)]) == 2
    advice = capsys.readouterr().err.rpartition("\nnext: ")[2]
    assert advice == f"jtrain launch --config=tiny --with profile --workdir {tmp_path}-profile\n"


def test_a_step_without_a_window(tmp_path: Path) -> None:
    """The message lists the existing windows."""
    left(tmp_path, 2, example.breakdown())
    left(tmp_path, 20, example.breakdown())
    with pytest.raises(ValueError, match="has windows after the steps 2, 20"):
        find(str(tmp_path), 3)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_breakdown_that_is_cut_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], share: float
) -> None:
    """However much is missing, one line names the file, and the exit code is 2."""
    file = left(tmp_path, 20, example.breakdown()) / "breakdown.json"
    text = file.read_text()
    file.write_text(text[: int(share * len(text))])

    assert main(["--workdir", str(tmp_path)]) == 2

    err = capsys.readouterr().err
    assert err.startswith(f"error: {file} ")
    assert err.count("\n") == 1


def test_a_window_that_left_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run killed in its window leaves a folder without a trace: one line, exit code 2."""
    (tmp_path / "profile" / "20").mkdir(parents=True)
    assert main(["--workdir", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_export_names_its_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There may be others."""
    assert main(["export", "--workdir", str(tmp_path)]) == 2
    assert "--perfetto" in capsys.readouterr().err


def test_a_report_needs_no_jax(tmp_path: Path) -> None:
    left(tmp_path, 20, example.breakdown())
    loaded = list_loaded(["jax"], ["jtrain.profile", "--workdir", str(tmp_path)])
    assert (loaded.codes, loaded.packages) == ([0], [])


def test_the_module_is_the_command(tmp_path: Path) -> None:
    """`python -m jtrain.profile` returns its exit codes to the shell."""
    left(tmp_path, 20, example.breakdown())
    shown = python("-m", "jtrain.profile", "--workdir", str(tmp_path))
    assert shown.returncode == 0
    assert shown.stderr.startswith("next: jtrain profile ")
    assert "Where a step's time went" in shown.stdout
    refused = python("-m", "jtrain.profile", "--workdir", str(tmp_path / "profile"))
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 2
