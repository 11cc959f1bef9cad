"""The README: its size, its links, and its commands as they stand there."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
COMMANDS = "".join(re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)).splitlines()
SET_UP = "python3.12 -m venv .venv && . .venv/bin/activate && pip install "


def test_the_readme_is_short_and_starts_with_its_two_lines() -> None:
    """One line that trains, one that tests; `.ci/run` runs the second."""
    assert len(TEXT.split()) <= 900
    train, test, *_ = COMMANDS
    assert train == f"{SET_UP}-e . && jtrain launch --config=tiny"
    checks = "ruff check . && basedpyright && pytest -n 3 --durations=20"
    assert test == f"{SET_UP}-c constraints.txt -e '.[test,aot]' && {checks}"
    assert [line for line in COMMANDS if line.startswith(SET_UP)] == [train, test]


def test_every_link_of_the_readme_is_a_file() -> None:
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []


def test_the_picture_is_small() -> None:
    (picture,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", TEXT)
    assert (ROOT / picture).stat().st_size <= 200_000
    assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("jtrain launch")])
def test_every_launch_command_of_the_readme_is_a_config(command: str) -> None:
    """Config, fiddlers and sets are there; nothing runs."""
    argv = [sys.executable, "-m", *shlex.split(command), "--print-config"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("seed: int = ")


@pytest.mark.slow
def test_a_newcomer_types_the_readme(tmp_path: Path) -> None:
    """Every command but the tests, word for word, in order, in a fresh clone; only /my/ is somewhere else."""
    clone = tmp_path / "jtrain"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    corpus = tmp_path / "my"
    corpus.mkdir()
    with open(corpus / "a.jsonl", "w") as file:
        for number in range(2000):
            print(
                json.dumps({"text": f"document {number} says {number * number} and no more. " * 8}), file=file
            )
    train, _, *others = COMMANDS
    dropped = ("JAX_", "XLA_", "PYTHON", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    env |= {"HOME": str(tmp_path), "PATH": f"{sys.base_prefix}/bin:{os.environ['PATH']}"}
    for command in [train, *(f". .venv/bin/activate && {command}" for command in others)]:
        mine = command.replace("/my/", f"{corpus}/")
        done = subprocess.run(
            ["bash", "-c", mine], cwd=clone, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
