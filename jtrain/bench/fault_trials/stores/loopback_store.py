"""Object store of a trial: Google's API on the loopback interface, in a process of its own, with a folder as
its bucket, so that the harness reads and damages objects as files.

The process is none of the training's: it does not count as a stray one.
"""

import contextlib
import dataclasses
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Literal

from jtrain.bench.fault_trials import processes
from jtrain.bench.fault_trials.stores.google_storage import BUCKET, Store, answer_google, serve
from jtrain.bench.fault_trials.workdir import Workdir
from jtrain.checkpoint import files
from jtrain.telemetry import metrics

Link = Literal["silent", "reset"]


class FolderFiles(MutableMapping[str, bytes]):
    """Objects as files of a folder: name -> content."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes()
        except OSError as error:
            raise KeyError(name) from error

    def __setitem__(self, name: str, content: bytes) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Objects appear whole, so the harness never reads half of one.
        part = self._folder.with_name(f"part-{secrets.token_hex(8)}")
        part.write_bytes(content)
        part.rename(path)

    def __delitem__(self, name: str) -> None:
        path = self._folder / name
        try:
            path.unlink()
        except OSError as error:
            raise KeyError(name) from error
        # A store has no folders: one without objects is not there.
        with contextlib.suppress(OSError):
            # Up to the first folder that holds something else, which rmdir refuses.
            while (path := path.parent) != self._folder:
                path.rmdir()

    def __iter__(self) -> Iterator[str]:
        return (str(path.relative_to(self._folder)) for path in self._folder.rglob("*") if path.is_file())

    def __len__(self) -> int:
        return sum(1 for _ in self)


class LoopbackStore:
    """Server of a trial. `partition` cuts it off; `heal` ends that."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / BUCKET).mkdir(parents=True)
        self._link, address = folder / "link", folder / "address"
        self.pid = processes.fork(lambda: self._serve(address), folder / "server.log")
        processes.NOT_OF_TRAININGS.add(self.pid)
        while not address.exists():
            time.sleep(0.01)  # the server writes it once it listens
        self.environ = {
            "STORAGE_EMULATOR_HOST": address.read_text(),
            "TENSORSTORE_GCS_HTTP_URL": address.read_text(),
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "test",
            # gcsfs would ask by gRPC what kind of bucket it is.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def partition(self, link: Link) -> None:
        """Cuts the store off: `silent` accepts connections and never answers, `reset` ends them."""
        self._link.write_text(link)

    def heal(self) -> None:
        """Lets the store answer again, also what it was asked meanwhile."""
        self._link.unlink(missing_ok=True)

    def close(self) -> None:
        """Ends the server."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        processes.NOT_OF_TRAININGS.discard(self.pid)

    def _serve(self, address: Path) -> int:
        store = Store(f"gs://{BUCKET}", FolderFiles(self.folder / BUCKET), reaches=self._reaches)
        with serve(store, answer_google) as store.address:
            new = address.with_name("address.new")
            new.write_text(store.address)
            # In one step, as the harness reads it as soon as it is there.
            new.rename(address)
            threading.Event().wait()
        return 0

    def _reaches(self) -> bool:
        while self._link.exists():
            if self._link.read_text() == "reset":
                return False
            time.sleep(0.02)  # silent until the link is healed
        return True


@dataclasses.dataclass(frozen=True)
class StoreWorkdir(Workdir):
    """Workdir in a loopback store: objects as files, and the metrics that the run has on its own disk.

    A checkpoint in a store is written under its own name, and its manifest comes last.

    cache: the user's cache folder of the run, which has its files until they are copied to the store.
    """

    cache: Path

    @property
    def url(self) -> str:
        """The workdir as after `--workdir`."""
        return f"gs://{BUCKET}/{self.path.name}"

    @property
    def metrics_file(self) -> Path:
        mirrors = self.cache.glob(f"jtrain/workdirs/{self.path.name}-*/process-0/{metrics.FILE}")
        return next(mirrors, self.path / metrics.FILE)

    def saving(self) -> tuple[Path, ...]:
        return tuple(
            path for path in self._folders() if path.name.isdecimal() and not (path / files.MANIFEST).exists()
        )

    def newest_folder(self) -> int:
        # One without a manifest is a save that was broken off: nobody has to be told of it.
        return max(self.committed(), default=0)

    def sealed(self) -> tuple[Path, ...]:
        return ()
