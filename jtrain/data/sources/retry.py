"""Errors of reading, classified by whose fault they are, and reads repeated after a transient error."""

import contextlib
import errno
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator

from jtrain.errors import FileError
from jtrain.runtime.retry import Backoff
from jtrain.runtime.retry import retried as repeat

READS = Backoff(0.1, factor=4.0, tries=6, jitter=0.25)
"""Waits of 0.1 to 25.6 s: the first helps against a lost packet, half a minute while a file server
restarts."""

_ERRNOS = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EINTR,
    errno.EIO,
    errno.EMFILE,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOLINK,
    errno.ENOMEM,
    errno.ENOTCONN,  # the process behind a FUSE mount is gone
    errno.EPIPE,
    errno.EREMOTEIO,
    errno.ESHUTDOWN,
    errno.ESTALE,
    errno.ETIMEDOUT,
    socket.EAI_AGAIN,  # no name server answered
}
"""Errors of a disk, a network or a machine. None of them says anything about the file that was read."""

_ALWAYS_LOGGED_WAIT_S = 1.0
_MAX_LOGGED_RETRIES = 10
"""Shorter waits that a process reports one by one; later ones are only counted."""


class TransientError(FileError):
    """Read that failed for a reason that may be over at the next try, such as an answer cut short."""

    reason = ""
    """The reason in the words of a store's client library, if it is known."""


class NeverSkipped(FileError):
    """Error that is the fault of no record, so that no policy leaves the record out."""


class GaveUp(NeverSkipped):
    """Read that failed at every try; it is not tried again."""


class FileLost(FileError):
    """File that has vanished, was locked or has changed its size since the source was opened."""


class Retries:
    """Count of repeated reads, and a listener that hears of each.

    Args:
      tell: function of a line for the log, empty once there were many, and the seconds until the next try. It
        is called by the threads that read, one at a time.
    """

    def __init__(self, tell: Callable[[str, float], None]) -> None:
        self.count = 0
        self._tell = tell
        self._lock = threading.Lock()

    def add(self, line: str, wait_s: float) -> None:
        """Counts one retry, and tells of it."""
        with self._lock:
            self.count += 1
            # A long wait is always reported, so that nobody takes a waiting run for a hanging one.
            if wait_s < _ALWAYS_LOGGED_WAIT_S and self.count > _MAX_LOGGED_RETRIES:
                line = (
                    "more reads are repeated; data_retries counts them"
                    if self.count == _MAX_LOGGED_RETRIES + 1
                    else ""
                )
            self._tell(line, wait_s)


def _to_stderr(line: str, wait_s: float) -> None:
    if line:
        print(f"data: {line}", file=sys.stderr, flush=True)


_listeners = [Retries(_to_stderr)]
"""The last one hears of each retry. Not an argument: Arrow reads remote files on threads of its own, which
pass no context on."""


@contextlib.contextmanager
def report_retries_to(retries: Retries) -> Iterator[None]:
    """Reports each repeated read of this process to `retries`; without it they go to stderr."""
    _listeners.append(retries)
    try:
        yield
    finally:
        # Not `pop`: two threads may leave in another order than they entered.
        _listeners.remove(retries)


def retried[T](label: str, read: Callable[[], T]) -> T:
    """Returns `read()`, which is repeated with longer and longer waits while its error is one that may pass.

    Args:
      label: file or setting, for messages.
      read: a function that may be called again after it raised.

    Raises:
      GaveUp: the last try failed like those before it.
      Exception: any other error of `read`, at once.
    """

    def tell(error: Exception, wait_s: float, number: int) -> None:
        # Reported before the wait: a loader tells its pool how long it takes.
        tries = f"try {number} of {READS.tries}"
        reason = _describe(transient_cause(error) or error, label)
        line = f"{label}: {reason}; it is read again in {wait_s:g} s ({tries})"
        _listeners[-1].add(line, wait_s)

    try:
        return repeat(read, READS, passes=lambda error: transient_cause(error) is not None, tell=tell)
    except Exception as error:  # stores agree on no class of error; one that cannot pass is raised as it is
        if (cause := transient_cause(error)) is None:
            raise
        raise GaveUp(
            f"{label}: {_describe(cause, label)}, at {READS.tries} tries over {sum(READS.waits_s()):.0f} s. "
            "Such an error is no fault of a document, so none is left out for it. See that the disk, network "
            "or store is back, and start again: the run goes on from its last checkpoint."
        ) from error


def transient_cause(error: BaseException) -> BaseException | None:
    """Returns the innermost transient error in the chain of causes, `error` included; None without one."""
    cause, link = None, error
    while link is not None:
        # Its tries are used up: without this an outer `retried` would repeat all of them.
        if isinstance(link, GaveUp):
            return None
        if isinstance(link, TransientError) or (isinstance(link, OSError) and is_transient(link)):
            cause = link
        link = link.__cause__
    return cause


def is_transient(error: OSError) -> bool:
    """True for errors of a disk, a network or a machine, False for errors that blame the file."""
    return error.errno in _ERRNOS or isinstance(error, (ConnectionError, TimeoutError))


def names_transient_error(message: str) -> bool:
    """True if the message of a library without error numbers names such an error."""
    return any(os.strerror(number) in message for number in _ERRNOS if number > 0)


def _describe(error: BaseException, label: str) -> str:
    """Returns an error in one line, without the name of the file."""
    if isinstance(error, TransientError):
        return error.reason or str(error).removeprefix(f"{label}: ").rstrip(".")
    # Without the file's name, which the caller puts first.
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return f"[Errno {error.errno}] {error.strerror}"
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":.")
