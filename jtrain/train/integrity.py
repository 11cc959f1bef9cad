"""Callback that ends a run when a device's memory or arithmetic is wrong, and names the device."""

import contextlib
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jtrain.checkpoint import Checkpoints
from jtrain.config.integrity_spec import IntegritySpec
from jtrain.config.run import build_run_optimizer
from jtrain.errors import HardwareFault, UserError
from jtrain.runtime import atomic_io
from jtrain.runtime.multihost import gather
from jtrain.step import recompute
from jtrain.step.checksums import METRIC, copies, differing_copies, summed_arrays
from jtrain.step.state import abstract_state
from jtrain.train.bad_steps.noise_floor import NoiseFloor
from jtrain.train.callbacks import Callback, LoopPhase, RunContext

FILE = "integrity.json"
"""File of a workdir: the sums of every array of each saved state."""

_REWRITTEN = "guard."
"""Prefix of the arrays that the host may rewrite between steps; only their copies are compared."""

_HOST_BYTES = 64


class IntegrityCheck(Callback):
    """Compares checksums of the state from step to step and between devices, and recomputes microbatches.

    Raises HardwareFault in all processes at the same step, before the state of that step is saved.

    Args:
      checkpoints: those of the run, perhaps in an object store; `FILE` is always in the local workdir.
    """

    def __init__(self, spec: IntegritySpec, checkpoints: Checkpoints) -> None:
        self._spec = spec
        self._checkpoints = checkpoints
        self._last: tuple[int, np.ndarray] | None = None
        self._recomputed: dict[int, tuple[jax.Array, jax.Array]] = {}
        self.noise = NoiseFloor()  # until the first step has been read
        self._copies_compared = self._copies_are_noisy = False
        self._kept_steps: set[int] = set()  # of states that this attempt saved or copied, or tried to

    def on_start(self, context: RunContext) -> None:
        self._context = context
        self._devices: list[jax.Device] = list(context.mesh.devices.flat)
        self._hosts = _host_names()
        self._agreed, self._compared, self._sums_are_unordered = context.start_step, False, False
        layout, mesh = context.job.layout, context.mesh
        like = abstract_state(layout, build_run_optimizer(context.run), mesh)
        self._names = [name for name, _ in summed_arrays(like)]
        self._dtypes = [str(array.dtype) for _, array in summed_arrays(like)]
        # For each device and array, the first device that holds the same part: copies are compared with it.
        self._first = copies(like, mesh)
        self._is_compared = np.array([not name.startswith(_REWRITTEN) for name in self._names])
        # Compiled when first called.
        self._signature = recompute.make_signature(
            context.run.model, layout, mesh, deterministic=context.run.deterministic
        )
        self._roll = recompute.make_roll(mesh)

    @contextlib.contextmanager
    def during(self, phase: LoopPhase, step: int, arguments: tuple[Any, ...]) -> Iterator[None]:
        every = self._spec.recompute_every_steps
        if phase == "dispatch" and every is not None and step % every == 0 and not self._sums_are_unordered:
            state, batch = arguments
            # Dispatched and not awaited: `check` reads both with the results of the step.
            own_signature = self._signature(state.params, state.scaling, batch)
            # The second pass gets the neighbour's batch, so that two devices compute each microbatch.
            self._recomputed[step] = (
                own_signature,
                self._signature(state.params, state.scaling, self._roll(batch)),
            )
        yield
        # The loop reads this step's results before it saves, so `_last` has its sums.
        if phase == "checkpoint" and step not in self._kept_steps:
            self._kept_steps.add(step)
            # Process 0 writes: all have the same sums.
            if self._last is not None and jax.process_index() == 0:
                self._keep_sums(step, self._last[1])

    def on_rewind(self, step: int) -> None:
        # The step after a rewind gets a restored state, which no step of this attempt has just returned.
        self._last = None
        self._recomputed.clear()
        self._kept_steps = {kept_step for kept_step in self._kept_steps if kept_step <= step}

    def check(self, step: int, values: Mapping[str, Any]) -> None:
        """Checks the metrics of a step; the loop calls it in order, before anything else reads them.

        Raises:
          HardwareFault: memory changed, copies differ, or a recomputation gave other bits; names the devices.
          UserError: the first step after a restore was given other bits than those that were saved.
        """
        if self._spec.checksums:
            sums = np.asarray(values[METRIC])
            given_sums, returned_sums = sums[:, 0], sums[:, 1]
            # The first step of an attempt or after a rewind: its state is a checkpoint's, or the seed's.
            if self._last is None:
                self._check_restored(step, given_sums)
            self._check_memory(step, given_sums)
            self._check_copies(step, returned_sums)
            # Kept after all checks: a step whose copies differ must not become the reference.
            self._last = step, returned_sums
        signatures = self._recomputed.pop(step, None)
        # The loop is a step ahead, and so is its recomputation.
        if signatures is not None and not self._sums_are_unordered:
            self._check_arithmetic(step, *signatures)

    def _keep_sums(self, step: int, returned_sums: np.ndarray) -> None:
        """Writes the sums of each saved array; drops those of states that are gone."""
        file, entries = self._sums_file(), _read(self._sums_file())
        # A store that does not answer is the save's to report; all sums stay.
        with contextlib.suppress(Exception):
            saved_steps = self._checkpoints.steps()
            # Those after the newest checkpoint may be a save in flight or states in local memory. States in
            # local memory that are older than the newest checkpoint are never read.
            newest = max(saved_steps, default=-1)
            self._kept_steps = {kept_step for kept_step in self._kept_steps if kept_step >= newest}
            existing_steps = {*saved_steps, *self._kept_steps}
            entries = {key: value for key, value in entries.items() if int(key) in existing_steps}
        totals = zip(self._names, self._dtypes, self._totals(returned_sums), strict=True)
        entries[str(step)] = {
            name: [dtype, total] for name, dtype, total in totals if not name.startswith(_REWRITTEN)
        }
        # A full disk is the save's to report; a restore without sums is not checked.
        with contextlib.suppress(OSError):
            atomic_io.write_whole(file, json.dumps(entries))

    def _check_restored(self, step: int, given_sums: np.ndarray) -> None:
        """Compares the restored state with what the step that saved it had computed, in any layout.

        Raises:
          UserError: the checkpoint holds other bits; names it and the older ones.
        """
        saved_sums = _read(self._sums_file()).get(str(step - 1), {})
        restored_sums = zip(self._names, self._dtypes, self._totals(given_sums), strict=True)
        # Only with the dtype that was saved: a checkpoint may be restored in another one.
        wrong = [
            name
            for name, dtype, total in restored_sums
            if name in saved_sums and saved_sums[name][0] == dtype and saved_sums[name][1] != total
        ]
        if not wrong:
            return
        checkpoint = self._checkpoints.folder / str(step - 1)
        older = [older_step for older_step in self._checkpoints.steps() if older_step < step - 1]
        raise UserError(
            f"the state restored from {checkpoint} has other bits in {wrong[0]} (and {len(wrong) - 1} more "
            f"arrays) than step {step - 1} computed: memory changed while it was saved or restored. Start "
            "again on another host; if this comes again, remove that checkpoint: "
            + (
                f"the same command then goes on from step {max(older)}."
                if older
                else "there is no older one."
            )
        )

    def _totals(self, sums: np.ndarray) -> list[int]:
        """Returns the sum of each array as a whole, which no layout changes: each part counts once."""
        # Copies of a part have the same sum: only the first of them counts.
        is_first_copy = self._first == np.arange(len(self._devices))[:, None]
        # uint32 wraps around, as the sums on the device do.
        return np.sum(sums, axis=0, where=is_first_copy, dtype=np.uint32).tolist()

    def _sums_file(self) -> Path:
        return self._context.workdir / FILE

    def _check_memory(self, step: int, given_sums: np.ndarray) -> None:
        """Compares the state that this step was given with the one that the step before returned."""
        # After a rewind, or before the first step, nothing is there to compare.
        if self._last is None or self._last[0] != step - 1:
            return
        # `_is_compared` excludes the arrays that the host may rewrite between the steps.
        wrong = np.argwhere((given_sums != self._last[1]) & self._is_compared)
        if not wrong.size:
            return
        pairs = [(int(array), int(device)) for device, array in wrong]
        devices = sorted({device for _, device in pairs})
        raise HardwareFault(
            f"step {step}: {self._name_devices(devices)} gave other bits of "
            f"{self._arrays([array for array, _ in pairs])} than step {step - 1} had written: memory "
            f"changed between the two steps (integrity.checksums). {self._way_on(step)}"
        )

    def _check_copies(self, step: int, returned_sums: np.ndarray) -> None:
        differences = differing_copies(returned_sums, self._first)
        # Without a fixed order of sums devices may compute copies apart. Whether this program does shows at
        # the first step: copies that are equal there come from sums that all devices share.
        is_first, self._copies_compared = not self._copies_compared, True
        if differences and is_first and not self.noise.repeats:
            self._copies_are_noisy = True
            self._context.metrics.say(
                f"step {step}: copies of {self._arrays([array for array, _, _ in differences])} differ "
                "between devices, and bits of this program do not repeat: this attempt goes on without "
                "comparing copies (integrity.checksums)."
            )
        if not differences or self._copies_are_noisy:
            return
        # A majority of equal copies names the odd one out; with two copies nobody can say which is wrong.
        outvoted = [device for _, devices, majority in differences if majority for device in devices]
        devices = sorted(set(outvoted)) or sorted(
            {device for _, devices, _ in differences for device in devices}
        )
        verb = (
            "differs from most"
            if outvoted and len(devices) == 1
            else "differ from most"
            if outvoted
            else "differ"
        )
        raise HardwareFault(
            f"step {step}: {self._name_devices(devices)} computed another "
            f"{self._arrays([array for array, _, _ in differences])}: its copies on several devices must be "
            f"equal, and these {verb} (integrity.checksums). A gradient, an update or memory was wrong "
            f"during this step. {self._way_on(step)}"
        )

    def _check_arithmetic(self, step: int, *signatures: jax.Array) -> None:
        own_words, neighbour_words = (np.asarray(signature) for signature in signatures)
        if not self.noise.repeats:
            neighbour_words = recompute.without_noise(
                own_words, neighbour_words, self._context.mesh, bound=self.noise.bounds[0]
            )
        devices = recompute.suspects(own_words, neighbour_words, self._context.mesh)
        first, self._compared = not self._compared, True
        if not devices:
            self._agreed = step
            return
        differs_at = own_words != neighbour_words[recompute.neighbours(self._context.mesh)]
        differing = int(differs_at.any(axis=1).sum())
        # Many devices at the very first comparison: an unordered sum in a kernel, not that many faults.
        if first and differing > len(self._devices) / 2:
            self._sums_are_unordered = True
            self._context.metrics.say(
                f"step {step}: {differing} of {len(self._devices)} devices gave other bits when a microbatch "
                "was computed again. A kernel that adds in any order is likelier than that many faults, so "
                "this attempt goes on without integrity.recompute_every_steps; None says the same in the "
                "config."
            )
            return
        words = list(
            dict.fromkeys(
                word_name
                for word_name, differs in zip(recompute.WORDS, differs_at.any(axis=0), strict=True)
                if differs
            )
        )
        raise HardwareFault(
            f"step {step}: {self._name_devices(devices)} computed another {' and '.join(words)} for the same "
            "sequences than the second time, on a neighbour where there is one "
            f"(integrity.recompute_every_steps). The check last passed at step {self._agreed}, so "
            f"checkpoints after that step may be affected. {self._way_on(step)}"
        )

    def _name_devices(self, devices: Sequence[int]) -> str:
        """Names up to four devices with kind, process and host."""
        names = [
            f"device {device.id} ({device.device_kind}, process {process} on {self._hosts[process]})"
            for device in (self._devices[number] for number in devices[:4])
            for process in [device.process_index]
        ]
        return ", ".join(names) + f" and {len(devices) - 4} more" if len(devices) > 4 else " or ".join(names)

    def _arrays(self, arrays: Sequence[int]) -> str:
        names = list(dict.fromkeys(self._names[array] for array in arrays))
        return names[0] + (f" (and {len(names) - 1} more arrays)" if len(names) > 1 else "")

    def _way_on(self, step: int) -> str:
        """Says what was not saved, and where the same command goes on."""
        in_flight = self._checkpoints.step_in_flight
        # The end of the run waits for the save in flight; if that fails, it says so itself.
        saved_steps = [] if in_flight is None else [in_flight]
        with contextlib.suppress(Exception):  # a store that does not answer must not hide the fault
            saved_steps += [saved_step for saved_step in self._checkpoints.steps() if saved_step < step]
        if not saved_steps:
            return (
                "Nothing was saved. Take the device or its host out; the same command starts again, on "
                "other hardware."
            )
        return (
            f"Nothing of step {step} was saved. Take the device or its host out; the same command goes on "
            f"from the checkpoint of step {max(saved_steps)}, on other hardware."
        )


def _host_names() -> list[str]:
    """Returns the host name of each process; a collective with several."""
    # A fixed number of bytes: gathered arrays have one shape.
    name = socket.gethostname().encode()[:_HOST_BYTES].ljust(_HOST_BYTES, b"\0")
    return [
        bytes(host).rstrip(b"\0").decode(errors="replace") for host in gather(np.frombuffer(name, np.uint8))
    ]


def _read(file: Path) -> dict[str, dict[str, list[Any]]]:
    """Returns the sums by step and array; nothing if the file is missing or was damaged."""
    try:
        return json.loads(file.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
