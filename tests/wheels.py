"""Distributions that tests build, and environments that tests install them into."""

import os
import subprocess
import sys
from pathlib import Path


def build(folder: Path, root: Path, target: str) -> Path:
    """The distribution that hatchling makes of `root`: a wheel or an sdist."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (file,) = folder.glob("jtrain-*.whl" if target == "wheel" else "jtrain-*.tar.gz")
    return file


def pip(environment: Path, *arguments: str) -> None:
    """Runs pip for another environment, which need not have it."""
    command = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), *arguments]
    subprocess.run(command, check=True, capture_output=True)


def own_environment() -> dict[str, str]:
    """The tests' environment without what points at the checkout or sets up emulated devices."""
    dropped = ("JAX_", "XLA_", "PYTHON", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
