"""Repetition of what failed for a reason that may pass: how long to wait before each try, and for which
errors.
"""

import dataclasses
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator

# Own state: a wait in the background must not move the numbers that a user's program draws from `random`.
_JITTER = random.Random()


@dataclasses.dataclass(frozen=True)
class Backoff:
    """Waits before further tries: first_s, first_s * factor, ... Backoff(0.1, factor=4, tries=4): 0.1, 0.4
    and 1.6 s.

    longest_s: no wait is longer.
    tries: number of tries, with the first; None: without an end.
    deadline_s: time after the first try after which none begins.
    jitter: largest share by which a wait is shortened at random, so that thousands of processes do not ask at
      once.
    """

    first_s: float
    factor: float = 2.0
    longest_s: float = math.inf
    tries: int | None = None
    deadline_s: float = math.inf
    jitter: float = 0.0

    def wait_s(self, number: int) -> float:
        """Returns the wait after so many tries, without jitter."""
        return min(self.longest_s, self.first_s * self.factor ** (number - 1))

    def waits_s(self) -> Iterator[float]:
        """Yields the wait after each try but the last, without jitter."""
        numbers = itertools.count(1) if self.tries is None else range(1, self.tries)
        return (self.wait_s(number) for number in numbers)


def retried[T](
    action: Callable[[], T],
    backoff: Backoff,
    *,
    passes: Callable[[Exception], bool],
    tell: Callable[[Exception, float, int], None] = lambda error, wait_s, number: None,
    wait: Callable[[float], object] = time.sleep,
) -> T:
    """Returns `action()`, which is repeated while it fails with an error that may pass; raises that of the
    last try.

    Args:
      action: a function that may be called again after it raised.
      passes: True for an error that may be over at the next try; any other one is raised at once.
      tell: called before each wait with the error, the seconds, and the number of the try that follows.
      wait: waits for so many seconds; if it returns True, such as that of an event, no try follows.
    """
    began_s = time.monotonic()
    # Counts from 2: `number` is the try that follows the one in the loop.
    for number, wait_s in enumerate(backoff.waits_s(), start=2):
        try:
            return action()
        except Exception as error:  # clients of stores and servers agree on no class
            # The deadline stops further tries and never cuts one short.
            if not passes(error) or time.monotonic() - began_s > backoff.deadline_s:
                raise
            tell(error, wait_s, number)
            # Shortened only, never lengthened: `longest_s` stays the longest.
            if wait(wait_s * (1.0 - backoff.jitter * _JITTER.random())) is True:
                raise
    # The last try lies outside the loop: its error is the caller's.
    return action()
