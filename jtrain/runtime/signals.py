"""Signal handling: SIGINT, SIGTERM and SIGHUP request a stop after the current step, with a checkpoint."""

import contextlib
import os
import signal
import types
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, the signal that schedulers send before they kill a job, and the end of the terminal or
connection."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Returns the SIGNALS that ask this process to stop: all but SIGHUP where it is ignored, as under
    `nohup`.

    SIGINT counts even where it is ignored. A shell starts so what it puts into the background of a script,
    but a run is then stopped by `kill -INT` as well.
    """
    # Under `nohup` the run must go on when the terminal closes.
    return tuple(n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN)


class StopRequest:
    """Context in which the SIGNALS only set a flag, so that the loop can finish its step and save.

        with StopRequest() as stop:
            while not agree(stop.requested)[0]: ...

    The first Ctrl-C requests the stop, the second prints that the state is being saved, the third raises
    KeyboardInterrupt. SIGTERM and SIGHUP request the stop however often they come; under `nohup` SIGHUP stays
    ignored. The previous handlers return after the `with` block.

    Raises:
      ValueError: entered outside the main thread, where Python allows no handlers.
    """

    def __init__(self) -> None:
        self.requested = False
        self._interrupts = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in stop_signals():
            # The old handlers are kept per signal, so that nested contexts restore each other's.
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if handler is not None:  # None stands for a handler of C code, which Python cannot restore
                signal.signal(number, handler)
        self._before.clear()

    def _on_signal(self, number: int, _frame: types.FrameType | None) -> None:
        # Read before it is set: only the first signal prints its line.
        first = not self.requested
        self.requested = True
        if number == signal.SIGINT:
            self._interrupts += 1
        # Raised from the handler, so it stops even a loop that never looks at `requested`.
        if self._interrupts >= 3:
            raise KeyboardInterrupt
        if first:
            _say(f"{signal.Signals(number).name}: stopping after this step, with a checkpoint.")
        elif number == signal.SIGINT:
            _say(
                "Still saving the checkpoint. Ctrl-C once more to stop at once and lose the steps since the "
                "last one."
            )


def _say(text: str) -> None:
    # os.write, because a signal may interrupt a print, and buffered streams cannot be re-entered.
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())
