"""Lock of a workdir: one run at a time writes to it, on one host or many; a lease in its folder `lock/`."""

import os
import socket
import types
from collections.abc import Callable
from pathlib import Path

from jtrain.errors import UserError
from jtrain.runtime import lease, multihost
from jtrain.runtime.atomic_io import cannot_write
from jtrain.runtime.lease import NOBODY, Holder, Lease, LeaseHeld, LeaseLost
from jtrain.runtime.lease_stores import FolderStore

FOLDER = "lock"


class WorkdirLock:
    """Holds a workdir for this run inside the `with` block. All processes enter together; process 0 holds the lease.

        with WorkdirLock(workdir, say=print) as lock:
            ...
            lock.check()  # at every step

    After a SIGKILL the next run on the same host takes the lock over at once; on another host it waits until the lock
    has not been touched for `lease.STALE_S`.

    Args:
      workdir: created if missing.
      say: gets a line if a stale lock is taken over.

    Raises:
      UserError: another run holds the workdir; names host, process and time.
      FileError: the workdir cannot be written to.
    """

    def __init__(self, workdir: Path, *, say: Callable[[str], None]) -> None:
        self._workdir = workdir
        self._say = say
        self._lease = Lease(FolderStore(workdir / FOLDER))

    def __enter__(self) -> "WorkdirLock":
        refused: UserError | None = None
        joined = multihost.is_joined()
        if not (joined and multihost.process_index()):
            try:
                self._take()
            except LeaseHeld as error:
                refused = self._refusal(error.holder)
            except OSError as error:
                refused = cannot_write(self._workdir, error)
        if joined and multihost.agree(refused is not None)[0] and refused is None:
            raise UserError(f"process 0 could not lock --workdir {self._workdir}: see its message.")
        if refused is not None:
            raise refused
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Releases the lock.

        Raises:
          LeaseLost: the lock was lost, and that is why the block failed.
        """
        self._lease.release()
        if self._lease.is_lost and isinstance(error, Exception) and not isinstance(error, LeaseLost):
            raise self._lost() from error

    def check(self) -> None:
        """Raises LeaseLost if another run has taken the lock over; call it before anything is written."""
        try:
            self._lease.check()
        except LeaseLost:
            raise self._lost() from None

    def _take(self) -> None:
        self._workdir.mkdir(parents=True, exist_ok=True)
        self._lease.take(
            watching=lambda holder: self._say(
                f"{self._workdir} is locked by {holder}: watching for at most {lease.STALE_S:.0f} s whether it lives"
            ),
            taken_over=lambda holder: self._say(f"took over the lock of {self._workdir} from {holder}"),
        )

    def _refusal(self, holder: Holder | None) -> UserError:
        how = "" if holder is None else f" (`kill {holder.pid}` on {holder.host}: it saves first)"
        return UserError(
            f"--workdir {self._workdir} is in use by another run: {holder or NOBODY}. Wait for it, stop it{how}, or "
            "set --workdir to another folder."
        )

    def _lost(self) -> LeaseLost:
        return LeaseLost(
            f"the lock of --workdir {self._workdir} was taken over by {self._lease.taken_by}, because this process "
            f"(pid {os.getpid()} on {socket.gethostname()}) had not touched it for more than {lease.STALE_S:.0f} s: it "
            "was stopped, or its disk was away. Nothing more is written here. The other run goes on from the last "
            "checkpoint; end it first if this one shall go on."
        )
