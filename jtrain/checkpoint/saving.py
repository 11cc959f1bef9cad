"""Saves of one run: when they are due, their failures and retries. All processes make the same calls in the
same order.

A save that fails does not end the run: it is said once, loudly, and tried again after 1/16 of the interval
between saves, then after 2/16, and so on. `checkpoint.max_failures` in a row end the run. The save at the end
of a run has no later steps to wait for: it is tried again after seconds.
"""

import concurrent.futures
import itertools
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jtrain.checkpoint import files, removal
from jtrain.checkpoint.files import CheckpointAwayError, CheckpointError, gib
from jtrain.runtime import multihost
from jtrain.runtime.atomic_io import tells_away
from jtrain.runtime.retry import Backoff
from jtrain.runtime.stores import error_line, in_store, is_silent_text
from jtrain.runtime.workdir_lock import WorkdirLock

if TYPE_CHECKING:
    from jtrain.checkpoint.layer_order import LayerOrder
    from jtrain.checkpoint.save_task import SaveTask

LAST_RETRY = Backoff(2.0)
"""Pause before the save at the end of a run is tried again; each next one is twice as long. Schedulers grant
some 30 s between their warning and the end."""
ABANDON_S = 60.0
"""How long a run of several processes that ends by an error waits for its save in flight."""

_FRACTION = 16
_attempts = itertools.count()  # of all saves in this process; the same in all processes, which save together


class Saves:
    """Saves into `folder`, one at a time, in the background.

    say: prints a warning about a save, to stderr unless it is set; called in the thread that trains.
    lock: the run's hold of its workdir, asked before each commit and deletion; None where nothing else
      writes.
    order: layers of the state at the places of a pipeline's stages; None if they are those of the model.
    """

    def __init__(
        self,
        folder: Path,
        *,
        every_steps: int | None,
        max_failures: int,
        order: "LayerOrder | None" = None,
    ) -> None:
        self.folder = folder
        self.say: Callable[[str], None] = _print
        self.lock: WorkdirLock | None = None
        self._every_steps = every_steps
        self._max_failures = max_failures
        self._order = order
        self.task: SaveTask | None = None
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._failures = 0
        self._retry_step: int | None = None
        self._last: tuple[int, Any, str, str] | None = None

    def prepare(self) -> None:
        """Imports orbax (0.8 s), makes the directory and removes leftovers, so that the first save is fast.

        Call it before training, while a device is busy: it also finds out early if the directory is not
        writable.

        Raises:
          CheckpointError: the directory cannot be written to.
        """
        if self._pool is not None:
            return
        from jtrain.checkpoint import array_writer  # lazy, as everywhere here: imports orbax

        try:
            if multihost.process_index() == 0:
                if not in_store(self.folder):
                    self.folder.mkdir(parents=True, exist_ok=True)
                    # `.deleted`, so that `sweep` removes it if a kill falls between the two lines.
                    probe = self.folder / "writable.deleted"
                    probe.mkdir(exist_ok=True)
                    probe.rmdir()
                if self.lock is not None:
                    self.lock.check(confirm=True)
                # After the probe, in process 0 alone: no save is in
                # flight yet that could own a partial folder.
                removal.sweep(self.folder)
        except Exception as error:  # clients of stores raise many types
            raise CheckpointError(
                f"{self.folder} cannot be written to "
                f"({error_line(error)}).{self._room_text()}{self._kept_text()}"
            ) from error
        # Copies, for the time in which the threads that write wait for the disk: what those can write from
        # the state's memory takes a fifth less CPU time than a copy that is written later.
        self._pool = array_writer.open_pool(low=True)

    @property
    def step_in_flight(self) -> int | None:
        """Step of the save in flight or just ended; None if there is none, or it has failed."""
        return None if self.task is None or self.task.failure else self.task.contents.step

    def should_save(self, step: int) -> bool:
        """True if a save is due after `step`: every `every_steps`; after a failed save, at the step of its
        next try.
        """
        every = self._every_steps
        if self._retry_step is not None:
            return step >= self._retry_step
        return every is not None and step % every == 0

    def save(
        self, step: int, state: Any, data_state: dict[str, Any], config_text: str, *, last: bool = False
    ) -> bool:
        """Saves in the background; returns when `state` may be donated or deleted.

        Waits for the previous save first.

        Args:
          step: number of completed updates.
          state: a pytree of jax.Arrays.
          data_state: position in the data stream, as JSON values.
          config_text: the run's flat config.
          last: no step follows, so `state` stays as it is and `wait` may try this save again.

        Returns:
          False if nothing was started: a complete checkpoint of this step exists already, for example after a
          crash between its commit and the next step, and stays unchanged; or the previous save has just been
          found to have failed, and its next try is later.

        Raises:
          CheckpointError: the previous save failed, as the last of `max_failures` in a row; or the directory
            cannot be written to at the first save.
          TypeError, ValueError: data_state cannot be written as JSON.
        """
        # First: a data state that cannot be written is the caller's error, and must not cost a save its turn.
        data = json.dumps(data_state, allow_nan=False)
        self.prepare()
        # At most one save is in flight: two would need twice the memory of the copies.
        self._finish_save(step, fatal=not last)
        if not last and self._retry_step is not None and not self.should_save(step):
            # The save before has just been found to have failed: this one would meet the same full disk.
            return False
        # If not known, the save says why.
        existing_steps = self._steps() or () if multihost.process_index() == 0 else ()
        # Process 0 decides for all: a shared disk may show them different listings.
        if multihost.from_process_zero(np.asarray(step in existing_steps)):
            self._failures, self._retry_step = 0, None
            return False
        self._last = (step, state, data, config_text) if last else None
        self._start(step, state, data, config_text)
        return True

    def check(self, step: int) -> None:
        """Says if the save in flight has failed, and when it will be tried again; otherwise returns at once.

        With several processes and a save in flight, all agree on whether it has ended, which waits for the
        devices.

        Args:
          step: number of completed updates.

        Raises:
          CheckpointError: it was the last of `max_failures` in a row.
        """
        # The last save is `wait`'s: it retries at once, where no step follows.
        if self.task is None or self._last is not None:
            return
        running = not self.task.ended
        # A save ends at its own time in each process; all must count a failure at the same step.
        if multihost.process_count() > 1:
            (running,) = multihost.agree(running)
        if not running:
            self._finish_save(step)

    def wait_for_save(self) -> None:
        """Returns when no save is in flight. Says if it has failed, and raises nothing: `check` decides about
        that.
        """
        self._finish_save(fatal=False)

    def _finish_save(self, step: int | None = None, *, fatal: bool = True) -> None:
        """Waits for the save in flight, if there is one. A failure is said and counted.

        Args:
          step: number of steps completed by now, from which the step of the next try is counted.
          fatal: raises at the last failure of `max_failures` in a row.
        """
        task = self._join_task()
        if task is None:
            return
        if task.failure is None:
            self._failures, self._retry_step = 0, None
            return
        self._failures += 1
        # 1/16 of the interval, doubled at each failure: 1000 steps give 62, 124, 248.
        pause = max(1, (self._every_steps or _FRACTION) // _FRACTION) * 2 ** (self._failures - 1)
        # From the step by now: the failed save's own may be long past.
        self._retry_step = (task.contents.step if step is None else step) + pause
        max_failures = self._max_failures
        if fatal and self._failures >= max_failures:
            times = (
                ""
                if max_failures == 1
                else f" {max_failures} saves in a row failed (checkpoint.max_failures={max_failures})."
            )
            raise self._failed(task, f"{self._failure_text(task)}{times}{self._resume_text()}")
        self.say(
            f"WARNING: {self._failure_text(task)} Training goes on, and the next try is after step "
            f"{self._retry_step}: this was failure {self._failures}, and "
            f"checkpoint.max_failures={max_failures} in a row end the run."
        )

    def wait(self) -> None:
        """Returns when the last save is durable: committed, synced to the disk and read back.

        Tries a save that was the `last` again, `max_failures` times in all.

        Raises:
          CheckpointError: the save failed. Earlier checkpoints are unchanged.
        """
        max_failures = self._max_failures
        for failures in itertools.count(1):
            task = self._join_task()
            if task is None or task.failure is None:
                break
            # `failures` counts tries of this save, `_failures` saves in a row.
            if self._last is None or failures >= max_failures:
                self._last = None
                times = f" It was tried {failures} times." if failures > 1 else ""
                raise self._failed(task, f"{self._failure_text(task)}{times}{self._resume_text()}")
            pause = LAST_RETRY.wait_s(failures)
            self.say(
                f"WARNING: {self._failure_text(task)} The next try is in {pause:.0f} s, {failures} of "
                f"{max_failures} failed."
            )
            time.sleep(pause)  # a full disk may have room by then
            self._start(*self._last)
        self._last = None

    def close(self, *, abandon: bool = False) -> None:
        """Ends the threads, after the save in flight.

        Args:
          abandon: gives a save of several processes `ABANDON_S`: the others may be gone, and it would never
            end.

        Raises:
          CheckpointError: the save failed, and is not abandoned.
        """
        try:
            if not abandon:
                self.wait()
            elif self.task is not None:
                # A process on its own is never left waiting, so its save may take its time.
                self.task.join(ABANDON_S if multihost.process_count() > 1 else None)
                task, self.task = self.task, None
                if not task.ended or task.failure is not None:
                    self.say(f"WARNING: {self._failure_text(task)}")
        finally:
            pool, self._pool = self._pool, None
            if pool is not None:
                pool.shutdown()

    def _prune(self) -> None:
        """Deletes surplus checkpoints, after a newer one was read back."""

    def _start(self, step: int, state: Any, data: str, config_text: str) -> None:
        from jtrain.checkpoint import array_files, host_copy, layer_order, save_task

        assert self._pool is not None
        leaves = array_files.leaves(layer_order.checkpoint_shapes(state, self._order))
        contents = save_task.Contents(
            step, leaves, layer_order.describe_leaves(state, self._order), data, config_text
        )
        chunks = host_copy.StateChunks(state, layer_order.splitter(self._order))
        # A store is slow: all is copied first, so that training waits for memory and not for the network.
        if in_store(self.folder):
            chunks.copy(self._pool)
        # The task's threads start to write at once, from the front; `release` copies from the back.
        self.task = save_task.SaveTask(
            self.folder,
            contents,
            chunks,
            attempt=next(_attempts),
            background=self._last is None,
            prune=self._prune,
            lock=self.lock,
        )
        # Returns when the state's memory is read no more: the caller donates it to the next step.
        chunks.release(self._pool)

    def _join_task(self) -> "SaveTask | None":
        """Returns the save that was in flight, after its end."""
        task, self.task = self.task, None
        if task is None:
            return None
        task.join()
        if task.warning is not None:
            self.say(f"WARNING: {task.warning}.")
        return task

    def _failed(self, task: "SaveTask", message: str) -> CheckpointError:
        # By its text, which all processes have: they must end with one code.
        reason = task.failure or ""
        is_away = tells_away(reason) or (in_store(self.folder) and is_silent_text(reason))
        return (CheckpointAwayError if is_away else CheckpointError)(message)

    def _failure_text(self, task: "SaveTask") -> str:
        state_bytes = sum(leaf.bytes for leaf in task.contents.leaves.values())
        reason = task.failure or f"no end within {ABANDON_S:.0f} s"
        return (
            f"{self.folder} cannot take the checkpoint of step {task.contents.step} ({reason}). The state "
            f"has {gib(state_bytes)},{self._room_text()}{self._kept_text()}"
        )

    def _room_text(self) -> str:
        if in_store(self.folder):
            return " Check the store and the credentials for it, or choose another --workdir."
        # The folder itself may be missing, which is why the save failed: its disk is that of a parent.
        existing_folder = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        free_text = gib(shutil.disk_usage(existing_folder).free)
        return f" {free_text} are free on this disk. Fix the cause, or choose another --workdir."

    def _steps(self) -> tuple[int, ...] | None:
        """Returns the steps of the complete checkpoints, or None if the disk or store does not tell them."""
        try:
            return files.steps(self.folder)
        except Exception:  # clients of stores raise many types
            return None

    def _kept_text(self) -> str:
        complete_steps = self._steps()
        if complete_steps is None:
            return " Earlier checkpoints are untouched, but cannot be listed now."
        if not complete_steps:
            return " No checkpoint was written before."
        return f" Earlier checkpoints are untouched: steps {', '.join(map(str, complete_steps))}."

    def _resume_text(self) -> str:
        complete_steps = self._steps()
        newest = (
            "its newest checkpoint" if complete_steps is None else f"step {max(complete_steps, default=0)}"
        )
        return f" The same command goes on from {newest}."


def _print(line: str) -> None:
    if multihost.process_index() == 0:
        print(line, file=sys.stderr, flush=True)
