"""What a run says of itself in its workdir before it trains: config.txt and run.json."""

import datetime
import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from jax.sharding import Mesh

_VERSIONS = ("jtrain", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")


def write_run_files(workdir: Path, config_text: str, mesh: Mesh, *, num_processes: int) -> None:
    """config.txt and run.json: what runs, with what, since when."""
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
        # Renamed when whole: half a config.txt would be taken for another run's.
        new = workdir / f"{name}.new"
        new.write_text(text)
        new.replace(workdir / name)


def git_commit() -> str | None:
    """The commit of jtrain's checkout, with `+changes` if files differ from it; None outside of one."""

    def git(*command: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *command], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
