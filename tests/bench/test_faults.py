"""The harness of faults: a slice of its trials, what it finds where something is lost, and what it
refuses.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jtrain.bench.__main__ import bench
from jtrain.bench.fault_trials import sequences
from jtrain.bench.fault_trials.kinds import FaultKind, register_all
from jtrain.bench.faults import draw_trials
from tests.processes import program

SLICE = ("kill-commit",)
"""Kinds whose trials are short, on one process; the slow test below has all kinds."""

BAD = ("forgets", "diverges")
"""Kinds that the test adds: the harness has to find what they do."""

SEED = 2
TRIALS = len(SLICE) + len(BAD)
"""One of each kind."""


@pytest.mark.slow
def test_a_fault_of_each_short_kind_loses_nothing_and_a_loss_is_found(tmp_path: Path) -> None:
    """The slice for every change, on one process; and a run that forgets, beside a process that stays, and one
    that diverges.

    All in one command, which shares its imports and its unbroken run: exit 1, because of those two alone.
    """
    rows, trials = tmp_path / "rows.json", tmp_path / "trials"
    arguments = ("--trials", str(TRIALS), "--seed", str(SEED), "--only", ",".join((*SLICE, *BAD)))
    done = subprocess.run(
        program(__file__, "faults_that_fail", *arguments, "--workdir", trials, "--json", rows),
        env=os.environ | {"XLA_FLAGS": ""},  # one device, as a user has it
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    survived = re.findall(r"^([a-z-]+) \d+: (?:survived|refused, then survived)", done.stdout, re.MULTILINE)
    assert sorted(survived) == sorted(SLICE), done.stdout

    failed = dict(re.findall(r"^([a-z]+ \d+): FAILED.*\n((?:    .*\n)+)", done.stdout, re.MULTILINE))
    said = {name.split()[0]: text for name, text in failed.items()}
    assert sorted(said) == sorted(BAD)
    assert re.search(r"more than one interval lost: at step|refused: ", said["forgets"])
    assert "step 1 diverges" in said["diverges"]
    assert re.search(r"the final state diverges in \d\d of", said["diverges"])
    assert "a process stayed behind" in said["forgets"]
    for name, text in failed.items():
        kind, seed = name.split()
        assert f"python -m jtrain.bench faults --trials 1 --seed {seed} --only {kind} --processes 1" in text
        assert (trials / f"{kind}-{seed}" / "attempt0" / "process0.log").exists(), "kept to look at"

    values = {row["what"]: row["value"] for row in json.loads(rows.read_text())["rows"]}
    assert all(values[f"{kind}: lost or diverged"] == (kind in BAD) for kind in (*SLICE, *BAD))
    assert sum(values[f"{kind}: recoveries"] for kind in SLICE) >= 1, "a fault has to hit"
    assert any(values[f"{kind}: most steps done again"] > 0 for kind in SLICE)


@pytest.mark.slow
def test_drawn_sequences_run_and_a_bug_is_shortened_to_the_faults_that_show_it(tmp_path: Path) -> None:
    """Two sequences of kills, and of a bug that shows after a kill alone: the first has it before, and
    survives; the second has it twice behind, and one of the two is left out.
    """
    arguments = ("--hours", "1", "--trials", "2", "--seed", "177", "--only", "kill-step,litters")
    done = subprocess.run(
        program(__file__, "faults_that_fail", *arguments, "--workdir", tmp_path / "trials"),
        env=os.environ | {"XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^litters:430,kill-step:726 0: survived", done.stdout, re.MULTILINE), done.stdout
    tried = re.findall(r"^  (\S+): (fails|survived)$", done.stdout, re.MULTILINE)
    assert tried == [
        *((part, "survived") for part in ("kill-step:438", "litters:756", "litters:871")),
        ("kill-step:438,litters:756", "fails"),
    ]
    failed = done.stdout[done.stdout.index("kill-step:438,litters:756,litters:871 1: FAILED") :]
    assert "files that an unbroken run does not leave: ['forgotten.tmp']" in failed
    assert "python -m jtrain.bench faults --sequence kill-step:438,litters:756 --processes 1" in failed
    assert "faults of the sequences: litters 3, kill-step 2" in done.stdout


def test_a_sequence_is_drawn_read_and_shortened() -> None:
    """The same for one seed; texts and sequences are each other's; the shortest part that fails is found."""
    names = ("a", "b", "c", "on-disk", "in-store")
    kinds = {
        name: FaultKind(
            name,
            "nothing happens",
            lambda trial: None,
            on_disk=name == "on-disk",
            in_store=name == "in-store",
        )
        for name in names
    }
    drawn = list(itertools.islice(sequences.draw(kinds, 3), 50))
    assert drawn == list(itertools.islice(sequences.draw(kinds, 3), 50))
    assert drawn != list(itertools.islice(sequences.draw(kinds, 4), 50))
    assert {len(sequence) for sequence in drawn} == {2, 3, 4}
    assert {fault.name for sequence in drawn for fault in sequence} == set(names)
    assert not any("on-disk" in text and "in-store" in text for text in map(sequences.shown, drawn))
    assert [sequences.parse(sequences.shown(sequence), kinds) for sequence in drawn] == drawn
    with pytest.raises(ValueError, match="on-disk needs a workdir on a disk, the others one in a store"):
        sequences.parse("on-disk:0,in-store:0", kinds)

    tried: list[str] = []

    def fails(part: sequences.FaultSequence) -> bool:
        tried.append(sequences.shown(part))
        return [fault.name for fault in part] == ["a", "c"]

    sequence = sequences.parse("b:1,a:2,b:3,c:4", kinds)
    assert sequences.shown(sequences.shorten(sequence, fails)) == "a:2,c:4"
    assert tried[:4] == ["b:1", "a:2", "b:3", "c:4"], "short ones first"
    assert len(tried) == len(set(tried)) <= 14
    assert sequences.shorten(sequence, lambda part: False) == sequence


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", (1, 2))
def test_every_kind_of_fault_is_survived(tmp_path: Path, num_processes: int) -> None:
    """One trial of each kind, with a supervisor, small disks and bad numbers as well."""
    kinds = [name for name, kind in register_all().items() if num_processes in kind.processes]
    arguments = (
        "--trials",
        str(len(kinds)),
        "--processes",
        str(num_processes),
        "--workdir",
        str(tmp_path / "trials"),
    )
    done = subprocess.run(
        [sys.executable, "-m", "jtrain.bench", "faults", *arguments],
        env=os.environ | {"XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(
        re.findall(r"^[a-z-]+ \d+: (?:survived|refused, then|skipped)", done.stdout, re.MULTILINE)
    ) == len(kinds)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trials", "0"), r"--trials 0 must be above 0"),
        (("--hours", "-1"), r"--hours -1\.0 must be above 0"),
        (("--sequence", "nan-weight:1"), r"--sequence nan-weight:1: no kind of this name can follow others"),
        (("--sequence", "kill-step"), r"--sequence kill-step: a fault is KIND:NUMBER, such as kill-step:0"),
        (("--hours", "1", "--only", "flip"), r"--only flip: there is no such kind of fault\."),
        (
            ("--only", "kill-save,kil-step"),
            r"--only kil-step: there is no such kind of fault\. .* kill-step,",
        ),
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
    trials = list(draw_trials(names, 3 * len(names), seed=5))
    assert trials == list(draw_trials(names, 3 * len(names), seed=5))
    assert trials != list(draw_trials(names, 3 * len(names), seed=6))
    assert [seed for seed, _ in trials] == list(range(5, 5 + len(trials)))
    assert sorted(name for _, name in trials) == sorted(3 * names)


def test_every_kind_is_in_the_docs() -> None:
    """docs/faults.md lists each, with what a user sees."""
    page = (Path(__file__).parents[2] / "docs" / "faults.md").read_text()
    listed = set(re.findall(r"^\| `([a-z-]+)`", page, re.MULTILINE))
    assert listed == set(register_all())
