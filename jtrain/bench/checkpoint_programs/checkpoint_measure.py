"""How a save slows training down, and what memory it takes: measured alike for jtrain, Orbax and torch.

Standard library only: the programs that import it run in different environments.
"""

import contextlib
import itertools
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

STEPS_WARM = 5
"""Steps before anything is measured."""
STEPS_BEFORE = 7
"""Steps before each save, whose median the steps after it are compared with."""
STEPS_AFTER = 3
"""Steps after the background work of a save has ended, which still count."""
MATMUL, MATMULS = 1024, 12
"""Size and number of the square matrices that a step multiplies, beside updating the state."""
STDDEV = 0.02
"""Scale of the normal values of the state. Orbax compresses: of equal values it would write next to
nothing."""


def shapes(size: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a transformer's parameters, 110 (`100M`) or 1.8 (`small`) million numbers."""
    # Layers are stacked along the first axis, as in jtrain.
    layers, d_model, vocab = {"100M": (12, 768, 32_000), "small": (2, 256, 1_024)}[size]
    attention = {f"attention_{name}": (layers, d_model, d_model) for name in "qkvo"}
    return {
        "embed": (vocab, d_model),
        **attention,
        "mlp_in": (layers, d_model, 4 * d_model),
        "mlp_out": (layers, 4 * d_model, d_model),
        "norm": (layers, d_model),
    }


def arguments() -> SimpleNamespace:
    """Arguments of each program: its name, the size of the state, a folder, the number of saves."""
    program, size, folder, saves = sys.argv[1:]
    return SimpleNamespace(program=program, size=size, folder=Path(folder), saves=int(saves))


class _Memory:
    """Highest resident memory of this process, sampled every 2 ms."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        # 2 ms is short against a save, whose peak is what counts.
        while not self._stop.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, resident_bytes())

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    # The second number of statm is the resident set, in pages.
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def _durable_s(durable: Callable[[], bool]) -> Iterator[list[float]]:
    """Yields a list that gets the seconds after which `durable` was first true."""
    start = time.perf_counter()
    times_s: list[float] = []
    stop = threading.Event()

    def watch() -> None:
        # Polled in a thread, because the main thread goes on training.
        while not stop.wait(0.002):
            if durable():
                times_s.append(time.perf_counter() - start)
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield times_s
    finally:
        # A save that never becomes durable leaves the list empty, and the figures fail.
        thread.join(timeout=60)
        stop.set()


def measure(
    *,
    state_bytes: int,
    step: Callable[[], None],
    save: Callable[[int], None],
    durable: Callable[[int], bool],
    ended: Callable[[], bool],
    saves: int,
) -> None:
    """Runs steps and saves, and prints the figures as one line of JSON.

    The first save is not timed: it imports and compiles. Its memory counts. What each save leaves is a
    median, since the heap now and then grows by the 8 MiB of a step's temporaries, also without any save: 0.4
    small states.

    Args:
      step: runs one step and waits for it.
      save: starts the save of this number.
      durable: true when the save of this number has its final name.
      ended: true when nothing of the last save runs any more.
    """

    def timed() -> tuple[float, float]:
        # CPU time of all threads shows what background work costs even where cores are idle.
        start, start_cpu = time.perf_counter(), time.process_time()
        step()
        return time.perf_counter() - start, time.process_time() - start_cpu

    for _ in range(STEPS_WARM):
        step()
    # After the warm-up, so that compilation and first buffers are not counted as a save's.
    before_bytes = resident_bytes()
    memory = _Memory()
    rows = []
    rest_states = []
    for number in range(saves + 1):
        # Measured before each save, since the machine's speed drifts.
        usual_s, usual_cpu_s = map(
            statistics.median, zip(*(timed() for _ in range(STEPS_BEFORE)), strict=True)
        )
        with _durable_s(lambda number=number: durable(number)) as durable_s:
            start, start_cpu = time.perf_counter(), time.process_time()
            save(number)
            save_s = time.perf_counter() - start
            # The first step after the save comes first: `first_step_s` says how long the save delays it.
            after_s = [timed()[0]]
            while not ended():
                after_s.append(timed()[0])
            after_s += [timed()[0] for _ in range(STEPS_AFTER)]
            # CPU time beyond that of the steps themselves.
            cpu_s = time.process_time() - start_cpu - usual_cpu_s * len(after_s)
        rest_states.append((resident_bytes() - before_bytes) / state_bytes)
        rows.append({
            "step_s": usual_s,
            "save_s": save_s,
            "first_step_s": after_s[0] - usual_s,
            # Longer than usual, summed over all steps that the save could touch.
            "slower_s": sum(after_s) - usual_s * len(after_s),
            "cpu_s": cpu_s,
            "durable_s": durable_s[0],
        })  # fmt: skip
    memory.stop()
    # Without the first save, which imports and compiles.
    figures = {key: statistics.median(row[key] for row in rows[1:]) for key in rows[0]}
    grown = statistics.median(later - earlier for earlier, later in itertools.pairwise(rest_states))
    peak = (memory.peak_bytes - before_bytes) / state_bytes
    print(json.dumps({**figures, "rest_states": rest_states[-1], "grown_states": grown, "peak_states": peak}))
