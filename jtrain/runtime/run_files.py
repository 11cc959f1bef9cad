"""Description of a run in its workdir, written before training: config.txt, run.json and plan.txt."""

import contextlib
import datetime
import errno
import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jax.sharding import Mesh

from jtrain.errors import FileError
from jtrain.runtime import secrets
from jtrain.runtime.atomic_io import cannot_write, write_whole

_VERSIONS = ("jtrain", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
_NO_WRITES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


def write_run_files(workdir: Path, config_text: str, mesh: Mesh, *, num_processes: int, plan: str) -> None:
    """Writes config.txt, and run.json with command, commit, versions, devices and start time; both without
    secrets.

    Args:
      plan: text of plan.txt: what the run needs.

    Raises:
      FileError: the workdir cannot be written to.
    """
    facts = {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        # As it was typed, with the interpreter and its options.
        "command": secrets.redact_command(sys.orig_argv),
        "commit": git_commit(),
        "versions": {"python": platform.python_version()} | versions(_VERSIONS),
        "devices": {"kind": mesh.devices.flat[0].device_kind, "count": mesh.devices.size},
        "processes": num_processes,
        "mesh": dict(mesh.shape),
    }
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        for name, text in (
            ("run.json", json.dumps(facts, indent=1) + "\n"),
            ("config.txt", secrets.redact_lines(config_text)),
        ):
            # Atomic, because half a config.txt would look like the config of another run. For the owner
            # alone, because they may hold a secret that nothing marks as one.
            write_whole(workdir / name, text, mode=0o600)
        # Not forced to the disk: no run reads it to go on.
        write_whole(workdir / "plan.txt", plan, durable=False)
    except OSError as error:
        raise cannot_write(workdir, error) from error


def add_to_run_json(workdir: Path, name: str, value: object) -> None:
    """Adds a fact that is known only once the run has begun; on a full disk it is left out."""
    file = workdir / "run.json"
    # It only describes the run, and the first lines have said it: nothing reads it to go on.
    with contextlib.suppress(OSError):
        facts = json.loads(file.read_text()) | {name: value}
        write_whole(file, json.dumps(facts, indent=1) + "\n", mode=0o600)


@contextlib.contextmanager
def full_disk_named(workdir: Path) -> Iterator[None]:
    """Raises FileError that names the workdir where a write fails because its disk is full or has become
    read-only.
    """
    try:
        yield
    except OSError as error:
        # Other errors are not about the disk's room; a FileError already says what to do.
        if isinstance(error, FileError) or error.errno not in _NO_WRITES:
            raise
        raise cannot_write(workdir, error) from error


def versions(names: Iterable[str]) -> dict[str, str | None]:
    """Version of each distribution; None if it is not installed, as jtrain itself in a bare checkout."""

    def version_of(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return {name: version_of(name) for name in names}


def git_commit() -> str | None:
    """Returns the commit of jtrain's checkout, with `+changes` if tracked files differ; None outside a
    checkout.
    """

    def git(*command: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *command], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + (
            "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return None
