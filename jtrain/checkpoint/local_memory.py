"""State of a run kept in the hosts' memory, so that a restart neither waits for the store nor loses an interval.

    DIR/jtrain-<workdir>-<hash>-<uid>/process-<p>/<0|1>.bin    the shards that process p holds
                                                 /<0|1>.json   step, data state, config, and the hash of each shard
                                     /copy-<p>/...             the same of a process of another host

The folder lies in tmpfs. Two generations alternate: the newest one that all processes have is intact while the next is
written. A generation without its .json is not there; the .json is removed before the first byte changes, and written
last. What was kept survives the processes and their crash, not the host: for that each process sends its own to a
neighbour on another host.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import json
import mmap
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jtrain.checkpoint import files
from jtrain.checkpoint.generation import (
    FORMAT,
    arrays,
    as_bytes,
    digest,
    hashes,
    header_at,
    pieces,
    read_header,
    shards,
)
from jtrain.checkpoint.neighbours import Neighbours, open_private, reserve
from jtrain.errors import HardwareFault, UserError
from jtrain.runtime import multihost
from jtrain.runtime.atomic_io import write_whole

if TYPE_CHECKING:
    from jtrain.checkpoint.save_restore import CheckpointSpec

DEFAULT_DIR = "/dev/shm"
GENERATIONS = (0, 1)

_ONLY_WATCHES = ("checkpoint.", "eval.", "metrics.", "profile.", "callbacks")
"""Prefixes of config paths that change what a run writes, not its state."""

_ID = "local_memory.id"
_ID_BYTES = 16
_NONE = -1


class LocalMemory:
    """Generations of one run's state in local memory. All processes make the same calls in the same order.

    Args:
      workdir: of the run; a file in it holds the run's identity, so that a new run in a folder of the same name never
        takes the state of the old one.
      directory: folder in tmpfs.
      like: shapes, dtypes and shardings of the state.
      config_text: the run's flat config; a generation of another config is not used.
      newest_checkpoint: returns the step of the newest checkpoint, 0 if there is none; called by process 0 alone.
      say: prints a line.

    Raises:
      UserError: the folder has too little room for two generations and the neighbour's two, or cannot be written to.
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
        path = workdir.absolute()
        self._id_file = path / _ID
        path_hash = hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()
        self.folder = Path(directory or DEFAULT_DIR) / f"jtrain-{path.name}-{path_hash}-{os.getuid()}"
        self._process, self._processes = multihost.process_index(), multihost.process_count()
        self._say = say
        self._newest_checkpoint = newest_checkpoint
        self._config = _config_digest(config_text)
        self._run = self._identity()
        self._pieces = list(pieces(like))
        self._size_bytes = max((piece.offset + piece.size_bytes for piece in self._pieces), default=0) or 1
        self._neighbours = Neighbours(self.folder)
        self._newest_everywhere = _NONE
        self._maps: dict[int, np.ndarray] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "local-memory")
        self._writing: concurrent.futures.Future[int] | None = None
        self._is_off = False
        self._take_room()

    @property
    def own(self) -> Path:
        """Folder of this process's generations."""
        return self.folder / f"process-{self._process}"

    def start(self, like: Any, *, checkpoint: int, is_wanted: bool = True) -> tuple[int, Any, dict[str, Any]] | None:
        """Returns step, state and data state of the newest generation that all processes can read; None for none.

        What is not used is removed; all of it is where none is wanted. Arguments are those of `newest` and `restore`.
        """
        found = None
        for step in self.newest(checkpoint=checkpoint) if is_wanted else []:
            if (read := self.restore(step, like)) is not None:
                found = step, *read
                break
        self.keep_only(None if found is None else found[0])
        return found

    def newest(self, *, checkpoint: int) -> list[int]:
        """Returns the steps, newest first, of which every process's part is somewhere; none older than `checkpoint`.

        Args:
          checkpoint: step of the newest checkpoint, 0 if there is none. A generation from when there was a newer one is
            not used: somebody has moved checkpoints away, to go back.
        """
        here = np.full((self._processes, 2 * len(GENERATIONS)), _NONE, np.int32)
        found = [self._usable(process, checkpoint) for process in range(self._processes)]
        for process, steps in enumerate(found):
            here[process, : len(steps)] = steps
        everywhere = multihost.gather(here)
        of_each = [set(everywhere[:, process].ravel().tolist()) - {_NONE} for process in range(self._processes)]
        whole = set[int].intersection(*of_each)
        if not whole and any(of_each):
            missing = [process for process, steps in enumerate(of_each) if not steps]
            why = f"of {'process' if len(missing) == 1 else 'processes'} {', '.join(map(str, missing[:8]))} nothing is"
            self._say(f"The state in local memory is not used: {why if missing else 'no step of it is whole'} there.")
        self._holders = everywhere
        return sorted((step for step in whole if step >= checkpoint), reverse=True)

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """Reads the state and data state of a step; fetches this process's part from where it is, if it is not here.

        Returns:
          None, in all processes, if any of them finds its part damaged.
        """
        why = ""
        found: tuple[Any, dict[str, Any]] | None = None
        try:
            generation = self._generation_of(step)
            header = read_header(generation)
            content = np.memmap(generation.with_suffix(".bin"), np.uint8, "r")
            found = arrays(header, content, like), header["data"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
        if multihost.agree(found is None)[0]:
            self._say(f"The state of step {step} in local memory cannot be used: {why or 'another process says so'}.")
            return None
        self._newest_everywhere = step
        return found

    def keep_only(self, step: int | None) -> None:
        """Removes all generations but those of the step from which the run goes on; None if that is a checkpoint's.

        Others are of steps that the run takes again, perhaps with another config. All processes must have restored.
        """
        multihost.agree(True)
        for folder in self._folders() if self._neighbours.is_first_of_host else []:
            for number in GENERATIONS:
                header = header_at(folder / str(number))
                if header is None or header["step"] != step:
                    (folder / f"{number}.json").unlink(missing_ok=True)
        multihost.agree(True)

    def forget_after(self, step: int) -> None:
        """Removes the generations of later steps, of which the run has gone back."""
        self._wait()
        for folder in self._folders():
            for number in GENERATIONS:
                header = header_at(folder / str(number))
                if header is not None and header["step"] > step:
                    (folder / f"{number}.json").unlink(missing_ok=True)
        self._newest_everywhere = min(self._newest_everywhere, step)

    def save(self, step: int, state: Any, data_state: dict[str, Any]) -> None:
        """Keeps a state; returns when `state` may be donated, and hashes and sends the copies in the background.

        Shards are copied from the devices straight into local memory: there is no other copy of the state on the host.
        A failure is said, and ends the saves in local memory of this attempt; training goes on.
        """
        if self._is_off:
            return
        done, why = self._wait()
        everywhere = multihost.gather(np.asarray(done, np.int32))
        if (everywhere == _NONE).any():
            self._is_off = True
            self._say(f"No more states are kept in local memory in this attempt: {why or 'another process failed'}.")
            return
        # The generation that all processes have is the one that stays.
        if everywhere.min() > 0:
            self._newest_everywhere = int(everywhere.min())
            self._remove_others()
        number = self._free_generation()
        (self.own / f"{number}.json").unlink(missing_ok=True)
        target = self._map(number)
        for piece, data in zip(self._pieces, shards(state, self._pieces), strict=True):
            target[piece.offset : piece.offset + piece.size_bytes] = as_bytes(data)
        header = {
            "format": FORMAT,
            "run": self._run,
            "process": self._process,
            "processes": self._processes,
            "step": step,
            "config": self._config,
            "data": data_state,
        }
        self._writing = self._pool.submit(self._finish, number, header)

    def remove(self) -> None:
        """Removes everything kept of this run, whose last checkpoint is there."""
        self._wait()
        self._maps.clear()
        multihost.agree(True)
        shutil.rmtree(self.own, ignore_errors=True)
        if self._neighbours.is_first_of_host:
            shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Waits for the generation that is being written, and ends the threads."""
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
            self._id_file.unlink(missing_ok=True)
        self.close()

    def _finish(self, number: int, header: dict[str, Any]) -> int:
        """Hashes a generation, commits it and sends it to the neighbour; returns its step."""
        content = self._map(number)
        header["checkpoint"] = self._newest_checkpoint() if self._process == 0 else 0
        header["pieces"] = [
            [piece.leaf, piece.index, piece.offset, piece.size_bytes, hashed]
            for piece, hashed in zip(self._pieces, hashes(content, self._pieces), strict=True)
        ]
        text = json.dumps(header | {"digest": digest(header)}, allow_nan=False)
        write_whole(self.own / f"{number}.json", text, durable=False)
        self._neighbours.send(number, text.encode(), memoryview(content))
        return header["step"]

    def _wait(self) -> tuple[int, str]:
        """Waits for the generation being written; returns its step, 0 if there was none or -1 if it failed, and why."""
        writing, self._writing = self._writing, None
        if writing is None:
            return 0, ""
        try:
            return writing.result(), ""
        except Exception as error:  # of the folder, of the connection, or of what the neighbour answered
            return _NONE, f"{type(error).__name__}: {error}"

    def _free_generation(self) -> int:
        """Returns the generation to write over: not the one that all processes have."""
        steps = [(header_at(self.own / str(number)) or {}).get("step", _NONE) for number in GENERATIONS]
        return 1 if steps[0] == self._newest_everywhere and steps[0] != _NONE else 0

    def _remove_others(self) -> None:
        """Removes the folders of processes that were on this host in an earlier attempt; theirs are elsewhere now."""
        for folder in self._folders() if self._neighbours.is_first_of_host else []:
            if folder.name not in self._neighbours.names_here:
                shutil.rmtree(folder, ignore_errors=True)

    def _folders(self) -> list[Path]:
        return [entry for entry in self.folder.iterdir() if entry.is_dir()]

    def _usable(self, process: int, checkpoint: int) -> list[int]:
        """Returns the steps of a process's generations on this host; says once why one is not used."""
        steps = []
        for kind in ("process", "copy"):
            for number in GENERATIONS:
                if (header := header_at(self.folder / f"{kind}-{process}" / str(number))) is None:
                    continue
                if header["run"] != self._run or header["processes"] != self._processes:
                    why = "it is of another run" if header["run"] != self._run else "the run had other processes"
                elif header["config"] != self._config:
                    why = "the config has changed"
                elif header["checkpoint"] > checkpoint:
                    why = f"it is from after checkpoint {header['checkpoint']}, which is no longer there"
                else:
                    steps.append(header["step"])
                    continue
                if process == self._process == 0:
                    self._say(f"The state of step {header['step']} in local memory is not used: {why}.")
        return sorted(set(steps), reverse=True)[: 2 * len(GENERATIONS)]

    def _generation_of(self, step: int) -> Path:
        """Returns the path, without suffix, of this process's generation of a step; fetched if no file here is it."""
        for kind in ("process", "copy"):
            for number in GENERATIONS:
                path = self.folder / f"{kind}-{self._process}" / str(number)
                header = header_at(path)
                if header is not None and header["step"] == step and header["run"] == self._run:
                    return path
        holders = np.flatnonzero((self._holders[:, self._process] == step).any(axis=1)).tolist()
        number = self._free_generation()
        self._neighbours.fetch(holders[0], self._process, step, self.own / str(number))
        return self.own / str(number)

    def _map(self, number: int) -> np.ndarray:
        """Returns a generation's bytes, in a shared map; its memory is taken, so that writing cannot fail."""
        if number not in self._maps:
            with open_private(self.own / f"{number}.bin") as file:
                reserve(file, self._size_bytes)
                self._maps[number] = np.frombuffer(mmap.mmap(file.fileno(), self._size_bytes), np.uint8)
        return self._maps[number]

    def _take_room(self) -> None:
        """Takes the memory of both generations; refuses a folder that has too little for them and the neighbour's."""
        why = ""
        sizes_mib = multihost.gather(np.asarray(-(-self._size_bytes // (1 << 20)), np.int32))  # jax has no int64
        try:
            self.own.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.chmod(0o700)
            kept = [*self._neighbours.processes_here, *self._neighbours.copies_here]
            need = len(GENERATIONS) * sum(sizes_mib[kept].tolist()) << 20
            there = sum(file.stat().st_blocks * 512 for file in self.folder.rglob("*.bin"))
            free = shutil.disk_usage(self.folder).free + there
            if need > free:
                why = (
                    f"checkpoint.local_every_steps keeps two generations of the state, and two of another host's where "
                    f"there are several: {_gib(need)} in {self.folder.parent}, which has {_gib(free)} free. Make it "
                    "larger (`mount -o remount,size=... /dev/shm`, `docker run --shm-size`), set checkpoint.local_dir "
                    "to another folder in memory, or checkpoint.local_every_steps=None."
                )
        except OSError as error:
            why = (
                f"checkpoint.local_dir: {self.folder} cannot be written to ({error.strerror}). Set it to a folder in "
                "memory that can."
            )
        if multihost.agree(bool(why))[0]:
            self._neighbours.close()
            raise UserError(why or "another process of this run has no room for the state in local memory; see there.")
        for number in GENERATIONS:
            self._map(number)

    def _identity(self) -> str:
        """Returns the run's identity, made by process 0 when the run first keeps a state."""
        identity = b""
        if self._process == 0:
            if not self._id_file.exists():
                self._id_file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self._id_file, secrets.token_hex(_ID_BYTES // 2))
            identity = self._id_file.read_bytes()[:_ID_BYTES]
        return multihost.from_process_zero(np.frombuffer(identity.ljust(_ID_BYTES), np.uint8)).tobytes().decode("ascii")


@contextlib.contextmanager
def local_memory(
    spec: "CheckpointSpec", workdir: Path, like: Callable[[], Any], config_text: str
) -> Iterator[LocalMemory | None]:
    """Opens the local memory of a run until the block ends; None if the spec keeps no state there.

    Args:
      like: returns shapes, dtypes and shardings of the state.
    """
    if spec.local_every_steps is None:
        yield None
        return
    checkpoints = workdir.absolute() / "checkpoints"
    with LocalMemory(
        workdir,
        spec.local_dir,
        like(),
        config_text,
        newest_checkpoint=lambda: max(files.steps(checkpoints), default=0),
        say=functools.partial(print, flush=True),
    ) as memory:
        yield memory


def _config_digest(config_text: str) -> str:
    """Returns a hash of the config without its remarks, and without what does not change the state."""
    lines = [line for line in config_text.splitlines() if not line.startswith(("#", *_ONLY_WATCHES))]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
