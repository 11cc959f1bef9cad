"""Repeated tries: for which errors, how often, after which waits."""

import pytest

from jtrain.runtime import retry
from jtrain.runtime.retry import Backoff, retried


def test_waits_grow_to_a_longest_and_end_with_the_tries() -> None:
    assert list(Backoff(1.0, factor=4.0, longest_s=10.0, tries=5).waits_s()) == [1.0, 4.0, 10.0, 10.0]
    assert [Backoff(0.5, factor=2.0).wait_s(number) for number in (1, 2, 3)] == [0.5, 1.0, 2.0]


def test_an_error_that_may_pass_is_repeated_and_the_last_one_raised() -> None:
    """Another error, and a wait that says so, end it at once; what is told is the wait without jitter."""
    errors: list[Exception] = []
    told: list[tuple[str, float, int]] = []
    waits_s: list[float] = []

    def fail() -> str:
        if not errors:
            return "done"
        raise errors.pop(0)

    def repeat(tries: int, stops: bool = False) -> str:
        return retried(
            fail,
            Backoff(1.0, factor=2.0, tries=tries, jitter=0.5),
            passes=lambda error: isinstance(error, OSError),
            tell=lambda error, wait_s, number: told.append((str(error), wait_s, number)),
            wait=lambda wait_s: waits_s.append(wait_s) or stops,
        )

    errors += [OSError("a"), OSError("b")]
    assert repeat(3) == "done"
    assert told == [("a", 1.0, 2), ("b", 2.0, 3)]
    assert 0.5 < waits_s[0] <= 1.0 < waits_s[1] <= 2.0
    errors += [OSError("c"), OSError("d")]
    with pytest.raises(OSError, match="d"):
        repeat(2)
    errors += [ValueError("e"), OSError("f")]
    with pytest.raises(ValueError, match="e"):
        repeat(3)
    with pytest.raises(OSError, match="f"):
        repeat(3, stops=True)
    assert errors == []


def test_no_try_follows_a_failure_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is asked for every second, for two seconds; the clock is the test's."""
    now_s, tries_s = 0.0, []

    def fail() -> None:
        tries_s.append(now_s)
        raise OSError("away")

    def wait(wait_s: float) -> None:
        nonlocal now_s
        now_s += wait_s

    monkeypatch.setattr(retry.time, "monotonic", lambda: now_s)
    with pytest.raises(OSError, match="away"):
        retried(fail, Backoff(1.0, factor=1.0, deadline_s=2.0), passes=lambda error: True, wait=wait)
    assert tries_s == [0.0, 1.0, 2.0, 3.0]
