"""The README's commands, as they stand there."""

import json
import os
import re
import shlex
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def commands(text: str) -> list[str]:
    """What the README's bash blocks run before "What works", a line each, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", text.partition("## What works")[0], re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(re.sub(r"\s#.*", "", line).split()) for line in lines if line.strip()]


COMMANDS = commands((ROOT / "README.md").read_text())


def test_the_readme_has_its_two_commands_first() -> None:
    """Whoever copies these two is training."""
    assert COMMANDS[:2] == ["pip install -e .", "python -m jtrain.launch --config=tiny"]
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("command", [command for command in COMMANDS if "jtrain.launch" in command])
def test_every_launch_command_of_the_readme_is_a_config(command: str) -> None:
    """Its config, fiddlers and sets are there; nothing runs."""
    argv = [sys.executable, *shlex.split(command)[1:], "--print-config"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("seed: int = ")


@pytest.mark.slow
def test_a_newcomer_types_the_readme(tmp_path: Path) -> None:
    """Every command word for word, in order, in a fresh clone and a fresh environment; only /my/ is somewhere else."""
    clone = tmp_path / "jtrain"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    venv.create(tmp_path / "env", with_pip=True)
    corpus = tmp_path / "my"
    corpus.mkdir()
    with open(corpus / "a.jsonl", "w") as file:
        for number in range(2000):
            print(json.dumps({"text": f"document {number} says {number * number} and no more. " * 8}), file=file)
    home = {"HOME": str(tmp_path), "PATH": f"{tmp_path}/env/bin:{os.environ['PATH']}"}
    env = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))} | home
    for command in [*COMMANDS[:1], "pip install -e '.[aot]'", *COMMANDS[1:]]:
        mine = command.replace("/my/", f"{corpus}/")
        done = subprocess.run(["bash", "-c", mine], cwd=clone, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
