"""One save: runs in the background of all processes at the same time, and has the same result in all of them.

    every process   writes its part, hashed, to `<step>.<attempt>.orbax-checkpoint-tmp`
    process 0       hears from all, sees all files, writes the manifest, renames: this is the commit
    every process   reads its share of the files back from their final place
    process 0       hears from all, then deletes older checkpoints; or this one, if it is not what was written

The processes tell each other through the coordination service. One whose disk is full says so at once, and
the others do not wait for it.
"""

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path

from jtrain.checkpoint import array_writer, files, folders, removal
from jtrain.checkpoint.array_writer import Checksums, DescribedLeaf
from jtrain.checkpoint.files import CheckpointError, ManifestLeaf
from jtrain.checkpoint.host_copy import StateChunks
from jtrain.errors import first_few
from jtrain.runtime import atomic_io, multihost
from jtrain.runtime.store_paths import error_line, in_store
from jtrain.runtime.workdir_lock import WorkdirLock

PATIENCE_S = 900.0
"""How long process 0 waits, after its own part, for the others to say how theirs went."""

_MAX_NAMED = 5


@dataclasses.dataclass(frozen=True)
class Contents:
    """Holds what a save writes, apart from the bytes of the arrays."""

    step: int
    leaves: dict[str, ManifestLeaf]
    described: list[DescribedLeaf]
    data: str
    config: str


class SaveTask:
    """A save in the background.

    failure: None, or why there is no new checkpoint; valid when `ended`.
    warning: None, or what went wrong after the checkpoint was safe; in process 0.
    """

    def __init__(
        self,
        folder: Path,
        contents: Contents,
        chunks: StateChunks,
        *,
        attempt: int,
        background: bool,
        prune: Callable[[], None],
        lock: WorkdirLock | None,
    ) -> None:
        """Starts the save.

        Args:
          chunks: this process's part; emptied as it is written.
          attempt: number of this save, the same in all processes and of no other save of this run.
          background: True if steps run beside it, which must not wait for its threads.
          prune: deletes surplus checkpoints.
          lock: asked before each commit and deletion whether this run still has the workdir.
        """
        # Everything the thread reads is set before it starts, at the end of this method.
        self.contents = contents
        self.failure: str | None = None
        self.warning: str | None = None
        # A name per attempt: a late word about a failed save must not count for the next one.
        self._exchange = multihost.agreement(f"checkpoint/{attempt}")
        self._exchange_before = multihost.agreement(f"checkpoint/{attempt - 1}")
        self._folder = folder
        self._final = folder / str(contents.step)
        # A store has no renames: there the manifest alone tells a checkpoint from the remains of a save.
        self._partial = (
            self._final if in_store(folder) else folder / f"{contents.step}.{attempt}{removal.PARTIAL}"
        )
        self._chunks = chunks
        self._checksums: Checksums = {}
        self._background = background
        self._prune = prune
        self._lock = lock
        self._commit_before: int | None = None  # set by process 0
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self, seconds: float | None = None) -> None:
        """Waits until the save has ended, or for so many seconds."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self.failure = self._save()
        # The failure is a text that `Saves` reads in the main
        # thread: an exception here would only be printed.
        except Exception as error:  # the coordination service is gone
            self.failure = cause(error)
        finally:
            # Also after a failure: `release` waits in the main thread until no chunk is left.
            self._chunks.drop()

    def _save(self) -> str | None:
        described = self.contents.described if multihost.process_index() == 0 else []
        failed, hashes = _attempt(
            lambda: array_writer.write_arrays(
                self._partial, self._chunks, described, self._checksums, background=self._background
            ),
            otherwise={},
        )
        # This process may have failed while others write: its chunks are free before it waits for them.
        self._chunks.drop()
        # From here on files are only read back, beside the steps.
        if self._background and not in_store(self._folder):
            array_writer.yield_to_steps()
        # Before `written`: process 0 reads the hashes as soon as it has heard that from all.
        self._exchange.tell("files", json.dumps(hashes))
        if failure := self._agree_on("written", failed, then=self._commit, otherwise=self._discard):
            return failure
        # Only after the commit, in every process: the files have their final names then.
        failed, _ = _attempt(self._read_back, otherwise=None)
        return self._agree_on("verified", failed, then=self._retire, otherwise=self._withdraw)

    def _agree_on(
        self, topic: str, failed: str | None, *, then: Callable[[], None], otherwise: Callable[[], None]
    ) -> str | None:
        """Returns None or a failure, the same in all processes.

        Process 0 runs `then` if no process failed, and `otherwise` if one did or `then` fails.
        """
        # First everybody speaks, then process 0 listens: it would wait for itself otherwise.
        self._exchange.tell(topic, failed or "")
        if multihost.process_index() == 0:
            failure = self._first_failure(topic)
            if failure is None:
                failure, _ = _attempt(then, otherwise=None)
            if failure is not None:
                with contextlib.suppress(Exception):  # the next start removes what is left
                    otherwise()
            # Also an empty word is announced: the others wait for one.
            self._exchange.announce(topic, failure or "")
        return self._exchange.announced(topic) or None

    def _first_failure(self, topic: str) -> str | None:
        """Waits for all processes; returns what the first one that failed said."""
        heard = self._exchange.collect(topic, seconds=PATIENCE_S, enough=bool)
        count = multihost.process_count()
        # In the order of the processes, so that reruns name the same one.
        for process, text in sorted(heard.items()):
            if text:
                return text if count == 1 else f"process {process} of {count}: {text}"
        silent = self._exchange.silent(heard)
        return f"no word from {silent} within {PATIENCE_S:.0f} s" if silent else None

    def _commit(self) -> None:
        contents = self.contents
        self._check_lock()
        self._exchange_before.forget()  # all processes are in this save, so none is in the one before
        hashes = {}
        for hashes_text in self._exchange.told("files").values():
            hashes |= {name: (size, digest) for name, (size, digest) in json.loads(hashes_text).items()}
        # Before the manifest exists: a folder that lacks a part must never pass for a checkpoint.
        if missing := array_writer.find_missing_parts(self._partial, hashes, contents.leaves):
            raise CheckpointError(
                f"{_join_some(missing)}: all processes must write to one folder. Set --workdir to one that "
                "all hosts share"
            )
        files.seal(
            self._partial,
            step=contents.step,
            leaves=contents.leaves,
            data=contents.data,
            config=contents.config,
            hashes={name: digest for name, (_, digest) in hashes.items()},
            processes=multihost.process_count(),
            lease=None if self._lock is None else self._lock.number,
        )
        # On a disk this rename is the commit; in a store, `seal` has made it by writing the manifest.
        if not in_store(self._folder):
            if self._final.exists():  # a directory without a manifest: a user's unfinished copy
                removal.delete(self._folder, contents.step)
            self._partial.rename(self._final)
            # Without it, a power cut may forget the rename, although the files are safe.
            atomic_io.sync_directory(self._folder)
        # After the rename: a note of a step that is not there would tell of a lost checkpoint.
        with contextlib.suppress(Exception):  # the note of an earlier commit serves as well
            self._commit_before = files.last_commit(self._folder)
            files.note_commit(self._folder, contents.step)

    def _check_lock(self) -> None:
        """Raises LeaseLost if another run has the workdir: its files have the same names as this run's."""
        if self._lock is not None:
            self._lock.check(confirm=True)

    def _discard(self) -> None:
        self._check_lock()
        folders.remove(self._partial, first=files.MANIFEST)

    def _read_back(self) -> None:
        """Compares this process's share of the files in their final place with what was written."""
        manifest = files.read_manifest(self._final)
        # All processes sort alike, so their shares cover every file once.
        by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name][0], name))
        share = by_size[multihost.process_index() :: multihost.process_count()]
        hashes = {name: manifest.files[name] for name in share}
        if wrong := array_writer.find_differences(self._final, hashes, self._checksums):
            raise CheckpointError(f"the files were read back, and {_join_some(wrong)}")

    def _retire(self) -> None:
        """Deletes older checkpoints, now that this one is known to be whole."""
        try:
            self._check_lock()
            # Only after the files were read back: until then the older
            # checkpoint is the one that is known to be good.
            self._prune()
        except Exception as error:  # of the disk or store: this checkpoint is whole nevertheless
            self.warning = f"older checkpoints in {self._folder} cannot be deleted ({cause(error)})"

    def _withdraw(self) -> None:
        """Deletes this checkpoint: its state is still in memory, and will be saved again."""
        self._check_lock()
        # First: after a kill in between, a note of this step would tell of a lost checkpoint.
        with contextlib.suppress(Exception):  # the checkpoint goes in any case
            files.note_commit(self._folder, self._commit_before)
        removal.delete(self._folder, self.contents.step)


def cause(error: Exception) -> str:
    """Returns type and text of an error; the text alone where it was written for users."""
    return str(error) if isinstance(error, CheckpointError) else error_line(error)


def _attempt[T](action: Callable[[], T], *, otherwise: T) -> tuple[str | None, T]:
    """Returns None and the result of `action`, or why it failed and `otherwise`."""
    try:
        return None, action()
    except Exception as error:  # of the disk, or of the device that an array is fetched from
        return cause(error), otherwise


def _join_some(lines: list[str]) -> str:
    return first_few(lines, _MAX_NAMED, "; ")
