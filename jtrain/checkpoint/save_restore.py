"""Checkpoints of one run: asynchronous saves, retention, restore into any layout, and messages for every failure."""

import dataclasses
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.checkpoint import files, lost_history, restoring
from jtrain.checkpoint.saving import Saves
from jtrain.errors import UserError
from jtrain.runtime import multihost
from jtrain.runtime.store_paths import in_store


@dataclasses.dataclass(frozen=True)
class CheckpointSpec:
    """Config of saves and retention.

    every_steps: save after each multiple of this many steps; None saves only at the end and when stopped.
    keep_last: number of newest checkpoints to keep. During a save there is one more on disk.
    keep_every_steps: keep the checkpoints of multiples of this step for ever; None keeps none.
    max_failures: saves that may fail in a row; the last of them ends the run.
    local_every_steps: also keep the state in the hosts' memory after each multiple of this many steps, two generations
      of it, and two of another host's: a restart then neither waits for the store nor loses an interval. None does not.
    local_dir: folder in memory (tmpfs) for them; None is /dev/shm.
    """

    every_steps: int | None = 1000
    keep_last: int = 2
    keep_every_steps: int | None = None
    max_failures: int = 3
    local_every_steps: int | None = None
    local_dir: str | None = None

    def __post_init__(self) -> None:
        for field, way_out in (
            ("every_steps", " or None to save only at the end and when stopped"),
            ("keep_last", ": the newest checkpoint is never deleted"),
            ("keep_every_steps", " or None to keep none beyond checkpoint.keep_last"),
            ("max_failures", ": 1 ends the run at the first save that fails"),
            ("local_every_steps", " or None to keep no state in local memory"),
        ):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise UserError(f"checkpoint.{field}={value} must be at least 1{way_out}.")


class Checkpoints:
    """Manager of the directory `workdir`/checkpoints. All processes of a run make the same calls in the same order.

        with Checkpoints(workdir, CheckpointSpec()) as checkpoints:
            checkpoints.save(step, state, data_state, config_text)  # returns when the arrays are copied or written
            checkpoints.wait()  # returns when the checkpoint is durable

    After a kill at any instant, the checkpoints committed before are intact and no partial one counts as complete. An
    older checkpoint is deleted only after the files of a newer one were read back from their final place. At most one
    save is in flight. A save that fails is said and tried again, `CheckpointSpec.max_failures` times.

    Leaving the `with` block by an exception also waits for a save in flight.

    layer_order: layer of the model at each place of the state's layers, -1 for none, where a pipeline reorders them
      (`jtrain.pipeline.pipeline_layout`). Checkpoints hold the model's own order, so that any run restores them.
    hold: while True, no checkpoint is deleted. Set it while numbers are suspicious.
    """

    def __init__(self, workdir: Path, spec: CheckpointSpec, *, layer_order: tuple[int, ...] | None = None) -> None:
        self.folder = (workdir if in_store(workdir) else workdir.absolute()) / "checkpoints"
        self.hold = False
        self._spec = spec
        self._order = layer_order
        self._saves = Saves(
            self.folder,
            every_steps=spec.every_steps,
            max_failures=spec.max_failures,
            prune=self._prune,
            order=layer_order,
        )

    def prepare(self) -> None:
        """Imports orbax (0.8 s), makes the directory and removes leftovers, so that the first save is fast.

        Call it before training, while a device is busy: it also finds out early if the directory is not writable.

        Raises:
          CheckpointError: the directory cannot be written to.
        """
        self._saves.prepare()

    def say_with(self, say: Callable[[str], None]) -> None:
        """Sets the function that prints warnings about saves; without it, they go to stderr."""
        self._saves.say = say

    def steps(self) -> tuple[int, ...]:
        """Returns the steps of the complete checkpoints, ascending."""
        return files.steps(self.folder)

    def latest_step(self) -> int | None:
        """Returns the newest complete checkpoint or None; every process gets the result of process 0."""
        newest = max(self.steps(), default=-1)
        newest = int(multihost.from_process_zero(np.asarray(newest)))
        return None if newest < 0 else newest

    def due(self, step: int) -> bool:
        """True if a save is due after `step`: every `every_steps`; after a failed save, at the step of its next try."""
        return self._saves.due(step)

    def save(self, step: int, state: Any, data_state: dict[str, Any], config_text: str, *, last: bool = False) -> bool:
        """Saves in the background; returns when `state` may be donated or deleted.

        Waits for the previous save first.

        Args:
          step: number of completed updates.
          state: a pytree of jax.Arrays.
          data_state: position in the data stream, as JSON values.
          config_text: the run's flat config.
          last: no step follows, so `state` stays as it is and `wait` may try this save again.

        Returns:
          False if nothing was started: a complete checkpoint of this step exists already, for example after a crash
          between its commit and the next step, and stays unchanged; or the previous save has just been found to have
          failed, and its next try is later.

        Raises:
          CheckpointError: the previous save failed, as the last of `max_failures` in a row; or the directory cannot be
            written to at the first save.
          TypeError, ValueError: data_state cannot be written as JSON.
        """
        return self._saves.save(step, state, data_state, config_text, last=last)

    def check(self, step: int) -> None:
        """Says if the save in flight has failed, and when it will be tried again; otherwise returns at once.

        With several processes and a save in flight, all agree on whether it has ended, which waits for the devices.

        Args:
          step: number of completed updates.

        Raises:
          CheckpointError: it was the last of `max_failures` in a row.
        """
        self._saves.check(step)

    def wait(self) -> None:
        """Returns when the last save is durable: committed, synced to the disk and read back.

        Tries a save that was the `last` again, `max_failures` times in all.

        Raises:
          CheckpointError: the save failed. Earlier checkpoints are unchanged.
        """
        self._saves.wait()

    def settle(self) -> None:
        """Returns when no save is in flight. Says if it has failed, and raises nothing: `check` decides about that."""
        self._saves.settle(fatal=False)

    def start(self, like: Any, *, workdir: Path | None = None, from_scratch: bool = False) -> restoring.Restored:
        """Reads the newest whole checkpoint, as `restoring.restore_newest`, and notes its step in the workdir.

        Args:
          workdir: folder of the run's other files; the checkpoints' parent if not given.
        """
        self.settle()
        found = restoring.restore_newest(self.folder, like, from_scratch=from_scratch, order=self._order)
        lost_history.begin(workdir or self.folder.parent, self.folder, found)
        return found

    def restore(self, step: int, like: Any, *, verify: bool = True) -> tuple[Any, dict[str, Any]]:
        """Reads the state and data state of a checkpoint; see `restoring.restore`."""
        self.settle()
        return restoring.restore(self.folder, step, like, verify=verify, order=self._order)

    def restore_part(self, step: int, like: dict[str, Any], *, verify: bool = True) -> dict[str, Any]:
        """Reads some branches of the state, such as `{"params": ...}`, and no others; see `restoring.restore`."""
        self.settle()
        return restoring.restore_part(self.folder, step, like, verify=verify)

    def data_state(self, step: int) -> dict[str, Any]:
        """Returns the data state that was saved with `step`."""
        return restoring.read_data_state(self.folder, step)

    def config_text(self, step: int) -> str:
        """Returns the flat config of the run that saved `step`; raises CheckpointError if it does not exist."""
        self.settle()
        path, _ = restoring.open_step(self.folder, step, verify=False)
        return (path / files.CONFIG).read_text()

    def close(self) -> None:
        """Waits for the last save, then ends all threads.

        Raises:
          CheckpointError: the last save failed.
        """
        self._saves.close(abandon=False)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._saves.close(abandon=error is not None)

    def _prune(self) -> None:
        """Deletes surplus checkpoints. Runs right after the newest one was read back, so that one always stays."""
        if self.hold:
            return
        keep = {"keep_last": self._spec.keep_last, "keep_every_steps": self._spec.keep_every_steps}
        for step in files.surplus(self.steps(), **keep):
            files.delete(self.folder, step)
