"""Bad steps: what a run does after an update that was not applied, or a new state that is not finite.

    found       the update was not applied, and the next batch is used; a single bad step under
                guard.on_bad=skip has no other consequence
    went back   to the last good checkpoint, in this process; the same steps run again with the same batches
                (replay)
    repeats     the replay gave the same bits, or the same but for noise if the first step, run twice, has
                shown that bits do not repeat (`noise_floor.py`): the data or the arithmetic is bad. Those
                batches are left out for good
    differs     the replay gave other numbers than that: a device computes wrongly, and the process ends with
                `HardwareFault`

Every entry is a line of `bad_steps.jsonl` in the workdir. The batches to leave out are read from it at each
start, so that a killed run leaves out the same ones. On a full disk entries wait in memory; a run that loses
them finds the same bad steps again. All processes see the same numbers, and decide the same.
"""

import contextlib
import dataclasses
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jtrain.checkpoint import Checkpoints, files, removal
from jtrain.errors import HardwareFault, UserError, first_few
from jtrain.runtime.multihost import from_process_zero, gather
from jtrain.runtime.stores import error_line
from jtrain.step.guard import LEFT_OUT, NAMES, WINDOW, GuardSpec, StepNumbers
from jtrain.telemetry.append_file import AppendFile
from jtrain.telemetry.metrics import BAD_STEPS, encode
from jtrain.train.bad_steps.decisions_file import read_decisions
from jtrain.train.bad_steps.noise_floor import NoiseFloor, finite_alike

CALM_STEPS = 16
"""Steps after a bad one in which no checkpoint is deleted."""

_MOST_RECORDS = 8192
"""Steps whose numbers are kept for a comparison with a replay."""

_HOST_BYTES = 64


class BadNumbers(UserError):
    """The run ends because of bad numbers.

    step: completed updates, this one included.
    names: the metrics that are bad; `state` for the new state.
    """

    def __init__(self, message: str, *, step: int, names: tuple[str, ...]) -> None:
        super().__init__(message)
        self.step = step
        self.names = names


class WentBack(Exception):
    """Signal to the loop: steps go on from the last good checkpoint, `BadSteps.origin`."""


class BadSteps:
    """Decides after each step; made once per attempt, which closes it. All processes make the same calls.

    Args:
      workdir: where `bad_steps.jsonl` is.
      say: prints a line.
      alert: sends an alert, as `Metrics.alert`.
    """

    def __init__(
        self,
        spec: GuardSpec,
        workdir: Path,
        mesh: Mesh,
        checkpoints: Checkpoints,
        say: Callable[[str], None],
        alert: Callable[..., None],
    ) -> None:
        self._spec = spec
        self._file = workdir / BAD_STEPS
        self._entries = AppendFile(self._file, say=say, durable=True)
        self._mesh = mesh
        self._checkpoints = checkpoints
        self._say = say
        self._alert = alert
        self._records: dict[int, StepNumbers] = {}
        self._bad: set[int] = set()  # steps of this attempt, without those that a replay has settled
        self._until: int | None = None
        self._origin, self.noise = 0, NoiseFloor()  # the noise is measured by the first step
        self.left_out, self.since, self._returns = read_decisions(self._file, say)

    def begin(self, first: StepNumbers, second: StepNumbers, noise: NoiseFloor) -> None:
        """Takes the two passes over the first step, which say what later replays may conclude.

        Raises:
          HardwareFault: only one of them was finite, which no order of sums explains.
        """
        self.noise = noise
        # The first pass made no new state: that of the second is judged with the step itself.
        without_state = dataclasses.replace(second, by_device=second.by_device * np.array([1, 0], np.float32))
        if not finite_alike(first, without_state):
            self._origin = second.step - 1
            raise self._fault_error(first, second)

    def close(self) -> None:
        """Writes the entries that wait for room on the disk, or says that they are lost."""
        self._entries.close()

    @property
    def origin(self) -> int:
        """Step of the checkpoint from which the steps go on after `WentBack`; 0 for the start."""
        return self._origin

    def in_doubt(self, step: int) -> bool:
        """True if the numbers of `step` were bad and no replay has repeated them: its state is not to be
        saved.
        """
        return step in self._bad

    def check(
        self,
        numbers: StepNumbers,
        *,
        dispatched: int,
        last: bool,
        documents: Callable[[], dict[str, list[str]]],
    ) -> None:
        """Decides what follows from the numbers of a step.

        Args:
          dispatched: the last step that the devices have been given.
          last: no step follows this one.
          documents: looks up the documents of the step's batch by source; {} if they are not known.

        Raises:
          BadNumbers: the run ends here.
          WentBack: steps go on from `origin`.
          HardwareFault: a replay differs from the first pass.
        """
        step = numbers.step
        first_numbers = self._records.get(step)
        # Before it is recorded: the first pass's numbers stay as the evidence.
        if first_numbers is not None and not self.noise.agree(first_numbers, numbers):
            raise self._fault_error(first_numbers, numbers)
        self._record(numbers)
        bad_names = numbers.bad
        # A replay has judged the steps up to `since`: their loss and norm may be bad, their new state not.
        if bad_names and first_numbers is None and (step > self.since or "state" in bad_names):
            self._bad.add(step)
            self._handle_bad_step(numbers, dispatched=dispatched, last=last, documents=documents)
        # After the step itself was judged: the replay may end at the same step.
        if self._until is not None and step >= self._until:
            self._finish_replay(numbers, dispatched)
        # While numbers are suspicious every checkpoint stays: one of them is the point to go back to.
        self._checkpoints.hold = self._until is not None or any(
            step - CALM_STEPS < bad_step for bad_step in self._bad
        )

    def _handle_bad_step(
        self, numbers: StepNumbers, *, dispatched: int, last: bool, documents: Callable[[], Any]
    ) -> None:
        """Writes down a new bad step; ends the run or goes back where the spec says so."""
        step, spec = numbers.step, self._spec
        recent = sum(step - WINDOW < bad_step for bad_step in self._bad)
        device_names = self._name_devices(numbers.strange_devices)
        # All processes build the same text, since they have the same numbers.
        reason = (
            f"{' and '.join(numbers.bad)} bad at step {step}: {numbers.shown}; "
            f"batch_hash={numbers.batch_hash}"
        )
        reason += (
            f"; not finite on {device_names}"
            if device_names and len(numbers.strange_devices) < len(numbers.by_device)
            else ""
        )
        finite = "state" not in numbers.bad and bool(np.isfinite(numbers.values).all())
        # The alert goes out before the run ends or goes back: this process may never come to a later line.
        self._alert(
            "spike" if finite else "nan",
            step,
            reason,
            **dict(zip(NAMES, numbers.values.tolist(), strict=True)),
        )
        # Looked up only for a bad step: it reads the index of the data.
        document_names = documents()
        entry: dict[str, Any] = {"step": step, "action": "found", "bad": list(numbers.bad)}
        entry |= dict(zip(NAMES, numbers.values.tolist(), strict=True)) | {"batch_hash": numbers.batch_hash}
        entry |= {f"{name}_bound": bound for name, bound in zip(NAMES, numbers.bounds.tolist(), strict=True)}
        # Written down before anything follows from it: a kill in
        # between must find the step at the next start.
        self._write(entry | {"devices": numbers.strange_devices, "documents": document_names})
        reason += "".join(f"; {source}: {first_few(names, 8)}" for source, names in document_names.items())
        if spec.on_bad == "stop":
            raise self._stopped_error(numbers, reason)
        # `last`: the run must end with a saved state, and one in doubt is not saved.
        should_go_back = (
            "state" in numbers.bad or spec.on_bad == "rollback" or recent >= spec.max_skips or last
        )
        if not should_go_back:
            self._say(f"{reason}. The update was not applied; bad steps among the last {WINDOW}: {recent}.")
            return
        # Only returns within the window count: a run of weeks may go back now and then.
        returns = [bad_step for bad_step in self._returns if bad_step > step - WINDOW]
        if len(returns) >= spec.max_rollbacks:
            raise self._exhausted_error(numbers, reason, returns)
        # A corrupt weight may have been saved before the loss
        # showed it, so the replay begins well before that.
        must_precede = step if "state" in numbers.bad else max(min(self._bad) - CALM_STEPS, 1)
        self.go_back(step, reason, must_precede=must_precede, nth=len(returns))
        raise WentBack

    def go_back(self, step: int, reason: str, *, must_precede: int, nth: int) -> None:
        """Chooses the replay's checkpoint: the newest before step `must_precede`, or the nth older one."""
        # Held first: a save in flight would delete the checkpoint to go back to when it ends.
        self._checkpoints.hold = True
        # Waited for: its checkpoint may be the newest one before the bad step.
        self._checkpoints.wait_for_save()
        earlier_steps = [saved_step for saved_step in self._checkpoints.steps() if saved_step < step]
        well_before = [saved_step for saved_step in earlier_steps if saved_step < must_precede]
        # The nth return in a row takes the nth older one: the newest may hold the bad weight already.
        origin = earlier_steps[max(len(well_before) - 1 - nth, 0)] if earlier_steps else 0
        # Process 0 decides: hosts may see different listings of a shared folder.
        self._origin = int(from_process_zero(np.asarray(origin)))
        self._until = step
        self._returns.append(step)
        self._write({"step": step, "action": "went back", "to": self._origin})
        origin_text = f"the checkpoint of step {self._origin}" if self._origin else "the start"
        self._say(
            f"{reason}. Going back to {origin_text}: steps {self._origin + 1} to {step} run again with the "
            "same batches."
        )

    def _finish_replay(self, numbers: StepNumbers, dispatched: int) -> None:
        """Ends a replay that gave the bits of the first pass; leaves out the batch if its update breaks the
        state.
        """
        self._until = None
        poisons = "state" in numbers.bad
        # Steps after `since` have new bounds. The devices may have judged one more step by the old ones.
        self.since = numbers.step if poisons else max(dispatched, numbers.step)
        if poisons:
            # The newest LEFT_OUT ones: the guard's state has that many places.
            self.left_out = tuple(sorted({*self.left_out, numbers.step}))[-LEFT_OUT:]
        replayed_steps = sorted(self._bad)
        self._bad.clear()
        self._write(
            {"step": numbers.step, "action": "repeats", "since": self.since, "left_out": list(self.left_out)}
        )
        steps = (
            f"step{'s' * (len(replayed_steps) > 1)} {first_few([str(step) for step in replayed_steps], 8)}"
        )
        self._say(
            f"the replay of step {numbers.step} gave the same {self.noise.same_text}, so the data or the "
            f"arithmetic is bad, not the hardware: the update{'s' * (len(replayed_steps) > 1)} of {steps} "
            f"stay{'s' * (len(replayed_steps) == 1)} left out."
        )
        if poisons:
            # Records up to the origin stay: those steps do not run again.
            self._forget(self._origin)
            raise WentBack

    def _forget(self, step: int) -> None:
        """Drops the records after `step`: with a batch left out, other numbers follow."""
        self._records = {
            recorded_step: numbers
            for recorded_step, numbers in self._records.items()
            if recorded_step <= step
        }

    def _record(self, numbers: StepNumbers) -> None:
        self._records[numbers.step] = numbers
        if len(self._records) > _MOST_RECORDS:
            # Dicts keep the order of insertion, so the first key is the oldest step.
            del self._records[next(iter(self._records))]

    def _write(self, entry: dict[str, Any]) -> None:
        if jax.process_index() == 0:
            self._entries.append(encode(entry).encode())

    def _name_devices(self, devices: list[int]) -> str:
        """Names devices by their place in the mesh: number and process."""
        flat = self._mesh.devices.flatten()
        return first_few([f"device {flat[i].id} of process {flat[i].process_index}" for i in devices], 8)

    def _fault_error(self, first_numbers: StepNumbers, second_numbers: StepNumbers) -> HardwareFault:
        """Returns the error for a step that gave other bits in its replay; sets later checkpoints aside."""
        # Gathered before the error is built: all processes are here, and the name of any host may be needed.
        hosts = gather(
            np.frombuffer(socket.gethostname().encode()[:_HOST_BYTES].ljust(_HOST_BYTES), np.uint8)
        )
        differing = np.flatnonzero(
            # As integers: as a float NaN differs from NaN.
            (first_numbers.by_device.view(np.uint32) != second_numbers.by_device.view(np.uint32)).any(axis=1)
        )
        strange_devices = sorted({*first_numbers.strange_devices, *second_numbers.strange_devices})
        named_devices = strange_devices or [int(i) for i in differing]
        processes = sorted({self._mesh.devices.flat[i].process_index for i in named_devices})
        process_names = ", ".join(
            f"process {process} on host {bytes(hosts[process]).decode().strip()}" for process in processes
        )
        if not named_devices:
            place_text = "Only sums over devices differ, so no single device can be named"
        elif len(named_devices) == len(first_numbers.by_device) > 1:
            place_text = (
                "Every device differs, so a weight or sum that all of them read was wrong before "
                f"({process_names})"
            )
        else:
            place_text = f"The numbers of {self._name_devices(named_devices)} differ ({process_names})"
        first_text, second_text = first_numbers.shown, second_numbers.shown
        aside = self._set_aside(second_numbers.step)
        self._write(
            {
                "step": second_numbers.step,
                "action": "differs",
                "devices": named_devices,
                "first": first_text,
                "again": second_text,
            }
        )
        return HardwareFault(
            f"step {second_numbers.step}, run twice from the checkpoint of step {self._origin} with the "
            f"same batches, gave two results: first {first_text}; then {second_text}. "
            f"{self.noise.beyond_text}, so a device or its memory failed. {place_text}. {aside}. Replace "
            "that host; the same command goes on from the last checkpoint."
        )

    def _set_aside(self, step: int) -> str:
        """Renames checkpoints whose state the faulty first pass computed, from `step` - 1 on. Returns what to
        say.
        """
        doubtful = [
            # From step - 1: wrong bits may have been in the state that the step was given.
            saved_step
            for saved_step in self._checkpoints.steps()
            if saved_step >= max(step - 1, 1) and saved_step > self._origin
        ]
        if not doubtful:
            return "Nothing of it was saved"
        saved = "What its first pass saved (step {})"
        folder, trouble, remaining_steps = self._checkpoints.folder, "", list(doubtful)
        # One process renames; the others know the list from their own listing.
        if jax.process_index() != 0:
            return f"{saved.format(', '.join(map(str, doubtful)))} is set aside by process 0"
        try:
            if self._checkpoints.lock is not None:
                self._checkpoints.lock.check(confirm=True)
            while remaining_steps:
                # Removed from the list one by one: what is left after an error is what could not be renamed.
                removal.set_aside(folder, remaining_steps[0])
                del remaining_steps[0]
        except OSError as error:
            trouble = error.strerror or error_line(error)
        with contextlib.suppress(OSError):  # a full disk; a stale note only makes the next start warn
            files.note_commit(folder, max(files.steps(folder), default=None))
        if remaining_steps:
            return (
                f"{saved.format(', '.join(map(str, remaining_steps)))} cannot be set aside ({trouble}): "
                "move it away"
            )
        return f"{saved.format(', '.join(map(str, doubtful)))} was set aside as damaged"

    def _stopped_error(self, numbers: StepNumbers, reason: str) -> BadNumbers:
        return BadNumbers(
            f"{reason}. guard.on_bad=stop ends the run. {self._checkpoint_text(numbers.step)} Ways on in "
            f"this workdir: `--set guard.on_bad=skip` leaves this batch out; {_SLOWER}; "
            "precision.compute_dtype=float32 with `--allow-change precision` shows whether precision is the "
            "cause.",
            step=numbers.step,
            names=numbers.bad,
        )

    def _exhausted_error(self, numbers: StepNumbers, reason: str, returns: list[int]) -> BadNumbers:
        return BadNumbers(
            f"{reason}. The run went back {len(returns)} times within {WINDOW} steps (at steps "
            f"{', '.join(map(str, returns))}), which is guard.max_rollbacks={self._spec.max_rollbacks}. "
            f"{self._checkpoint_text(numbers.step)} Ways on in this workdir: {_SLOWER}; a larger "
            f"guard.max_rollbacks (up to {LEFT_OUT}) leaves out more batches.",
            step=numbers.step,
            names=numbers.bad,
        )

    def _checkpoint_text(self, step: int) -> str:
        self._checkpoints.wait_for_save()
        earlier_steps = [saved_step for saved_step in self._checkpoints.steps() if saved_step < step]
        if not earlier_steps:
            return "No checkpoint was written before it."
        return (
            f"Its state was not saved; the newest checkpoint, of step {earlier_steps[-1]}, is from before it."
        )


_SLOWER = (
    "half the learning rate from there on, `--set optimizer.peak_lr=... --allow-change optimizer.peak_lr` "
    "(or optimizer.clip_norm in the same way)"
)
