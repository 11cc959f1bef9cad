"""The harness of faults: a slice of its trials, what it finds where something is lost, and what it refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jtrain.bench.__main__ import bench
from jtrain.bench.fault_trials.kinds import register_all
from jtrain.bench.faults import drawn

CHEAP = (
    "damage-missing",
    "damage-truncated",
    "damage-flipped",
    "damage-emptied",
    "damage-garbage",
    "no-manifest",
    "renumbered",
    "bad-metrics",
    "bad-ledger",
    "kill-restore",
    "kill-save",
    "kill-commit",
    "kill-compile",
)
"""Kinds whose trials start the training once or twice, on one process."""

BAD_RUNS = """
import sys
from jtrain.bench.__main__ import bench
from jtrain.bench.fault_trials import kinds, processes
from jtrain.bench.fault_trials.planted import Plant

kinds.register_all()
processes.ENDED_S = 0.1

@kinds.fault("forgets", "loses all checkpoints but does not refuse: the workdir is emptied")
def forgets(trial):
    trial.from_half()
    for name in ("checkpoints", "metrics.jsonl", "run.json", "config.txt", "goodput.json"):
        path = trial.workdir.path / name
        path.rename(trial.folder / name)
    trial.workdir.path.joinpath("metrics.jsonl").write_bytes((trial.folder / "metrics.jsonl").read_bytes())

@kinds.fault("diverges", "a resumed run computes something else, and says nothing")
def diverges(trial):
    trial.from_half()
    trial.module = Plant("large", 14, seed=trial.rng.randrange(100)).module

@kinds.fault("stays", "a process stays after the training")
def stays(trial):
    trial.from_half()
    attempt = trial.start()
    processes.fork(lambda: processes.time.sleep(60) or 0, trial.folder / "sleeper.log")
    attempt.wait()
    trial.settle(attempt)

sys.exit(bench(["faults", "--trials", "3", "--only", "forgets,diverges,stays", *sys.argv[1:]]))
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with one device, as a user has it."""
    environ = os.environ | {"XLA_FLAGS": ""}
    return subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True, check=False)


def test_twenty_faults_lose_nothing(tmp_path: Path) -> None:
    """The slice for every change: kills and damaged files, one process."""
    rows = tmp_path / "rows.json"
    arguments = ("--trials", "20", "--seed", "16", "--only", ",".join(CHEAP), "--json", str(rows))
    done = run("-m", "jtrain.bench", "faults", *arguments, "--workdir", str(tmp_path / "trials"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^[a-z-]+ \d+: survived", done.stdout, re.MULTILINE)) == 20, done.stdout
    by_name = {row["what"]: row["value"] for row in json.loads(rows.read_text())["rows"]}
    assert sum(value for what, value in by_name.items() if what.endswith(": trials")) == 20
    assert sum(value for what, value in by_name.items() if what.endswith(": lost or diverged")) == 0
    assert sum(value for what, value in by_name.items() if what.endswith(": recoveries")) >= 15, "a fault must hit"
    assert any(value > 0 for what, value in by_name.items() if what.endswith("steps done again"))


def test_a_loss_is_found(tmp_path: Path) -> None:
    """A run that forgets its checkpoints, one that computes something else, a process that stays: exit 1, each named."""
    done = run("-c", BAD_RUNS, "--workdir", str(tmp_path / "trials"))
    assert done.returncode == 1, done.stdout + done.stderr
    failed = dict(re.findall(r"^([a-z]+ \d+): FAILED.*\n((?:    .*\n)+)", done.stdout, re.MULTILINE))
    said = {name.split()[0]: text for name, text in failed.items()}
    assert set(said) == {"forgets", "diverges", "stays"}
    assert re.search(r"more than one interval lost: at step 9|refused: ", said["forgets"])
    assert re.search(r"step 14 diverges|not done after|refused: ", said["diverges"])
    assert "a process stayed behind" in said["stays"]
    for name, text in failed.items():
        kind, seed = name.split()
        assert f"python -m jtrain.bench faults --trials 1 --seed {seed} --only {kind} --processes 1" in text
        assert (tmp_path / "trials" / f"{kind}-{seed}" / "attempt0" / "process0.log").exists(), "kept to look at"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trials", "0"), r"--trials 0 must be at least 1"),
        (("--only", "kill-save,kil-step"), r"--only kil-step: there is no such kind of fault\. .* kill-step,"),
        (("--only", "unshared"), r"--only unshared needs --processes 2 or 4, not 1"),
        (("--workdir", "{file}/here"), r"--workdir .*/here cannot be written to \(Not a directory\)"),
        (("--workdir", "{folder}"), r"--workdir .* is not empty\. Choose a new folder"),
        (("--config", "tinny"), r"tinny"),
    ],
)
def test_bad_arguments_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    """One message, before anything starts; `cli.run` makes it exit code 2."""
    monkeypatch.setattr("jtrain.bench.__main__.start_jax", lambda environ: None)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match=message):
        bench(["faults", *(text.format(file=file, folder=tmp_path) for text in arguments)])


def test_the_seed_draws_the_trials() -> None:
    """Every kind comes as often as every other; trial i of seed S is trial 0 of seed S + i."""
    names = list(register_all())
    trials = list(drawn(names, 3 * len(names), seed=5))
    assert trials == list(drawn(names, 3 * len(names), seed=5))
    assert trials != list(drawn(names, 3 * len(names), seed=6))
    assert [seed for seed, _ in trials] == list(range(5, 5 + len(trials)))
    assert sorted(name for _, name in trials) == sorted(3 * names)


def test_every_kind_is_in_the_docs() -> None:
    """docs/faults.md lists each, with what a user sees."""
    page = (Path(__file__).parents[2] / "docs" / "faults.md").read_text()
    listed = set(re.findall(r"^\| `([a-z-]+)`", page, re.MULTILINE))
    assert listed == set(register_all())
