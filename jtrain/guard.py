"""What to do when a run must stop: because it was asked to, or because its numbers are no longer numbers."""

import contextlib
import hashlib
import math
import os
import signal
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what schedulers send before they kill."""


class StopRequest:
    """While it is entered, SIGINT and SIGTERM only set a flag, so that the loop can finish its step and save.

        with StopRequest() as stop:
            while not agree(stop.requested)[0]: ...

    The first Ctrl-C asks, the second says that the state is being saved, the third raises KeyboardInterrupt. SIGTERM
    asks however often it comes. The handlers that were there before are back after the `with` block.

    Raises:
      ValueError: entered outside the main thread, where Python allows no handlers.
    """

    def __init__(self) -> None:
        self.requested = False
        self._interrupts = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            if handler is not None:  # None was set by C code, which Python cannot give back
                signal.signal(number, handler)
        self._before.clear()

    def _on_signal(self, number: int, _frame: types.FrameType | None) -> None:
        first = not self.requested
        self.requested = True
        if number == signal.SIGINT:
            self._interrupts += 1
        if self._interrupts >= 3:
            raise KeyboardInterrupt
        if first:
            _say(f"{signal.Signals(number).name}: stopping after this step, with a checkpoint.")
        elif number == signal.SIGINT:
            _say("Still saving the checkpoint. Ctrl-C once more to stop at once and lose the steps since the last one.")


def agree(*flags: bool) -> tuple[bool, ...]:
    """Of each flag: true in every process at the same step if it is true in any of them.

    A signal reaches processes at different times, and one that stops alone leaves the others waiting in a collective.
    Every process must call this at the same steps. With one process it is free. With several it is an all-gather of
    a byte per flag that queues behind the steps already dispatched: the host waits for the device, so call it where
    the loop reads metrics anyway, not before each dispatch.
    """
    import jax  # lazy: signals need none

    if jax.process_count() == 1:
        return flags
    from jax.experimental import multihost_utils

    everywhere = np.asarray(multihost_utils.process_allgather(np.asarray(flags, np.bool_)))
    return tuple(bool(flag) for flag in everywhere.any(axis=0))


def same_everywhere(text: str) -> bool:
    """Whether every process has passed the same text. Every process must call this at the same steps."""
    import jax  # lazy: signals need none

    if jax.process_count() == 1:
        return True
    from jax.experimental import multihost_utils

    digest = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), np.uint32)
    everywhere = multihost_utils.process_allgather(digest)
    return bool((np.asarray(everywhere) == digest).all())


class NotFinite(ValueError):
    """A metric of a step is NaN or infinite.

    step: completed updates, this one included.
    names: the metrics that are not finite.
    """

    def __init__(self, message: str, *, step: int, names: tuple[str, ...]) -> None:
        super().__init__(message)
        self.step = step
        self.names = names


def check_finite(step: int, metrics: Mapping[str, float], *, batch_hash: str, last_checkpoint_step: int | None) -> None:
    """Refuses to go on from a step whose metrics are not all finite; call it before its state is saved.

    Args:
      step: completed updates, this one included.
      metrics: name -> value, such as loss_nats, grad_norm and learning_rate.
      batch_hash: hex, of the batch that fed this step.
      last_checkpoint_step: the newest checkpoint, written while all was finite.

    Raises:
      NotFinite: says the step, all metrics, the batch, and what to try.
    """
    names = tuple(name for name, value in metrics.items() if not math.isfinite(value))
    if not names:
        return
    values = ", ".join(f"{name}={float(value):.6g}" for name, value in metrics.items())
    good = (
        "No checkpoint was written before it."
        if last_checkpoint_step is None
        else f"The checkpoint of step {last_checkpoint_step} is from before it; the same command goes on from there, "
        "and meets the same numbers again: data and arithmetic repeat to the bit."
    )
    raise NotFinite(
        f"{' and '.join(names)} not finite at step {step}: {values}; batch_hash={batch_hash}. "
        f"The state after it was not saved. {good} Try, with another --workdir: a lower optimizer.peak_lr (half), more "
        "optimizer.warmup_steps, a smaller optimizer.clip_norm, layout.compute_dtype=float32 to see whether precision "
        "is the cause.",
        step=step,
        names=names,
    )


def _say(text: str) -> None:
    # os.write, because a handler may interrupt a print half-way, and buffered streams refuse to be re-entered.
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())
