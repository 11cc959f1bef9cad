"""Workdir of a trial as an observer sees it: logged steps, checkpoints, and saves and deletions under way."""

import dataclasses
import hashlib
import json
import os
import re
from pathlib import Path

from jtrain.bench.fault_trials import processes
from jtrain.bench.fault_trials.recipe import EVERY_STEPS
from jtrain.checkpoint import files
from jtrain.telemetry import metrics


@dataclasses.dataclass(frozen=True)
class LoggedStep:
    """Logged results of one step; `loss` keeps every bit (the text in the file)."""

    step: int
    loss: str
    batch_hash: str


@dataclasses.dataclass(frozen=True)
class Workdir:
    """A run's folder, which other processes change at any time."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics_file(self) -> Path:
        """File with the newest lines of the steps."""
        return self.path / metrics.FILE

    def logged(self) -> list[LoggedStep]:
        """Returns all steps in metrics.jsonl in the order of its lines, without lines that cannot be read."""
        logged_steps = []
        try:
            text = self.metrics_file.read_bytes()
        except OSError:
            return []
        # The last line may still be in the middle of being written.
        for line in text.rpartition(b"\n")[0].splitlines():
            try:
                # Floats as text, so that no bit is lost.
                values = json.loads(line, parse_float=str)
                logged_steps.append(LoggedStep(values["step"], values["loss_nats"], values["batch_hash"]))
            except (ValueError, KeyError, TypeError):
                continue
        return logged_steps

    def last_step(self) -> int:
        """Returns the highest logged step, 0 without one."""
        return max((step.step for step in self.logged()), default=0)

    def committed(self) -> tuple[int, ...]:
        """Returns the steps of the checkpoints that count as complete."""
        return files.steps(self.checkpoints)

    def newest_folder(self) -> int:
        """Returns the highest step that any folder is named after, complete or not; 0 without one."""
        # Folders of complete checkpoints have a number as their name.
        return max((int(path.name) for path in self._folders() if path.name.isdecimal()), default=0)

    def saving(self) -> tuple[Path, ...]:
        """Returns the folders of saves under way, or left by interrupted ones."""
        return tuple(
            # Damaged and doubtful ones were renamed by a run that looked at them.
            path
            for path in self._folders()
            if not path.name.isdecimal() and not _set_aside(path.name)
        )

    def sealed(self) -> tuple[Path, ...]:
        """Returns the folders of saves whose files and manifest are written, but which are not committed."""
        return tuple(path for path in self.saving() if (path / files.MANIFEST).exists())

    def deleting(self) -> tuple[Path, ...]:
        """Returns the folders of deletions under way."""
        return tuple(path for path in self._folders() if path.name.endswith(".deleted"))

    def _folders(self) -> list[Path]:
        try:
            return [Path(entry.path) for entry in os.scandir(self.checkpoints) if entry.is_dir()]
        # The folder comes with the first save.
        except OSError:
            return []

    def entries(self) -> frozenset[str]:
        """Returns the names in the workdir and in its folders, with N for each number."""
        paths = [*self.path.glob("*"), *self.path.glob("*/*")]
        return frozenset(re.sub(r"\d+", "N", str(path.relative_to(self.path))) for path in paths)

    def open_checkpoints(self, pid: int) -> list[Path]:
        """Returns the files of checkpoints that a process has open."""
        open_files = []
        folder = str(self.checkpoints.resolve())
        try:
            for entry in os.scandir(f"/proc/{pid}/fd"):
                target = os.readlink(entry.path)
                if target.startswith(folder):
                    open_files.append(Path(target))
        # The process ended, or closed the file meanwhile.
        except OSError:
            return []
        return open_files

    def digests(self, step: int, log: Path) -> dict[str, str]:
        """Returns leaf -> hash of its bytes, dtype and shape, for the state in the checkpoint of `step`."""
        # In a fork: reading starts JAX's backend, which the harness must not have.
        text = processes.in_fork(lambda: _print_digests(self.checkpoints / str(step) / files.STATE), log)
        return json.loads(text.splitlines()[-1])


@dataclasses.dataclass(frozen=True)
class StateBefore:
    """Workdir as a start finds it.

    part: kind of a sequence that starts it.
    due_step: newest step up to `logged_step` whose save may have begun: a save under way delays others.
    newest: highest step that any folder is named after.
    """

    part: int
    logged_step: int
    committed: int
    due_step: int
    newest: int

    @classmethod
    def of(cls, workdir: Workdir, part: int) -> "StateBefore":
        logged_step = workdir.last_step()
        under_way = [
            int(path.name.partition(".")[0]) for path in workdir.saving() if path.name[:1].isdecimal()
        ]
        due_step = min([logged_step // EVERY_STEPS * EVERY_STEPS, *under_way])
        committed = max(workdir.committed(), default=0)
        return cls(part, logged_step, committed, due_step, workdir.newest_folder())


def resumed_from(text: str) -> int | None:
    """Returns the step that an attempt's output says it resumed from; None if it began at step 0."""
    steps = re.findall(r"resumed from step (\d+)", text)
    # The last one: a supervised run prints one for each start.
    return int(steps[-1]) if steps else None


def _set_aside(name: str) -> bool:
    return re.search(r"\.(deleted|damaged|doubtful)", name) is not None


def _print_digests(path: Path) -> int:
    """Prints the hashes of all arrays at `path`, read as NumPy arrays without devices."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    # On a CPU, so that no accelerator is taken from a training.
    jax.config.update("jax_platforms", "cpu")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        tree = reader.metadata(path).item_metadata.tree
        restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        state = reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=restore_args))
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    digests = {}
    for keys, leaf in leaves:
        array = np.ascontiguousarray(leaf)
        # dtype and shape too: equal bytes of another dtype are another array.
        body = repr((array.dtype.name, array.shape)).encode() + array.tobytes()
        digests[jax.tree_util.keystr(keys, simple=True, separator=".")] = hashlib.blake2b(
            body, digest_size=16
        ).hexdigest()
    # A line of its own behind whatever Orbax prints.
    print("\n" + json.dumps(digests))
    return 0
