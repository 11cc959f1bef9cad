"""The distributions: what a wheel and an sdist carry, and what a user of the installed wheel sees."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.wheels import build, own_environment, pip

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"

RIGHT_USE = """
from typing import assert_type

import jtrain_kernels.device
from jtrain.config.load import load_config
from jtrain.layout.mesh import MeshSpec

assert_type(MeshSpec(data=4, tensor=2).size, int)
assert_type(MeshSpec().shape, dict[str, int])
assert_type(jtrain_kernels.device.from_name("h200").hbm_bytes, int | None)
load_config("tiny", ["debug"], ["num_steps=5"])
"""

WRONG_USE = """
import jtrain_kernels.device
from jtrain.layout.mesh import MeshSpec

MeshSpec(data="eight")
MeshSpec(dota=8)
jtrain_kernels.device.from_name(200)
"""


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the wheel alone; what it depends on is looked up in the tests' environment."""
    environment = tmp_path_factory.mktemp("installed")
    venv.create(environment)
    pip(environment, "install", "--no-deps", "--no-index", str(wheel))
    (site,) = environment.glob("lib/python*/site-packages")
    # The editable jtrain of the tests' environment is not found this way: Python reads no .pth of such a
    # folder.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment


def run(environment: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a program of `environment` in `folder`, as a user would type it."""
    command = [str(environment / "bin" / words[0]), *words[1:]]
    return subprocess.run(
        command, cwd=folder, env=own_environment(), capture_output=True, text=True, check=False, timeout=300
    )


def test_a_wheel_carries_what_a_user_needs_and_no_more(wheel: Path) -> None:
    """Both packages, their type markers, configs and the license; no folder bench."""
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "jtrain/__init__.py",
        "jtrain/py.typed",
        "jtrain_kernels/py.typed",
        "jtrain/_configs/tiny.py",
        "jtrain/_constraints.txt",
    } <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {"jtrain/bench/one_gpu.py", "jtrain/bench/checkpoint_programs/checkpoint_torch.py"} <= names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"jtrain", "jtrain_kernels"}


def test_a_wheel_has_the_c_core_for_every_python_of_its_platform(wheel: Path) -> None:
    """Where there is a C compiler; `pip install` of the wheel then needs none."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    assert re.fullmatch(r"jtrain-.*-py3-none-(?!any).*\.whl", wheel.name)
    # The library is checked against the C files, so they are all there.
    files = {f"jtrain/data/native/{name}" for name in ("_core.so", "core.c", "json.c")}
    assert files <= set(zipfile.ZipFile(wheel).namelist())


def test_without_a_c_compiler_a_wheel_is_built_for_any_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy then does the core's work. An old library beside the source does not end up in the wheel."""
    with tarfile.open(build(tmp_path / "sdist", ROOT, "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.glob("jtrain-*/")
    (tree / "jtrain" / "data" / "native" / "_core.so").write_bytes(b"of another source")
    monkeypatch.setenv("CC", "/none/cc")
    wheel = build(tmp_path / "wheel", tree, "wheel")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "jtrain/data/native/_core.so" not in zipfile.ZipFile(wheel).namelist()


def test_the_metadata_says_what_one_may_do_with_it(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = archive.read(name).decode()
    for line in ("License-Expression: Apache-2.0", "License-File: LICENSE", "Classifier: Typing :: Typed"):
        assert f"{line}\n" in metadata
    assert "wandb" not in metadata


@pytest.mark.slow
def test_an_sdist_builds_into_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """No file of the wheel is lost on the way through the source distribution."""
    sdist = build(tmp_path / "sdist", ROOT, "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.glob("jtrain-*/")
    for name in (
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "constraints.txt",
        "tests/conftest.py",
        "jtrain/py.typed",
    ):
        assert (tree / name).is_file(), name
    again = build(tmp_path / "wheel", tree, "wheel")
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(wheel).namelist())


def test_an_installed_wheel_finds_its_configs_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    """`jtrain launch --config=llama8b` works as in the checkout."""
    where = run(
        installed,
        tmp_path,
        "python",
        "-c",
        "import jtrain, jtrain_kernels as k; print(jtrain.__file__, k.__file__)",
    )
    assert where.returncode == 0, where.stderr
    assert all(path.startswith(str(installed)) for path in where.stdout.split())
    done = run(installed, tmp_path, "jtrain", "launch", "--config=llama8b", "--print-config")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (GOLDEN / "llama8b.txt").read_text()


def test_a_wheel_lists_the_benchmarks_it_has_and_refuses_others_in_one_line(
    installed: Path, tmp_path: Path
) -> None:
    """Published figures beside other projects are measured in a checkout, and the message says so."""
    listed = run(installed, tmp_path, "jtrain", "bench").stdout.splitlines()
    assert {"one_gpu", "faults", "startup", "checkpoint"} <= {line.split()[0] for line in listed}
    assert not [line for line in listed if "cpu_step" in line]
    done = run(installed, tmp_path, "jtrain", "bench", "cpu_step")
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "no benchmark cpu_step. There are: " in line
    assert (
        "Those of published figures are in the folder bench/ of a checkout of jtrain: run them there" in line
    )


def type_errors(environment: Path, folder: Path, source: str) -> list[str]:
    """The rules that a strict type checker finds broken in `source`, which imports the installed packages."""
    (folder / "use.py").write_text(source)
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict"}))
    checker = [
        sys.executable,
        "-m",
        "basedpyright",
        "--pythonpath",
        str(environment / "bin" / "python"),
        "--outputjson",
    ]
    done = subprocess.run(
        [*checker, "use.py"], cwd=folder, env=own_environment(), capture_output=True, text=True, check=False
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    return [problem["rule"] for problem in found if problem["severity"] == "error"]


@pytest.mark.slow
def test_a_type_checker_sees_the_types_of_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    """Right use is accepted in strict mode, each wrong use is an error; without py.typed right use is refused
    too.
    """
    assert type_errors(installed, tmp_path, RIGHT_USE) == []
    assert type_errors(installed, tmp_path, WRONG_USE) == [
        "reportArgumentType",
        "reportCallIssue",
        "reportArgumentType",
    ]
    markers = list(installed.glob("lib/python*/site-packages/jtrain*/py.typed"))
    assert len(markers) == 2
    for marker in markers:
        marker.rename(marker.with_suffix(".off"))
    untyped = type_errors(installed, tmp_path, RIGHT_USE)
    for marker in markers:
        marker.with_suffix(".off").rename(marker)
    assert untyped.count("reportMissingTypeStubs") == 3, untyped


@pytest.mark.slow
def test_a_wheel_alone_in_a_fresh_environment_trains_tiny(wheel: Path, tmp_path: Path) -> None:
    """The declared dependencies are all that it needs, in the versions that CI tested."""
    environment = tmp_path / "fresh"
    venv.create(environment)
    pip(environment, "install", "-c", str(ROOT / "constraints.txt"), str(wheel))
    done = run(environment, tmp_path, "jtrain", "launch", "--config=tiny", "--set", "num_steps=20")
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss_nats"] for line in map(json.loads, lines) if "loss_nats" in line]
    assert losses[-1] < losses[0] - 0.5
