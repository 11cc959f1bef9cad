"""Lease on what one process at a time may use: its holder, heartbeats that show that it lives, and a fencing
number.

    lease = Lease(FolderStore(workdir / "lock"))
    lease.take(say=print)  # refuses while the holder lives, takes over from one that is gone
    ...
    lease.check()  # before each write: raises LeaseLost, naming who has it
    lease.release()

The fencing number grows with each holder and never repeats, so a process that judged an old record can never
replace a newer one by mistake. A beat writes the holder's record again, with a payload such as phase and
step. A holder of the same machine is looked up by process id and start time; one of another machine is gone
when its record has not been written for `STALE_S` by the clock of the store, and for `WATCH_S` by the clock
of the process that watches; or for twice `STALE_S` by the latter alone. Standard library only: supervisors
and training processes beat before jax is imported.
"""

import contextlib
import dataclasses
import datetime
import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from jtrain.errors import UserError
from jtrain.runtime.lease_stores import Entry, Holder, LeaseStore

BEAT_S = 3.0
"""Time between two beats of a holder, unless it is given."""

STALE_S = 60.0
"""A holder on another machine whose record was not written for so long is gone."""

WATCH_S = 10.0
"""Time over which a record of another machine is watched, however old: file servers may count time
differently."""

POLL_S = 0.2
"""Time between two looks at a record that another process may have changed."""


NOBODY = "a process that has not written its name"
"""Name of a holder that was killed, or is, between creating its record and writing it."""


class LeaseHeld(UserError):
    """A living process holds the lease."""

    def __init__(self, holder: Holder | None) -> None:
        super().__init__(f"in use by {holder or NOBODY}")
        self.holder = holder


class LeaseLost(UserError):
    """Another process has taken the lease over, while this one stood still. Nothing more may be written."""


class Watch:
    """Time for which something that should change with each beat has not changed, by this process's clock."""

    def __init__(self) -> None:
        self._version: Hashable = None
        self._changed_s = time.monotonic()
        self._changes = -1

    def saw(self, version: Hashable) -> bool:
        """Notes what is there now; returns True if it has changed since the last look."""
        if version == self._version:
            return False
        self._version, self._changed_s = version, time.monotonic()
        self._changes += 1
        # The first look is no change: -1 becomes 0, and only the second version shows that somebody beats.
        return self._changes > 0

    @property
    def silent_s(self) -> float:
        """Seconds since the last change."""
        return time.monotonic() - self._changed_s


class Rival:
    """View of a process on a lease that it does not hold."""

    def __init__(self, store: LeaseStore) -> None:
        self._store = store
        self._machine = this_machine()
        self._watch = Watch()
        self.entry = Entry(0, None)

    def is_alive(self) -> bool | None:
        """True if a living process holds the lease, False if none does, None until it was watched for long
        enough.
        """
        self.entry = entry = self._store.read()
        if entry.is_free:
            return False
        holder = entry.holder
        # Same machine: the kernel knows at once. The start time tells a reused process id apart.
        if holder is not None and holder.machine == self._machine:
            return process_started(holder.pid) == holder.started
        # The number counts too: a new holder's first record may have the version of the old one's last.
        if self._watch.saw((entry.number, entry.version)):
            return True
        with contextlib.suppress(FileNotFoundError):  # removed just now: the next look tells
            # Both clocks: the store's, which survives this process,
            # and our own, since a file server's may be wrong.
            if self._watch.silent_s >= WATCH_S and self._store.age_s(entry) >= STALE_S:
                return False
            # A record from the future, as the server's clock was set back, would count as fresh until then.
            # Twice the time, as NFS may show an old record for a minute.
            if self._watch.silent_s >= 2 * STALE_S:
                return False
        return None

    def how_gone(self) -> str:
        """Tells about the holder of a lease, which is not alive."""
        holder = self.entry.holder
        if holder is not None and holder.machine == self._machine:
            return f"{holder}, which is gone"
        return f"{holder or NOBODY}, which has not touched it for {self._store.age_s(self.entry):.0f} s"


class Lease:
    """One process's hold of a lease; a thread beats until it is released or lost.

    is_lost: another process has taken it over, `taken_by`.

    Args:
      beat_s: time between two beats; None for BEAT_S. 0.0: no thread; the owner calls `beat`.
      payload: called before each beat by the thread that beats; its result goes into the record as JSON.
      on_lost: called once, by the thread that beats, when the lease is lost.
    """

    def __init__(
        self,
        store: LeaseStore,
        *,
        beat_s: float | None = None,
        payload: Callable[[], Any] = lambda: None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._rival = Rival(store)
        self.holder = this_holder()
        self._beat_s = beat_s
        self._payload = payload
        self._on_lost = on_lost
        self._entry: Entry | None = None
        self.is_lost = False
        self.taken_by = "another process"
        self._beaten_s = self._tried_s = 0.0
        self._beating = threading.Lock()
        self._soon = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    @property
    def is_held(self) -> bool:
        """True from the time when it was taken until it is released or lost."""
        return self._entry is not None and not self.is_lost

    def take(self, *, watching: Callable[[str], None], taken_over: Callable[[str], None]) -> None:
        """Takes the lease, after watching whether its holder lives.

        Args:
          watching: called with the holder once, before a wait that may take `STALE_S`.
          taken_over: called with what is known of the holder from which the lease was taken over.

        Raises:
          LeaseHeld: a living process holds it.
        """
        rival, has_told = self._rival, False
        # `seize` fails if a rival was faster: then its record is the one to watch.
        while (is_alive := rival.is_alive()) is not False or not self.seize(rival.entry):
            if is_alive:
                raise LeaseHeld(rival.entry.holder)
            if is_alive is None:
                if not has_told:
                    watching(str(rival.entry.holder or NOBODY))
                    has_told = True
                time.sleep(POLL_S)  # a store tells nobody that a record has changed
        if not rival.entry.is_free:
            taken_over(rival.how_gone())

    def try_take(self) -> bool:
        """Takes the lease if nobody holds it, or its holder is known to be gone; True if this process holds
        it.
        """
        if not self.is_held and self._rival.is_alive() is False:
            self.seize(self._rival.entry)
        return self.is_held

    def wait(self) -> None:
        """Waits until this process holds the lease."""
        while not self.try_take():
            time.sleep(POLL_S / 4)  # as in `take`

    def seize(self, old: Entry | None = None) -> bool:
        """Takes the lease from whoever holds it; False if the newest state is not `old`.

        Args:
          old: state that this process has judged; None for any.
        """
        # `create` compares with `old`, so what was judged is what is replaced.
        old = self._store.read() if old is None else old
        self._entry = self._store.create(old, self._record())
        if self._entry is None:
            return False
        # Before the thread starts, which ends as soon as one of them is true.
        self.is_lost = self._is_closed = False
        self._beaten_s = self._tried_s = time.monotonic()
        if self._beat_s != 0.0:
            self._thread = threading.Thread(target=self._keep_beating, name="lease", daemon=True)
            self._thread.start()
        return True

    def beat(self) -> None:
        """Writes the record again if this process is still the newest holder; notes the loss if it is not."""
        # The thread beats, and `check` may in another one: two writes of one record would race for its file.
        with self._beating:
            if not self.is_held or self._entry is None:
                return
            content = self._record()
            try:
                entry = self._store.swap(self._entry, content)
            except (OSError, UserError):  # the store is away, or full, or something else wrote the record
                # No loss: `check` asks again before the next write, and STALE_S leaves many beats.
                self._tried_s = time.monotonic()
                return
            if entry is None:
                with contextlib.suppress(OSError, UserError):
                    self.taken_by = str(self._store.read().holder or NOBODY)
                # Set before `on_lost`, which may look at it.
                self.is_lost = True
                self._on_lost()
                return
            self._entry = entry
            self._beaten_s = self._tried_s = time.monotonic()

    def beat_soon(self) -> None:
        """Has the thread beat at once."""
        self._soon.set()

    @property
    def number(self) -> int | None:
        """Fencing number of this hold; None if the lease was not taken."""
        return None if self._entry is None else self._entry.number

    def check(self, *, confirm: bool = False) -> None:
        """Raises LeaseLost if another process has taken the lease over; call it before anything is written.

        Reads the store only if the last beat is long ago, because this process was stopped or its disk was
        away.

        Args:
          confirm: asks the store in any case, for what cannot be undone: a commit, a deletion.

        Raises:
          LeaseLost: another process has it.
          TimeoutError: with `confirm`, the store has not answered for so long that another may have it.
        """
        if confirm and self._is_closed:
            raise OSError("the lease has been given back")
        # A rival takes over after STALE_S without a write: within a quarter of it the store is not asked.
        # Counted from the last try: where the thread that beats asks in vain, a step must not wait as well.
        if self.is_held and (confirm or time.monotonic() - self._tried_s > STALE_S / 4):
            self.beat()
        if self.is_lost:
            raise LeaseLost(f"taken over by {self.taken_by}")
        if confirm and self.is_held and self._unconfirmed_s > STALE_S / 4:
            raise TimeoutError(f"nobody could be asked for {self._unconfirmed_s:.0f} s who holds the lease")

    @property
    def _unconfirmed_s(self) -> float:
        return time.monotonic() - self._beaten_s

    def release(self, wait_s: float | None = None) -> None:
        """Ends the beats, and gives the lease back unless it was lost.

        Args:
          wait_s: longest wait for the thread that beats, which may be in `payload`; None: until it has ended.
        """
        # Before the event: the thread must find it true when it wakes.
        self._is_closed = True
        self._soon.set()
        if self._thread is not None:
            self._thread.join(wait_s)
        # Not beside a beat of `check` in another thread, which would write the record again.
        has_ended = self._beating.acquire(timeout=-1 if wait_s is None else wait_s)
        try:
            # A lost lease belongs to somebody else: there is nothing to give back.
            if has_ended and self._entry is not None and not self.is_lost:
                with contextlib.suppress(OSError, UserError):  # then the next one finds that this one is gone
                    self._store.delete(self._entry)
            self._entry = None
        finally:
            if has_ended:
                self._beating.release()

    def _record(self) -> bytes:
        return (
            json.dumps({"holder": dataclasses.asdict(self.holder), "payload": self._payload()}).encode()
            + b"\n"
        )

    def _keep_beating(self) -> None:
        while self.is_held:
            self._soon.wait(BEAT_S if self._beat_s is None else self._beat_s)
            # Cleared before the beat: a wish for a beat that comes during it is not lost.
            self._soon.clear()
            if self._is_closed:
                return
            self.beat()


def this_holder() -> Holder:
    """Returns the identity of this process."""
    pid = os.getpid()
    now_text = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Holder(
        socket.gethostname(), pid, now_text, this_machine(), process_started(pid), secrets.token_hex(4)
    )


def this_machine() -> str:
    """Name for the processes that see each other by their ids: one boot of one machine, or one container on
    it.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Containers share the boot's id; the inode of their PID namespace tells them apart.
        return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # not Linux: process ids count for the host's name
        return socket.gethostname()


def process_started(pid: int) -> str:
    """Start of a process of this machine, in ticks since boot; empty if there is no such process."""
    try:
        # From the last parenthesis on: the name before it may hold spaces and parentheses itself.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # Z, X: a zombie holds no lease any more, although its id still exists.
        return "" if fields[0] in "ZX" else fields[19]  # field 22 of the line, the 20th after the name
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH) and Path("/proc/self/stat").exists():
            return ""
    try:  # where there is no /proc, or it hides others' processes: only whether the process exists
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass
    # The process lives, perhaps another user's, and nothing tells when it started.
    return "unknown"
