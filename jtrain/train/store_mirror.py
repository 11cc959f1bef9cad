"""Small files of a run whose workdir is in an object store: kept on the local disk, and copied to the store.

A store has no appends, so metrics, goodput, TensorBoard's events, logs and profiles are written to a local
folder. They are copied at each save, before its checkpoint is committed as a rule, and at the end. A start on
another machine first fetches what the run needs to go on: the files at the top of the workdir.
"""

import concurrent.futures
import contextlib
import hashlib
import os
import shutil
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jtrain.checkpoint import folders
from jtrain.errors import UserError
from jtrain.runtime import multihost
from jtrain.runtime.lease import LeaseLost
from jtrain.runtime.multihost import process_index
from jtrain.runtime.platform import user_cache
from jtrain.runtime.stores import error_line, in_store, store_errors
from jtrain.runtime.workdir_lock import WorkdirLock
from jtrain.train.callbacks import Callback, LoopPhase

_THREADS = 8
_NOT_COPIED = ("checkpoints", "last_checkpoint.json", "local_memory.id")
"""What is written to the store directly."""


def local_folder(url: Path, environ: Mapping[str, str], *, process: int) -> Path:
    """Returns the folder of one process for the small files of the run at `url`."""
    digest = hashlib.blake2b(str(url).encode(), digest_size=8).hexdigest()
    return user_cache(environ) / "workdirs" / f"{url.name}-{digest}" / f"process-{process}"


def open_workdir(home: Path, environ: Mapping[str, str]) -> "tuple[Path, list[Callback]]":
    """Returns the local folder for the small files of the run in `home`, and their mirror if `home` is in a
    store.

    Raises:
      UserError: the store cannot be read, or another run, of this host or another, has the same workdir.
    """
    if not in_store(home):
        return home, []
    mirror = StoreMirror(home, local_folder(home, environ, process=process_index()))
    # The local folder is replaced: it may be that of a run which trains now.
    with WorkdirLock(home, say=print) as lock:
        mirror.fetch()
        mirror.fetched_under = lock.number
    return mirror.local, [mirror]


class StoreMirror(Callback):
    """Callback that copies the small files of a run to its store.

    with StoreMirror(url, local) as mirror:
        ...  # writes files to `local`

    A copy that fails is a warning: training goes on, and the next copy takes all files that have changed
    since.

    url: the workdir in the store.
    local: the folder on this host, which holds what was fetched.
    """

    def __init__(self, url: Path, local: Path) -> None:
        self.url = url
        self.local = local
        self._copied: dict[str, tuple[int, int]] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "mirror")
        self._lock = threading.Lock()
        self._warned = False
        self.lock: WorkdirLock | None = None  # set once the run holds the workdir
        self.fetched_under: int | None = None  # number of the lease; None in processes other than 0

    def fetch(self) -> None:
        """Replaces the local folder by the files at the top of the workdir in the store.

        Raises:
          UserError: the store cannot be read.
        """
        self.local.mkdir(parents=True, exist_ok=True)
        for old in self.local.iterdir():
            # The local folder of a run in a store is a copy: what is here counts for nothing.
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        with store_errors(f"--workdir {self.url}"):
            for name in sorted({*folders.names(self.url)} - {*folders.folder_names(self.url)}):
                if name not in _NOT_COPIED and not name.startswith("."):
                    (self.local / name).write_bytes((self.url / name).read_bytes())
        # What has just been fetched is not copied back.
        self._copied = self._stat_files()

    def hold(self, lock: WorkdirLock, *, takes: int, moved: bool) -> None:
        """Takes the lock that the run holds from here on; all processes call it together.

        Fetches again if another run has had the workdir since the fetch: it may have gone on from there.

        Args:
          takes: times that this run itself has taken the lease since the fetch.
          moved: the history was moved aside here, which another fetch would undo.

        Raises:
          UserError: another run had the workdir, and the history is moved; or as `fetch`.
        """
        self.lock = lock
        fetched, held = self.fetched_under, lock.number
        # Every hold of a workdir has the next number.
        is_stale = fetched is not None and held is not None and held != fetched + takes
        if not (multihost.agree(is_stale)[0] if multihost.is_joined() else is_stale):
            return
        if moved:
            raise UserError(
                f"another run has had --workdir {self.url} while this one began with --from-scratch. Look at "
                "what it left there, and run the same command again."
            )
        self.fetch()

    def copy(self) -> None:
        """Copies the files that have changed since the last copy, and removes those that were removed
        here.
        """
        try:
            # One copy at a time: two would write the same names.
            with self._lock, concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
                if self.lock is not None:
                    self.lock.check(confirm=True)
                local_files = self._stat_files()
                # Size and time of change: a file of the same length that was written again is noticed.
                changed = [name for name, state in local_files.items() if self._copied.get(name) != state]
                list(
                    pool.map(
                        lambda name: (self.url / name).write_bytes((self.local / name).read_bytes()), changed
                    )
                )
                for name in self._copied.keys() - local_files.keys():
                    (self.url / name).unlink(missing_ok=True)
                # Only after all copies: a failure leaves them for the next attempt.
                self._copied = local_files
        except LeaseLost:  # the files there are the other run's; the lock itself says so
            return
        except Exception as error:  # clients of stores raise many types
            if not self._warned:
                print(
                    f"WARNING: metrics and logs of {self.local} cannot be copied to {self.url} now "
                    f"({error_line(error)}). The run goes on, and tries again at its next save and at its "
                    "end.",
                    file=sys.stderr,
                    flush=True,
                )
            self._warned = True

    def __enter__(self) -> "StoreMirror":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        # Ends the thread, so that no copy runs beside the last one.
        self._pool.shutdown()
        self._warned = False  # what is not copied now is only here: say so again
        self.copy()

    @contextlib.contextmanager
    def during(self, phase: LoopPhase, step: int, arguments: tuple[Any, ...]) -> Iterator[None]:
        """Begins a copy in the background as a save begins."""
        if phase == "checkpoint":
            # In the background: the save must not wait for the store.
            self._pool.submit(self.copy)
        yield

    def _stat_files(self) -> dict[str, tuple[int, int]]:
        """Returns bytes and time of change of each local file by its path in the folder."""
        stats = {}
        for folder, _, names in os.walk(self.local):
            for name in names:
                if name.endswith(".tmp"):
                    continue  # of an atomic write under way
                with contextlib.suppress(FileNotFoundError):
                    stat = os.stat(os.path.join(folder, name))
                    path = os.path.relpath(os.path.join(folder, name), self.local)
                    stats[path] = (stat.st_size, stat.st_mtime_ns)
        return {name: state for name, state in stats.items() if name.partition("/")[0] not in _NOT_COPIED}
