"""Step time when reading is what takes time, as a source slows or its weight rises.

The trainer's accelerator is emulated: a step sleeps 100 ms. Each of 64 documents a step takes 1 ms to read,
10 ms from the slow source, with the interpreter's lock held: what decoding takes on a core of its own, of
which this machine has two. One loader keeps up with the quick ones (64 ms a step) but not with a slow source
at its even share (136 ms) or at 30 % (237 ms). Grain with one worker, as many as keep up at first, takes that
long (bench/NOTES.md).
"""

import dataclasses
import statistics
import time
from collections.abc import Iterator

from bench.data_parts.files import DOCUMENT_CHARACTERS
from jtrain.bench import Row, row
from jtrain.data.dataset import PackedText, open_dataset
from jtrain.data.mixture.schedule import Constant, Staged
from jtrain.data.sources.source import Source

SOURCES, DOCUMENTS = 8, 64
"""Sources, and documents per step."""
NAMES = tuple(f"source_{number}" for number in range(SOURCES))
STEP_S = 0.100
EVEN, RARE, FREQUENT = 1 / SOURCES, 0.01, 0.30
"""Weights of the slow source."""


@dataclasses.dataclass(frozen=True)
class TwoPhaseTimes:
    """Medians in seconds: before the change, and in the last third of the steps after it.

    slowest_s: the slowest step between.
    steps_until_back: steps after the change until step times, by the median of five, stay within 10 %.
    """

    before_s: float
    after_s: float
    slowest_s: float
    steps_until_back: int


def rows(*, steps: int = 60) -> Iterator[Row]:
    """Both scenarios, `steps` before the change, and after."""
    slow_source, rising_weight = our_slow_source(steps), our_rising_weight(steps)
    for scenario, step_times in (
        ("one source 10x slower, against none", slow_source),
        ("slow source at 30 %, against 1 %", rising_weight),
    ):
        yield row(
            f"step, {scenario}",
            1e3 * step_times.after_s,
            "ms",
            baseline=1e3 * step_times.before_s,
            bar="<= 1.1",
        )
    yield row("slowest step after the weight rose", 1e3 * rising_weight.slowest_s, "ms")
    yield row("steps until they are within 10 %", float(rising_weight.steps_until_back), "steps")


def our_slow_source(steps: int) -> TwoPhaseTimes:
    """Compares two runs: in that of `before_s` the last source is quick, in that of `after_s` it is slow."""
    even = Constant(dict.fromkeys(NAMES, EVEN))
    return steps_of(our_steps(even, "quick", steps), our_steps(even, "slow", 2 * steps))


def our_rising_weight(steps: int) -> TwoPhaseTimes:
    """One run whose schedule takes the slow source from 1 % to 30 % after `steps` steps."""
    rare, frequent = (
        dict.fromkeys(NAMES, (1 - weight) / (SOURCES - 1)) | {NAMES[-1]: weight}
        for weight in (RARE, FREQUENT)
    )
    step_s = our_steps(Staged(((0, rare), (steps, frequent))), "slow", 3 * steps)
    # From the middle on: the autoscaler has settled by then.
    return steps_of(step_s[steps // 2 : steps], step_s[steps:])


def our_steps(mixture: Constant | Staged, last: str, steps: int) -> list[float]:
    """Returns the seconds of each step of a trainer that sleeps; function `last` makes the last source."""
    mixed = {name: Source(path="bench.data_parts.files:quick", format="grain") for name in NAMES[:-1]}
    mixed[NAMES[-1]] = Source(path=f"bench.data_parts.files:{last}", format="grain")
    spec = PackedText(
        sources=mixed,
        mixture=mixture,
        # Eight documents fill a row, so that a step reads the same number at all times.
        seq_len=8 * (DOCUMENT_CHARACTERS + 1),  # and the end token
        global_batch=DOCUMENTS // 8,
        eval_fraction=0.0,
        max_loaders=8,
    )
    step_s = []
    with open_dataset(spec, seed=0).train_batches() as batches:
        # Start-up is not part of any step.
        next(batches)
        for _ in range(steps):
            start_s = time.perf_counter()
            next(batches)
            time.sleep(STEP_S)  # the device's step
            step_s.append(time.perf_counter() - start_s)
    return step_s


def steps_of(before_s: list[float], after_s: list[float]) -> TwoPhaseTimes:
    """Returns the medians before and after the change, and how long the steps stayed slow."""
    median_before = statistics.median(before_s)
    # Median of five: a single slow step is noise, a slow loader is not.
    smoothed_s = [statistics.median(after_s[first : first + 5]) for first in range(len(after_s))]
    slow_steps = [number for number, seconds in enumerate(smoothed_s) if seconds > 1.1 * median_before]
    return TwoPhaseTimes(
        before_s=median_before,
        after_s=statistics.median(after_s[-(len(after_s) // 3) :]),
        slowest_s=max(after_s),
        steps_until_back=slow_steps[-1] + 1 if slow_steps else 0,
    )
