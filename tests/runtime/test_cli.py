"""Exit codes: a user's mistake is a message and 2, also where Python has no sources to look at."""

import compileall
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compiled_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both packages as .pyc files alone, as some distributions ship Python."""
    site = tmp_path_factory.mktemp("site")
    for package in (ROOT / "jtrain", ROOT / "kernels" / "jtrain_kernels"):
        shutil.copytree(package, site / package.name, ignore=shutil.ignore_patterns("__pycache__", "bench"))
    assert compileall.compile_dir(site, quiet=1, legacy=True)
    for source in site.rglob("*.py"):
        source.unlink()
    return site


def python(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(site), "XLA_FLAGS": ""}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_messages_need_no_sources(compiled_only: Path, tmp_path: Path) -> None:
    """Exit 2 and one line; the package is really the compiled one."""
    where = python(compiled_only, tmp_path, "-c", "import jtrain.launch; print(jtrain.launch.__file__)").stdout.strip()
    assert where == str(compiled_only / "jtrain" / "launch.pyc")
    done = python(compiled_only, tmp_path, "-m", "jtrain.launch", "--config=nowhere")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: --config=nowhere: no such config.")
    assert "Traceback" not in done.stderr


def test_a_bug_stays_a_bug_without_sources(compiled_only: Path, tmp_path: Path) -> None:
    """A ValueError that is no UserError keeps its traceback, exit code 1."""
    code = "import sys; from jtrain.runtime import cli; sys.exit(cli.run(lambda: int('a word')))"
    done = python(compiled_only, tmp_path, "-c", code)
    assert done.returncode == 1
    assert "ValueError: invalid literal" in done.stderr


def test_faulty_hardware_has_a_code_of_its_own(compiled_only: Path, tmp_path: Path) -> None:
    """Supervisors replace the host on 76; the message stands alone on stderr."""
    code = (
        "import sys; from jtrain.errors import HardwareFault; from jtrain.runtime import cli\n"
        "def main(): raise HardwareFault('device 3 of host a')\n"
        "sys.exit(cli.run(main))"
    )
    done = python(compiled_only, tmp_path, "-c", code)
    assert (done.returncode, done.stderr) == (76, "error: device 3 of host a\n")
