"""The checkpoints of one run: when to write one, which to keep, what to say when one cannot be written or read."""

import contextlib
import dataclasses
import json
import shutil
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jtrain.checkpoint import files, processes
from jtrain.checkpoint.files import CheckpointError, Leaf, Manifest

MAX_NAMED_LEAVES = 10


@dataclasses.dataclass(frozen=True)
class CheckpointSpec:
    """When to save and what to keep.

    every_steps: a save after each multiple of this many steps; None saves only at the end and when stopped.
    keep_last: the newest so many stay. While one is written there is one more on the disk.
    keep_every_steps: multiples of this stay for ever; None keeps none.
    """

    every_steps: int | None = 1000
    keep_last: int = 2
    keep_every_steps: int | None = None

    def __post_init__(self) -> None:
        for field, way_out in (
            ("every_steps", " or None to save only at the end and when stopped"),
            ("keep_last", ": the newest checkpoint is never deleted"),
            ("keep_every_steps", " or None to keep none beyond checkpoint.keep_last"),
        ):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"checkpoint.{field}={value} must be at least 1{way_out}.")


class Checkpoints:
    """The directory `workdir`/checkpoints. Every process of a run makes one and calls the same methods in step.

        with Checkpoints(workdir, CheckpointSpec()) as checkpoints:
            checkpoints.save(step, state, data_state, config_text)  # back when the arrays are on the host
            checkpoints.wait()  # durable

    A kill at any instant leaves the checkpoints committed before it, and nothing that counts as one besides. An older
    one is deleted only after a newer was committed. At most one save is in flight.

    Leaving the `with` block by an exception waits for a save in flight, too.
    """

    def __init__(self, workdir: Path, spec: CheckpointSpec) -> None:
        self.folder = workdir.absolute() / "checkpoints"
        self._spec = spec
        self._writer: Any = None  # arrays.Writer: its module imports orbax, so it is made by prepare()
        self._saving: _Saving | None = None

    def prepare(self) -> None:
        """Does what the first save would have to do: imports orbax (0.8 s), makes the directory, sweeps it.

        Call it while a device is busy; before any training, to learn early that the directory cannot be written.

        Raises:
          CheckpointError: it cannot.
        """
        if self._writer is not None:
            return
        from jtrain.checkpoint import arrays

        with self._explained("cannot be written to"):
            if processes.index() == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                probe = self.folder / "writable.deleted"
                probe.mkdir(exist_ok=True)
                probe.rmdir()
                files.sweep(self.folder)
        self._writer = arrays.Writer(seal=self._seal, after=self._prune)

    def steps(self) -> tuple[int, ...]:
        """Steps of the complete checkpoints, ascending."""
        return files.steps(self.folder)

    def latest_step(self) -> int | None:
        """The newest complete checkpoint; None if there is none. A listing, but process 0's in every process."""
        newest = max(self.steps(), default=-1)
        newest = processes.zero_says(newest)
        return None if newest < 0 else newest

    def save(self, step: int, state: Any, data_state: dict[str, Any], config_text: str) -> bool:
        """Saves in the background; returns when `state` may be donated or deleted.

        Waits for the previous save first, if that is not done.

        Args:
          step: completed updates.
          state: a pytree of jax.Arrays.
          data_state: JSON: where the data stream goes on.
          config_text: the run's flat config.

        Returns:
          False if a complete checkpoint of this step is there already, as after a crash between its commit and the
          next step; it stays as it is.

        Raises:
          CheckpointError: this save cannot begin, or the previous one failed in the background.
          TypeError, ValueError: data_state is no JSON.
        """
        data = json.dumps(data_state, allow_nan=False)
        self.prepare()
        self.wait()
        if processes.zero_says(int(step in self.steps())):
            return False
        from jtrain.checkpoint import arrays

        leaves = arrays.leaves(state)
        self._saving = _Saving(step, leaves, data, config_text)
        with self._saved():
            # A directory of this name without a manifest is a copy that a user did not finish.
            self._writer.save(self.folder / str(step), state, force=(self.folder / str(step)).exists())
        return True

    def check(self) -> None:
        """Raises the error of a save that failed in the background since the last call; returns at once otherwise."""
        if self._writer is not None:
            with self._saved():
                self._writer.check()

    def wait(self) -> None:
        """Returns when the last save is durable: committed, and on the disk itself.

        Raises:
          CheckpointError: it failed. Earlier checkpoints are as they were.
        """
        if self._writer is not None and self._saving is not None:
            with self._saved():
                self._writer.wait()
            self._saving = None

    def restore(self, step: int, like: Any, *, verify: bool = True) -> tuple[Any, dict[str, Any]]:
        """The state and data state of a checkpoint, the state with the shapes, dtypes and shardings of `like`.

        Any layout reads what any other saved: each device reads its own part, none holds more. A leaf saved in another
        floating-point dtype is rounded to nearest even.

        Args:
          step: one of `steps()`.
          like: the same pytree as was saved, of `jax.ShapeDtypeStruct` with shardings.
          verify: hash every file first (processes divide them): about 1 s per GB and thread, 8 threads. Without,
            only missing files and wrong sizes are found beforehand.

        Raises:
          CheckpointError: no such checkpoint; one of another model or optimizer, with the leaves that differ; a
            damaged one, with the way back to an older.
        """
        path, manifest = self._open(step, verify=verify)
        self._check_same(step, manifest.leaves, like)
        return self._read(path, like), self.data_state(step)

    def restore_part(self, step: int, like: dict[str, Any], *, verify: bool = True) -> dict[str, Any]:
        """Some branches of the state, such as `{"params": ...}`; the others are not read. Otherwise as `restore`."""
        path, manifest = self._open(step, verify=verify)
        branches = tuple(f"{name}." for name in like)
        saved = {name: leaf for name, leaf in manifest.leaves.items() if f"{name}.".startswith(branches)}
        self._check_same(step, saved, like)
        return self._read(path, like, only_some=True)

    def data_state(self, step: int) -> dict[str, Any]:
        """Where the data stream goes on after `step`."""
        return json.loads((self.folder / str(step) / files.DATA).read_text())

    def config_text(self, step: int) -> str:
        """The flat config of the run that saved `step`. Raises CheckpointError where there is no such checkpoint."""
        path, _ = self._open(step, verify=False)
        return (path / files.CONFIG).read_text()

    def close(self) -> None:
        """Waits for the last save, then lets go of all threads.

        Raises:
          CheckpointError: that save failed.
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
        )

    def _prune(self) -> None:
        """Runs right after a commit, so there is always a newer one than those that go."""
        keep = {"keep_last": self._spec.keep_last, "keep_every_steps": self._spec.keep_every_steps}
        for step in files.surplus(self.steps(), **keep):
            files.delete(self.folder, step)

    def _open(self, step: int, *, verify: bool) -> tuple[Path, Manifest]:
        self.wait()
        path = self.folder / str(step)
        there = self.steps()
        if step not in there:
            have = f"there are those of steps {', '.join(map(str, there))}" if there else "there is none"
            raise CheckpointError(f"No complete checkpoint of step {step} in {self.folder}: {have}.")
        wrong: list[str] = []
        try:
            manifest = files.read_manifest(path)
            wrong = files.damage(path, manifest, hashes=verify, share=processes.share())
        except CheckpointError as error:
            manifest, wrong = None, [str(error)]
        if processes.anywhere(bool(wrong)) or manifest is None:
            raise self._damaged(step, wrong or ["another process of this run found it"])
        return path, manifest

    def _read(self, path: Path, like: Any, *, only_some: bool = False) -> Any:
        from jtrain.checkpoint import arrays

        try:
            return arrays.restore(path / files.STATE, like, only_some=only_some)
        except Exception as error:  # Orbax and TensorStore raise many kinds
            raise self._damaged(int(path.name), [f"{type(error).__name__}: {error}"]) from error

    def _damaged(self, step: int, wrong: list[str]) -> CheckpointError:
        """The error for a checkpoint that cannot be read; hashes the older ones until one is whole."""
        said = "\n".join(f"  {line}" for line in wrong[:MAX_NAMED_LEAVES])
        more = f"\n  and {len(wrong) - MAX_NAMED_LEAVES} more" if len(wrong) > MAX_NAMED_LEAVES else ""
        path = self.folder / str(step)
        for older in reversed([other for other in self.steps() if other < step]):
            other = self.folder / str(older)
            with contextlib.suppress(CheckpointError):
                if not files.damage(other, files.read_manifest(other)):
                    way = (
                        f"The checkpoint of step {older} is whole (all hashes match). To go on from it, move the "
                        f"damaged one away and run the same command again: mv {path} {path}.damaged"
                    )
                    break
        else:
            way = f"No older checkpoint in {self.folder} is whole: restore the directory from a copy, or start anew."
        return CheckpointError(f"The checkpoint {path} is damaged:\n{said}{more}\n{way}")

    def _check_same(self, step: int, saved: dict[str, Leaf], like: Any) -> None:
        from jtrain.checkpoint import arrays

        wanted = arrays.leaves(like)
        lines = [
            f"{name}: {_shown(saved.get(name))} there, {_shown(wanted.get(name))} here"
            for name in dict.fromkeys([*wanted, *saved])
            if name not in saved or name not in wanted or not _compatible(saved[name], wanted[name])
        ]
        if not lines:
            return
        kinds = {"opt_state": "optimizer", "scaling": "layout.matmul_dtype"}
        found = {kinds.get(line.partition(".")[0], "model") for line in lines}
        what = found.pop() if len(found) == 1 else "model"
        field = what if "." in what else f"{what}.*"
        listed = "".join(f"\n  {line}" for line in lines[:MAX_NAMED_LEAVES])
        more = f"\n  and {len(lines) - MAX_NAMED_LEAVES} more" if len(lines) > MAX_NAMED_LEAVES else ""
        raise CheckpointError(
            f"The checkpoint {self.folder / str(step)} is of another {what}: {len(lines)} of {len(wanted)} leaves "
            f"differ.{listed}{more}\nSet {field} as in {self.folder / str(step) / files.CONFIG}, or choose another "
            "--workdir."
        )

    @contextlib.contextmanager
    def _saved(self) -> Iterator[None]:
        """Around what may raise a save's error: removes what that save left, and explains."""
        step = f" of step {self._saving.step}" if self._saving else ""
        try:
            with self._explained(f"does not take the checkpoint{step}"):
                yield
        except CheckpointError:
            self._saving = None
            if processes.index() == 0:
                files.sweep(self.folder)
            raise

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # Orbax and TensorStore raise many kinds, OSError and ValueError among them
            raise CheckpointError(
                f"{self.folder} {what} ({type(error).__name__}: {error}).{self._room()}{self._left()}"
            ) from error

    def _room(self) -> str:
        there = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        need = f" The state has {_gib(self._saving.state_bytes)}," if self._saving else ""
        free = _gib(shutil.disk_usage(there).free)
        return f"{need} {free} are free there. Mend that, or choose another --workdir."

    def _left(self) -> str:
        there = self.steps()
        if not there:
            return " No checkpoint was written before."
        return f" Earlier checkpoints are untouched: steps {', '.join(map(str, there))}."


@dataclasses.dataclass(frozen=True)
class _Saving:
    """What goes beside the arrays of the save in flight."""

    step: int
    leaves: dict[str, Leaf]
    data: str
    config: str

    @property
    def state_bytes(self) -> int:
        return sum(leaf.bytes for leaf in self.leaves.values())


def _compatible(saved: Leaf, wanted: Leaf) -> bool:
    floating = all(leaf.dtype.startswith(("float", "bfloat")) for leaf in (saved, wanted))
    return saved.shape == wanted.shape and (saved.dtype == wanted.dtype or floating)


def _shown(leaf: Leaf | None) -> str:
    return "nothing" if leaf is None else str(leaf)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
