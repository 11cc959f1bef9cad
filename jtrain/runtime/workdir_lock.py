"""A workdir at a start: one run at a time writes to it, by a lease in its folder `lock/`, and all processes
see it.
"""

import contextlib
import os
import secrets
import socket
import types
from collections.abc import Callable
from pathlib import Path

from jtrain.errors import UserError
from jtrain.runtime import lease, multihost
from jtrain.runtime.agreement import Agreement, FolderCarrier
from jtrain.runtime.atomic_io import cannot_write
from jtrain.runtime.lease import NOBODY, Lease, LeaseHeld, LeaseLost
from jtrain.runtime.lease_stores import FolderStore, Holder, ObjectStore
from jtrain.runtime.stores import WAY_OUT, error_line, in_store, unusable

FOLDER = "lock"

PATIENCE_S = 60.0
"""Time for a network file system to show a file that another host wrote: NFS keeps listings for up to 60
s."""

_WAY_OUT = (
    "Set --workdir to a folder that all hosts share (NFS, Lustre, ...), or to gs://bucket/run or "
    "s3://bucket/run."
)


class WorkdirLock:
    """Holds a workdir for this run inside the `with` block. All processes enter together; process 0 holds the
    lease.

        with WorkdirLock(workdir, say=print) as lock:
            ...
            lock.check()  # at every step

    After a SIGKILL the next run on the same host takes the lock over at once; on another host it waits until
    the lock has not been touched for `lease.STALE_S`.

    Args:
      workdir: a folder, created if missing, or the URL of one in an object store.
      say: gets a line if a stale lock is taken over.

    Raises:
      UserError: another run holds the workdir; names host, process and time.
      FileError: the workdir cannot be written to.
    """

    def __init__(self, workdir: Path, *, say: Callable[[str], None]) -> None:
        self._workdir = workdir
        self._say = say
        self._lease = Lease(
            ObjectStore(workdir / FOLDER / "lease.json")
            if in_store(workdir)
            else FolderStore(workdir / FOLDER)
        )

    def __enter__(self) -> "WorkdirLock":
        refused: UserError | None = None
        joined = multihost.is_joined()
        # One lease for the run: process 0 holds it for all.
        if not (joined and multihost.process_index()):
            try:
                self._take()
            except LeaseHeld as error:
                refused = self._refusal(error.holder)
            except UserError as error:  # a record that no lease wrote
                refused = error
            except OSError as error:
                refused = (
                    unusable(f"--workdir {self._workdir}", error)
                    if in_store(self._workdir)
                    else cannot_write(self._workdir, error)
                )
        # All wait here until process 0 has the lock: nobody may write to the workdir before.
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
        # Released first: `is_lost` is known for certain once the thread has ended.
        self._lease.release()
        # The lost lock is the cause of whatever failed: two runs in one workdir overwrite each other.
        if self._lease.is_lost and isinstance(error, Exception) and not isinstance(error, LeaseLost):
            raise self._lost_error() from error

    @property
    def number(self) -> int | None:
        """Fencing number: higher for each run that holds this workdir; None in processes other than 0."""
        return self._lease.number

    def check(self, *, confirm: bool = False) -> None:
        """Raises LeaseLost if another run has taken the lock over; call it before anything is written.

        Args:
          confirm: as of `Lease.check`.
        """
        try:
            self._lease.check(confirm=confirm)
        except LeaseLost:
            raise self._lost_error() from None

    def _take(self) -> None:
        if not in_store(self._workdir):
            self._workdir.mkdir(parents=True, exist_ok=True)
        self._lease.take(
            watching=lambda holder: self._say(
                f"{self._workdir} is locked by {holder}: watching for at most {lease.STALE_S:.0f} s whether "
                "it lives"
            ),
            taken_over=lambda holder: self._say(f"took over the lock of {self._workdir} from {holder}"),
        )

    def _refusal(self, holder: Holder | None) -> UserError:
        advice = "" if holder is None else f" (`kill {holder.pid}` on {holder.host}: it saves first)"
        return UserError(
            f"--workdir {self._workdir} is in use by another run: {holder or NOBODY}. Wait for it, stop "
            f"it{advice}, or set --workdir to another folder."
        )

    def _lost_error(self) -> LeaseLost:
        return LeaseLost(
            f"the lock of --workdir {self._workdir} was taken over by {self._lease.taken_by}, because this "
            f"process (pid {os.getpid()} on {socket.gethostname()}) had not touched it for more than "
            f"{lease.STALE_S:.0f} s: it was stopped, or its disk was away. Nothing more is written here. The "
            "other run goes on from the last checkpoint; end it first if this one shall go on."
        )


def check_shared(folder: Path, *, patience_s: float = PATIENCE_S) -> None:
    """Checks that every process can write to `folder`, and that process 0 and each other process see the same
    one.

    Each process writes a file with a random token of process 0, reads the file of process 0, and process 0
    reads all. All processes must call it, and all raise the same error.

    Args:
      folder: a folder on a disk, created if missing, or in an object store.
      patience_s: time to wait for files of other processes to appear.

    Raises:
      UserError: some process cannot write there, or does not see what process 0 writes.
    """
    index, count = multihost.process_index(), multihost.process_count()
    if count == 1 and not in_store(folder):
        return  # what a run refuses before it writes leaves no folder behind
    token = multihost.gather_texts(secrets.token_hex(8))[0]
    probe = Agreement("", FolderCarrier(folder), process=index, processes=count)
    # Random, so that files of an earlier attempt do not count.
    topic = f".probe-{token}"
    write_error = ""
    try:
        probe.tell(topic, token)
    except Exception as error:  # clients of object stores raise many types
        # Told below, after the gathers: each of them needs all processes.
        write_error = error_line(error)
    write_errors = multihost.gather_texts(write_error)
    missed = ""  # numbers of the processes whose files this one did not see, joined by commas
    hosts = multihost.gather_texts(socket.gethostname())
    # Only if all could write: otherwise some would wait for a file that does not come.
    if not any(write_errors):
        # Process 0 reads all files, the others only its: 2 n reads and not n squared.
        expected_processes = range(count) if index == 0 else [0]
        texts = probe.collect(
            topic, of=expected_processes, seconds=patience_s, counts=lambda text: text == token
        )
        missed = ",".join(str(process) for process in expected_processes if process not in texts)
    # A gather, which also keeps the files until every process has read them.
    missed_by_process = multihost.gather_texts(missed)
    with contextlib.suppress(Exception):  # 16 bytes that nothing reads
        probe.withdraw(topic)
    if any(write_errors):
        process = next(number for number, text in enumerate(write_errors) if text)
        process_text = "" if count == 1 else f" by process {process} on host {hosts[process]}"
        raise UserError(
            f"--workdir {folder} cannot be written to{process_text} ({write_errors[process]}). "
            + (WAY_OUT if in_store(folder) else "Fix the cause, or choose another --workdir.")
        )
    # What process 0 missed, and everybody who missed its file.
    apart = sorted(
        {int(number) for text in missed_by_process[:1] for number in text.split(",") if number}
        | {process for process, text in enumerate(missed_by_process) if process and text}
    )
    if apart:
        names = ", ".join(f"process {process} on host {hosts[process]}" for process in apart)
        raise UserError(
            f"--workdir {folder} is not one shared folder: process 0 on host {hosts[0]} and {names} do not "
            f"see each other's files there, after waiting for {patience_s:.0f} s. {_WAY_OUT}"
        )
