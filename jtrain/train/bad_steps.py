"""Bad steps: what a run does after an update that was not applied, or a new state that is not finite.

    found       the update was not applied, and the next batch is used; a single bad step under guard.on_bad=skip has
                no other consequence
    went back   to the last good checkpoint, in this process; the same steps run again with the same batches (replay)
    repeats     the replay gave the same bits: the data or the arithmetic is bad. Those batches are left out for good
    differs     the replay gave other bits: a device computes wrongly, and the process ends with `HardwareFault`

Every entry is a line of `bad_steps.jsonl` in the workdir. The batches to leave out are read from it at each
start, so that a killed run leaves out the same ones. On a full disk entries wait in memory; a run that loses
them finds the same bad steps again. All processes see the same numbers, and decide the same.
"""

import contextlib
import dataclasses
import math
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jtrain.checkpoint import Checkpoints, files, removal
from jtrain.errors import HardwareFault, UserError, first_few
from jtrain.runtime.multihost import from_process_zero, gather
from jtrain.step.guard import LEFT_OUT, WINDOW, GuardSpec
from jtrain.telemetry.append_file import AppendFile, WriteTrouble, aside_text, keep_lines, parsed
from jtrain.telemetry.metrics import encode

FILE = "bad_steps.jsonl"

CALM_STEPS = 16
"""Steps after a bad one in which no checkpoint is deleted."""

_MOST_RECORDS = 8192
"""Steps whose numbers are kept for a comparison with a replay."""

_NAMES = ("loss_nats", "grad_norm")
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


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Numbers of one step, as the devices computed them.

    values: loss and gradient norm.
    bounds: the largest good values of both; infinite where there is no bound.
    applied: True if the update was applied.
    by_device: [devices, 2], as in `make_train_step`.
    """

    step: int
    values: np.ndarray
    bounds: np.ndarray
    applied: bool
    by_device: np.ndarray
    batch_hash: str

    @classmethod
    def of(cls, step: int, metrics: Mapping[str, Any], batch_hash: str) -> "Numbers":
        values = np.asarray([metrics[name] for name in _NAMES], np.float32)
        bounds, by_device = (np.asarray(metrics[name]) for name in ("bounds", "by_device"))
        return cls(step, values, bounds, bool(metrics["applied"]), by_device, batch_hash)

    @property
    def bad(self) -> tuple[str, ...]:
        """Names of the bad numbers; `state` if the new state is not finite."""
        names = [
            name
            for name, value, most in zip(_NAMES, self.values, self.bounds, strict=True)
            if not value <= most
        ]
        names += [name for name, value in zip(_NAMES, self.values, strict=True) if math.isinf(value)]
        return tuple(dict.fromkeys(names + ["state"] * bool(self.by_device[:, 1].any())))

    @property
    def strange_devices(self) -> list[int]:
        """Devices, in the order of the mesh, whose share of the loss or new state is not finite."""
        return np.flatnonzero(~np.isfinite(self.by_device[:, 0]) | (self.by_device[:, 1] > 0)).tolist()

    @property
    def shown(self) -> str:
        parts = [
            f"{name}={value:.6g}" + (f" (bound {most:.6g})" if math.isfinite(most) else "")
            for name, value, most in zip(_NAMES, self.values.tolist(), self.bounds.tolist(), strict=True)
        ]
        if "state" in self.bad:
            parts.append(f"{int(self.by_device[:, 1].sum())} elements of the new state not finite")
        return ", ".join(parts)

    def same_bits(self, other: "Numbers") -> bool:
        """True if two passes over a step computed the same."""
        pairs = ((self.values, other.values), (self.by_device, other.by_device))
        return all(a.tobytes() == b.tobytes() for a, b in pairs) and self.applied == other.applied


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
        self._file = workdir / FILE
        self._entries = AppendFile(self._file, say=say, durable=True)
        self._mesh = mesh
        self._checkpoints = checkpoints
        self._say = say
        self._alert = alert
        self._records: dict[int, Numbers] = {}
        self._bad: set[int] = set()  # steps of this attempt, without those that a replay has settled
        self._until: int | None = None
        self._origin = 0
        self.left_out, self.since, self._returns = self._decisions()

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
        self, numbers: Numbers, *, dispatched: int, last: bool, documents: Callable[[], dict[str, list[str]]]
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
        before = self._records.get(step)
        if before is not None and not numbers.same_bits(before):
            raise self._fault(before, numbers)
        self._record(numbers)
        bad = numbers.bad
        if bad and before is None and (step > self.since or "state" in bad):
            self._bad.add(step)
            self._found(numbers, dispatched=dispatched, last=last, documents=documents)
        if self._until is not None and step >= self._until:
            self._finish_replay(numbers, dispatched)
        self._checkpoints.hold = self._until is not None or any(step - CALM_STEPS < one for one in self._bad)

    def _found(self, numbers: Numbers, *, dispatched: int, last: bool, documents: Callable[[], Any]) -> None:
        """Writes down a new bad step; ends the run or goes back where the spec says so."""
        step, spec = numbers.step, self._spec
        recent = sum(step - WINDOW < one for one in self._bad)
        where = self._named(numbers.strange_devices)
        why = (
            f"{' and '.join(numbers.bad)} bad at step {step}: {numbers.shown}; "
            f"batch_hash={numbers.batch_hash}"
        )
        why += (
            f"; not finite on {where}"
            if where and len(numbers.strange_devices) < len(numbers.by_device)
            else ""
        )
        finite = "state" not in numbers.bad and bool(np.isfinite(numbers.values).all())
        self._alert(
            "spike" if finite else "nan", step, why, **dict(zip(_NAMES, numbers.values.tolist(), strict=True))
        )
        known = documents()
        entry: dict[str, Any] = {"step": step, "action": "found", "bad": list(numbers.bad)}
        entry |= dict(zip(_NAMES, numbers.values.tolist(), strict=True)) | {"batch_hash": numbers.batch_hash}
        entry |= {f"{name}_bound": bound for name, bound in zip(_NAMES, numbers.bounds.tolist(), strict=True)}
        self._write(entry | {"devices": numbers.strange_devices, "documents": known})
        why += "".join(f"; {source}: {first_few(names, 8)}" for source, names in known.items())
        if spec.on_bad == "stop":
            raise self._stopped(numbers, why)
        again = "state" in numbers.bad or spec.on_bad == "rollback" or recent >= spec.max_skips or last
        if not again:
            self._say(f"{why}. The update was not applied; bad steps among the last {WINDOW}: {recent}.")
            return
        returns = [one for one in self._returns if one > step - WINDOW]
        if len(returns) >= spec.max_rollbacks:
            raise self._exhausted(numbers, why, returns)
        # A corrupt weight may have been saved before the loss
        # showed it, so the replay begins well before that.
        before = step if "state" in numbers.bad else max(min(self._bad) - CALM_STEPS, 1)
        self._go_back(step, why, before=before, nth=len(returns))
        raise WentBack

    def _go_back(self, step: int, why: str, *, before: int, nth: int) -> None:
        """Chooses the checkpoint of the replay: the newest before `before`, an older one at each return soon
        after.
        """
        self._checkpoints.hold = True
        self._checkpoints.wait_for_save()
        there = [one for one in self._checkpoints.steps() if one < step]
        early = [one for one in there if one < before]
        origin = there[max(len(early) - 1 - nth, 0)] if there else 0
        self._origin = int(from_process_zero(np.asarray(origin)))
        self._until = step
        self._returns.append(step)
        self._write({"step": step, "action": "went back", "to": self._origin})
        to = f"the checkpoint of step {self._origin}" if self._origin else "the start"
        self._say(
            f"{why}. Going back to {to}: steps {self._origin + 1} to {step} run again with the same batches."
        )

    def _finish_replay(self, numbers: Numbers, dispatched: int) -> None:
        """Ends a replay that gave the bits of the first pass; leaves out the batch if its update breaks the
        state.
        """
        self._until = None
        poisons = "state" in numbers.bad
        # Steps after `since` have new bounds. The devices may have judged one more step by the old ones.
        self.since = numbers.step if poisons else max(dispatched, numbers.step)
        if poisons:
            self.left_out = tuple(sorted({*self.left_out, numbers.step}))[-LEFT_OUT:]
        settled = sorted(self._bad)
        self._bad.clear()
        self._write(
            {"step": numbers.step, "action": "repeats", "since": self.since, "left_out": list(self.left_out)}
        )
        steps = f"step{'s' * (len(settled) > 1)} {first_few([str(one) for one in settled], 8)}"
        self._say(
            f"the replay of step {numbers.step} gave the same bits, so the data or the arithmetic is bad, "
            f"not the hardware: the update{'s' * (len(settled) > 1)} of {steps} "
            f"stay{'s' * (len(settled) == 1)} left out."
        )
        if poisons:
            self._forget(self._origin)
            raise WentBack

    def _forget(self, step: int) -> None:
        """Drops the records after `step`: with a batch left out, other numbers follow."""
        self._records = {one: numbers for one, numbers in self._records.items() if one <= step}

    def _record(self, numbers: Numbers) -> None:
        self._records[numbers.step] = numbers
        if len(self._records) > _MOST_RECORDS:
            del self._records[next(iter(self._records))]

    def _decisions(self) -> tuple[tuple[int, ...], int, list[int]]:
        """Reads the decisions of earlier attempts: batches to leave out, `since`, and the steps of recent
        returns.
        """
        kept = np.zeros(2 * LEFT_OUT + 1, np.int32)
        if jax.process_index() == 0 and self._file.exists():
            try:
                if damaged := keep_lines(self._file, lambda entry: True if "action" in entry else None):
                    self._say(aside_text(self._file, damaged))
            except OSError as error:  # a full disk: bad lines stay in the file for now
                WriteTrouble(self._file, self._say).failed(error, "its damaged lines are left out")
            found = (parsed(line) for line in self._file.read_bytes().splitlines())
            entries = [entry for entry in found if entry is not None and "action" in entry]
            settled = [entry for entry in entries if entry["action"] == "repeats"]
            if settled:
                newest = settled[-1]["left_out"][-LEFT_OUT:]
                kept[0], kept[1 : 1 + len(newest)] = settled[-1]["since"], newest
            back: list[int] = []
            for entry in entries:
                if entry["action"] == "went back":
                    back = [*back, entry["step"]][-LEFT_OUT:]
                elif entry["action"] == "differs":  # the fault was the host's, which has been replaced since
                    back = []
            kept[1 + LEFT_OUT : 1 + LEFT_OUT + len(back)] = back
        kept = from_process_zero(kept)
        left_out, returns = ([int(one) for one in part if one] for part in np.split(kept[1:], 2))
        return tuple(left_out), int(kept[0]), returns

    def _write(self, entry: dict[str, Any]) -> None:
        if jax.process_index() == 0:
            self._entries.append(encode(entry).encode())

    def _named(self, devices: list[int]) -> str:
        """Names devices by their place in the mesh: number and process."""
        flat = self._mesh.devices.flatten()
        return first_few([f"device {flat[i].id} of process {flat[i].process_index}" for i in devices], 8)

    def _fault(self, before: Numbers, now: Numbers) -> HardwareFault:
        """Returns the error for a step that gave other bits in its replay; sets later checkpoints aside."""
        hosts = gather(
            np.frombuffer(socket.gethostname().encode()[:_HOST_BYTES].ljust(_HOST_BYTES), np.uint8)
        )
        differing = np.flatnonzero(
            (before.by_device.view(np.uint32) != now.by_device.view(np.uint32)).any(axis=1)
        )
        strange = sorted({*before.strange_devices, *now.strange_devices})
        named = strange or [int(i) for i in differing]
        processes = sorted({self._mesh.devices.flat[i].process_index for i in named})
        names = ", ".join(f"process {one} on host {bytes(hosts[one]).decode().strip()}" for one in processes)
        if not named:
            place = "Only sums over devices differ, so no single device can be named"
        elif len(named) == len(before.by_device) > 1:
            place = (
                f"Every device differs, so a weight or sum that all of them read was wrong before ({names})"
            )
        else:
            place = f"The numbers of {self._named(named)} differ ({names})"
        first, again = before.shown, now.shown
        aside = self._set_aside(now.step)
        self._write({"step": now.step, "action": "differs", "devices": named, "first": first, "again": again})
        return HardwareFault(
            f"step {now.step}, run twice from the checkpoint of step {self._origin} with the same batches, "
            f"gave two results: first {first}; then {again}. Data and arithmetic repeat bit for bit, so a "
            f"device or its memory failed. {place}. {aside}. Replace that host; the same command goes on "
            "from the last checkpoint."
        )

    def _set_aside(self, step: int) -> str:
        """Renames checkpoints whose state the faulty first pass computed, from `step` - 1 on. Returns what to
        say.
        """
        doubtful = [
            one for one in self._checkpoints.steps() if one >= max(step - 1, 1) and one > self._origin
        ]
        if not doubtful:
            return "Nothing of it was saved"
        saved = "What its first pass saved (step {})"
        folder, trouble, left = self._checkpoints.folder, "", list(doubtful)
        if jax.process_index() != 0:
            return f"{saved.format(', '.join(map(str, doubtful)))} is set aside by process 0"
        try:
            while left:
                removal.set_aside(folder, left[0])
                del left[0]
        except OSError as error:
            trouble = str(error.strerror)
        with contextlib.suppress(OSError):  # a full disk; a stale note only makes the next start warn
            files.note_commit(folder, max(files.steps(folder), default=None))
        if left:
            return f"{saved.format(', '.join(map(str, left)))} cannot be set aside ({trouble}): move it away"
        return f"{saved.format(', '.join(map(str, doubtful)))} was set aside as damaged"

    def _stopped(self, numbers: Numbers, why: str) -> BadNumbers:
        return BadNumbers(
            f"{why}. guard.on_bad=stop ends the run. {self._from_before(numbers.step)} Ways on in this "
            f"workdir: `--set guard.on_bad=skip` leaves this batch out; {_SLOWER}; "
            "precision.compute_dtype=float32 with `--allow-change precision` shows whether precision is the "
            "cause.",
            step=numbers.step,
            names=numbers.bad,
        )

    def _exhausted(self, numbers: Numbers, why: str, returns: list[int]) -> BadNumbers:
        return BadNumbers(
            f"{why}. The run went back {len(returns)} times within {WINDOW} steps (at steps "
            f"{', '.join(map(str, returns))}), which is guard.max_rollbacks={self._spec.max_rollbacks}. "
            f"{self._from_before(numbers.step)} Ways on in this workdir: {_SLOWER}; a larger "
            f"guard.max_rollbacks (up to {LEFT_OUT}) leaves out more batches.",
            step=numbers.step,
            names=numbers.bad,
        )

    def _from_before(self, step: int) -> str:
        self._checkpoints.wait_for_save()
        there = [one for one in self._checkpoints.steps() if one < step]
        if not there:
            return "No checkpoint was written before it."
        return f"Its state was not saved; the newest checkpoint, of step {there[-1]}, is from before it."


_SLOWER = (
    "half the learning rate from there on, `--set optimizer.peak_lr=... --allow-change optimizer.peak_lr` "
    "(or optimizer.clip_norm in the same way)"
)
