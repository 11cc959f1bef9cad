"""Checkpoints of one run: asynchronous saves, retention, restore into any layout, and messages for every failure."""

import contextlib
import dataclasses
import json
import shutil
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.checkpoint import files, history, restoring
from jtrain.checkpoint.files import CheckpointError, ManifestLeaf
from jtrain.errors import UserError
from jtrain.runtime import multihost


@dataclasses.dataclass(frozen=True)
class CheckpointSpec:
    """Config of saves and retention.

    every_steps: save after each multiple of this many steps; None saves only at the end and when stopped.
    keep_last: number of newest checkpoints to keep. During a save there is one more on disk.
    keep_every_steps: keep the checkpoints of multiples of this step for ever; None keeps none.
    local_every_steps: also keep the state in the hosts' memory after each multiple of this many steps, two generations
      of it, and two of another host's: a restart then neither waits for the store nor loses an interval. None does not.
    local_dir: folder in memory (tmpfs) for them; None is /dev/shm.
    """

    every_steps: int | None = 1000
    keep_last: int = 2
    keep_every_steps: int | None = None
    local_every_steps: int | None = None
    local_dir: str | None = None

    def __post_init__(self) -> None:
        for field, way_out in (
            ("every_steps", " or None to save only at the end and when stopped"),
            ("keep_last", ": the newest checkpoint is never deleted"),
            ("keep_every_steps", " or None to keep none beyond checkpoint.keep_last"),
            ("local_every_steps", " or None to keep no state in local memory"),
        ):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise UserError(f"checkpoint.{field}={value} must be at least 1{way_out}.")


class Checkpoints:
    """Manager of the directory `workdir`/checkpoints. All processes of a run make the same calls in the same order.

        with Checkpoints(workdir, CheckpointSpec()) as checkpoints:
            checkpoints.save(step, state, data_state, config_text)  # returns when the arrays are on the host
            checkpoints.wait()  # returns when the checkpoint is durable

    After a kill at any instant, the checkpoints committed before are intact and no partial one counts as complete. An
    older checkpoint is deleted only after a newer one was committed. At most one save is in flight.

    Leaving the `with` block by an exception also waits for a save in flight.
    """

    def __init__(self, workdir: Path, spec: CheckpointSpec) -> None:
        self.folder = workdir.absolute() / "checkpoints"
        self._spec = spec
        self._writer: Any = None  # orbax_io.Writer, made by prepare() because its module imports orbax
        self._saving: _Saving | None = None
        self.hold = False
        """True while numbers are suspicious: no checkpoint is deleted."""

    def prepare(self) -> None:
        """Imports orbax (0.8 s), makes the directory and removes leftovers, so that the first save is fast.

        Call it before training, while a device is busy: it also finds out early if the directory is not writable.

        Raises:
          CheckpointError: the directory cannot be written to.
        """
        if self._writer is not None:
            return
        from jtrain.checkpoint import orbax_io

        with self._explained("cannot be written to"):
            if multihost.process_index() == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                probe = self.folder / "writable.deleted"
                probe.mkdir(exist_ok=True)
                probe.rmdir()
                files.sweep(self.folder)
        self._writer = orbax_io.Writer(seal=self._seal, after=self._prune)

    def steps(self) -> tuple[int, ...]:
        """Returns the steps of the complete checkpoints, ascending."""
        return files.steps(self.folder)

    def latest_step(self) -> int | None:
        """Returns the newest complete checkpoint or None; every process gets the result of process 0."""
        newest = max(self.steps(), default=-1)
        newest = int(multihost.from_process_zero(np.asarray(newest)))
        return None if newest < 0 else newest

    def save(self, step: int, state: Any, data_state: dict[str, Any], config_text: str) -> bool:
        """Saves in the background; returns when `state` may be donated or deleted.

        Waits for the previous save first.

        Args:
          step: number of completed updates.
          state: a pytree of jax.Arrays.
          data_state: position in the data stream, as JSON values.
          config_text: the run's flat config.

        Returns:
          False if a complete checkpoint of this step exists already, for example after a crash between its commit and
          the next step; it stays unchanged.

        Raises:
          CheckpointError: this save cannot start, or the previous one failed in the background.
          TypeError, ValueError: data_state cannot be written as JSON.
        """
        data = json.dumps(data_state, allow_nan=False)
        self.prepare()
        self.wait()
        if multihost.from_process_zero(np.asarray(step in self.steps())):
            return False
        from jtrain.checkpoint import orbax_io

        leaves = orbax_io.leaves(state)
        self._saving = _Saving(step, leaves, data, config_text, orbax_io.written_by_process(state))
        with self._saved():
            # A directory of this name without a manifest is an unfinished copy by a user.
            self._writer.save(self.folder / str(step), state, force=(self.folder / str(step)).exists())
        return True

    def check(self) -> None:
        """Raises the error of a background save that failed since the last call; otherwise returns at once."""
        if self._writer is not None:
            with self._saved():
                self._writer.check()

    def wait(self) -> None:
        """Returns when the last save is durable: committed and synced to the disk.

        Raises:
          CheckpointError: the save failed. Earlier checkpoints are unchanged.
        """
        if self._writer is not None and self._saving is not None:
            with self._saved():
                self._writer.wait()
            self._saving = None

    def start(self, like: Any, *, workdir: Path | None = None, from_scratch: bool = False) -> restoring.Restored:
        """Reads the newest whole checkpoint, as `restoring.restore_newest`, and notes its step in the workdir.

        Args:
          workdir: folder of the run's other files; the checkpoints' parent if not given.
        """
        self.wait()
        found = restoring.restore_newest(self.folder, like, from_scratch=from_scratch)
        if multihost.process_index() == 0:
            if found.state is None and found.said:
                history.move_history(workdir or self.folder.parent)
            files.note_commit(self.folder, None if found.state is None else found.step)
        return found

    def restore(self, step: int, like: Any, *, verify: bool = True) -> tuple[Any, dict[str, Any]]:
        """Reads the state and data state of a checkpoint; see `restoring.restore`."""
        self.wait()
        return restoring.restore(self.folder, step, like, verify=verify)

    def restore_part(self, step: int, like: dict[str, Any], *, verify: bool = True) -> dict[str, Any]:
        """Reads some branches of the state, such as `{"params": ...}`, and no others; see `restoring.restore`."""
        self.wait()
        return restoring.restore_part(self.folder, step, like, verify=verify)

    def data_state(self, step: int) -> dict[str, Any]:
        """Returns the data state that was saved with `step`."""
        return restoring.read_data_state(self.folder, step)

    def config_text(self, step: int) -> str:
        """Returns the flat config of the run that saved `step`; raises CheckpointError if it does not exist."""
        self.wait()
        path, _ = restoring.open_step(self.folder, step, verify=False)
        return (path / files.CONFIG).read_text()

    def close(self) -> None:
        """Waits for the last save, then ends all threads.

        Raises:
          CheckpointError: the last save failed.
        """
        try:
            self.wait()
        finally:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.close()

    def _seal(self, path: Path) -> None:
        saving = self._saving
        assert saving is not None
        files.seal(
            path,
            step=saving.step,
            leaves=saving.leaves,
            data=saving.data,
            config=saving.config,
            written=saving.written,
        )

    def _prune(self) -> None:
        """Notes the commit and deletes surplus checkpoints. Runs right after a commit, so the newest one stays."""
        assert self._saving is not None
        with contextlib.suppress(OSError):  # the note of an earlier commit serves as well
            files.note_commit(self.folder, self._saving.step)
        if self.hold:
            return
        keep = {"keep_last": self._spec.keep_last, "keep_every_steps": self._spec.keep_every_steps}
        for step in files.surplus(self.steps(), **keep):
            files.delete(self.folder, step)

    @contextlib.contextmanager
    def _saved(self) -> Iterator[None]:
        """Wraps calls that may raise the error of a save: explains it, and removes what the save left."""
        step = f" of step {self._saving.step}" if self._saving else ""
        try:
            with self._explained(f"cannot take the checkpoint{step}"):
                yield
        except CheckpointError:
            self._saving = None
            if multihost.process_index() == 0:
                files.sweep(self.folder)
            raise

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # Orbax and TensorStore raise many types, OSError and ValueError among them
            raise CheckpointError(
                f"{self.folder} {what} ({type(error).__name__}: {error}).{self._room()}{self._left()}"
            ) from error

    def _room(self) -> str:
        there = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        need = f" The state has {_gib(self._saving.state_bytes)}," if self._saving else ""
        free = _gib(shutil.disk_usage(there).free)
        return f"{need} {free} are free on this disk. Fix the cause, or choose another --workdir."

    def _left(self) -> str:
        there = self.steps()
        if not there:
            return " No checkpoint was written before."
        return f" Earlier checkpoints are untouched: steps {', '.join(map(str, there))}."


@dataclasses.dataclass(frozen=True)
class _Saving:
    """Files beside the arrays, of the save in flight."""

    step: int
    leaves: dict[str, ManifestLeaf]
    data: str
    config: str
    written: tuple[int, ...]

    @property
    def state_bytes(self) -> int:
        return sum(leaf.bytes for leaf in self.leaves.values())


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
