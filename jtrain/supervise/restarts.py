"""Pause before each restart, and how many restarts there may be.

`Supervisor._decide_restart` decides if a failed run is started again.
"""

import signal

from jtrain.runtime import exit_codes
from jtrain.runtime.retry import Backoff
from jtrain.supervise.spec import SuperviseSpec

NEVER_RESTARTED = (exit_codes.DONE, exit_codes.REFUSED, exit_codes.STOPPED, exit_codes.FAULTY_HARDWARE)
"""Exit codes that are final: repeating the command on this host would not help, or it is done."""

LONGEST_BACKOFF_S = 60.0

AWAY_S = 3600.0
"""Time for which exit code 77 is tried again: a full disk, a store or a coordinator may be back."""


class Restarts:
    """Counts failures in a row; an attempt from a later checkpoint than all before resets the count."""

    def __init__(self) -> None:
        self.failures = 0
        # Below 0, because a run that starts at step 0 makes progress as well.
        self._newest_step = -1
        self._away_failures = 0
        self._away_since_s = 0.0

    def note_start(self, start_step: int) -> None:
        """Notes the step that an attempt resumed from."""
        if start_step > self._newest_step:
            self._newest_step = start_step
            self.failures = self._away_failures = 0

    def away_pause_s(self, spec: SuperviseSpec, *, now_s: float) -> float | None:
        """Returns the pause before the next attempt after exit code 77, or None once an hour has passed.

        These count as no failures: nothing of the run has failed.
        """
        if not self._away_failures:
            # The hour begins with the first failure in a row.
            self._away_since_s = now_s
        self._away_failures += 1
        if now_s - self._away_since_s > AWAY_S:
            return None
        backoff = Backoff(spec.backoff_s or 1.0, factor=2.0, longest_s=LONGEST_BACKOFF_S)
        return backoff.wait_s(self._away_failures)

    def pause_s(self, spec: SuperviseSpec) -> float | None:
        """Counts a failure; returns the pause before the next attempt, or None to give up.

        With the default spec, failures in a row wait 0, 1, 4, 16 and 60 s; the sixth gives up.
        """
        self.failures += 1
        if self.failures > spec.max_restarts:
            return None
        # The first restart comes at once; the backoff begins with the second.
        backoff = Backoff(spec.backoff_s, factor=4.0, longest_s=LONGEST_BACKOFF_S)
        return 0.0 if self.failures == 1 else backoff.wait_s(self.failures - 1)


def shell_code(code: int) -> int:
    """Exit code as shells report it: 128 + the signal for a process that a signal killed."""
    return 128 - code if code < 0 else code


def describe_exit(code: int) -> str:
    """Describes an exit code of a process, as subprocess gives it: negative for a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    cause = {
        "SIGKILL": " (by the kernel where the host's memory is exhausted: see dmesg; or by an operator)",
        "SIGABRT": " (C++ code gave up: its reason is in the lines above)",
    }.get(name, "")
    return f"was killed by {name}{cause}"
