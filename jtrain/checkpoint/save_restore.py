"""Checkpoints of one run: asynchronous saves, retention, restore into any layout, and messages for every
failure.
"""

import dataclasses
import types
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.checkpoint import files, lost_history, removal, restoring
from jtrain.checkpoint.saving import Saves
from jtrain.errors import UserError
from jtrain.runtime import multihost
from jtrain.runtime.stores import in_store


@dataclasses.dataclass(frozen=True)
class CheckpointSpec:
    """Config of saves and retention.

    every_steps: save after each multiple of this many steps; None saves only at the end and when stopped.
    keep_last: number of newest checkpoints to keep. During a save there is one more on disk.
    keep_every_steps: keep the checkpoints of multiples of this step for ever; None keeps none.
    max_failures: saves that may fail in a row; the last of them ends the run.
    local_every_steps: also keep the state in the hosts' memory after each multiple of this many steps, two
      generations of it, and two of another host's: a restart then neither waits for the store nor loses an
      interval. None does not.
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


class Checkpoints(Saves):
    """Manager of the directory `workdir`/checkpoints. All processes of a run make the same calls in the same
    order.

        with Checkpoints(workdir, CheckpointSpec()) as checkpoints:
            checkpoints.save(step, state, data_state, config_text)  # returns when the arrays were copied
            checkpoints.wait()  # returns when the checkpoint is durable

    After a kill at any instant, the checkpoints committed before are intact and no partial one counts as
    complete. An older checkpoint is deleted only after the files of a newer one were read back from their
    final place. At most one save is in flight. A save that fails is said and tried again,
    `CheckpointSpec.max_failures` times.

    Leaving the `with` block by an exception also waits for a save in flight.

    layer_order: layer of the model at each place of the state's layers, -1 for none, where a pipeline
      reorders them (`jtrain.pipeline.pipeline_layout`). Checkpoints hold the model's own order, so that any
      run restores them.
    hold: while True, no checkpoint is deleted. Set it while numbers are suspicious.
    """

    def __init__(
        self, workdir: Path, spec: CheckpointSpec, *, layer_order: tuple[int, ...] | None = None
    ) -> None:
        super().__init__(
            # Absolute: a later chdir of user code must not move the checkpoints.
            (workdir if in_store(workdir) else workdir.absolute()) / "checkpoints",
            every_steps=spec.every_steps,
            max_failures=spec.max_failures,
            order=layer_order,
        )
        self.hold = False
        self._spec = spec

    def steps(self) -> tuple[int, ...]:
        """Returns the steps of the complete checkpoints, ascending."""
        return files.steps(self.folder)

    def latest_step(self) -> int | None:
        """Returns the newest complete checkpoint or None; every process gets the result of process 0."""
        newest = max(self.steps(), default=-1)
        # Process 0 decides: a file system may show a new folder to the others later. -1 stands for None.
        newest = int(multihost.from_process_zero(np.asarray(newest)))
        return None if newest < 0 else newest

    def start(
        self, like: Any, *, workdir: Path | None = None, from_scratch: bool = False
    ) -> restoring.Restored:
        """Reads the newest whole checkpoint, as `restoring.restore_newest`, and notes its step in the
        workdir.

        Args:
          workdir: folder of the run's other files; the checkpoints' parent if not given.
        """
        # A save in flight could still rename its folder into place while the restore lists the steps.
        self.wait_for_save()
        restored = restoring.restore_newest(self.folder, like, from_scratch=from_scratch, order=self._order)
        # After the restore: the note must name the step that really was read.
        lost_history.begin(workdir or self.folder.parent, self.folder, restored)
        return restored

    def restore(self, step: int, like: Any, *, verify: bool = True) -> tuple[Any, dict[str, Any]]:
        """Reads the state and data state of a checkpoint; see `restoring.restore`."""
        self.wait_for_save()
        return restoring.restore(self.folder, step, like, verify=verify, order=self._order)

    def restore_part(
        self, step: int, like: dict[str, Any], *, verify: bool = True, whole: bool = True
    ) -> dict[str, Any]:
        """Reads some branches of the state, such as `{"params": ...}`, and no others; see
        `restoring.restore_part`.
        """
        self.wait_for_save()
        options: Any = dict(verify=verify, whole=whole, order=self._order)
        return restoring.restore_part(self.folder, step, like, **options)

    def data_state(self, step: int) -> dict[str, Any]:
        """Returns the data state that was saved with `step`."""
        return restoring.read_data_state(self.folder, step)

    def config_text(self, step: int) -> str:
        """Returns the flat config of the run that saved `step`; raises CheckpointError if it does not
        exist.
        """
        self.wait_for_save()
        path, _ = restoring.open_step(self.folder, step, verify=False)
        return (path / files.CONFIG).read_text()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        # After an exception the other processes may be gone: `close` must not wait for them without end.
        self.close(abandon=error is not None)

    def _prune(self) -> None:
        """Deletes surplus checkpoints. Runs right after the newest one was read back, so that one always
        stays.
        """
        if self.hold:
            return
        keep = {"keep_last": self._spec.keep_last, "keep_every_steps": self._spec.keep_every_steps}
        # By the list on the disk, not by a memory of what was saved: a restart or a user may have changed it.
        for step in removal.surplus_steps(self.steps(), **keep):
            removal.delete(self.folder, step)
