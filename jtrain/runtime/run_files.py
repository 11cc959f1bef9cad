"""Description of a run in its workdir, written before training: config.txt and run.json."""

import datetime
import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from jax.sharding import Mesh

from jtrain.runtime.atomic_io import write_whole

_VERSIONS = ("jtrain", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")


def write_run_files(workdir: Path, config_text: str, mesh: Mesh, *, num_processes: int) -> None:
    """Writes config.txt, and run.json with command, commit, versions, devices and start time."""
    workdir.mkdir(parents=True, exist_ok=True)
    facts = {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.orig_argv,
        "commit": git_commit(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in _VERSIONS},
        "devices": {"kind": mesh.devices.flat[0].device_kind, "count": mesh.devices.size},
        "processes": num_processes,
        "mesh": dict(mesh.shape),
    }
    for name, text in (("run.json", json.dumps(facts, indent=1) + "\n"), ("config.txt", config_text)):
        # Atomic, because half a config.txt would look like the config of another run.
        write_whole(workdir / name, text)


def git_commit() -> str | None:
    """Returns the commit of jtrain's checkout, with `+changes` if tracked files differ; None outside a checkout."""

    def git(*command: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *command], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
