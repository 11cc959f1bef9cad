"""State of a run kept in the hosts' memory, so that a restart neither waits for the store nor loses an
interval.

    DIR/jtrain-<workdir>-<hash>-<uid>/process-<p>/{a,b}/   folders of the shards that process p holds
                                     /copy-<p>/{a,b}/      the same of a process of another host

The folder lies in tmpfs. Two slots alternate (`jtrain.checkpoint.slots`): the newest one that all processes
have is intact while the other is written. What was kept survives the processes and their crash, not the host:
for that each process sends its own to a neighbour on another host.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.checkpoint import files, host_copy, restoring, slots
from jtrain.checkpoint.files import Manifest, ProcessPart
from jtrain.checkpoint.neighbours import Neighbours
from jtrain.checkpoint.slots import SLOTS
from jtrain.errors import HardwareFault, UserError
from jtrain.runtime import multihost
from jtrain.runtime.stores import error_line, in_store

DEFAULT_DIR = "/dev/shm"

_ONLY_WATCHES = ("checkpoint.", "eval.", "metrics.", "profile.", "callbacks")
"""Prefixes of config paths that change what a run writes, not its state."""

_ID = "local_memory.id"
_ID_BYTES = 8
_NONE = -1


class LocalMemory:
    """Newest states of one run in local memory. All processes make the same calls in the same order.

    Args:
      workdir: of the run, perhaps in an object store; a file in it holds the run's identity, so that a new
        run in a folder of the same name never takes the state of the old one.
      directory: folder in tmpfs.
      like: shapes, dtypes and shardings of the state.
      config_text: the run's flat config; a state of another config is not used.
      newest_checkpoint: returns the step of the newest checkpoint, 0 if there is none; called by process 0
        alone.
      say: prints a line.

    Raises:
      UserError: the folder has too little room for two states and the neighbour's two, or cannot be written
        to; nor can the workdir.
    """

    def __init__(
        self,
        workdir: Path,
        directory: str | None,
        like: Any,
        config_text: str,
        *,
        newest_checkpoint: Callable[[], int],
        say: Callable[[str], None],
    ) -> None:
        path = workdir if in_store(workdir) else workdir.absolute()
        self._id_file = path / _ID
        path_hash = hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()
        self.folder = Path(directory or DEFAULT_DIR) / f"jtrain-{path.name}-{path_hash}-{os.getuid()}"
        self._process, self._processes = multihost.process_index(), multihost.process_count()
        self.own_folder = self.folder / f"process-{self._process}"
        self._say = say
        self._newest_checkpoint = newest_checkpoint
        self._newest_seen = 0
        self._silence = ""  # why the newest checkpoint was not told when last asked for
        self._is_silence_said = False
        self._config_text, self._config = config_text, _config_digest(config_text)
        self._run = self._identity()
        self._like = like
        self._leaves = slots.held_leaves(like)
        self._neighbours = Neighbours(self.folder, say)
        self._newest_everywhere: Path | None = None  # own slot with the newest state that all processes have
        self._maps: dict[Path, dict[str, np.ndarray]] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "local-memory")
        self._writing: concurrent.futures.Future[tuple[int, Path]] | None = None
        self._is_off = False
        self._take_room()

    def start(self, *, checkpoint: int, is_wanted: bool = True) -> tuple[int, Any, dict[str, Any]] | None:
        """Returns step, state and data state of the newest state that all processes can read; None for none.

        What is not used is removed: it is of steps that the run takes again, perhaps with another config.

        Args:
          checkpoint: as in `newest`.
          is_wanted: False if none is used.
        """
        restored = None
        for step in self.newest(checkpoint=checkpoint) if is_wanted else []:
            if (read := self._restore(step)) is not None:
                restored = step, *read
                break
        # Barrier: no process may remove a slot that another one still fetches.
        multihost.agree(True)
        if self._neighbours.is_first_of_host:
            self._forget(lambda step: restored is None or step != restored[0])
        # Barrier: no process may write a slot that the first process of its host still removes.
        multihost.agree(True)
        return restored

    def newest(self, *, checkpoint: int) -> list[int]:
        """Returns the steps, newest first, of which every process's part is somewhere; none older than
        `checkpoint`.

        Args:
          checkpoint: step of the newest checkpoint, 0 if there is none. A state from when there was a newer
            one is not used: somebody has moved checkpoints away, to go back.
        """
        local_steps = np.full((self._processes, 2 * len(SLOTS)), _NONE, np.int32)
        usable_steps = [self._usable_steps(process, checkpoint) for process in range(self._processes)]
        # Gathered arrays have one shape: steps fill a row from the left, _NONE the rest.
        for process, steps in enumerate(usable_steps):
            local_steps[process, : len(steps)] = steps
        steps_by_reader = multihost.gather(local_steps)
        steps_of_process = [
            # Any host may hold a process's part: its own slot, or a neighbour's copy.
            set(steps_by_reader[:, process].ravel().tolist()) - {_NONE}
            for process in range(self._processes)
        ]
        common_steps = set[int].intersection(*steps_of_process)
        if not common_steps and any(steps_of_process):
            missing = [process for process, steps in enumerate(steps_of_process) if not steps]
            reason = (
                f"of {'process' if len(missing) == 1 else 'processes'} {', '.join(map(str, missing[:8]))} "
                "nothing is"
            )
            self._say(
                f"The state in local memory is not used: {reason if missing else 'no step of it is whole'} "
                "there."
            )
        self._holders = steps_by_reader
        return sorted((step for step in common_steps if step >= checkpoint), reverse=True)

    def _restore(self, step: int) -> tuple[Any, dict[str, Any]] | None:
        """Reads the state and data state of a step; None, in all processes, if any finds its part damaged."""
        reason, slot = "", None
        restored: tuple[Any, dict[str, Any]] | None = None
        try:
            slot, manifest = self._find(step)
            restored = slots.read(slot, manifest, self._like), json.loads((slot / files.DATA).read_bytes())
        except (OSError, ValueError, LookupError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
        # All processes take this state or none: with different steps they would train different models.
        if multihost.agree(restored is None)[0]:
            self._say(
                f"The state of step {step} in local memory cannot be used: "
                f"{reason or 'another process says so'}."
            )
            return None
        self._newest_everywhere = slot
        return restored

    def forget_after(self, step: int) -> None:
        """Removes the states of later steps, of which the run has gone back."""
        self._wait()
        self._forget(lambda stored_step: stored_step > step)

    def save(self, step: int, state: Any, data_state: dict[str, Any]) -> None:
        """Keeps a state; returns when `state` may be donated, and hashes and sends the copies in the
        background.

        Shards are copied from the devices straight into local memory: there is no other copy of the state on
        the host. A failure is said, and ends the saves in local memory of this attempt; training goes on.
        """
        if self._is_off:
            return
        kept_step, slot, reason = self._wait()
        # A failure travels as a number: an exception in one
        # process would leave the others waiting in the gather.
        kept_steps = multihost.gather(np.asarray(kept_step, np.int32))
        if (kept_steps == _NONE).any():
            self._is_off = True
            self._say(
                "No more states are kept in local memory in this attempt: "
                f"{reason or 'another process failed'}."
            )
            return
        # The state that all processes have is the one that stays.
        if kept_steps.min() > 0:
            self._newest_everywhere = slot
            self._remove_others()
        slot = self._free_slot()
        # The manifest goes before the first byte changes: a kill in
        # the middle leaves no slot that passes for whole.
        slots.mark_empty(slot)
        for chunk in host_copy.held_chunks(state):
            np.copyto(self._maps[slot][chunk.name], np.frombuffer(chunk.data, np.uint8))
        self._writing = self._pool.submit(self._finish, slot, step, data_state)

    def remove(self) -> None:
        """Removes everything kept of this run, whose last checkpoint is there."""
        self._wait()
        self._maps.clear()
        # Barrier: another process may still send a copy into this host's folder.
        multihost.agree(True)
        shutil.rmtree(self.own_folder, ignore_errors=True)
        if self._neighbours.is_first_of_host:
            shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Waits for the state that is being written, and ends the threads."""
        self._wait()
        self._pool.shutdown()
        self._neighbours.close()

    def __enter__(self) -> "LocalMemory":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._wait()
        if kind is None:
            multihost.agree(True)  # another process may still be sending its copy to this one
        elif issubclass(kind, HardwareFault):
            # What a broken device computed is on all hosts. Without the identity none of it is ever used.
            # The states of this host go as well, for a store may not answer; the fault is what is to be said.
            with contextlib.suppress(OSError):
                self._forget(lambda _: True)
            with contextlib.suppress(Exception):
                self._id_file.unlink(missing_ok=True)
        self.close()

    def _finish(self, slot: Path, step: int, data_state: dict[str, Any]) -> tuple[int, Path]:
        """Hashes a slot, commits it and sends it to the neighbour; returns its step and the slot."""
        if self._process == 0:
            try:
                self._newest_seen, self._silence = self._newest_checkpoint(), ""
            except Exception as error:  # a store that does not answer now: its last answer stands
                self._silence = error_line(error)
        files.seal(
            slot,
            step=step,
            leaves=self._leaves,
            data=json.dumps(data_state, allow_nan=False),
            config=self._config_text,
            hashes=files.hashes_of(slot, self._maps[slot]),
            processes=self._processes,
            part=ProcessPart(self._process, self._run, self._config, self._newest_seen),
        )
        try:
            self._neighbours.send(slot)
        except OSError as error:
            # At once: the next save, which says the consequence, may be minutes away.
            self._say(f"Local memory: the state of step {step} has no copy on another host: {error}.")
            raise
        return step, slot

    def _wait(self) -> tuple[int, Path | None, str]:
        """Waits for the slot being written; returns its step, 0 if there was none or -1 if it failed, slot,
        and why.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return 0, None, ""
        try:
            step, slot = writing.result()
            self._say_silence(step)
            return step, slot, ""
        except Exception as error:  # of the folder, of the connection, or of what the neighbour answered
            return _NONE, None, f"{type(error).__name__}: {error}"

    def _say_silence(self, step: int) -> None:
        """Says once, until the next answer, that the newest checkpoint is not known."""
        if self._silence and not self._is_silence_said:
            self._say(
                f"WARNING: the newest checkpoint is not told now ({self._silence}): the state of step {step} "
                f"in local memory names that of step {self._newest_seen}, as the last answer. Before you "
                f"move newer checkpoints away to go back, remove {self.folder} on each host."
            )
        self._is_silence_said = bool(self._silence)

    def _free_slot(self) -> Path:
        """Returns the slot to write over: not the one that all processes have."""
        # No slot is the newest before the first save: then both are free.
        first, second = (self.own_folder / name for name in SLOTS)
        return second if self._newest_everywhere == first else first

    def _remove_others(self) -> None:
        """Removes the folders of processes that were on this host in an earlier attempt; theirs are elsewhere
        now.
        """
        for folder in self._folders() if self._neighbours.is_first_of_host else []:
            if folder.name not in self._neighbours.local_names:
                shutil.rmtree(folder, ignore_errors=True)

    def _forget(self, should_remove: Callable[[int], bool]) -> None:
        """Removes the states on this host of whose step `should_remove` is true."""
        for folder in self._folders():
            for slot, manifest in slots.whole_slots(folder):
                if should_remove(manifest.step):
                    slots.mark_empty(slot)

    def _folders(self) -> list[Path]:
        return [entry for entry in self.folder.iterdir() if entry.is_dir()]

    def _usable_steps(self, process: int, checkpoint: int) -> list[int]:
        """Returns the steps of a process's parts on this host; says once why one is not used."""
        steps = set[int]()
        for _, manifest, part in slots.parts_of(self.folder, process):
            if part.run != self._run:
                reason = "it is of another run"
            elif manifest.processes != self._processes:
                reason = "the run had other processes"
            elif part.config != self._config:
                reason = "the config has changed"
            elif part.checkpoint > checkpoint:
                reason = f"it is from after checkpoint {part.checkpoint}, which is no longer there"
            else:
                steps.add(manifest.step)
                continue
            if process == self._process == 0:
                self._say(f"The state of step {manifest.step} in local memory is not used: {reason}.")
        return sorted(steps, reverse=True)

    def _find(self, step: int) -> tuple[Path, Manifest]:
        """Returns the slot with this process's part of a step; fetches it if it is not on this host."""
        for slot, manifest, part in slots.parts_of(self.folder, self._process):
            if manifest.step == step and part.run == self._run:
                return slot, manifest
        # Row h, column p: the steps of process p's part that process h can read on its host.
        holders = np.flatnonzero((self._holders[:, self._process] == step).any(axis=1)).tolist()
        slot = self._free_slot()
        for holder in holders:
            try:
                self._neighbours.fetch(holder, self._process, step, slot)
                break
            except OSError as error:
                # Another host may have the same: its own part, or a copy.
                if holder == holders[-1]:
                    raise
                self._say(f"Local memory: {error}; another process has the state of step {step}, too.")
        return slot, files.read_manifest(slot)

    def _take_room(self) -> None:
        """Takes the memory of both slots; refuses a folder that has too little for them and the
        neighbour's.
        """
        reason = ""
        size_bytes = sum(leaf.bytes for leaf in self._leaves.values()) or 1
        sizes_mib = multihost.gather(np.asarray(-(-size_bytes // (1 << 20)), np.int32))  # jax has no int64
        try:
            self.own_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.chmod(0o700)
            stored_processes = [*self._neighbours.local_processes, *self._neighbours.local_copies]
            # `<<` binds weaker than `*`: MiB to bytes
            needed_bytes = len(SLOTS) * sum(sizes_mib[stored_processes].tolist()) << 20
            reason = slots.missing_room(self.folder, needed_bytes)
        except OSError as error:
            reason = (
                f"checkpoint.local_dir: {self.folder} cannot be written to ({error.strerror}). Set it to a "
                "folder in memory that can."
            )
        # All processes raise or none: one that went on would wait for the others at the next gather.
        if multihost.agree(bool(reason))[0]:
            self._neighbours.close()
            raise UserError(
                reason or "another process of this run has no room for the state in local memory; see there."
            )
        sizes = slots.chunk_sizes(self._like)
        for slot in (self.own_folder / name for name in SLOTS):
            slots.reserve(slot, sizes)
            self._maps[slot] = {name: slots.shared_map(slot / name) for name in sizes}

    def _identity(self) -> str:
        """Returns the run's identity, made by process 0 when the run first keeps a state."""

        def read_or_make() -> str:
            if not self._id_file.exists():
                if not in_store(self._id_file):
                    self._id_file.parent.mkdir(parents=True, exist_ok=True)
                # Now, and to where the checkpoints are: a run that is killed before its first save may go on
                # from local memory.
                files.write_text(self._id_file, secrets.token_hex(_ID_BYTES))
            return self._id_file.read_text()

        return restoring.in_process_zero(read_or_make, self._id_file.parent)


def _config_digest(config_text: str) -> str:
    """Returns a hash of the config without its remarks, and without what does not change the state."""
    lines = [line for line in config_text.splitlines() if not line.startswith(("#", *_ONLY_WATCHES))]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
